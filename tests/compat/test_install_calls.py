"""Calls in all forms of arguments, by safetensors' own functions and after `stio.compat.install`: the same results and
kinds of errors, but for the calls in `DIFFERS`.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy as of_numpy
import safetensors.torch as of_torch
import torch

import stio.compat

ARRAY = np.arange(4, dtype=np.float32)
MATRIX = torch.arange(12.0).reshape(3, 4)
HAS_SPEC = hasattr(safetensors, "TensorSpec")
HAS_BACKEND = "backend" in inspect.signature(safetensors.safe_open).parameters


class Pair(torch.nn.Module):
    """Two matrices, which may be one."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(self.a.weight, 1.0)
        torch.nn.init.constant_(self.b.weight, 2.0)
        if is_tied:
            self.b.weight = self.a.weight


class Text(str):
    """A path as a subclass of `str`."""


CALLS: dict[str, Callable[[], Any]] = {}
"""Each is made in a directory with the files of `files`; what it writes is `out`."""

DIFFERS: dict[str, str] = {
    **dict.fromkeys(
        [f"{name} device=torch.device" for name in ("load_file", "load_file, by position", "safe_open", "load_model")],
        "a torch.device is taken by stio in all places",
    ),
    **dict.fromkeys(
        [f"{name} device=cuda" for name in ("load_file", "load_file, by position", "safe_open", "load_model")],
        "without CUDA, torch's own error; the original asks for pinned memory first",
    ),
    "numpy load of BF16": "an error of the library instead of a KeyError",
    "save complex128": "an error of the library instead of a KeyError",
    "save_file complex128": "an error of the library instead of a KeyError",
    "save named __metadata__": "no reader could read the tensor",
    "save_file named __metadata__": "no reader could read the tensor",
    "save conjugated": "the values are saved, and not the memory",
    "save_file conjugated": "the values are saved, and not the memory",
    "numpy save transposed": "the values are saved, and not the memory",
    "numpy save of a number": "a number of numpy has the attributes of an array",
    "serialize named __metadata__": "no reader could read the tensor",
    "serialize metadata={}": "the original's text is no JSON",
    "serialize dicts": "the form of releases before 0.8 is taken with all of them",
}
"""What is different, and why."""

IS_REFERENCE = safetensors.__version__ == "0.8.0" and not torch.cuda.is_available()
"""Whether all that is in `DIFFERS` differs: not all releases do so."""


def path_calls() -> None:
    absent = ("missing", "folder", "broken", "empty", "short", "", "a\0b")
    for path in ("model", Path("model"), Text("model"), b"model", 3, None, *absent):
        out = Path("out") if isinstance(path, Path) else Text("out") if isinstance(path, Text) else path
        target = "out" if path == "model" and type(path) is str else out
        CALLS[f"load_file {path!r}"] = lambda path=path: of_torch.load_file(path)
        CALLS[f"load_model {path!r}"] = lambda path=path: of_torch.load_model(Pair(), path)
        CALLS[f"safe_open {path!r}"] = lambda path=path: safetensors.safe_open(path, "pt").keys()
        CALLS[f"numpy load_file {path!r}"] = lambda path=path: of_numpy.load_file(path)
        if path in ("missing", "broken", "empty", "short"):
            continue  # a save writes these
        CALLS[f"save_file {path!r}"] = lambda path=target: of_torch.save_file({"w": MATRIX}, path)
        CALLS[f"save_model {path!r}"] = lambda path=target: of_torch.save_model(Pair(), path)
        CALLS[f"numpy save_file {path!r}"] = lambda path=target: of_numpy.save_file({"w": ARRAY}, path)
        CALLS[f"serialize_file {path!r}"] = lambda path=target: safetensors.serialize_file({}, path)


