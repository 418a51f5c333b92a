"""No path changes a bit on a device; the table of paths is `bit_paths.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import bit_paths
import pytest
import torch
from accelerators import gpu

from stio.compat.safetensors import _open
from stio.device.base import resolve_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # by inductor
]
NAMES = bit_paths.names_for(device_is_cpu=False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Return the device; the drop-in knows it."""
    found = resolve_device("auto")
    monkeypatch.setattr(_open, "_DEVICES", (*_open._DEVICES, found.type))  # the original's list has no simulated one
    yield found
    torch._dynamo.reset()


@pytest.mark.matrix
@pytest.mark.costly("all bit patterns, and torch.compile")
@gpu
@pytest.mark.parametrize("name", NAMES)
def test_c301_no_path_changes_a_bit_on_a_device(name: str, fast_path: Path, device: torch.device) -> None:
    with ExitStack() as stack:
        bit_paths.run(name, bit_paths.Case(fast_path, str(device), stack))


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("name", NAMES)
def test_c301_no_path_changes_a_bit_of_a_dtype_alone(name: str, fast_path: Path, device: torch.device) -> None:
    """A list of tensors of one dtype goes to other kernels than one of several.

    On the simulated device the dtypes take turns, path by path; `make nightly` tries all of them.
    """
    for dtype in bit_paths.taking_turns(bit_paths.ALONE, NAMES.index(name)):
        folder = fast_path / dtype
        folder.mkdir()
        with ExitStack() as stack:
            bit_paths.run(name, bit_paths.Case(folder, str(device), stack, bit_paths.of_dtype(dtype)))


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bit_paths.write_delta(tmp_path_factory.mktemp("delta") / "chain")


@pytest.mark.matrix
@pytest.mark.costly("all bit patterns, and torch.compile")
@gpu
@pytest.mark.parametrize("name", bit_paths.names_for_deltas(device_is_cpu=False))
def test_no_path_changes_a_bit_of_a_delta_on_a_device(
    name: str, fast_path: Path, device: torch.device, delta: Path
) -> None:
    with ExitStack() as stack:
        bit_paths.run(name, bit_paths.Case(fast_path, str(device), stack, stored=delta))
