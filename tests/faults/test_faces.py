"""Faults 241, 245 and 247: what one face writes another one reads, one rule for hostile indexes, warnings of `verify`.

Everything goes through public names. A hostile index is offered to every entry that reads an index, and all of them
must give the same verdict.
"""

from __future__ import annotations

import asyncio
import collections
import datetime
import decimal
import enum
import hashlib
import io
import json
import logging
import math
import os
import pathlib
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from crash.zygote import Zygote
from integrations import published_vllm
from support import INDEX, bits_of, require_equal, save_file, save_sharded
from torch import nn

import stio
from stio import sync
from stio.cli import verify
from stio.cli.main import main
from stio.compat import huggingface_hub, olmo
from stio.conversion.torch_files import read_pickle
from stio.format.files.manifest import FileState, Manifest
from stio.integrations import iterators, vllm

# Fault 241: OLMo's writer and its own reader.


class _Phase(enum.IntEnum):
    TRAIN = 1


class _Pair(collections.namedtuple("_Pair", "first second")):
    __slots__ = ()


def _doubled(times: int) -> list[Any]:
    """Return a list that unfolds to 2 to the power of `times` values."""
    value: list[Any] = [1]
    for _ in range(times):
        value = [value, value]
    return value


def _param_groups() -> list[Any]:
    """Return groups as an optimizer's state holds them whose learning rate is a tensor."""
    return [{"lr": torch.tensor(1e-3), "betas": (0.9, 0.999), "capturable": True, "params": [0, 1]}]


PICKLED: dict[str, Callable[[], Any]] = {
    "numpy-float64": lambda: np.float64(0.5),
    "numpy-int64": lambda: np.int64(7),
    "numpy-bool": lambda: np.bool_(True),
    "numpy-str": lambda: np.str_("x"),
    "numpy-in-param-groups": lambda: [{"lr": np.float64(1e-3), "params": [0]}],
    "numpy-array": lambda: np.ones(2),
    "numpy-random-state": lambda: np.random.RandomState(1).get_state(),
    "numpy-dtype": lambda: np.dtype("f4"),
    "complex": lambda: 1 + 2j,
    "torch-dtype": lambda: torch.bfloat16,
    "torch-device": lambda: torch.device("cpu"),
    "torch-size": lambda: torch.Size([2, 3]),
    "tensor-in-list": lambda: [torch.ones(2)],
    "tensor-in-tuple": lambda: (torch.ones(2),),
    "parameter-in-list": lambda: [nn.Parameter(torch.ones(2))],
    "tensor-in-param-groups": _param_groups,
    "enum": lambda: _Phase.TRAIN,
    "namedtuple": lambda: _Pair(1, 2),
    "path": lambda: pathlib.PurePosixPath("a"),
    "datetime": lambda: datetime.datetime(2026, 1, 2),
    "decimal": lambda: decimal.Decimal("0.1"),
    "bytearray": lambda: bytearray(b"x"),
    "deque": lambda: collections.deque([1]),
    "range": lambda: range(3),
    "type": lambda: int,
    "ordered-dict-in-list": lambda: [collections.OrderedDict(a=1)],
    "default-dict-in-list": lambda: [collections.defaultdict(int, a=1)],
    "many-float-keys": lambda: {k + 0.5 for k in range(10_001)},
    "large-tuple-key": lambda: [{tuple(range(1001)): 1}],
    "shared-lists": lambda: _doubled(22),
}
"""Values that Python pickles, and that the reader of plain values refuses."""

PLAIN: dict[str, Callable[[], Any]] = {
    "values": lambda: [None, True, -5, 1 << 5000, 0.1, "é\ud800", b"x", (1, (2,)), {"k": {1, 2}}, frozenset([3])],
    "empty": lambda: [[], (), {}, set(), frozenset()],
    "tensor-complex": lambda: torch.ones(2, dtype=torch.complex64),
    "tensor-float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "tensor-random-state": lambda: torch.Generator().get_state(),
}
"""Values that come back."""


