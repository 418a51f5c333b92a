"""Faults 322 to 326 and 328: files that are not safetensors, what each is called, and the step that the error names.

The step is tried: code in an error is run, and a key that it names is passed. Small files of each kind are made here.
"""

from __future__ import annotations

import argparse
import gzip
import io
import pickle
import re
import struct
import sys
import types
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import refused, run
from support import save_file
from torch import nn
from torch.package import PackageExporter

import stio
from stio import sync
from stio.conversion.torch_files import tensors_in
from stio.format.files.other_kinds import kind_of

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3)}
Make = Callable[[Path], object]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(WEIGHTS["w"].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def _script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(_Layer(), torch.zeros(1, 2)).save(str(path))


def _large_script(path: Path) -> None:
    """More names than the end of the file that is read holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(60)))
        torch.jit.trace(layers, torch.zeros(1, 1)).save(str(path))


def _package(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PackageExporter(str(path)) as exporter:
            exporter.save_pickle("model", "weights.pkl", WEIGHTS)


def _exported(path: Path) -> None:
    torch.export.save(torch.export.export(_Layer(), (torch.zeros(1, 2),)), path)


def _zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.safetensors", safetensors.torch.save(WEIGHTS))


def _by_numpy(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    save(made := io.BytesIO(), *arrays, **named)
    return made.getvalue()


def _ct2(path: Path) -> None:
    spec = b"TransformerSpec\0"
    path.write_bytes(struct.pack("<IH", 6, len(spec)) + spec + struct.pack("<II", 7, 100) + bytes(200))


KINDS: dict[str, tuple[str, Make]] = {
    "torchscript": ("a TorchScript archive", _script),
    "torchscript-large": ("a TorchScript archive", _large_script),
    "package": ("a package of torch.package", _package),
    "export": ("an exported program of torch.export", _exported),
    "npz": ("an archive of numpy arrays", lambda path: path.write_bytes(_by_numpy(np.savez, w=WEIGHTS["w"].numpy()))),
    "npy": ("a numpy array", lambda path: path.write_bytes(_by_numpy(np.save, WEIGHTS["w"].numpy()))),
    "zip": ("a zip archive", _zipped),
    "zip-cut": ("a zip archive without its end", lambda path: path.write_bytes(b"PK\3\4" + bytes(300))),
    "ct2": ("a model of CTranslate2", _ct2),
    "gguf": ("a GGUF file", lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + bytes(64))),
    "onnx": ("an ONNX model", lambda path: path.write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x052.4.0" + bytes(64))),
    "onnx-plain": ("an ONNX model", lambda path: path.write_bytes(b"\x08\x0d\x3a\x20" + bytes(64))),
    "hdf5": ("an HDF5 file", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))),
    "pickle": ("a pickle that torch.save has not written", lambda path: path.write_bytes(pickle.dumps({"w": 1}))),
    "gzip": ("a file compressed by gzip", lambda path: path.write_bytes(gzip.compress(bytes(500)))),
    "lfs": (
        "a pointer of Git LFS",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"),
    ),
    "html": ("a web page", lambda path: path.write_text("<!DOCTYPE html><html><body>Sign in</body></html>")),
    "json": ("JSON text", lambda path: path.write_text('{"architectures": ["LlamaForCausalLM"]}')),
}
OF_TORCH_SAVE: dict[str, Make] = {
    "new": lambda path: torch.save(WEIGHTS, path),
    "old": lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False),
}
ENTRIES: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: sync.convert(path, out),
    "load": lambda path, out: sync.load(path),
    "load-into": lambda path, out: sync.load_into(_Layer(), path),
    "load-state": lambda path, out: sync.load_state(path),
    "open": lambda path, out: sync.open(path).__enter__(),
}
SUFFIXES = [".pt", ".bin", ".safetensors", ""]


@pytest.mark.matrix
@pytest.mark.costly("each kind of file is made, torch.jit among them")
@pytest.mark.parametrize("kind", KINDS)
def test_c323_each_kind_is_named_by_every_entry(tmp_path: Path, kind: str) -> None:
    name, make = KINDS[kind]
    for suffix in SUFFIXES:
        path = tmp_path / f"model{suffix}"
        make(path)
        texts = set()
        for entry in ENTRIES.values():
            with pytest.raises(stio.FormatError) as caught:
                entry(path, tmp_path / "out.safetensors")
            texts.add(caught.value.message)
            assert type(caught.value) is stio.FormatError  # no limit is exceeded
        (text,) = texts
        assert text.startswith(f"this is {name}, which stio does not read; ")
        assert "stio convert" not in text
        assert "trust" not in text
        assert str(2**20) not in text and not re.search(r"\d{6}", text)
    assert not (tmp_path / "out.safetensors").exists()


def test_c323_a_zip_archive_is_unpacked_as_it_is_said(tmp_path: Path) -> None:
    _zipped(tmp_path / "model.bin")
    with pytest.raises(stio.FormatError, match="python -m zipfile -e FILE DIRECTORY"):
        sync.convert(tmp_path / "model.bin", tmp_path / "out")
    zipfile.main(["-e", str(tmp_path / "model.bin"), str(tmp_path / "unpacked")])  # type: ignore[attr-defined]
    assert torch.equal(sync.load(tmp_path / "unpacked")["w"], WEIGHTS["w"])


@pytest.mark.matrix
@pytest.mark.parametrize("made", OF_TORCH_SAVE)
@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt", ".safetensors", ".model", ""])
def test_c323_the_content_decides_and_not_the_name(tmp_path: Path, made: str, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    OF_TORCH_SAVE[made](path)
    sync.convert(path, tmp_path / "out.safetensors")
    assert torch.equal(sync.load(tmp_path / "out.safetensors")["w"], WEIGHTS["w"])
    save_file(WEIGHTS, path)
    sync.convert(path, tmp_path / "again.safetensors")
    assert torch.equal(sync.load(tmp_path / "again.safetensors")["w"], WEIGHTS["w"])


@pytest.mark.parametrize("content", [b"", b"x", b"\x80", b"garbage" * 100, bytes(300), b"PK\5\6" + bytes(18)])
def test_c323_unknown_bytes_are_not_to_be_trusted(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(stio.FormatError, match="fetch it again") as caught:
        sync.convert(tmp_path / "w.pt", tmp_path / "out.safetensors")
    assert "trust" not in str(caught.value)
    for command in (("inspect",), ("verify",)):
        done = run(*command, tmp_path / "w.pt", status=1 if command == ("verify",) else 2)
        assert "stio convert" not in done.output


@pytest.mark.parametrize("name", ["model.bin", "pytorch_model.bin", "model.ckpt"])
def test_c323_safetensors_under_another_name_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "m").mkdir()
    save_file(WEIGHTS, tmp_path / "m" / name)
    for call in (sync.load, lambda path: sync.convert(path, tmp_path / "out")):
        with pytest.raises(stio.CheckpointNotFoundError, match=f"{name} is a safetensors file .*: give its own path"):
            call(tmp_path / "m")
    assert torch.equal(sync.load(tmp_path / "m" / name)["w"], WEIGHTS["w"])  # the step
    sync.convert(tmp_path / "m" / name, tmp_path / "out")
    assert torch.equal(sync.load(tmp_path / "out")["w"], WEIGHTS["w"])


@pytest.mark.parametrize("name", ["model.bin", "model.onnx", "model.gguf", "weights.npz"])
def test_c323_the_only_file_of_a_directory_is_named_by_its_content(tmp_path: Path, name: str) -> None:
    kind = {"bin": "ct2", "onnx": "onnx", "gguf": "gguf", "npz": "npz"}[name.rpartition(".")[2]]
    (tmp_path / "m").mkdir()
    KINDS[kind][1](tmp_path / "m" / name)
    with pytest.raises(stio.CheckpointNotFoundError, match=f"{re.escape(name)} is {KINDS[kind][0]}: ") as caught:
        sync.load(tmp_path / "m")
    assert "stio convert" not in str(caught.value)
    with pytest.raises(stio.StioError, match=KINDS[kind][0]):
        sync.convert(tmp_path / "m", tmp_path / "out")


@pytest.mark.slow
def test_c323_a_hostile_archive_costs_little() -> None:
    read = []

    def reader(begin: int, end: int) -> bytes:
        read.append(end - begin)
        return b"PK\3\4" + b"PK\1\2\xff\xff" * ((end - begin) // 6)

    kind_of(reader, 1 << 40, "m.bin")
    assert sum(read) < 200_000
    names = zipfile.ZipFile(made := io.BytesIO(), "w")
    names.writestr("\x1b[2J" + "x" * 3000, b"")
    names.close()
    content = made.getvalue()
    found = kind_of(lambda begin, end: content[begin:end], len(content), "m.bin")
    assert found is not None and found.advice.isprintable() and len(found.advice) < 400


def test_c323_a_header_with_the_length_of_another_kind_is_safetensors(tmp_path: Path) -> None:
    """A length of 640 starts like a pickle of protocol 2."""
    for nbytes in (0x280, 0x380, 0x480):
        text = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(nbytes)
        path = tmp_path / "w.bin"
        path.write_bytes(nbytes.to_bytes(8, "little") + text + bytes(4))
        assert sync.load(path)["w"].tolist() == [0.0]
        sync.convert(path, tmp_path / "out.safetensors")


# 328: a file of torch.save that is loaded or inspected.


@pytest.mark.parametrize("made", OF_TORCH_SAVE)
def test_c328_the_message_begins_with_what_the_file_is(tmp_path: Path, made: str) -> None:
    path, out = tmp_path / "w.pt", tmp_path / "w.safetensors"
    OF_TORCH_SAVE[made](path)
    for name, entry in ENTRIES.items():
        if name == "convert":
            continue
        with pytest.raises(stio.FormatError) as caught:
            entry(path, out)
        assert not isinstance(caught.value, stio.LimitError)
        assert caught.value.message.startswith("this is a file of torch.save, and not safetensors; `stio convert ")
        assert "header" not in str(caught.value) and "expected" not in str(caught.value)
    for command in (("inspect", path), ("load", path, "--device", "cpu"), ("diff", path, path)):
        text = refused(*command)
        assert text.startswith(f"Error: {path}: this is a file of torch.save, and not safetensors; ")
        assert text.endswith("`stio convert SOURCE DESTINATION` makes safetensors of it")
    run("convert", path, out)
    assert torch.equal(sync.load(out)["w"], WEIGHTS["w"])


@pytest.mark.parametrize("limits", [None, stio.Limits(header_bytes=2**62), stio.Limits(header_bytes=10)])
def test_c328_whatever_the_limits_are(tmp_path: Path, limits: stio.Limits | None) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    with pytest.raises(stio.FormatError, match="this is a file of torch.save") as caught:
        sync.load(tmp_path / "w.pt", limits=limits)
    assert type(caught.value) is stio.FormatError


# 322: nested dicts.


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(WEIGHTS["w"].clone())


OPTIMIZER = {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}
NESTED: dict[str, tuple[Any, Any]] = {
    "two-levels": ({"model": {"state_dict": WEIGHTS}, "epoch": 1}, "model.state_dict"),
    "three-levels": ({"a": {"b": {"c": WEIGHTS}}}, "a.b.c"),
    "dots-in-keys": ({"ema.model": {"net.weights": WEIGHTS}, "step": 3}, "ema.model.net.weights"),
    "number": ({"models": {0: WEIGHTS}, "step": 3}, "models.0"),
    "list": ({"models": [WEIGHTS, {}], "step": 3}, "models.0"),
    "list-at-the-top": ([WEIGHTS, 3], "0"),
    "beside-an-optimizer": ({"net": {"weights": {**WEIGHTS, "b": torch.ones(1), "c": torch.ones(1)}},
                             "optim": OPTIMIZER}, "net.weights"),
    "ordered": (OrderedDict(model=OrderedDict(inner=OrderedDict(WEIGHTS)), x=None), "model.inner"),
    "ambiguous-text": ({"a.b": {"c": 1}, "a": {"b": {"c": WEIGHTS}}}, ("a", "b", "c")),
    "tensors-beside": ({"scale": torch.ones(1), "inner": {"weights": WEIGHTS}}, "inner.weights"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("case", NESTED)
def test_c322_the_first_error_names_the_key_and_the_second_call_works(tmp_path: Path, case: str) -> None:
    value, key = NESTED[case]
    path, out = tmp_path / "n.pt", tmp_path / "out.safetensors"
    torch.save(value, path)
    with pytest.raises(stio.StioError) as caught:
        sync.convert(path, out)
    named = re.findall(r"key=('[^']*'|\([^)]*\))", caught.value.message)
    assert eval(named[0]) == key
    sync.convert(path, out, key=key)
    assert torch.equal(sync.load(out)["w"], WEIGHTS["w"])
    if isinstance(key, str):
        assert f"--key {key}" in refused("convert", path, out)
        run("convert", path, out, "--key", key)
    assert "stio convert" not in str(caught.value)


@pytest.mark.parametrize("key", [("model", "state_dict"), ["model", "state_dict"], "model.state_dict"])
def test_c322_a_key_is_text_or_a_sequence(tmp_path: Path, key: Any) -> None:
    torch.save({"model": {"state_dict": WEIGHTS}}, tmp_path / "n.pt")
    sync.convert(tmp_path / "n.pt", tmp_path / "out.safetensors", key=key)
    assert set(sync.load(tmp_path / "out.safetensors")) == {"w"}


@pytest.mark.parametrize("key", [3, b"model", {"model"}, (None,), [["model"]]])
def test_c322_a_key_of_another_type_is_refused_first(tmp_path: Path, key: Any) -> None:
    with pytest.raises(TypeError, match="key= takes text, or a sequence of keys"):
        sync.convert(tmp_path / "nowhere.pt", tmp_path / "out.safetensors", key=key)


@pytest.mark.parametrize("key", ["nope", "model.nope", "model.state_dict.w.x", "", ".", ("model", "nope")])
def test_c322_a_wrong_key_is_answered_with_the_right_one(tmp_path: Path, key: Any) -> None:
    torch.save({"model": {"state_dict": WEIGHTS}, "epoch": 1}, tmp_path / "n.pt")
    with pytest.raises(stio.TensorNotFoundError, match=r"no such key; its tensors are under key='model\.state_dict'"):
        sync.convert(tmp_path / "n.pt", tmp_path / "out.safetensors", key=key)
    assert not (tmp_path / "out.safetensors").exists()


def test_c322_a_key_that_leads_half_way_names_the_rest(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": WEIGHTS, "config": {}}, "epoch": 1}, tmp_path / "n.pt")
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"under this key; its tensors are under key='model\.state"):
        sync.convert(tmp_path / "n.pt", tmp_path / "out.safetensors", key="model")


def test_c322_several_parts_are_a_choice_in_one_line(tmp_path: Path) -> None:
    value = {"model": {"state_dict": {**WEIGHTS, "b": torch.ones(1)}}, "ema": {"state_dict": WEIGHTS}, "n": 1}
    torch.save(value, tmp_path / "n.pt")
    match = r"choose one part of it: key='model\.state_dict' or key='ema\.state_dict' \(found "
    with pytest.raises(stio.AmbiguousCheckpointError, match=match):
        sync.convert(tmp_path / "n.pt", tmp_path / "out.safetensors")
    torch.save({f"part{k}": {"x": WEIGHTS} for k in range(300)}, tmp_path / "many.pt")
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"and 298 others") as caught:
        sync.convert(tmp_path / "many.pt", tmp_path / "out.safetensors")
    assert len(str(caught.value)) < 450


@pytest.mark.parametrize(
    "value", [{"epoch": 1, "w": WEIGHTS["w"]}, [WEIGHTS["w"]], WEIGHTS["w"], {"a": {"b": [1, None]}}, {"x": {}}]
)
def test_c322_without_tensors_by_name_a_state_can_be_saved(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "n.pt")
    with pytest.raises(stio.StioError, match=r"stio\.save_state\(torch\.load\(FILE\), DESTINATION\)"):
        sync.convert(tmp_path / "n.pt", tmp_path / "out.safetensors")
    sync.save_state(torch.load(tmp_path / "n.pt"), tmp_path / "state.safetensors")
    assert str(sync.load_state(tmp_path / "state.safetensors")) == str(value)


def test_c322_a_module_below_a_key(tmp_path: Path) -> None:
    assert set(tensors_in("x", {"ema": {"net": _Whole()}}, "ema.net")) == {"w"}
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"under key='ema\.net'"):
        tensors_in("x", {"ema": {"net": _Whole()}}, None)


@pytest.mark.slow
def test_c322_the_search_for_tensors_ends() -> None:
    deep: Any = WEIGHTS
    for _ in range(300):
        deep = {"x": deep}
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    for value in (deep, loop, {"w": [[k] for k in range(100_000)]}):
        with pytest.raises(stio.AmbiguousCheckpointError, match="save_state"):
            tensors_in("x", value, None)


# 324: what a pickle needs.


def _of_module(path: Path, module: str, **keywords: Any) -> None:
    made = types.ModuleType(module)
    exec("class Net:\n    def __init__(self): self.a = 1", made.__dict__)
    made.Net.__module__ = module
    sys.modules[module] = made
    try:
        torch.save({"model": made.Net(), "w": WEIGHTS["w"]}, path, **keywords)
    finally:
        del sys.modules[module]


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("module", ["ultra_missing", "__main__"])
def test_c324_a_pickle_that_needs_a_module_names_it(tmp_path: Path, module: str, new: bool) -> None:
    path, name = tmp_path / "m.pt", "ultra_missing" if module != "__main__" else "_of_a_script"
    if module == "__main__":
        main = sys.modules["__main__"]
        main._OfAScript = type("_OfAScript", (), {"__module__": "__main__"})  # type: ignore[attr-defined]
        torch.save({"model": main._OfAScript(), **WEIGHTS}, path, _use_new_zipfile_serialization=new)  # type: ignore[attr-defined]
        del main._OfAScript  # type: ignore[attr-defined]
        name = "_OfAScript"
    else:
        _of_module(path, module, _use_new_zipfile_serialization=new)
    with pytest.raises(stio.FormatError, match=name) as caught:
        sync.convert(path, tmp_path / "out.safetensors")
    trusted = pytest.raises(stio.FormatError, match=rf"the file needs .*{name}.*with the program that wrote it")
    with pytest.warns(RuntimeWarning, match="can run any code"), trusted as with_trust:
        sync.convert(path, tmp_path / "out.safetensors", trust_pickle=True)
    for error in (caught.value, with_trust.value):
        assert "not a file of torch.save" not in str(error) and "damaged" not in str(error)
        assert "fetch it again" not in str(error)
    assert "trust_pickle" not in str(caught.value)  # it would not help
    assert "damaged" not in refused("convert", path, tmp_path / "out.safetensors")


def test_c324_a_class_that_is_here_is_named_with_the_price(tmp_path: Path) -> None:
    torch.save({"model": {"args": argparse.Namespace(lr=1), **WEIGHTS}}, tmp_path / "m.pt")
    with pytest.raises(stio.FormatError, match=r"needs argparse\.Namespace.*trust_pickle=True reads more.*runs code"):
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", key="model")
    assert "--trust-pickle reads more" in refused("convert", tmp_path / "m.pt", tmp_path / "out.safetensors")
    torch.save({"model": OrderedDict(WEIGHTS), "args": argparse.Namespace(lr=1)}, tmp_path / "m.pt")
    with pytest.warns(RuntimeWarning):
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors", key="model", trust_pickle=True)
    assert torch.equal(sync.load(tmp_path / "out.safetensors")["w"], WEIGHTS["w"])


def test_c324_a_damaged_file_is_still_called_damaged(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3000)}, tmp_path / "m.pt")
    content = bytearray((tmp_path / "m.pt").read_bytes())
    at = content.index(b"}q\x00") if b"}q\x00" in content else content.index(b"data.pkl") + 80
    content[at : at + 30] = b"\xff" * 30
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(stio.FormatError) as caught:
        sync.convert(tmp_path / "m.pt", tmp_path / "out.safetensors")
    assert "needs" not in str(caught.value)


# 326: a training's directory.


TRAININGS = {
    "trainer": ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"],
    "trainer-ranks": ["training_args.bin", "optimizer.pt", *(f"rng_state_{k}.pth" for k in range(4))],
    "accelerate": ["optimizer.bin", "optimizer_1.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl"],
    "deepspeed": ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "training_args.bin"],
    "hidden": ["._pytorch_model.bin", ".pytorch_model.bin.swp.bin"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("weights", ["pytorch_model.bin", "adapter_model.bin", "model.pt"])
def test_c326_weights_beside_the_states_of_a_training(tmp_path: Path, training: str, weights: str) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    torch.save(WEIGHTS, folder / weights)
    for name in TRAININGS[training]:
        torch.save({"state": {}, "args": [1]}, folder / name)
    sync.convert(folder, tmp_path / "out.safetensors")
    assert torch.equal(sync.load(tmp_path / "out.safetensors")["w"], WEIGHTS["w"])
    with pytest.raises(stio.CheckpointNotFoundError, match=f"{re.escape(weights)} is a file of torch.save: `stio conv"):
        sync.load(folder)


def test_c326_two_files_of_weights_are_still_two(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "ema.bin", "optimizer.pt"):
        torch.save(WEIGHTS, tmp_path / name)
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"found ema\.bin, pytorch_model\.bin\)"):
        sync.convert(tmp_path, tmp_path / "out.safetensors")


def test_c326_states_alone_are_no_weights(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin"):
        torch.save({}, tmp_path / name)
    for call in (lambda: sync.convert(tmp_path, tmp_path / "out.safetensors"), lambda: sync.load(tmp_path)):
        with pytest.raises(stio.CheckpointNotFoundError, match="holds the state of a training, and no weights") as e:
            call()
        assert "stio convert" not in str(e.value)


# 325: reasons and lists are cut between words.


def test_c325_a_reason_ends_with_a_word_and_says_that_it_is_cut(tmp_path: Path) -> None:
    for length in range(100, 140):
        path = tmp_path / "m.pt"
        value = {"/".join(["word"] * (length // 5)) + "x" * (length % 5): 1, "w": WEIGHTS["w"]}
        torch.save(value, path)
        with pytest.raises(stio.AmbiguousCheckpointError) as caught:
            sync.convert(path, tmp_path / "out.safetensors")
        assert len(str(caught.value)) < 700
    from stio.errors import listed, printable

    text = "a reason of several words " * 20
    shown = printable(text)
    cut, _, rest = shown.partition("...")
    assert text.startswith(cut + " ") and rest == " (520 characters)"
    assert printable("word " * 23 + "end.x") == "word " * 23 + "end.x"  # 120 characters: nothing is cut
    assert printable("x" * 500).startswith("x" * 120 + "...")
    assert printable("a, b, " * 30).partition("...")[0][-1] in "ab"
    assert printable("é" * 130).isprintable()
    assert listed([]) == "nothing"
    assert listed(["a"]) == "a"
    assert listed("abcdefg") == "a, b, c, d, e and 2 others"
    assert listed("abcdef") == "a, b, c, d, e and 1 other"
    assert listed(["x" * 60, "y" * 60, "z"]) == "x" * 60 + " and 2 others"
    assert len(listed(["x" * 10_000] * 9)) < 200


def test_c325_lists_of_files_say_how_many_there_are(tmp_path: Path) -> None:
    for k in range(9):
        save_file(WEIGHTS, tmp_path / f"part-{k}.safetensors")
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"found part-.*and 4 others\)"):
        sync.load(tmp_path)
