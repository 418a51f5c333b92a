"""What these tests share: a checkpoint, and the devices that it goes to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerators import Place
from fakes import write_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def tensors() -> Tensors:
    """Tensors with allocations of their own, of 6 MiB, and small ones that share some."""
    chance = torch.Generator().manual_seed(0)
    large = {f"large.{k}": torch.randint(0, 255, (6, 1 << 20), generator=chance, dtype=torch.uint8) for k in range(7)}
    small = {f"small.{k:02}": torch.randn(k * k + 1, generator=chance) for k in range(60)}
    return large | small | {"empty": torch.empty(0, 3), "half": torch.randn(77, generator=chance).bfloat16()}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    """Write them in three files; return the directory."""
    return write_checkpoint(tmp_path_factory.mktemp("gpu"), tensors, 3)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Return a device; parametrize it with `PLACES`, indirectly."""
    return Place(request.param)