class _Messages(logging.Handler):
    """Collects the warnings and errors that the logger `stio` gets."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _warned_or_refused(save: Callable[[], object], key: str) -> bool:
    """Save; return whether an error or a warning names `key`."""
    listener = _Messages()
    logging.getLogger("stio").addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save()
    except (stio.StioError, TypeError, ValueError) as error:
        assert key in str(error)
        return True
    finally:
        logging.getLogger("stio").removeHandler(listener)
    return any(key in text for text in [*listener.messages, *(str(warning.message) for warning in caught)])


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, types and tensors included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits_of(one) == bits_of(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _comes_back(path: Path, state: dict[Any, Any]) -> bool:
    """Return whether the reader gives what was saved."""
    try:
        return _same(olmo.safetensors_file_to_state_dict(path), state)
    except stio.StioError:
        return False


@pytest.mark.matrix
@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=kind) for kind, make in {**PICKLED, **PLAIN}.items()),
    ],
)
def test_c241_what_olmo_s_writer_takes_its_reader_gives(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Otherwise the save raises or warns, and names the key."""
    path, state = tmp_path / "optim.safetensors", {"state": {"momentum": make()}}
    is_known = _warned_or_refused(lambda: olmo.state_dict_to_safetensors_file(state, path), "momentum")
    assert is_known or _comes_back(path, state)


def test_c241_conversion_of_a_pt_file(tmp_path: Path) -> None:
    """The same for an optimizer's state that `torch.save` wrote."""
    state = {"optim": {"param_groups": _param_groups()}}
    torch.save(state, tmp_path / "optim.pt")
    is_known = _warned_or_refused(lambda: olmo.pt_file_to_safetensors_file(tmp_path / "optim.pt"), "['param_groups']")
    assert is_known or _comes_back(tmp_path / "optim.safetensors", state)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(tuple(range(999)), id="long-tuple"),
        pytest.param("k" * 12_000, id="long-text"),
        pytest.param(1 << 70, id="large-number"),
        pytest.param(("a", (1, None)), id="tuple"),
    ],
)
def test_c241_keys_that_the_writer_takes_the_reader_takes(tmp_path: Path, key: Any) -> None:
    path = tmp_path / "optim.safetensors"
    is_known = _warned_or_refused(lambda: olmo.state_dict_to_safetensors_file({key: 1}, path), str(key)[:20])
    assert is_known or _comes_back(path, {key: 1})


def test_c241_many_tuple_keys(tmp_path: Path) -> None:
    path, state = tmp_path / "optim.safetensors", {("a", k): 1 for k in range(10_001)}
    is_known = _warned_or_refused(lambda: olmo.state_dict_to_safetensors_file(state, path), "('a',")
    assert is_known or _comes_back(path, state)


def test_c241_two_keys_of_one_name(tmp_path: Path) -> None:
    """Every NaN is a key of its own for Python, and all have the same pickle."""
    path, state = tmp_path / "optim.safetensors", {math.nan: "first", float("nan"): "second"}
    is_known = _warned_or_refused(lambda: olmo.state_dict_to_safetensors_file(state, path), "nan")
    assert is_known or sorted(olmo.safetensors_file_to_state_dict(path).values()) == ["first", "second"]


# Fault 245: one safety rule for the index, the same for all entries.

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {"v": torch.ones(2), "w": torch.full((2,), 2.0)}
SHARDS = {
    shard: safetensors.torch.save({name: TENSORS[name]}, {"format": "pt"})
    for shard, name in ((FIRST, "v"), (SECOND, "w"))
}


