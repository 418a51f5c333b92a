"""What was done, or not done, without a word: 414, 416, 454, 461."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import require_equal
from torch import nn

import stio
from stio import sync
from stio.compat.safetensors import numpy as drop_in
from stio.compat.safetensors import safe_open


@pytest.mark.parametrize("assign", [False, True])
def test_c414_a_load_that_has_no_name_of_the_module_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, assign: bool
) -> None:
    save_file({"model.weight": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    module = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "stio"):
        report = sync.load_into(module, tmp_path / "m.safetensors", strict=False, assign=assign)
    assert report.missing == ("weight", "bias") and report.unexpected == ("model.weight",)
    (message,) = [record.getMessage() for record in caplog.records if "nothing is loaded" in record.getMessage()]
    assert "missing weight" in message and "unexpected model.weight" in message


def test_c414_a_load_of_some_names_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"weight": torch.ones(2, 2), "other": torch.ones(1)}, tmp_path / "m.safetensors")
    with caplog.at_level(logging.WARNING, "stio"):
        sync.load_into(nn.Linear(2, 2), tmp_path / "m.safetensors", strict=False)
    assert "nothing is loaded" not in caplog.text


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.uint16, np.bool_, np.complex64])
def test_c416_arrays_have_the_dtype_that_numpy_has(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "m.safetensors"
    drop_in.save_file({"a": np.ones((2, 3), kind)}, path)
    part = safe_open(path, "np", backend="pread").get_slice("a")[:1]
    arrays = [
        drop_in.load_file(path)["a"],
        drop_in.load(path.read_bytes())["a"],
        safe_open(path, "np").get_tensor("a"),
        part,
    ]
    for array in arrays:
        assert array.dtype is np.dtype(kind)
        if kind is not np.complex64:  # which memoryview does not take at all
            assert memoryview(array)[0, 0] == 1


def test_c461_the_first_start_of_a_training_has_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = object()
    assert stio.latest(tmp_path / "run", default=None) is None
    (tmp_path / "run").mkdir()
    assert stio.latest(tmp_path / "run", default=nowhere) is nowhere
    (tmp_path / "run" / "step-3").mkdir()
    (tmp_path / "run" / "step-3" / "model-00001-of-00002.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "stio"):
        assert stio.latest(tmp_path / "run", default=None) is None
    assert "step-3" in caplog.text and "left out" in caplog.text
    with pytest.raises(stio.CheckpointNotFoundError, match="step-3"):
        stio.latest(tmp_path / "run")
    sync.save({"w": torch.ones(1)}, tmp_path / "run" / "step-4")
    assert stio.latest(tmp_path / "run", default=None) == str(tmp_path / "run" / "step-4")


@pytest.mark.parametrize("wrong", ["", "~/run", "s3://bucket/run", 3])
def test_c461_a_wrong_path_is_an_error_with_a_default_too(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        stio.latest(wrong, default=None)  # type: ignore[call-overload]


def test_c454_each_tensor_is_cast_when_its_turn_comes(tmp_path: Path) -> None:
    alive, most = 0, 0
    weights = {f"w{k}": torch.rand(64, 64) for k in range(8)}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most
        copy = tensor.bfloat16()
        alive, most = alive + 1, max(most, alive + 1)

        def freed() -> None:
            nonlocal alive
            alive -= 1

        weakref.finalize(copy, freed)
        return copy

    half = {name: stio.LazyTensor(torch.bfloat16, one.shape, partial(cast, one)) for name, one in weights.items()}
    sync.save(half, tmp_path / "half.safetensors")
    require_equal(sync.load(tmp_path / "half.safetensors"), {name: one.bfloat16() for name, one in weights.items()})
    assert most <= 2