def open_calls() -> None:
    devices = {"cpu": "cpu", "cpu:0": "cpu:0", "None": None, "torch.device": torch.device("cpu"), "cuda": "cuda"}
    for name, device in (devices | {"nonsense": "nonsense", "meta": "meta", "1.5": 1.5, "-1": -1}).items():
        for call, made in {
            "load_file": lambda device=device: of_torch.load_file("model", device=device),
            "load_file, by position": lambda device=device: of_torch.load_file("model", device),
            "safe_open": lambda device=device: opened(device=device).get_tensor("w"),
            "load_model": lambda device=device: of_torch.load_model(Pair(), "pair", device=device),
        }.items():
            CALLS[f"{call} device={name}"] = made
    for framework in ("pt", "torch", "pytorch", "np", "numpy", "PT", "x", None, 1, b"pt"):
        CALLS[f"framework {framework!r}"] = lambda framework=framework: safetensors.safe_open(
            "model", framework=framework
        ).get_tensor("w")
    CALLS["safe_open, no arguments"] = lambda: safetensors.safe_open()  # type: ignore[call-arg]
    CALLS["safe_open, no framework"] = lambda: safetensors.safe_open("model")  # type: ignore[call-arg]
    CALLS["safe_open, keywords"] = lambda: safetensors.safe_open(filename="model", framework="pt", device="cpu").keys()
    CALLS["safe_open, four positions"] = lambda: safetensors.safe_open("model", "pt", "cpu", "mmap")  # type: ignore[misc]
    CALLS["safe_open, unknown keyword"] = lambda: safetensors.safe_open("model", "pt", rows=1)  # type: ignore[call-arg]
    for backend in ("mmap", "pread", "x", None) if HAS_BACKEND else ():
        CALLS[f"backend {backend!r}"] = lambda backend=backend: opened(backend=backend).get_tensor("w")
        CALLS[f"load_file backend {backend!r}"] = lambda backend=backend: of_torch.load_file("model", backend=backend)
    for name in ("w", "missing", 3, None, b"w"):
        CALLS[f"get_tensor {name!r}"] = lambda name=name: opened().get_tensor(name)
        CALLS[f"get_slice {name!r}"] = lambda name=name: opened().get_slice(name)[0]
    for method in ("keys", "metadata"):
        CALLS[method] = lambda method=method: getattr(opened(), method)()
        CALLS[f"{method} of a closed file"] = lambda method=method: getattr(closed(), method)()
    CALLS["metadata, none"] = lambda: safetensors.safe_open("numbers", "np").metadata()
    CALLS["get_tensor of a closed file"] = lambda: closed().get_tensor("w")
    CALLS["a closed file as a block"] = lambda: closed().__enter__() and None
    CALLS["slice, dtype"] = lambda: opened().get_slice("w").get_dtype()
    CALLS["slice, shape"] = lambda: opened().get_slice("w").get_shape()
    CALLS["iterate"] = lambda: list(opened())
    CALLS["contains"] = lambda: "w" in opened()
    CALLS["length"] = lambda: len(opened())
    CALLS["new attribute"] = lambda: setattr(opened(), "x", 1)
    CALLS["pickle"] = lambda: pickle.dumps(opened())
    CALLS["copy"] = lambda: copy.copy(opened())


def opened(**options: Any) -> Any:
    return safetensors.safe_open("model", "pt", **options)


def closed() -> Any:
    with opened() as file:
        pass
    return file


def bytes_calls() -> None:
    raw = of_torch.save({"w": MATRIX}, {"k": "v"})
    inputs = {"bytes": raw, "bytearray": bytearray(raw), "view": memoryview(raw), "str": "x", "None": None}
    for name, data in (inputs | {"no bytes": b"", "three": b"123", "short": raw[:-1], "long": raw + b"x"}).items():
        CALLS[f"load {name}"] = lambda data=data: of_torch.load(data)
        CALLS[f"numpy load {name}"] = lambda data=data: of_numpy.load(data)
        CALLS[f"deserialize {name}"] = lambda data=data: sorted(safetensors.deserialize(data))
    CALLS["load, keyword"] = lambda: of_torch.load(data=raw)
    CALLS["deserialize, keyword"] = lambda: safetensors.deserialize(bytes=raw)
    raw_bf16 = of_torch.save({"w": torch.ones(2, dtype=torch.bfloat16)})
    CALLS["numpy load of BF16"] = lambda: of_numpy.load(raw_bf16)