class _Model(nn.Module):
    """Two parameters, all zeros, with the method by which vLLM loads."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        for name in TENSORS:
            self.register_parameter(name, nn.Parameter(torch.zeros(2, device=device), requires_grad=False))

    def load_weights(self, pairs: Any) -> set[str]:
        loaded = set()
        for name, tensor in pairs:
            self.get_parameter(name).copy_(tensor)
            loaded.add(name)
        return loaded

    def is_untouched(self) -> bool:
        return all(not bool(parameter.any()) for parameter in self.parameters())


class _CommandRefused(Exception):
    """A command ended with a status above 0, and with a message."""


def _command(*arguments: object) -> None:
    done = CliRunner().invoke(main, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        assert done.output.strip()
        raise _CommandRefused(done.output)


def _open(directory: Path, model: _Model) -> None:
    with sync.open(directory) as checkpoint:
        checkpoint.keys()


async def _open_async(directory: Path) -> None:
    async with stio.open(directory) as checkpoint:
        checkpoint.keys()


def _warm_start(directory: Path, model: _Model) -> None:
    with sync.warm_start(_Model("meta"), directory) as warm:
        warm.done()


def _prefetch(directory: Path, model: _Model) -> None:
    with sync.HostCache(1 << 20, device="cpu") as cache:
        cache.prefetch(directory)


def _by_vllm(directory: Path, model: _Model, **extra: object) -> None:
    """Load by the loader that vLLM is given, with the interface that vLLM publishes."""
    with pytest.MonkeyPatch.context() as patch:
        published_vllm.install(patch)
        vllm.register()
        config = import_module("vllm.config.load").LoadConfig(
            load_format="stio", use_tqdm_on_load=False, model_loader_extra_config=extra
        )
        loader = import_module("vllm.model_executor.model_loader").get_model_loader(config)
        loader.load_weights(model, SimpleNamespace(model=str(directory), revision=None, quantization=None))


ENTRIES: dict[str, Callable[[Path, _Model], object]] = {
    "load": lambda directory, model: asyncio.run(stio.load(directory)),
    "load_into": lambda directory, model: asyncio.run(stio.load_into(model, directory)),
    "open": lambda directory, model: asyncio.run(_open_async(directory)),
    "sync.load": lambda directory, model: sync.load(directory),
    "sync.load-index": lambda directory, model: sync.load(directory / INDEX),
    "sync.load_into": lambda directory, model: sync.load_into(model, directory),
    "sync.load_state": lambda directory, model: sync.load_state(directory),
    "sync.open": _open,
    "sync.warm_start": _warm_start,
    "sync.convert": lambda directory, model: sync.convert(directory, directory.parent / "converted"),
    "HostCache.prefetch": _prefetch,
    "huggingface_hub": lambda directory, model: huggingface_hub.load_torch_model(model, directory),
    "iterators": lambda directory, model: list(iterators.weights(directory)),
    "vllm": _by_vllm,
    "inspect": lambda directory, model: _command("inspect", directory),
    "verify": lambda directory, model: _command("verify", directory),
    "command-load": lambda directory, model: _command("load", directory),
    "diff-first": lambda directory, model: _command("diff", directory, directory.parent / "good"),
    "diff-second": lambda directory, model: _command("diff", directory.parent / "good", directory),
    "convert": lambda directory, model: _command("convert", directory, directory.parent / "converted"),
}
"""Everything public that reads an index, each called on a directory and a model."""

ONLY_STATE = "sync.load_state"
"""The entry that refuses a checkpoint without nested state, for that reason."""


def _write_good(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for shard, data in SHARDS.items():
        (directory / shard).write_bytes(data)
    _write_index(directory, SECOND)
    return directory


def _write_index(directory: Path, second: str) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"v": FIRST, "w": second}}))


def _named(name: str) -> Callable[[Path], None]:
    """Return a function that lets an index name a shard so, and puts a real shard where that name leads."""

    def write(directory: Path) -> None:
        shard = name.replace("/absolute", str(directory.parent))
        _write_index(directory, shard)
        if "\0" not in shard and shard:
            place = os.path.join(directory, shard.rstrip("/"))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.replace(directory / SECOND, place)

    return write


def _link_shard(directory: Path) -> None:
    os.replace(directory / SECOND, directory.parent / "outside.safetensors")
    (directory / SECOND).symlink_to("../outside.safetensors")


def _link_folder(directory: Path) -> None:
    (directory.parent / "outside").mkdir()
    os.replace(directory / SECOND, directory.parent / "outside" / SECOND)
    (directory / "sub").symlink_to("../outside")
    _write_index(directory, f"sub/{SECOND}")


def _link_index(directory: Path) -> None:
    os.replace(directory / INDEX, directory.parent / "outside.json")
    (directory / INDEX).symlink_to("../outside.json")


def _link_single(directory: Path) -> None:
    for name in (FIRST, SECOND, INDEX):
        (directory / name).unlink()
    save_file(TENSORS, directory.parent / "outside.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").symlink_to("../outside.safetensors")


def _replaced_by(make: Callable[[Path], object], name: str = SECOND) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return write


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_PATH)
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")  # the plain path may be longer than a socket's may be
        finally:
            os.close(folder)


UNSAFE = stio.UnsafePathError
MALFORMED = stio.IndexFormatError
HOSTILE: dict[str, tuple[Callable[[Path], None], type[Exception]]] = {
    "c74-parent": (_named("../x.safetensors"), UNSAFE),
    "c74-parent-inside": (_named("a/../x.safetensors"), UNSAFE),
    "c74-parent-with-a-space": (_named("a/.. /x.safetensors"), UNSAFE),
    "c74-dot": (_named("./x.safetensors"), UNSAFE),
    "c74-dots": (_named(".../x.safetensors"), UNSAFE),
    "c75-absolute": (_named("/absolute/x.safetensors"), UNSAFE),
    "c75-two-slashes": (_named("//absolute/x.safetensors"), UNSAFE),
    "c76-drive": (_named("C:x.safetensors"), UNSAFE),
    "c76-parent-by-backslash": (_named("..\\x.safetensors"), UNSAFE),
    "c76-folder-by-backslash": (_named("a\\x.safetensors"), UNSAFE),
    "c76-unc": (_named("\\\\host\\share\\x.safetensors"), UNSAFE),
    "c76-stream": (_named("x.safetensors:y.safetensors"), UNSAFE),
    "c77-link": (_link_shard, UNSAFE),
    "c77-link-of-a-folder": (_link_folder, UNSAFE),
    "c77-link-of-the-index": (_link_index, UNSAFE),
    "c77-link-of-the-only-file": (_link_single, UNSAFE),
    "c78-fifo": (_replaced_by(os.mkfifo), stio.StioError),
    "c78-fifo-as-index": (_replaced_by(os.mkfifo, INDEX), stio.StioError),
    "c78-directory": (_replaced_by(os.mkdir), stio.StioError),
    "c78-socket": (_replaced_by(_make_socket), stio.StioError),
    "c78-device": (_replaced_by(lambda path: path.symlink_to("/dev/zero")), stio.StioError),
    "c79-bin": (_named("pytorch_model.bin"), MALFORMED),
    "c79-pickle": (_named("x.safetensors.pkl"), MALFORMED),
    "c79-upper-case": (_named("x.SAFETENSORS"), MALFORMED),
    "c79-only-the-extension": (_named(".safetensors"), MALFORMED),
    "c79-empty": (_named(""), MALFORMED),
    "c79-empty-folder": (_named("a//x.safetensors"), MALFORMED),
    "c80-missing": (lambda directory: (directory / SECOND).unlink(), stio.CheckpointNotFoundError),
    "c87-url": (_named("https://host/x.safetensors"), UNSAFE),
    "c87-file-url": (_named("file:///absolute/x.safetensors"), UNSAFE),
    "c87-percent": (_named("%2e%2e/x.safetensors"), UNSAFE),
    "nul": (_named("x\0.safetensors"), UNSAFE),
    "newline": (_named("x\n.safetensors"), UNSAFE),
}
"""What is wrong with a checkpoint's index or shards, by the number of the fault, and the error that it must get."""

