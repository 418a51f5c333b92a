"""Faults 435 to 437 and 473: files of other programs, what each is called, and what stio does with it.

Files that only another package writes are in tests/fixtures/writers, whose make.py names the versions.

`test_c437_the_next_step_runs` runs the commands of each kind, and `test_c437_the_named_function_reads_it` the function
that a step names. Two steps need more than a small file, and no test runs them: `git lfs pull`, and transformers'
`gguf_file=`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gzip
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import refused, run
from torch import nn
from torch.package import PackageExporter

import stio
from stio import sync
from stio.compat.safetensors.numpy import save_file as save_arrays
from stio.conversion.torch_files import kind_of_file
from stio.format.files.other_kinds import _KINDS, _TORCH_SAVE

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
    for key in (None, "config", "model"):
        with pytest.raises(stio.FormatError, match=said):
            sync.convert(path, out, key=key)
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


@pytest.mark.parametrize("beside", [{}, {"ema": WEIGHTS}], ids=["alone", "beside"])
@pytest.mark.parametrize("key", ["model.state_dict", ("model", "state_dict"), "model.state_dict.w"])
def test_c435_a_key_below_what_needs_code_is_refused(tmp_path: Path, key: Any, beside: dict[str, Any]) -> None:
    torch.save({"model": argparse.Namespace(state_dict=WEIGHTS), **beside}, tmp_path / "m.pt")
    step = "its tensors are under key='ema', which needs no code" if beside else ".*; trust_pickle=True reads more.*"
    with pytest.raises(stio.FormatError, match=rf"needs argparse\.Namespace, .*{step}$"):
        sync.convert(tmp_path / "m.pt", tmp_path / "out", key=key)


def test_c435_a_missing_key_where_all_tensors_need_code(tmp_path: Path) -> None:
    torch.save({"model": argparse.Namespace(state_dict=WEIGHTS)}, tmp_path / "m.pt")
    with pytest.raises(stio.FormatError, match=r"needs argparse\.Namespace"):
        sync.convert(tmp_path / "m.pt", tmp_path / "out", key="ema")


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
def test_c435_parameters_and_buffers_with_attributes(tmp_path: Path, new: bool) -> None:
    parameter, plain, of_buffer = nn.Parameter(torch.ones(2)), torch.arange(3.0), nn.Buffer(torch.zeros(4))
    parameter.tensor_model_parallel = plain.note = argparse.Namespace(x=1)  # type: ignore[attr-defined]
    weights = {"parameter": parameter, "plain": plain, "buffer": of_buffer}
    sparse = nn.Parameter(torch.eye(2).to_sparse())  # of no function that makes tensors here
    sparse.note = "x"  # type: ignore[attr-defined]
    value = {"args": argparse.Namespace(lr=1), "state_dict": weights, "sparse": [sparse, nn.Parameter(sparse.data)]}
    torch.save(value, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", key="state_dict")
    loaded = sync.load(tmp_path / "out.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], one) for name, one in weights.items())


def _scripted(path: Path, disguised: bool) -> None:
    """Make an archive that torch takes for TorchScript; disguised, stio takes it for a file of torch.save."""
    torch.save(WEIGHTS, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/constants.pkl", b"")
        if disguised:  # what looks like the start of an entry, which goes on into the next one, of constants.pkl
            archive.filelist[-2].comment = b"PK\x01\x02".ljust(36, b"\0")
    assert (kind_of_file(str(path)) == _TORCH_SAVE) == disguised


@pytest.mark.parametrize("other", ["jit", "jit in disguise", "tar", "jit in place"])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_c435_a_file_replaced_between_the_reads(
    tmp_path: Path, other: str, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second read, with placeholders, neither runs a TorchScript archive nor unpacks a tar."""
    path, second, runs = tmp_path / ("m.pt" if mapped else "m.safetensors"), tmp_path / "second", []
    torch.save({"args": argparse.Namespace(), "model": WEIGHTS}, path)
    if other == "tar":
        _tar(second)
    else:
        _scripted(second, "disguise" in other)
    real = torch.load

    def load(*arguments: Any, **options: Any) -> Any:
        try:
            return real(*arguments, **options)
        finally:
            if second.exists() and "place" in other:
                path.write_bytes(second.read_bytes())
            elif second.exists():
                os.replace(second, path)

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: runs.append("jit"))
    monkeypatch.setattr(tarfile.TarFile, "extract", lambda *_, **__: runs.append("tar"))
    with pytest.raises(stio.FormatError, match=r"needs argparse\.Namespace"):
        sync.convert(path, tmp_path / "out.safetensors", key="model")
    assert not runs


def test_c435_a_disguised_torchscript_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, runs = tmp_path / "m.pt", []
    _scripted(path, disguised=True)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: runs.append("jit"))
    with pytest.raises(stio.FormatError):
        sync.convert(path, tmp_path / "out.safetensors", key="model")
    assert not runs


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


# 436 and 437: the table of kinds, and the files of other writers.

WRITERS = Path(__file__).parents[1] / "fixtures" / "writers"
_CODE = re.compile("`([^`]+)`")