def save_calls() -> None:
    metadata: dict[str, Any] = {
        "None": None,
        "{}": {},
        "text": {"a": "b"},
        "number": {"a": 1},
        "number as key": {1: "a"},
    }
    metadata |= {"list": [("a", "b")], "str": "x", "ordered": OrderedDict(a="b"), "UserDict": UserDict(a="b")}
    metadata |= {"None in it": {"a": None}, "surrogate": {"a": "\ud800"}}
    for name, value in metadata.items():
        CALLS[f"save metadata={name}"] = lambda value=value: of_torch.save({"w": MATRIX}, copy.copy(value))
        CALLS[f"save_file metadata={name}"] = lambda value=value: of_torch.save_file(
            {"w": MATRIX}, "out", metadata=copy.copy(value)
        )
        CALLS[f"save_model metadata={name}"] = lambda value=value: of_torch.save_model(
            Pair(), "out", metadata=copy.copy(value)
        )
        CALLS[f"numpy save metadata={name}"] = lambda value=value: of_numpy.save(
            {"w": ARRAY}, metadata=copy.copy(value)
        )
        CALLS[f"serialize metadata={name}"] = lambda value=value: safetensors.serialize({}, metadata=copy.copy(value))
    one = torch.ones(2)
    dicts: dict[str, Any] = {"nothing": {}, "ordered": OrderedDict(w=one), "UserDict": UserDict(w=one), "None": None}
    dicts |= {"list": [("w", one)], "number": {"w": 1}, "array": {"w": ARRAY}, "number as name": {1: one}}
    dicts |= {"parameter": {"w": torch.nn.Parameter(one)}, "transposed": {"w": MATRIX.t()}, "view": {"w": MATRIX[1:]}}
    dicts |= {
        "shared": {"a": MATRIX, "b": MATRIX},
        "parts": {"a": MATRIX[:1], "b": MATRIX[1:]},
        "empty name": {"": one},
    }
    dicts |= {"sparse": {"w": torch.eye(2).to_sparse()}, "meta": {"w": torch.ones(2, device="meta")}}
    dicts |= {"scalar": {"w": torch.tensor(1.0)}, "no elements": {"w": torch.zeros(0, 3)}, "gradient": {"w": one * 2}}
    dicts |= {"complex128": {"w": one.to(torch.complex128)}, "float8": {"w": one.to(torch.float8_e4m3fn)}}
    dicts |= {"conjugated": {"w": torch.tensor([1 + 2j]).conj()}, "named __metadata__": {"__metadata__": one}}
    dicts |= {"state_dict": Pair().state_dict(), "tied": Pair(is_tied=True).state_dict()}
    for name, tensors in dicts.items():
        CALLS[f"save {name}"] = lambda tensors=tensors: of_torch.save(tensors)
        CALLS[f"save_file {name}"] = lambda tensors=tensors: of_torch.save_file(tensors=tensors, filename="out")
    arrays: dict[str, Any] = {"nothing": {}, "list": [1], "None": None, "number": {"w": 1}, "tensor": {"w": one}}
    arrays |= {
        "text": {"w": np.array(["a"])},
        "objects": {"w": np.array([None])},
        "big-endian": {"w": np.ones(2, ">f4")},
    }
    arrays |= {"transposed": {"w": ARRAY.reshape(2, 2).T}, "0 dimensions": {"w": np.array(1.0)}, "lists": {"w": [1.0]}}
    arrays |= {"of a number": {"w": np.float32(1)}, "complex128": {"w": np.ones(2, complex)}}
    for name, values in arrays.items():
        CALLS[f"numpy save {name}"] = lambda values=values: of_numpy.save(tensor_dict=values)
    for is_tied in (False, True):
        for path in ("pair", "tied", "other", "model"):
            for strict in (True, False):
                CALLS[f"load_model {path}, {is_tied=}, {strict=}"] = lambda path=path, is_tied=is_tied, strict=strict: (
                    of_torch.load_model(Pair(is_tied=is_tied), path, strict)
                )
        CALLS[f"save_model, {is_tied=}"] = lambda is_tied=is_tied: of_torch.save_model(Pair(is_tied=is_tied), "out")
    CALLS["save_model of nothing"] = lambda: of_torch.save_model(None, "out")  # type: ignore[arg-type]
    for name, tensor in {
        "plain": MATRIX,
        "sparse": torch.eye(2).to_sparse(),
        "meta": dicts["meta"]["w"],
        "none": None,
    }.items():
        CALLS[f"storage_ptr {name}"] = lambda tensor=tensor: of_torch.storage_ptr(tensor)
        CALLS[f"storage_size {name}"] = lambda tensor=tensor: of_torch.storage_size(tensor)
        CALLS[f"shared, {name}"] = lambda tensor=tensor: of_torch._find_shared_tensors({"w": tensor, "v": MATRIX})