TRUSTED = [("sync.load-index", "c77-link-of-the-index"), ("sync.load-index", "c77-link-of-the-only-file")]
"""The caller names the index itself: it may be a link to anywhere, or not be there."""


def _verdict(entry: str, directory: Path, model: _Model) -> Exception | None:
    """Return what an entry refuses a directory with, None if it takes it; one that hangs fails."""
    found: list[Exception | None] = []

    def body() -> None:
        try:
            ENTRIES[entry](directory, model)
            found.append(None)
        except (stio.StioError, _CommandRefused) as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(10)
    for path in (directory / SECOND, directory / INDEX) if thread.is_alive() else ():
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # or the thread would wait for ever
    assert found, f"{entry} waits, or ends by another error"
    return found[0]


def _fault(folder: Path, entry: str, kind: str) -> str | None:
    """Return what is wrong with an entry's verdict on a checkpoint of this kind; None: nothing."""
    write, error = HOSTILE[kind]
    if entry.startswith("diff"):
        _write_good(folder / "good")
    write(_write_good(folder / "model"))
    model = _Model()
    found = _verdict(entry, folder / "model", model)
    if not isinstance(found, error | _CommandRefused):
        return f"accepted, or refused otherwise: {found!r}"
    if not model.is_untouched():
        return f"tensors were filled before the refusal: {found!r}"
    return "something was written" if (folder / "converted").exists() else None