def fixture(name: str, folder: Path) -> Path:
    """Return a copy of a file or directory of another writer; one that is compressed is decompressed."""
    source, target = WRITERS / name, folder / Path(name).name
    if name.endswith(".dat"):
        return fixture(str(Path(name).parent), folder) / Path(name).name
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        packed = source.with_name(f"{source.name}.gz")
        target.write_bytes(gzip.decompress(packed.read_bytes()) if packed.exists() else source.read_bytes())
    return target


def _jit(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(nn.Linear(2, 3, bias=False), torch.zeros(1, 2)).save(str(path))


def _package(path: Path) -> None:
    with warnings.catch_warnings(), PackageExporter(str(path)) as exporter:
        warnings.simplefilter("ignore")
        exporter.save_pickle("model", "weights.pkl", WEIGHTS)


def _tar(path: Path) -> None:
    (path.parent / "inner").write_bytes(safetensors.torch.save({"w": WEIGHTS["w"]}))
    subprocess.run(["tar", "-cf", path, "-C", path.parent, "inner"], check=True)
    (path.parent / "inner").unlink()


def _compressed(command: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")
        content = safetensors.torch.save({"w": WEIGHTS["w"]})
        path.write_bytes(subprocess.run([command, "-c"], input=content, stdout=subprocess.PIPE, check=True).stdout)

    return make


def _lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\n")


STEPS: dict[str, str | Callable[[Path], Any]] = {
    "a file of torch.save": lambda path: torch.save(WEIGHTS, path),
    "a file compressed by gzip": _compressed("gzip"),
    "a file compressed by bzip2": _compressed("bzip2"),
    "a file compressed by xz": _compressed("xz"),
    "a file compressed by zstd": _compressed("zstd"),
    "a tar archive": _tar,
    "a zip archive": lambda path: _zip(path, {"model.safetensors": safetensors.torch.save({"w": WEIGHTS["w"]})}),
    "a checkpoint of torch.distributed.checkpoint": "dcp/distcp",
    "a pointer of Git LFS": _lfs,
}
"""A small file or directory of each kind whose next step has a command."""


def _npy(array: Any) -> bytes:
    np.save(made := io.BytesIO(), array)
    return made.getvalue()


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_c437_each_step_with_code_has_a_file_to_run_it() -> None:
    assert {kind.name for _, _, kind in _KINDS if "`" in kind.advice} == STEPS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if "distributed" in one else ()) for one in STEPS]
)
def test_c437_the_next_step_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = STEPS[name]
    path = fixture(made, tmp_path) if isinstance(made, str) else tmp_path / "model.pt"
    if not isinstance(made, str):
        made(path)
    with pytest.raises(stio.StioError, match=f"this is {re.escape(name)}[,:]") as caught:
        sync.load(path)
    out = tmp_path / "out.safetensors"
    for code in _CODE.findall(caught.value.message):
        if code != "git lfs pull":
            _run_step(code, path, out, monkeypatch)
    if name not in ("a pointer of Git LFS", "a tar archive", "a zip archive"):
        assert len(sync.load(out)) > 0


FUNCTIONS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "torch.jit.load": (lambda path: _jit(path), lambda path: torch.jit.load(path).state_dict()),
    "torch.export.load": (
        lambda path: torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.zeros(1, 2),)), path),
        lambda path: dict(torch.export.load(path).state_dict),
    ),
    "numpy.load": (lambda path: path.write_bytes(_npy(np.arange(3))), lambda path: {"w": np.load(path)}),
}


@pytest.mark.slow
@pytest.mark.costly("torch.export and torch.jit make files")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_c437_the_named_function_reads_it(tmp_path: Path, name: str) -> None:
    """Those of packages that stio is tested with."""
    write, read = FUNCTIONS[name]
    write(tmp_path / "model.pt")
    with pytest.raises(stio.FormatError, match=f"with {re.escape(name)}, and give them to ") as caught:
        sync.load(tmp_path / "model.pt")
    save = save_arrays if "stio.compat.safetensors.numpy" in caught.value.message else sync.save
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        tensors = read(tmp_path / "model.pt")
    save(tensors, tmp_path / "out.safetensors")
    assert len(sync.load(tmp_path / "out.safetensors")) > 0


