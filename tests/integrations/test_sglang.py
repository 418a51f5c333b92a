"""SGLang's ways to read weights, under its plugin: layers that are divided between ranks get what safetensors gives.

SGLang is too large to install here. `check_published.py` compares the calls that it makes with the newest release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from integrations.test_vllm import Parallel
from support import nothing_left, save_sharded

import stio.compat
from stio.integrations import sglang

Pairs = Iterator[tuple[str, torch.Tensor]]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGLANG_PLUGINS", "stio")
    with nothing_left():
        try:
            sglang.register()
            sglang.register()  # a process of SGLang may call it again
            yield
        finally:
            stio.compat.uninstall()


# The forms in which `sglang.srt.model_loader.weight_utils` of 0.5.23 calls safetensors.


def mapped(files: list[Path]) -> Pairs:
    """Read one tensor at a time: the default."""
    for path in files:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)


def whole(files: list[Path]) -> Pairs:
    """Read whole files, from bytes: `--weight-loader-disable-mmap`."""
    for path in files:
        yield from sorted(safetensors.torch.load(path.read_bytes()).items())


def threaded(files: list[Path]) -> Pairs:
    """Read files on threads: `enable_multithread_load`."""
    with ThreadPoolExecutor(max_workers=2) as executor:
        for pairs in executor.map(lambda path: list(mapped([path])), files):
            yield from pairs


def safetensors_files(directory: Path) -> tuple[dict[str, torch.Tensor], list[Path]]:
    rows = {"column": 48, "q": 32, "k": 8, "v": 8, "gate": 24, "up": 24, "vocab": 13}
    tensors = {name: torch.randn(count, 16) for name, count in rows.items()} | {"row": torch.randn(16, 48)}
    save_sharded(tensors, directory, 2)
    return tensors, sorted(directory.glob("*.safetensors"))


@pytest.mark.matrix
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("read", [mapped, whole, threaded])
def test_each_rank_takes_its_part(plugin: None, tmp_path: Path, read: Callable[[list[Path]], Pairs], size: int) -> None:
    tensors, files = safetensors_files(tmp_path)
    assert safetensors.safe_open.__module__.startswith("stio.")
    assert safetensors.torch.load.__module__.startswith("stio.")
    for rank in range(size):
        expected, found = Parallel(rank, size), Parallel(rank, size)
        expected.load_weights(tensors.items())
        found.load_weights(read(files))
        for name, parameter in expected.named_parameters():
            assert torch.equal(found.get_parameter(name), parameter), (rank, name)
            assert parameter.any()


@pytest.mark.matrix
@pytest.mark.parametrize("read", [mapped, whole, threaded])
def test_a_file_that_is_cut_off(plugin: None, tmp_path: Path, read: Callable[[list[Path]], Pairs]) -> None:
    _, files = safetensors_files(tmp_path)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(safetensors.SafetensorError, match="the file ends before its last tensor does"):  # stio's text
        list(read(files))


@pytest.mark.matrix
@pytest.mark.parametrize("read", [mapped, threaded])
def test_a_load_that_ends_early_leaves_nothing(
    plugin: None, tmp_path: Path, read: Callable[[list[Path]], Pairs]
) -> None:
    tensors, files = safetensors_files(tmp_path)
    pairs = read(files)
    name, tensor = next(pairs)
    del pairs
    assert torch.equal(tensor, tensors[name])
