"""Nested state as the target of a load: on which device its tensors are loaded. Ranks: tests/distributed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from accelerators import gpu

from stio import sync
from stio.device.base import resolve_device
from stio.loading.nested import StateTarget
from stio.loading.open import open_checkpoint
from stio.loading.options import LoadOptions


@gpu
def test_a_tensor_for_two_devices_is_loaded_to_the_cpu(tmp_path: Path) -> None:
    """A copy from a device to pinned memory does not block: the load would return before it is done."""
    w, device = torch.arange(4.0), resolve_device("auto")
    sync.save_state({"a": w, "b": w, "c": w + 1}, tmp_path / "state.safetensors")
    state = {name: torch.zeros(4, device=device) for name in "ac"} | {"b": torch.zeros(4, pin_memory=True)}
    target = StateTarget(state)
    with closing(open_checkpoint(tmp_path / "state.safetensors")) as opened:
        target.select(opened, LoadOptions(), lambda: None)
    assert isinstance(target.device, dict)
    assert sorted(map(str, target.device.values())) == ["cpu", str(device)]