def _run_step(code: str, path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"FILE": path, "DIRECTORY": path, "SOURCE": path, "DESTINATION": out, "FILE.pt": path.parent / "f.pt"}
    if code.startswith("stio convert"):  # of what the command before it has made
        sync.convert(words["FILE.pt"] if words["FILE.pt"].exists() else path, out)
    elif code.startswith("python -m "):
        arguments = [str(words.get(word, word)) for word in code.split()[2:]]
        if "zipfile" in arguments:
            arguments[-1] = str(path.parent / "unpacked")
        monkeypatch.setattr(sys, "argv", arguments)
        sys.modules.pop(arguments[0], None)
        runpy.run_module(arguments[0], run_name="__main__")
    elif re.match(r"(tar|gzip|bzip2|xz|zstd) ", code):
        command = " ".join(f"'{words[word]}'" if word in words else word for word in code.split())
        subprocess.run(command, shell=True, check=True, cwd=path.parent)
    else:
        raise AssertionError(f"no test runs {code}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("others/model.mlmodel", "this is a Core ML model, which stio does not read; take the checkpoint"),
        ("others/model.mlpackage", "this is a Core ML package: take the checkpoint"),
        ("others/objects.npy", "this is a numpy array of Python objects, which is a pickle"),
        ("others/zarr2", "this is a directory of zarr"),
        ("others/zarr3", "this is a directory of zarr"),
        ("others/model.tensors", "this is a file of tensorizer"),
        ("others/model.flashpack", "this is a file of flashpack"),
        ("others/model.safetensors.znn", "this is a file compressed by zipnn"),
        ("jax/flax_model.msgpack", "this is a msgpack file, as flax writes them"),
        ("jax/orbax", "this is a checkpoint of Orbax"),
        ("transformers/offload", "this is a folder that accelerate offloads to"),
        ("transformers/offload/w.dat", "this is a file without a header, like the .dat"),
        ("diffusers", "this is the root of a diffusers pipeline: .* the path of one, such as DIRECTORY/unet"),
        ("paddle/model.pdparams", "this is a pickle that torch.save has not written"),
        ("dcp/distcp", "this is a checkpoint of torch.distributed.checkpoint"),
    ],
)
def test_c436_each_kind_is_named(tmp_path: Path, name: str, said: str) -> None:
    path = fixture(name, tmp_path)
    for call in (sync.load, lambda source: sync.convert(source, tmp_path / "out.safetensors")):
        with pytest.raises(stio.StioError, match=said) as caught:
            call(path)
        assert "{" not in caught.value.message.partition("`")[0]


@pytest.mark.parametrize("content", [b"\x81", b"\x08\x01\x12", b"|TZR", b"ZN", b"FLASHPK", bytes(64), b"\x93NUMPY"])
def test_c436_short_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.x").write_bytes(content)
    with pytest.raises(stio.FormatError):
        sync.load(tmp_path / "model.x")


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "float4_e2m1fn"]
)
def test_c437_arrays_of_ml_dtypes_given_to_save(tmp_path: Path, name: str) -> None:
    """It has run with ml_dtypes 0.6.0, torch 2.13.0 and numpy 2.4.6."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.ones((2, 2), np.float32).astype(getattr(ml_dtypes, name))
    with pytest.raises(TypeError, match="'w' is no tensor, its type is ndarray; torch") as caught:
        sync.save({"w": array}, tmp_path / "m.safetensors")
    code = str(caught.value).partition("ndarray; ")[2].partition(" makes one of it")[0]
    tensor = eval(code, {"torch": torch, "ARRAY": array})
    assert tensor.float().tolist() == [[1, 1], [1, 1]]
    sync.save({"w": tensor}, tmp_path / "m.safetensors")
    assert sync.load(tmp_path / "m.safetensors")["w"].dtype == tensor.dtype


# docs/formats.md: what stio does with the files of each writer.

READS = {
    "mlx": {"w", "half", "scalar"},
    "paddle": {"w", "half"},
    "onnx": {"w", "half", "fp8", "int4", "fp4"},
    "jax": {"w", "half"},
    "torchao": None,
    "dcp/consolidated": {"w"},
    "fastsafetensors": {"w", "half"},
    "transformers/shards": None,
    "transformers/variants": None,
    "transformers/variants/model.safetensors": None,
    "transformers/variants/model.fp16.safetensors": None,
    "diffusers/unet": None,
    "diffusers/unet/diffusion_pytorch_model.safetensors": None,
    "diffusers/unet/diffusion_pytorch_model.fp16.safetensors": None,
    "hub/models--org--tiny/snapshots/" + "0" * 40: {"w", "half"},
}
"""Files that are read, and the names of their tensors; None: any."""


@pytest.mark.parametrize("name", READS)
def test_formats_what_stio_reads(name: str) -> None:
    path = WRITERS / name
    loaded = sync.load(path)
    assert READS[name] in (None, loaded.keys()) and loaded
    if "w" in loaded:
        assert loaded["w"].flatten().tolist() == list(range(loaded["w"].numel()))
    if "half" in loaded and name != "onnx":
        assert loaded["half"].dtype == torch.bfloat16 and loaded["half"].tolist() == [1.5, -2.0]
    run("verify", path)


def test_formats_parts_of_ranks_are_refused() -> None:
    with pytest.raises(stio.StioError) as caught:
        sync.load(WRITERS / "dcp" / "ranks")
    assert "shard-00001-model-00001-of-00001.safetensors" in str(caught.value)


def test_formats_each_writer_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    versions = re.findall(r"^    \"\"\"(.*?)\"\"\"$", (WRITERS / "make.py").read_text(), re.MULTILINE)
    for package, version in re.findall(r"([a-z][\w-]+) (\d+\.\d+(?:\.\d+)?)", " ".join(versions)):
        assert re.search(rf"{package}[^|\n]*{re.escape(version)}", page, re.IGNORECASE), (package, version)
    assert sum(one.lstat().st_size for one in WRITERS.rglob("*") if not one.is_dir()) < 200_000