@pytest.mark.matrix
@pytest.mark.parametrize("entry", ENTRIES)
def test_c245_one_rule_for_all(tmp_path: Path, entry: str) -> None:
    """Each kind gets the same refusal by every entry, before a tensor has changed."""
    kinds = [kind for kind in HOSTILE if (entry, kind) not in TRUSTED]
    found = {kind: _fault(tmp_path / kind, entry, kind) for kind in kinds}
    assert {kind: fault for kind, fault in found.items() if fault is not None} == {}


def _in_the_cache(directory: Path) -> Path:
    """Turn a checkpoint into a snapshot of the hub's cache: links to blobs of the same repository."""
    repository = directory.parent / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = directory.rename(repository / "snapshots" / "0123abc")
    for number, name in enumerate((FIRST, SECOND, INDEX)):
        os.replace(snapshot / name, repository / "blobs" / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.matrix
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != ONLY_STATE])
@pytest.mark.parametrize("where", ["plain", "cache"])
def test_c245_what_is_allowed_is_allowed_to_all(tmp_path: Path, entry: str, where: str) -> None:
    """Plain files, and the links of the hub's cache."""
    directory = _write_good(tmp_path / "model")
    if where == "cache":
        directory = _in_the_cache(directory)
    _write_good(directory.parent / "good")
    assert _verdict(entry, directory, _Model()) is None


