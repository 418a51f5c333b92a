"""Faults 435 to 438 and 473: files of other programs, what each is called, and what stio does with it.

Small files of each kind are made here. Those that only another package writes are in tests/fixtures/writers.
"""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import sys
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import refused, run
from torch import nn

import stio
from stio import sync

# 435: a pickle that needs code beside its tensors.

WEIGHTS = {
    "w": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    "parameter": nn.Parameter(torch.ones(2)).data,
    "rows": torch.arange(8.0)[::2],
}
_MODULE = """
class Config:
    def __init__(self): self.content = {"x": [1]}
class Attributes(dict): pass
class Items(list): pass
class Slots:
    __slots__ = ("a",)
    def __init__(self): self.a = 1
class Keywords:
    def __getnewargs_ex__(self): return (), {"x": 1}
    def __new__(cls, **keywords): return object.__new__(cls)
class Reduced:
    def __reduce__(self): return function, (1,), {"state": 1}, iter([1, 2]), iter([("a", 1)])
def function(*arguments): return Reduced()
"""


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Values that need code; their module is not here when they are read."""
    module = types.ModuleType("no_such_project")
    exec(_MODULE, module.__dict__)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "no_such_project", module)
        for name, one in vars(module).copy().items():
            if not name.startswith("_"):
                one.__module__ = "no_such_project"
    names = ("Config", "Slots", "Keywords", "Reduced")
    return {
        "module": module,
        "values": {
            **{name: getattr(module, name)() for name in names},
            "Attributes": module.Attributes(lr=1),
            "Items": module.Items([1, 2]),
            "class": module.Config,
            "partial": functools.partial(module.function, 1),
            "defaults": collections.defaultdict(module.function),
            "namespace": argparse.Namespace(lr=0.1),
            "path": Path("/x"),
            "array": np.arange(3),
            "generator": np.random.default_rng(1),
            "layer": nn.Linear(1, 1),
        },
    }


def _save(path: Path, value: Any, others: dict[str, Any], **keywords: Any) -> None:
    sys.modules["no_such_project"] = others["module"]
    try:
        torch.save(value, path, **keywords)
    finally:
        del sys.modules["no_such_project"]


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_c435_a_key_leads_past_what_needs_code(tmp_path: Path, others: dict[str, Any], new: bool, suffix: str) -> None:
    path, out = tmp_path / f"m{suffix}", tmp_path / "out.safetensors"
    weights = {
        name: one for name, one in WEIGHTS.items() if new or name != "fp8"
    }  # torch reads no FP8 from the old one
    value = {"hyper_parameters": others["values"], "model": {"state_dict": weights}, "epoch": 3}
    _save(path, value, others, _use_new_zipfile_serialization=new)
    before = {*sys.modules}
    sync.convert(path, out, key="model.state_dict")
    assert {*sys.modules} == before
    loaded = sync.load(out)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name].float(), one.float()) for name, one in weights.items())


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_c435_pickles_of_newer_protocols(tmp_path: Path, others: dict[str, Any], protocol: int) -> None:
    """torch's own reader of plain values knows protocol 2 alone."""
    out = tmp_path / "out.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _save(tmp_path / "m.pt", {"args": others["values"], "model": WEIGHTS}, others, pickle_protocol=protocol)
        torch.save(WEIGHTS, tmp_path / "flat.pt", pickle_protocol=protocol)
    sync.convert(tmp_path / "m.pt", out, key="model")
    assert torch.equal(sync.load(out)["w"], WEIGHTS["w"])
    sync.convert(tmp_path / "flat.pt", tmp_path / "flat.safetensors")
    assert torch.equal(sync.load(tmp_path / "flat.safetensors")["w"], WEIGHTS["w"])


def test_c435_the_first_error_names_the_key(tmp_path: Path, others: dict[str, Any]) -> None:
    path, out = tmp_path / "m.ckpt", tmp_path / "out.safetensors"
    _save(path, {"config": others["values"]["Config"], "state_dict": WEIGHTS}, others)
    said = r"needs no_such_project\.Config, .*; its tensors are under key='state_dict', which needs no code$"
    for key in (None, "config"):
        with pytest.raises(stio.FormatError, match=said):
            sync.convert(path, out, key=key)
    with pytest.raises(stio.TensorNotFoundError, match="no such key; its tensors are under key='state_dict'"):
        sync.convert(path, out, key="model")
    assert "under --key state_dict, " in refused("convert", path, out)
    run("convert", path, out, "--key", "state_dict")
    assert torch.equal(sync.load(out)["w"], WEIGHTS["w"])


