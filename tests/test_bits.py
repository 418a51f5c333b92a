"""No path changes a bit on the CPU; the table of paths is `bit_paths.py`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import bit_paths
import pytest


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.costly("torch.compile")] if "compile" in name else [])
        for name in bit_paths.names_for(device_is_cpu=True)
    ],
)
def test_c301_no_path_changes_a_bit_on_the_cpu(name: str, fast_path: Path) -> None:
    with ExitStack() as stack:
        bit_paths.run(name, bit_paths.Case(fast_path, "cpu", stack))


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bit_paths.write_delta(tmp_path_factory.mktemp("delta") / "chain")


@pytest.mark.matrix
@pytest.mark.parametrize("name", bit_paths.names_for_deltas(device_is_cpu=True))
def test_no_path_changes_a_bit_of_a_delta_on_the_cpu(name: str, fast_path: Path, delta: Path) -> None:
    with ExitStack() as stack:
        bit_paths.run(name, bit_paths.Case(fast_path, "cpu", stack, stored=delta))
