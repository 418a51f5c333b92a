"""Faults 327, 329, 330 and 335: what messages call things, sizes as text, and lists that stand before the advice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import refused, run
from support import save_file
from torch import nn

import stio
import stio.distributed
from stio import sync
from stio.cli.output import spelled
from stio.compat.safetensors import safe_open
from stio.errors import StioError
from stio.limits import parse_size
from stio.loading.options import LoadOptions

WEIGHTS = {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


# 329: what was requested, and what was found.


def _read(path: Path, *arguments: Any) -> object:
    with sync.open(path) as checkpoint:
        return checkpoint.read(*arguments)


def _info(path: Path, name: str) -> object:
    with sync.open(path) as checkpoint:
        return checkpoint.info(name)


def _convert(path: Path, key: str) -> object:
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 1}, path.with_suffix(".pt"))
    return sync.convert(path.with_suffix(".pt"), path.with_suffix(""), key=key)


def _warm(path: Path, order: str) -> object:
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, path)
    with sync.warm_start(module, path, device="cpu", order=order):
        return None


REQUESTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "load": (lambda path: sync.load(path, names=["wieght"]), "wieght"),
    "read": (lambda path: _read(path, "wieght"), "wieght"),
    "info": (lambda path: _info(path, "wieght"), "wieght"),
    "slices": (lambda path: sync.load(path, slices={"wieght": np.s_[0:1]}), "wieght"),
    "index": (lambda path: _read(path, "bias", np.s_[7]), "7"),
    "device": (lambda path: sync.load(path, device="nonsense"), "nonsense"),
    "device-number": (lambda path: sync.load(path, device="cuda:77"), "cuda:77"),
    "device-mapping": (lambda path: sync.load(path, device={"layers": "cpu"}), "bias"),
    "meta": (lambda path: sync.load(path, device="meta"), "meta"),
    "key": (lambda path: _convert(path, "modle"), "modle"),
    "warm-start": (lambda path: _warm(path, "wieght"), "wieght"),
}


@pytest.mark.parametrize("case", REQUESTED)
def test_c329_what_was_requested_is_not_called_found(model: Path, case: str) -> None:
    call, name = REQUESTED[case]
    with pytest.raises(StioError) as caught:
        call(model)
    error = caught.value
    assert name in str(error.requested)
    assert f"requested {error.requested}" in str(error)
    assert error.found is None or name not in str(error.found)
    assert f"found {name}" not in str(error)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (other.requested, str(other)) == (error.requested, str(error))


def test_c329_found_is_what_a_file_has(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "epoch": 1}, tmp_path / "m.pt")
    with pytest.raises(stio.TensorNotFoundError) as caught:
        sync.convert(tmp_path / "m.pt", tmp_path / "out", key="modle")
    assert str(caught.value).endswith("(requested modle, found model, epoch)")
    with pytest.raises(stio.FormatError, match=r"expected .*found 3"):
        (tmp_path / "x.safetensors").write_bytes(b"abc")
        sync.load(tmp_path / "x.safetensors")


def test_c329_commands_say_it_too(model: Path) -> None:
    assert "(requested nonsense, expected one of: cpu" in refused("load", model, "--device", "nonsense")


# 330: sizes as text.


SIZES: dict[str, Callable[[Path, Any], object]] = {
    "load": lambda path, size: sync.load(path, budget_bytes=size),
    "load-into": lambda path, size: sync.load_into(_module(), path, budget_bytes=size, strict=False),
    "open": lambda path, size: sync.open(path, budget_bytes=size).__enter__(),
    "save": lambda path, size: sync.save(WEIGHTS, path.with_name("out"), budget_bytes=size),
    "save-shards": lambda path, size: sync.save(WEIGHTS, path.with_name("out"), max_shard_size=size),
    "saver": lambda path, size: sync.Saver(budget_bytes=size),
    "save-state": lambda path, size: sync.save_state({"a": 1}, path.with_name("s.safetensors"), budget_bytes=size),
    "load-state": lambda path, size: _state(path, size),
    "convert": lambda path, size: sync.convert(path, path.with_name("c.safetensors"), budget_bytes=size),
    "warm-start": lambda path, size: _warm_start(path, size),
    "host-cache": lambda path, size: stio.HostCache(size),
    "disk-cache": lambda path, size: stio.DiskCache(path.with_name("cache"), max_bytes=size),
    "limits": lambda path, size: stio.Limits(header_bytes=size),
    "limits-of-states": lambda path, size: stio.Limits(state_bytes=size),
    "prefetch": lambda path, size: _prefetch(path, size),
    "dcp-writer": lambda path, size: stio.distributed.StioStorageWriter(path.with_name("d"), budget_bytes=size),
    "dcp-reader": lambda path, size: stio.distributed.StioStorageReader(path, budget_bytes=size),
    "distributed-load": lambda path, size: sync_of(stio.distributed.load_into(_module(), path, budget_bytes=size,
                                                                            strict=False)),
    "distributed-saver": lambda path, size: stio.distributed.Saver(budget_bytes=size),
}  # fmt: skip


def sync_of(coroutine: Any) -> object:
    import asyncio

    return asyncio.run(coroutine)


def _module() -> nn.Module:
    return nn.Linear(5, 3)


def _state(path: Path, size: Any) -> object:
    sync.save_state({"a": 1}, path.with_name("s.safetensors"))
    return sync.load_state(path.with_name("s.safetensors"), budget_bytes=size)


def _warm_start(path: Path, size: Any) -> object:
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, path)
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    with sync.warm_start(module, path, device="cpu", budget_bytes=size) as warm:
        return warm.done()


def _prefetch(path: Path, size: Any) -> object:
    with safe_open(path, "pt") as opened, opened.prefetch({"bias": ...}, budget_bytes=size) as loader:
        return loader.take("bias")


@pytest.mark.matrix
@pytest.mark.parametrize("size", ["1GB", "512MiB", " 64 mb ", "1000000", 1 << 20])
@pytest.mark.parametrize("entry", [one for one in SIZES if not one.startswith("distributed")])
def test_c330_a_size_is_a_number_or_text(model: Path, entry: str, size: Any) -> None:
    SIZES[entry](model, size)


@pytest.mark.matrix
@pytest.mark.parametrize("size", ["1 GBit", "lots", "", "-1GB", "0", "1e400GB", "nan MB", "5 G", True, 1.5, b"1GB"])
@pytest.mark.parametrize("entry", SIZES)
def test_c330_other_sizes_are_refused_at_the_call(model: Path, entry: str, size: Any) -> None:
    if entry == "save-shards" and size == 1.5:
        pytest.skip("torch's own numbers are indexes")
    before = sorted(path.name for path in model.parent.iterdir())
    with pytest.raises((TypeError, ValueError)) as caught:
        SIZES[entry](model, size)
    assert not isinstance(caught.value, StioError)
    assert isinstance(caught.value, ValueError if isinstance(size, str) else TypeError)
    made = {path.name for path in model.parent.iterdir()} - set(before)
    assert made <= {"s.safetensors"}  # nothing but what was there to be loaded


def test_c330_both_spellings_are_one_parser() -> None:
    for text, nbytes in (("1GB", 10**9), ("1GiB", 1 << 30), ("1.5kb", 1500), ("2 TiB", 2 << 40), ("77", 77)):
        assert parse_size(text) == nbytes
        assert LoadOptions(budget_bytes=text).budget == nbytes
        assert stio.Limits(header_bytes=text).header_bytes == nbytes
    assert stio.DiskCache("cache", max_bytes="1GB").max_bytes == 10**9
    with pytest.raises(
        ValueError, match="^budget_bytes: '1GiBB' is no size; give a number of bytes, or a number and KB"
    ):
        LoadOptions(budget_bytes="1GiBB")
    with pytest.raises(ValueError, match="^max_bytes: 'x' is no size"):
        stio.DiskCache("cache", max_bytes="x")
    with pytest.raises(ValueError, match="^header_bytes: 'x' is no size"):
        stio.Limits(header_bytes="x")
    with pytest.raises(ValueError) as caught:
        parse_size("\x1b[2J" * 1000)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_c330_a_limit_as_text_limits(model: Path) -> None:
    with pytest.raises(stio.LimitError):
        sync.load(model, limits=stio.Limits(header_bytes="16"))
    assert sync.load(model, limits=stio.Limits(header_bytes="1MB")).keys() == WEIGHTS.keys()
    assert stio.Limits(max_rank=3) == stio.Limits(max_rank=3) != stio.Limits()
    assert pickle.loads(pickle.dumps(stio.Limits(header_bytes="1kB"))).header_bytes == 1000


# 335: no long list before the advice.


LISTS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: sync.load(path, dtype="flaot16"),
    "load-into": lambda path: sync.load_into(_module(), path, dtype="fp61"),
    "open": lambda path: sync.open(path, dtype="bf61").__enter__(),
    "convert": lambda path: sync.convert(path, path.with_name("out"), dtype="bfloat61"),
    "convert-to-integers": lambda path: sync.convert(path, path.with_name("out"), dtype="int8"),
    "save": lambda path: sync.save({"x": torch.ones(2, dtype=torch.complex128)}, path.with_name("out")),
    "load-state": lambda path: sync.load_state(path, dtype="x" * 10_000),
}


@pytest.mark.parametrize("case", LISTS)
def test_c335_dtypes_are_not_listed_before_the_suggestion(model: Path, case: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        LISTS[case](model)
    text = str(caught.value)
    assert len(text) < 300
    known = ["U64", "I64", "F64", "float64", "int64", "uint64", "F8_E5M2", "float8_e5m2", "I16", "int16"]
    assert sum(name in text for name in known) < 2


def test_c335_the_nearest_name_is_still_suggested(model: Path) -> None:
    with pytest.raises(ValueError, match=r"such as 'bfloat16' or 'BF16', not 'bfloat61'; did you mean 'bfloat16'\?$"):
        sync.load(model, dtype="bfloat61")
    text = refused("convert", model, model.with_name("out"), "--dtype", "bfloat61")
    assert text == (
        "Error: --dtype takes the name of a dtype in torch or in the format, such as 'bfloat16' or 'BF16', not "
        "'bfloat61'; did you mean 'bfloat16'?"
    )


# 327: commands name their options.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key='model.state_dict' leads there", "--key model.state_dict leads there"),
        ("under key='a b'", "under --key 'a b'"),
        ("key= is for files", "--key is for files"),
        ("; trust_pickle=True reads more", "; --trust-pickle reads more"),
        ("because of trust_pickle=True", "because of --trust-pickle"),
        ("memory='map' maps files", "--memory map maps files"),
        ("leave it out by names=, or", "leave it out by --filter, or"),
        ("a save makes one with hash='sha256'", "`stio convert` makes one with --hash sha256"),
        (
            "s3://a/b with a slash missing (a pathlib.Path removes one): pass the URL as text",
            "s3://a/b, with a slash missing",
        ),
        ("max_shard_size is for directories", "--max-shard-size is for directories"),
        ("device= leads 'x' there", "--device leads 'x' there"),
        ("pass limits=stio.Limits(header_bytes=...)", "in Python, pass limits=stio.Limits(header_bytes=...)"),
        ("waited 60 s in all (lock_timeout=) for it", "waited 60 s in all for it"),
        ("monkey=1 and keys=2", "monkey=1 and keys=2"),
    ],
)
def test_c327_keywords_become_options(text: str, expected: str) -> None:
    assert spelled(text) == expected


def test_c327_what_the_commands_say(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert "--max-shard-size is for directories" in refused("convert", model, out, "--max-shard-size", "1GB")
    torch.save({"model": WEIGHTS, "n": 1}, tmp_path / "m.pt")
    assert "its tensors are under --key model" in refused("convert", tmp_path / "m.pt", out)
    text = run("verify", model, "--hash-required", status=1).stdout
    assert "`stio convert` makes one with --hash sha256" in text
    text = refused("load", model, "--memory", "gds", "--device", "cpu")
    assert "--memory gds" in text and "memory='gds'" not in text
    for option in ("--max-shard-size", "--dtype"):
        text = refused("convert", model, tmp_path / "o", option, "x")
        assert option in text or "is no size" in text
        assert "=" not in text


def test_c327_a_path_with_a_keyword_in_it_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / "key='a',dtype=BF16"
    folder.mkdir()
    assert str(folder / "dtype=F32.safetensors") in refused("inspect", folder / "dtype=F32.safetensors")
    torch.save(WEIGHTS, folder / "key=.pt")
    run("convert", folder / "key=.pt", folder / "out.safetensors")
    assert str(folder / "key=.pt") in refused("inspect", folder / "key=.pt")
