"""What tests of the host cache load, and where to. A file that defines these names itself has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeDevice
from support import save_sharded

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    chance = torch.Generator().manual_seed(2)
    large = {f"large.{k}": torch.randn(300_000 + k, generator=chance) for k in range(6)}
    small = {f"small.{k}": torch.randn(k % 40 + 1, generator=chance) for k in range(120)}
    return large | small | {"e": torch.empty(0, 3), "flag": torch.tensor([True, False])}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return save_sharded(tensors, tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(params=["cpu", "fake"])
def device(request: pytest.FixtureRequest) -> Any:
    return "cpu" if request.param == "cpu" else FakeDevice()
