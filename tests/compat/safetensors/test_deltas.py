"""A file of a delta holds no weights: the drop-in says so where the original would return its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltas import next_state, write_chain

from stio.compat import safetensors
from stio.compat.safetensors import SafetensorError
from stio.compat.safetensors import numpy as numpy_names
from stio.compat.safetensors import torch as torch_names


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    before = {"w": torch.randn(64, 9)}
    found = write_chain(tmp_path, [before, next_state(before, 0.05, torch.Generator().manual_seed(0))])
    return [path / "model.safetensors" for path in found]


@pytest.mark.parametrize(
    "read",
    [
        lambda path: safetensors.safe_open(path, "pt"),
        lambda path: safetensors.safe_open(path, "np", backend="pread"),
        lambda path: torch_names.load_file(path),
        lambda path: numpy_names.load_file(path),
        lambda path: torch_names.load(path.read_bytes()),
        lambda path: numpy_names.load(path.read_bytes()),
        lambda path: torch_names.load_model(torch.nn.Linear(1, 1), path, strict=False),
    ],
    ids=["safe_open", "safe_open-np", "load_file", "load_file-np", "load", "load-np", "load_model"],
)
def test_a_file_of_a_delta_is_refused(read: Callable[[Path], Any], paths: list[Path]) -> None:
    with pytest.raises(SafetensorError, match=r"Error while deserializing: this is a file of a delta.*stio convert"):
        read(paths[1])


def test_its_base_is_a_file_like_any_other(paths: list[Path]) -> None:
    assert torch_names.load_file(paths[0]).keys() == {"w"}