@pytest.mark.parametrize("entry", ["load", "huggingface_hub", "vllm", "verify", "convert"])
def test_c245_the_only_file_of_a_snapshot(tmp_path: Path, entry: str) -> None:
    """It is a link to a blob, as the files of a sharded one are. A blob of another repository is refused."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for repository, verdict in (("models--a--b", type(None)), ("models--c--d", stio.UnsafePathError | _CommandRefused)):
        blob = tmp_path / repository / "blobs" / "0"
        blob.parent.mkdir(parents=True)
        save_file(TENSORS, blob, metadata={"format": "pt"})
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(blob)
        assert isinstance(_verdict(entry, snapshot, _Model()), verdict), repository


@pytest.mark.parametrize("kind", ["c77-link", "c77-link-of-a-folder", "c77-link-of-the-index"])
def test_c245_links_that_the_caller_allows(tmp_path: Path, kind: str) -> None:
    HOSTILE[kind][0](_write_good(tmp_path / "model"))
    require_equal(sync.load(tmp_path / "model", follow_symlinks=True), TENSORS)
    require_equal(dict(iterators.weights(tmp_path / "model", follow_symlinks=True)), TENSORS)


def _write_files(directory: Path) -> Path:
    """Write two files without an index: loaders of a server take them all."""
    directory.mkdir()
    for shard, data in SHARDS.items():
        (directory / shard).write_bytes(data)
    return directory


BESIDE: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    kind: HOSTILE[kind] for kind in ("c77-link", "c78-fifo", "c78-directory", "c78-socket", "c78-device")
}
"""What is wrong with one of several files, by kind."""


@pytest.mark.parametrize("kind", BESIDE)
def test_c245_files_without_an_index(tmp_path: Path, kind: str) -> None:
    directory, model = _write_files(tmp_path / "model"), _Model()
    write, error = BESIDE[kind]
    write(directory)
    assert isinstance(_verdict("vllm", directory, model), error)
    assert model.is_untouched()


def test_c245_files_without_an_index_may_be_links_if_the_caller_allows(tmp_path: Path) -> None:
    directory, model = _write_files(tmp_path / "model"), _Model()
    _link_shard(directory)
    with pytest.raises(stio.UnsafePathError, match="follow_symlinks"):
        _by_vllm(directory, model)
    _by_vllm(directory, model, follow_symlinks=True)
    require_equal(dict(model.named_parameters()), TENSORS)


def test_c245_an_index_that_leads_nowhere_is_an_index(tmp_path: Path) -> None:
    """Else the files beside it would be taken for the checkpoint."""
    directory = _write_files(tmp_path / "model")
    (directory / INDEX).symlink_to("nowhere")
    for entry in ("load", "huggingface_hub", "vllm"):
        assert isinstance(_verdict(entry, directory, _Model()), stio.CheckpointNotFoundError), entry


@pytest.mark.parametrize("kind", ["c77-link", "c78-fifo", "c78-directory", "c80-missing"])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_c245_pickles_of_the_hub(tmp_path: Path, kind: str, is_sharded: bool) -> None:
    """Where the caller allows pickles the same rule holds for them."""
    names = ["pytorch_model-1.bin", "pytorch_model-2.bin"] if is_sharded else ["pytorch_model.bin"]
    directory, model = tmp_path / "model", _Model()
    directory.mkdir()
    for name, tensor in zip(names, TENSORS, strict=False):
        torch.save({tensor: TENSORS[tensor]}, directory / name)
    if is_sharded:
        weight_map = dict(zip(TENSORS, names, strict=True))
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load = partial(huggingface_hub.load_torch_model, model, directory, safe=False, mmap=True)
    load()
    assert not model.is_untouched()
    model.load_state_dict({name: torch.zeros(2) for name in TENSORS})
    last = directory / names[-1]
    last.rename(tmp_path / "outside.bin")
    if kind == "c77-link":
        last.symlink_to("../outside.bin")
    elif kind != "c80-missing":
        {"c78-fifo": os.mkfifo, "c78-directory": os.mkdir}[kind](last)
    with pytest.raises(stio.StioError):
        load()
    assert model.is_untouched()


@pytest.mark.parametrize("kind", ["c77-link", "c78-fifo", "c78-directory", "c78-device", "c80-missing"])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_c245_pickles_of_a_conversion(tmp_path: Path, kind: str, is_indexed: bool) -> None:
    """A directory of files of `torch.save` is opened by the rule for shards too."""
    directory = tmp_path / "model"
    directory.mkdir()
    torch.save(TENSORS, tmp_path / "outside.bin")
    if is_indexed:
        weight_map = dict.fromkeys(TENSORS, "a.bin")
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    file = directory / "a.bin"
    makers: dict[str, Callable[[], object]] = {
        "c77-link": lambda: file.symlink_to("../outside.bin"),
        "c78-fifo": lambda: os.mkfifo(file),
        "c78-directory": file.mkdir,
        "c78-device": lambda: file.symlink_to("/dev/zero"),
        "c80-missing": lambda: None,
    }
    makers[kind]()
    with pytest.raises(stio.StioError):
        sync.convert(directory, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", ["x.pt", "x", "pytorch_model.bin.index.json"])
def test_c78_a_conversion_of_a_fifo_does_not_wait(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(stio.StioError):
            sync.convert(source, tmp_path / "converted")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("is_zip", [True, False])
def test_c213_malformed_pickles_get_an_error_of_stio_s(tmp_path: Path, is_zip: bool) -> None:
    """Whatever torch raises for a changed byte."""
    whole = io.BytesIO()
    torch.save({"a": torch.ones(3)}, whole, _use_new_zipfile_serialization=is_zip)
    raw, path = whole.getvalue(), tmp_path / "x.pt"
    begin = raw.index(b"data.pkl") if is_zip else 0
    refused = 0
    for at in range(begin, begin + 260):
        for byte in (0xFF, raw[at] ^ 1):
            path.write_bytes(raw[:at] + bytes([byte]) + raw[at + 1 :])
            try:
                read_pickle(str(path), mapped=True)
            except stio.StioError:
                refused += 1
    assert refused > 100


MANY_SHARDS = """
    import json, resource, sys
    from pathlib import Path
    import safetensors.torch, torch
    from torch import nn
    from stio.compat.huggingface_hub import load_torch_model
    directory = Path(sys.argv[1])
    weight_map = {f"w{k}": f"model-{k:05d}-of-00200.safetensors" for k in range(200)}
    for name, shard in weight_map.items():
        safetensors.torch.save_file({name: torch.full((2,), float(name[1:]) + 1)}, directory / shard, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = nn.ParameterDict({name: torch.zeros(2) for name in weight_map})
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    load_torch_model(model, directory, strict=True)
    assert [int(model[name][0]) for name in weight_map] == list(range(1, 201))
    for parameter in model.values():
        parameter.data.zero_()
    (directory / "model-00199-of-00200.safetensors").write_bytes(b"")
    try:
        load_torch_model(model, directory)
    except ValueError:
        print("refused", any(bool(parameter.any()) for parameter in model.values()))
"""


@pytest.mark.slow
def test_c245_more_shards_than_may_be_open(zygote: Zygote, tmp_path: Path) -> None:
    """The files are opened again one by one; the headers of all are checked before."""
    done = zygote.run(MANY_SHARDS, tmp_path)
    assert (done.stdout, done.returncode) == ("refused False\n", 0), done.stderr


def test_c245_an_upper_case_pattern_of_the_hub(tmp_path: Path) -> None:
    """The hub's loader takes it for safetensors, as some systems ignore case; stio names the shards that it takes."""
    (tmp_path / "x.SAFETENSORS.index.json").write_text(json.dumps({"weight_map": {"v": "x-1.SAFETENSORS"}}))
    with pytest.raises(stio.IndexFormatError, match=r"a name ending in \.safetensors"):
        huggingface_hub.load_torch_model(_Model(), tmp_path, filename_pattern="x{suffix}.SAFETENSORS")


def test_c245_a_file_that_the_caller_names_may_be_a_link(tmp_path: Path) -> None:
    directory = _write_good(tmp_path / "model")
    _link_single(directory)
    model = _Model()
    huggingface_hub.load_torch_model(model, directory / "model.safetensors")
    require_equal(dict(model.named_parameters()), TENSORS)


@pytest.mark.parametrize("text", ["{}", '{"a":'])
def test_c245_a_wrong_header_comes_before_the_first_tensor(tmp_path: Path, text: str) -> None:
    directory, model = _write_good(tmp_path / "model"), _Model()
    (directory / SECOND).write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"trailing")
    with pytest.raises(stio.FormatError, match="Cannot load"):
        huggingface_hub.load_torch_model(model, directory)
    assert model.is_untouched()