def test_c435_a_part_that_needs_code_itself_is_refused(tmp_path: Path, others: dict[str, Any]) -> None:
    values = others["values"]
    _save(tmp_path / "m.pt", {"model": {**WEIGHTS, "step": values["Config"]}, "layer": values["layer"]}, others)
    for key in ("model", "layer"):
        with pytest.raises(stio.FormatError, match=r"needs no_such_project\.Config.*with the program that wrote it$"):
            sync.convert(tmp_path / "m.pt", tmp_path / "out", key=key)
    assert not (tmp_path / "out").exists()


class _Runs:
    """Runs code when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def test_c435_nothing_in_the_file_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for number, bad in enumerate((_Runs(eval, f"open({str(marker)!r}, 'w')"), _Runs(exec, "1/0"), _Runs(open, marker))):
        path = tmp_path / f"{number}.pt"
        torch.save({"bad": bad, "model": WEIGHTS, "more": bad}, path)
        sync.convert(path, tmp_path / f"{number}.safetensors", key="model")
        assert torch.equal(sync.load(tmp_path / f"{number}.safetensors")["w"], WEIGHTS["w"])
    torch.save({"bad": _Runs(os.system, f"touch {marker}"), "model": WEIGHTS}, tmp_path / "m.pt")
    with pytest.raises(stio.FormatError, match="code which no checkpoint needs"):
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", key="model")
    assert not marker.exists()


def test_c435_no_class_or_function_is_changed(tmp_path: Path) -> None:
    """A pickle can set attributes of what it names: here of the function that makes tensors, and of a class."""
    names = [(torch._utils._rebuild_tensor_v2, "__kwdefaults__"), (collections.OrderedDict, "hacked")]
    for number, (target, name) in enumerate(names):
        bad = _Runs(print)
        bad.reduced = argparse.Namespace, ()
        torch.save({"model": WEIGHTS, "bad": [bad, target]}, tmp_path / "plain.pt")
        text = (tmp_path / "plain.pt").read_bytes()
        # Behind the name of the target: BUILD with the state (None, {name: {}}).
        named = f"c{target.__module__}\n{target.__qualname__}\n".encode()
        state = named + b"(N}" + b"U" + bytes([len(name)]) + name.encode() + b"}stb"
        path = tmp_path / f"{number}.pt"
        _with_pickle(path, text, lambda pickled: pickled.replace(named, state, 1))  # noqa: B023 - called at once
        before = getattr(target, name, None)
        sync.convert(path, tmp_path / f"{number}.safetensors", key="model")
        assert getattr(target, name, None) is before


def _with_pickle(path: Path, archive: bytes, changed: Any) -> None:
    source = zipfile.ZipFile(io.BytesIO(archive))
    with zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/data.pkl"):
                assert changed(content) != content
                content = changed(content)
            target.writestr(name, content)


# 473: warnings are not damage.


def _warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load warns as torch 2.14 does of sparse tensors."""
    load = torch.load

    def warning(*arguments: Any, **keywords: Any) -> Any:
        warnings.warn("Sparse invariant checks are implicitly enabled", UserWarning, stacklevel=2)
        return load(*arguments, **keywords)

    monkeypatch.setattr(torch, "load", warning)


def test_c473_a_warning_of_torch_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _warns(monkeypatch)
    torch.save(WEIGHTS, tmp_path / "m.pt")
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"model": WEIGHTS, "args": argparse.Namespace(lr=1)}, tmp_path / "args.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors")
        sync.convert(tmp_path / "args.pt", tmp_path / "out.safetensors", key="model")
        with pytest.raises(stio.FormatError, match="sparse") as caught:
            sync.convert(tmp_path / "sparse.pt", tmp_path / "out.safetensors")
    assert "damaged" not in str(caught.value)
    assert "damaged" not in refused("convert", tmp_path / "sparse.pt", tmp_path / "out.safetensors")