def raw_calls() -> None:
    """What a release's own `serialize` takes: `TensorSpec`, and dicts before 0.8."""

    def spec(**changes: Any) -> dict[str, Any]:
        values = {"dtype": "float32", "shape": [4], "data_ptr": ARRAY.ctypes.data, "data_len": 16} | changes
        return {"w": safetensors.TensorSpec(**values)}

    def dicts(**changes: Any) -> dict[str, Any]:
        return {"w": {"dtype": "float32", "shape": [4], "data": ARRAY.tobytes()} | changes}

    one = spec if HAS_SPEC else dicts
    forms: dict[str, Callable[[], Any]] = {
        "plain": one,
        "tuple": lambda: one(shape=(2, 2)),
        "bfloat16": lambda: one(dtype="bfloat16", shape=[8]),
        "unknown dtype": lambda: one(dtype="F32"),
        "dtype of a wrong type": lambda: one(dtype=3),
        "shape below 0": lambda: one(shape=[-1]),
        "shape of floats": lambda: one(shape=[4.0]),
        "no shape": lambda: one(shape=None),
        "list": lambda: [("w", one()["w"])],
        "None in it": lambda: {"w": None},
        "number as name": lambda: {1: one()["w"]},
        "named __metadata__": lambda: {"__metadata__": one()["w"]},
        "two": lambda: {"b": one()["w"], "a": one(dtype="int32")["w"]},
        "dicts": dicts,
    }
    if HAS_SPEC:
        forms |= {
            "packed": lambda: spec(dtype="float4_e2m1fn_x2", shape=[4, 4]),
            "no elements": lambda: spec(shape=[0], data_len=0),
            "too short": lambda: spec(data_len=8),
        }
    else:
        forms |= {
            "no elements": lambda: dicts(shape=[0], data=b""),
            "data of a wrong type": lambda: dicts(data="text"),
            "no data": lambda: {"w": {"dtype": "float32", "shape": [4]}},
            "no dtype": lambda: {"w": {"data": b"", "shape": [4]}},
            "more": lambda: dicts(more=1),
        }
    for name, form in forms.items():
        CALLS[f"serialize {name}"] = lambda form=form: safetensors.serialize(form(), {"k": "v"})
        CALLS[f"serialize_file {name}"] = lambda form=form: safetensors.serialize_file(
            tensor_dict=form(), filename="out"
        )
        if f"serialize {name}" in DIFFERS:
            DIFFERS[f"serialize_file {name}"] = DIFFERS[f"serialize {name}"]


for _add in (path_calls, open_calls, bytes_calls, save_calls, raw_calls):
    _add()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    of_torch.save_file({"w": MATRIX, "b": torch.ones(3), "e": torch.zeros(0, 2)}, directory / "model", {"format": "pt"})
    of_numpy.save_file({"w": ARRAY}, directory / "numbers")
    of_torch.save_model(Pair(), str(directory / "pair"))
    of_torch.save_model(Pair(is_tied=True), str(directory / "tied"))
    of_torch.save_file({"a.weight": torch.ones(3, 2), "b.weight": torch.ones(2, 2)}, directory / "other")
    (directory / "broken").write_bytes(b"no header is here")
    (directory / "empty").write_bytes(b"")
    (directory / "short").write_bytes((directory / "model").read_bytes()[:-1])
    (directory / "folder").mkdir()
    return directory


@pytest.fixture(scope="module")
def outcomes(files: Path) -> dict[str, tuple[Any, Any]]:
    """What each call gives by safetensors' own function, and after `install`."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(files)
        warnings.simplefilter("ignore")  # the original's calls of functions of torch that are deprecated
        expected = {name: outcome(call) for name, call in CALLS.items()}
        with stio.compat.install():
            return {name: (expected[name], outcome(call)) for name, call in CALLS.items()}


def comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape, value.device, value.requires_grad, value.tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist(), value.flags.writeable
    if isinstance(value, dict):
        return type(value), {name: comparable(each) for name, each in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list | set):  # of `load_model`: no order
        return type(value), *(sorted(each) for each in value)
    return type(value), value


def outcome(call: Callable[[], Any]) -> Any:
    """Give the result and what was written, or the kind of the error and its first phrase."""
    Path("out").unlink(missing_ok=True)
    try:
        result = comparable(call())
    except safetensors.SafetensorError as error:
        return "SafetensorError", HAS_SPEC and ":".join(str(error).split(":")[:2])  # before, other words
    except OSError as error:  # for a directory stio's is of a more exact kind
        return OSError, isinstance(error, FileNotFoundError)
    except Exception as error:  # noqa: BLE001
        return next(kind for kind in (KeyError, ValueError, RuntimeError, type(error)) if isinstance(error, kind)), None
    return "result", result, Path("out").read_bytes() if Path("out").exists() else None


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_is_the_original_s(name: str, outcomes: dict[str, tuple[Any, Any]]) -> None:
    expected, found = outcomes[name]
    if name in DIFFERS:
        assert found[0] in ("result", "SafetensorError", AssertionError)
        assert found != expected or not IS_REFERENCE, "this does not differ any more"
    else:
        assert found == expected


def test_what_differs_is_called() -> None:
    assert set(DIFFERS) <= set(CALLS)