SAVES: dict[str, Callable[[Path], object]] = {
    "save": lambda directory: sync.save(TENSORS, directory),
    "save-shards": lambda directory: sync.save(TENSORS, directory, max_shard_size=8),
    "save-files": lambda directory: sync.save(TENSORS, directory, max_shard_size=8, shard_names="hub", commit="files"),
    "huggingface_hub": lambda directory: huggingface_hub.save_torch_state_dict(TENSORS, directory),
    "huggingface_hub-shards": lambda directory: huggingface_hub.save_torch_state_dict(
        TENSORS, directory, max_shard_size=8
    ),
    "convert": lambda directory: _command("convert", directory.parent / "good", directory),
    "gc": lambda directory: _command("gc", directory),
}
"""Everything public that removes or replaces what an index names."""

LEADING_OUT = [
    "c74-parent", "c74-parent-inside", "c75-absolute", "c77-link", "c77-link-of-a-folder", "c77-link-of-the-index",
    "c77-link-of-the-only-file",
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("save", SAVES)
def test_c245_nothing_outside_changes_by_a_save(tmp_path: Path, save: str) -> None:
    """What an old index names outside its directory is neither removed nor written to."""
    for kind in LEADING_OUT:
        _write_good(tmp_path / kind / "good")
        directory = _write_good(tmp_path / kind / "model")
        HOSTILE[kind][0](directory)
        before = _outside(directory)
        try:
            SAVES[save](directory)
        except (stio.StioError, _CommandRefused):
            pass
        assert _outside(directory) == before, kind


def _outside(directory: Path) -> dict[Path, bytes]:
    """Return the files beside a directory."""
    others = (path for path in directory.parent.rglob("*") if directory not in path.parents)
    return {path: path.read_bytes() for path in others if path.is_file()}


# Fault 247: the warnings of `verify`.


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Return the logger of stio; afterwards its settings are restored."""
    logger = logging.getLogger("stio")
    level, disabled, handlers, filters = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)
    yield logger
    logging.disable(logging.NOTSET)
    logger.setLevel(level)
    logger.disabled, logger.handlers[:], logger.filters[:] = disabled, handlers, filters


def _write_doubtful(directory: Path, total_size: int) -> Path:
    """Write a checkpoint that can be read, and that gives a warning: its index claims another size."""
    return save_sharded(TENSORS, directory, 2, metadata={"total_size": total_size})


def _verified(directory: Path) -> list[str]:
    """Return the warnings that `stio verify` reports."""
    warnings: list[str] = json.loads(commands.run("verify", "--json", directory).stdout)["warnings"]
    return warnings


SILENCED: dict[str, Callable[[logging.Logger], object]] = {
    "level": lambda logger: logger.setLevel(logging.ERROR),
    "disabled": lambda logger: setattr(logger, "disabled", True),
    "all-disabled": lambda logger: logging.disable(logging.CRITICAL),
    "filter": lambda logger: logger.addFilter(lambda record: False),
}
"""Ways to silence a logger; `logging.config` sets `disabled` on loggers that exist already."""


@pytest.mark.parametrize("silenced", SILENCED)
def test_c247_warnings_do_not_depend_on_logging(tmp_path: Path, logger: logging.Logger, silenced: str) -> None:
    directory = _write_doubtful(tmp_path / "model", 77)
    SILENCED[silenced](logger)
    assert len(_verified(directory)) == 1


def test_c247_a_warning_is_reported_once(tmp_path: Path, logger: logging.Logger) -> None:
    directory = _write_doubtful(tmp_path / "model", 77)
    (found,) = _verified(directory)
    assert "77" in found
    assert str(directory) in found


def test_c247_warnings_of_other_operations_stay_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another checkpoint is loaded while the first one is verified."""
    mine, other = _write_doubtful(tmp_path / "mine", 77), _write_doubtful(tmp_path / "other", 88)
    report = verify.examine(str(_hashed(mine)), progress=lambda nbytes, total_bytes: sync.load(other))
    assert str(other) in caplog.text
    (warning,) = report.warnings
    assert "77" in warning


def test_c247_the_program_s_own_records_stay_out(tmp_path: Path, logger: logging.Logger) -> None:
    mine = _write_doubtful(tmp_path / "model", 77)
    logged: list[int] = []

    def log_more(nbytes: int, total_bytes: int) -> None:
        logged.append(nbytes)
        logger.error("the program's own")

    report = verify.examine(str(_hashed(mine)), progress=log_more)
    assert logged
    assert [warning for warning in report.warnings if "the program's own" in warning] == []


def test_c247_two_at_once(tmp_path: Path) -> None:
    """Each gets its own warnings, whatever the order of their steps."""
    first, second = (_write_doubtful(tmp_path / str(size), size) for size in (77, 88))
    reports = []

    def other(nbytes: int, total_bytes: int) -> None:
        reports.append(verify.examine(str(second)))

    reports.append(verify.examine(str(_hashed(first)), progress=other))
    assert {report.path for report in reports} == {str(first), str(second)}
    for report in reports:
        (warning,) = report.warnings
        assert f"total_size {Path(report.path).name}" in warning


def test_c247_a_warning_is_not_printed_twice(zygote: Zygote, tmp_path: Path) -> None:
    """A program without settings for logging prints its warnings on standard error: not those that are reported."""
    directory = _write_doubtful(tmp_path / "model", 77)
    done = zygote.run(f"from stio.cli.main import main; main(['verify', {str(directory)!r}])")
    assert "77" in done.stdout
    assert done.stderr == ""


def test_c247_a_load_logs_its_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.load(_write_doubtful(tmp_path / "model", 77))
    assert len(caplog.records) == 1


def _hashed(directory: Path) -> Path:
    """Write the manifest of a checkpoint."""
    files = {}
    for shard in directory.glob("*.safetensors"):
        raw = shard.read_bytes()
        files[shard.name] = (FileState(len(raw), hashlib.sha256(raw).hexdigest()),)
    (directory / "model.safetensors.manifest.json").write_bytes(Manifest("sha256", files).encode())
    return directory
