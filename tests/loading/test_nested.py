"""Nested state as the target of a load: on which device its tensors are loaded, and in which parts. Ranks: tests/distributed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from accelerators import gpu

from stio import sync
from stio.device.base import resolve_device
from stio.loading.api import fill_from
from stio.loading.options import LoadOptions
from stio.loading.targets.base import LocalPart
from stio.loading.targets.nested import StateTarget
from stio.runtime.notifier import run_blocking
from stio.storage.checkpoint.open import open_checkpoint


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


@pytest.mark.parametrize("names", ["ab", "abc", "abd", "ae", "e"])
def test_names_of_one_tensor_get_different_parts_of_it(tmp_path: Path, names: str) -> None:
    w = torch.arange(12.0).reshape(6, 2)
    rows = {"a": slice(0, 1), "b": slice(3, 6), "c": slice(0, 6), "d": slice(1, 3), "e": slice(0, 0)}
    sync.save_state(dict.fromkeys(names, w), tmp_path / "state.safetensors")
    state = {name: torch.zeros_like(w[rows[name]]) for name in names}
    parts = {f"state[{name!r}]": LocalPart(state[name], (6, 2), (rows[name], slice(0, 2))) for name in names}
    target = StateTarget(state, part_of=lambda name, _: parts[name])
    run_blocking(fill_from(tmp_path / "state.safetensors", target, LoadOptions()))
    assert all(torch.equal(state[name], w[rows[name]]) for name in names)
