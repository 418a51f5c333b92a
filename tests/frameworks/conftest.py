"""What the tests of frameworks share: one action done over safetensors and over stio, and all that it gave compared."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import stio.compat
from stio.compat.safetensors import _file
from stio.compat.safetensors import torch as stio_torch

_KEPT: list[Any] = []


def _prepare_torchvision() -> None:
    """Let torchvision's Python part be imported where its compiled part cannot be loaded.

    The package index's wheel is linked against CUDA's libraries, and fails beside torch for the CPU: it describes two
    operators that the compiled part would have defined. timm and transformers need image transforms only.
    """
    if find_spec("torchvision") is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # the definitions end with it


_prepare_torchvision()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a framework is missing where `make frameworks` has installed all of them."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("STIO_TEST_FRAMEWORKS") == "all" and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@dataclass
class Calls:
    """What was opened and saved, and by which library."""

    opened_by_stio: list[str] = field(default_factory=list)
    saved_by_stio: list[str] = field(default_factory=list)
    read_by_original: list[str] = field(default_factory=list)

    def clear(self) -> None:
        for names in (self.opened_by_stio, self.saved_by_stio, self.read_by_original):
            names.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    init, loaded = _file.DropInFile.__init__, stio_torch.loaded
    write, write_if_small = stio_torch._write, stio_torch.write_if_small

    def opened(file: Any, path: str, *args: Any, **options: Any) -> None:
        calls.opened_by_stio.append(str(path))
        init(file, path, *args, **options)

    def written(tensors: Any, path: str, planner: Any) -> None:
        write(tensors, path, planner)
        calls.saved_by_stio.append(str(path))

    def written_if_small(path: str, nbytes: int, serialized: Any) -> bool:
        if is_written := write_if_small(path, nbytes, serialized):
            calls.saved_by_stio.append(str(path))
        return is_written

    def of_bytes(data: bytes, framework: Any) -> Any:
        calls.opened_by_stio.append("bytes")
        return loaded(data, framework)

    monkeypatch.setattr(_file.DropInFile, "__init__", opened)
    monkeypatch.setattr(stio_torch, "_write", written)
    monkeypatch.setattr(stio_torch, "write_if_small", written_if_small)
    monkeypatch.setattr(stio_torch, "loaded", of_bytes)

    # On the types: so a reference that a framework has kept anywhere is seen too.
    rust = import_module("safetensors._safetensors_rust")
    for kind in (getattr(rust, name, None) for name in ("safe_open", "_safe_open_handle")):
        for name in ("__enter__", "get_slice", "get_tensor", "get_tensors", "keys", "metadata", "offset_keys"):
            if name in getattr(kind, "__dict__", ()):
                monkeypatch.setattr(kind, name, _recording(name, getattr(kind, name), calls.read_by_original))
    return calls


def _recording(name: str, method: Callable[..., Any], into: list[str]) -> Callable[..., Any]:
    def recording(*args: Any, **options: Any) -> Any:
        into.append(name)
        return method(*args, **options)

    return recording


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that no framework asks a server."""
    if find_spec("huggingface_hub") is not None:
        monkeypatch.setattr(import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    for module in ("transformers.utils.hub", "diffusers.utils.constants"):
        if module in sys.modules and hasattr(sys.modules[module], "HF_HUB_OFFLINE"):
            monkeypatch.setattr(sys.modules[module], "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def _no_installation_stays() -> Iterator[None]:
    yield
    stio.compat.uninstall()


Action = Callable[[Path], Any]


@pytest.fixture
def compare(tmp_path: Path, calls: Calls) -> Callable[..., Any]:
    """Return a function that does an action twice, over safetensors and over stio, and compares all that it gave.

    The action gets an empty directory, by the same path both times. Compared are the names and bytes of all files that
    it leaves there, and its result: modules, tensors and containers of them, bit for bit.
    """

    def compare(action: Action, *, loads: bool = True, saves: bool = False) -> Any:
        folder = tmp_path / "run"
        expected = _done(action, folder)
        assert not calls.opened_by_stio
        assert not calls.saved_by_stio
        assert bool(calls.read_by_original) == loads
        folder.rename(tmp_path / "official")
        calls.clear()

        with stio.compat.install():
            found = _done(action, folder)
        files = _files(folder)
        written = {str(folder / name) for name in files if name.endswith(".safetensors")}
        assert not calls.read_by_original
        assert bool(calls.opened_by_stio) == loads
        assert bool(calls.saved_by_stio) == saves
        assert {name for name in calls.saved_by_stio if Path(name).exists()} == written
        _assert_files_equal(_files(tmp_path / "official"), files)
        assert_equal(expected, found, "result")
        return found

    return compare


def _done(action: Action, folder: Path) -> Any:
    folder.mkdir()
    torch.manual_seed(0)
    return action(folder)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _assert_files_equal(expected: dict[str, bytes], found: dict[str, bytes]) -> None:
    assert sorted(found) == sorted(expected)
    for name, data in expected.items():
        if name.endswith(".safetensors") and found[name] != data:
            # safetensors writes several entries of metadata in an order that changes from call to call
            (header, start), (other, other_start) = _header(data), _header(found[name])
            assert len(header.get("__metadata__", {})) > 1, name
            assert (list(other.items()), other_start) == (list(header.items()), start), name
            assert found[name][start:] == data[start:], name
        else:
            assert found[name] == data, name


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def assert_equal(expected: Any, found: Any, where: str) -> None:
    """Require that two results are equal, tensors bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.nn.Module):
        assert_equal(_members(expected), _members(found), where)
    elif isinstance(expected, torch.Tensor):
        _assert_tensors_equal(expected, found, where)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name, value in expected.items():
            assert_equal(value, found[name], f"{where}: {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, values in enumerate(zip(expected, found, strict=True)):
            assert_equal(*values, f"{where}[{number}]")
    elif hasattr(expected, "__array__"):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            where
        )
    else:
        assert found == expected, where


def _members(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a module, and which of them are one tensor."""
    members = dict(module.named_parameters(remove_duplicate=False))
    members |= dict(module.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in members.items():
        names.setdefault(id(tensor), []).append(name)
    return members | {"tied": [same for same in names.values() if len(same) > 1], "training": module.training}


def _assert_tensors_equal(expected: Any, found: Any, where: str) -> None:
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        assert getattr(found, name) == getattr(expected, name), f"{where}: {name}"
    if expected.is_meta:
        return
    if hasattr(expected, "__tensor_flatten__"):  # a quantised tensor is made of several
        inner, attributes = expected.__tensor_flatten__()
        assert found.__tensor_flatten__() == (inner, attributes), where
        for name in inner:
            assert_equal(getattr(expected, name), getattr(found, name), f"{where}.{name}")
        return
    assert found.stride() == expected.stride(), where
    first, second = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (expected, found))
    assert torch.equal(first, second), where
