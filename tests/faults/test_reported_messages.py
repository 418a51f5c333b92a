"""Fault 321: objects that are no tensors, states, links and old checkpoints: the message names the next step."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import require_equal
from torch import nn
from torch.ao import quantization

import stio
from stio import sync


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def optimizer() -> torch.optim.Optimizer:
    made = module()
    found = torch.optim.AdamW(made.parameters())
    made(torch.ones(1, 3)).sum().backward()
    found.step()
    return found


def scheduler() -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 10)


class Ema:
    """A user's own object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9}


OBJECTS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Any]]] = {
    "optimizer": (optimizer, "its state_dict()", lambda one: one.state_dict()),
    "scheduler": (scheduler, "its state_dict()", lambda one: one.state_dict()),
    "scaler": (lambda: torch.amp.GradScaler("cpu"), "its state_dict()", lambda one: one.state_dict()),
    "average": (Ema, "its state_dict()", lambda one: one.state_dict()),
    "generator": (torch.Generator, "its get_state()", lambda one: one.get_state()),
    "python": (lambda: random.Random(1), "its getstate()", lambda one: one.getstate()),
    "numpy": (lambda: np.random.default_rng(1), "its bit_generator.state", lambda one: one.bit_generator.state),
}


def saves(given: Any, where: Path) -> list[Callable[[], object]]:
    def by_saver() -> None:
        with sync.Saver() as saver:
            saver.save(given, where)

    return [lambda: sync.save(given, where), lambda: sync.save({"w": torch.ones(1), "it": given}, where), by_saver]


def states(given: Any, where: Path) -> list[Callable[[], object]]:
    def by_saver() -> None:
        with sync.Saver() as saver:
            saver.save_state([given], where)

    return [lambda: sync.save_state(given, where), lambda: sync.save_state({"a": [given]}, where), by_saver]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OBJECTS)
def test_c321_objects_with_a_state(tmp_path: Path, name: str) -> None:
    make, advice, state_of = OBJECTS[name]
    given = make()
    for save in saves(given, tmp_path / "m"):
        with pytest.raises(TypeError, match=rf"{type(given).__name__}; save_state takes {re.escape(advice)}\Z"):
            save()
    for save in states(given, tmp_path / "m"):
        with pytest.raises(TypeError, match=rf"which save_state does not take: pass {re.escape(advice)}\Z"):
            save()
    assert os.listdir(tmp_path) == []
    sync.save_state(state_of(given), tmp_path / "s.safetensors")  # the step that the message names
    sync.load_state(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (lambda: "model.safetensors", "the tensors come first, then the destination"),
        (lambda: Path("model.safetensors"), "the tensors come first, then the destination"),
        (lambda: torch.ones(2), 'pass {"name": tensor}'),
        (lambda: [torch.ones(2)], "save_state takes lists and other nested state"),
        (lambda: module().named_parameters(), "pass dict(...) of names and tensors"),
        (lambda: None, "not NoneType"),
        (lambda: nn.Linear, "not type"),
    ],
)
def test_c321_what_is_neither_a_mapping_nor_a_module(tmp_path: Path, given: Callable[[], Any], advice: str) -> None:
    with pytest.raises(TypeError, match=rf"tensors must be a mapping .*{re.escape(advice)}\Z"):
        sync.save(given(), tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_c321_a_module_among_tensors_and_in_a_state(tmp_path: Path) -> None:
    given = module()
    with pytest.raises(
        TypeError, match=r"'model' is no tensor, its type is Sequential; save_state takes its state_dict"
    ):
        sync.save({"model": given}, tmp_path / "m")
    with pytest.raises(TypeError, match=r"state\['model'\] is a .*Sequential, .*: pass its state_dict\(\)"):
        sync.save_state({"model": given}, tmp_path / "m")
    sync.save_state({"model": given.state_dict()}, tmp_path / "m")
    require_equal(sync.load_state(tmp_path / "m")["model"], given.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_c321_modules_that_torch_has_quantized(tmp_path: Path) -> None:
    plain = module()
    given = quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    match = "torch packs the weights of a quantized module.*Save the module as it is before"
    for save in [*saves(given, tmp_path / "m"), *states(given, tmp_path / "m")]:
        with pytest.raises(TypeError, match=match):
            save()
    with pytest.raises(TypeError, match=match):
        sync.save(given.state_dict(), tmp_path / "m")
    with pytest.raises(stio.UnsupportedDtypeError, match=r"of a quantized tensor `int_repr\(\)`"):
        sync.save_state(given.state_dict(), tmp_path / "m")
    assert os.listdir(tmp_path) == []
    sync.save(plain, tmp_path / "m")
    other = module()
    sync.load_into(other, tmp_path / "m")
    require_equal(other.state_dict(), plain.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("size", ["small", "large"])
def test_c321_a_state_given_to_load_into(tmp_path: Path, strict: bool, size: str) -> None:
    """Without `strict` too: the module would keep its own values."""
    made, target = module(), module()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    more = list(range(30_000)) if size == "large" else 3
    sync.save_state({"model": made.state_dict(), "more": more}, tmp_path / "s.safetensors")
    for options in ({}, {"assign": True}):
        with pytest.raises(
            stio.MismatchError, match=r"nested state of save_state: load_state returns it.*state\['model'\]"
        ):
            sync.load_into(target, tmp_path / "s.safetensors", strict=strict, **options)
        require_equal(target.state_dict(), before)
    with torch.device("meta"):
        empty = module()
    with (
        pytest.raises(stio.MismatchError, match="load_state returns it"),
        sync.warm_start(empty, tmp_path / "s.safetensors", device="cpu", strict=strict) as warm,
    ):
        warm.done()
    target.load_state_dict(sync.load_state(tmp_path / "s.safetensors")["model"])  # the step that the message names
    require_equal(target.state_dict(), made.state_dict())


def test_c321_a_flat_state_and_a_state_of_which_a_part_fits(tmp_path: Path) -> None:
    made, target = module(), module()
    sync.save_state(made.state_dict(), tmp_path / "flat")
    sync.load_into(target, tmp_path / "flat")
    require_equal(target.state_dict(), made.state_dict())
    sync.save_state({"0.weight": made[0].weight, "optimizer": {"x": torch.ones(1)}}, tmp_path / "part")
    report = sync.load_into(module(), tmp_path / "part", strict=False)
    assert (len(report.missing), report.unexpected) == (3, ("optimizer/x",))


@pytest.mark.parametrize("kind", ["file", "directory", "pickle", "in a directory", "parent", "shard", "chain"])
def test_c321_a_link_to_nothing_is_named(tmp_path: Path, kind: str) -> None:
    names = {"file": "m.safetensors", "directory": "m", "pickle": "m.pt", "chain": "m.safetensors"}
    link = path = tmp_path / names.get(kind, "link")
    target = "gone/blob"
    if kind == "in a directory":
        path, link = tmp_path / "dir", tmp_path / "dir" / "model.safetensors"
        path.mkdir()
    elif kind == "parent":
        path = link / "model.safetensors"
    elif kind == "shard":
        path = tmp_path / "dir"
        sync.save({"a": torch.ones(20), "b": torch.ones(20)}, path, max_shard_size=100)
        link = path / "model-00002-of-00002.safetensors"
        link.unlink()
    elif kind == "chain":
        (tmp_path / "second").symlink_to(target)
        target = "second"
    link.symlink_to(target)
    calls: list[Callable[[Any], object]] = [sync.load, sync.load_state, lambda one: sync.load_into(module(), one)]
    for call in [*calls, lambda one: sync.convert(one, tmp_path / "c.safetensors")]:
        with pytest.raises(
            stio.CheckpointNotFoundError, match=rf"'{link}' is a link to '{target}', which does not exist"
        ):
            call(path)
    if kind in ("file", "directory"):  # a save makes what the link leads to
        sync.save({"a": torch.ones(2)}, path)
        assert sync.load(path)["a"].tolist() == [1, 1]


def test_c321_what_is_missing_without_a_link_says_nothing_of_links(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for path in ("absent.safetensors", "absent/m.safetensors", "link/m.safetensors", "", "\0"):
        with pytest.raises(stio.StioError) as caught:
            sync.load(tmp_path / path if path else "")
        assert "is a link" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_c321_an_old_checkpoint_of_lightning(tmp_path: Path, zipped: bool) -> None:
    pytest.importorskip("lightning")
    lightning = pytest.importorskip("stio.integrations.lightning")
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    checkpoint = {"state_dict": module().state_dict(), "epoch": 3, "optimizer_states": [optimizer().state_dict()]}
    torch.save(checkpoint, old, _use_new_zipfile_serialization=zipped)
    plugin = lightning.StioCheckpointIO()
    with pytest.raises(stio.FormatError, match=r"(?s)this is a file of torch\.save.*`StioCheckpointIO\(asynchronous"):
        plugin.load_checkpoint(old)
    lightning.StioCheckpointIO(asynchronous=False).save_checkpoint(torch.load(old, map_location="cpu"), new)
    found = plugin.load_checkpoint(new)
    assert found["epoch"] == 3
    require_equal(found["state_dict"], checkpoint["state_dict"])


@pytest.mark.parametrize("zipped", [True, False])
def test_c321_an_old_checkpoint_given_to_a_load(tmp_path: Path, zipped: bool) -> None:
    weights = module().state_dict()
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=zipped)
    for load in (sync.load, sync.load_state, lambda path: sync.load_into(module(), path)):
        with pytest.raises(stio.FormatError, match=r"a file of torch\.save.*`stio convert SOURCE DESTINATION`"):
            load(tmp_path / "old.ckpt")
    with pytest.raises(stio.AmbiguousCheckpointError, match="key='state_dict'"):
        sync.convert(tmp_path / "old.ckpt", tmp_path / "new")
    sync.convert(tmp_path / "old.ckpt", tmp_path / "new", key="state_dict")
    require_equal(sync.load(tmp_path / "new"), weights)
    save_file(weights, tmp_path / "mine.ckpt")  # a safetensors file of that name
    require_equal(sync.load(tmp_path / "mine.ckpt"), weights)
