"""Conversion: every kind of source to every kind of destination, bit for bit, in bounded memory; refusals and cancels."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import assorted, needs_f4, ramp, require_equal

import stio
import stio.sync
from stio.compat import olmo
from stio.runtime.reports.progress import ProgressEvent

MIB = 1 << 20
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    """Return tensors of every dtype, ties, one larger than the smallest window, and wide and long ones."""
    made = assorted() | {"big": ramp(700, 3001), "wide": ramp(2, 600_000), "long": ramp(1_300_001, dtype=torch.int8)}
    made["tied"] = made["big"]
    return made


def sharded(folder: Path, made: Tensors, **keywords: Any) -> Path:
    stio.sync.save(made, folder, **{"max_shard_size": "2MB", "metadata": {"note": "x"}, **keywords})
    return folder


def cast(made: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in made.items()}


# Safetensors to safetensors.


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [None, 1, 4 * MIB])
def test_shards_to_one_file_and_back(tmp_path: Path, budget_bytes: int | None) -> None:
    made = tensors()
    source = sharded(tmp_path / "source", made)
    one = tmp_path / "one.safetensors"
    result = stio.sync.convert(source, one, budget_bytes=budget_bytes)
    assert result.aliases == {"tied": "big"}
    require_equal(stio.sync.load(one), made)
    stio.sync.save(made, tmp_path / "direct.safetensors", metadata={"note": "x"})
    assert one.read_bytes() == (tmp_path / "direct.safetensors").read_bytes()
    stio.sync.convert(one, tmp_path / "again", max_shard_size="2MB", budget_bytes=budget_bytes)
    for path in sorted(source.iterdir()):  # the order of names decides the cut, and a file holds another one
        assert (tmp_path / "again" / path.name).exists() or path.name.endswith(".safetensors")
    again = stio.sync.load(tmp_path / "again")
    require_equal(again, made)
    assert again["tied"] is again["big"]
    assert json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())["metadata"]["note"] == "x"


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, "F32", "float16"])
def test_cast(tmp_path: Path, dtype: Any) -> None:
    made = {name: tensor for name, tensor in tensors().items() if "float8_e8m0" not in name}
    source = sharded(tmp_path / "source", made)
    stio.sync.convert(source, tmp_path / "cast", dtype=dtype, budget_bytes=4 * MIB)
    wanted = {"F32": torch.float32, "float16": torch.float16}.get(dtype, dtype)
    found = stio.sync.load(tmp_path / "cast")
    require_equal(found, cast(made, wanted))
    assert found["tied"] is found["big"]


def test_a_tie_whose_alias_sorts_first(tmp_path: Path) -> None:
    save_file({"z": ramp(5), "m": ramp(3)}, tmp_path / "s.safetensors", metadata={"stio.aliases": '{"a": "z"}'})
    stio.sync.convert(tmp_path / "s.safetensors", tmp_path / "d.safetensors")
    found = stio.sync.load(tmp_path / "d.safetensors")
    require_equal(found, {"z": ramp(5), "m": ramp(3), "a": ramp(5)})
    assert found["a"] is found["z"]


def test_metadata(tmp_path: Path) -> None:
    save_file({"w": ramp(5)}, tmp_path / "s.safetensors", metadata={"format": "pt", "a": "1", "b": "2"})
    stio.sync.convert(tmp_path / "s.safetensors", tmp_path / "d.safetensors", metadata={"b": "3"})
    with safe_open(tmp_path / "d.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "a": "1", "b": "3"}
    index = {"metadata": {"total_size": 20, "total_parameters": 5}, "weight_map": {"w": "s.safetensors"}}
    (tmp_path / "s.safetensors.index.json").write_text(json.dumps(index))
    stio.sync.convert(tmp_path / "s.safetensors.index.json", tmp_path / "e.safetensors")  # numbers are no text
    require_equal(stio.sync.load(tmp_path / "e.safetensors"), {"w": ramp(5)})


@pytest.mark.slow
def test_nothing_and_many(tmp_path: Path) -> None:
    for number, made in enumerate(({}, {"e": torch.empty(0)}, {f"t{k}": torch.tensor(k) for k in range(9000)})):
        stio.sync.save(made, tmp_path / f"s{number}.safetensors")
        stio.sync.convert(tmp_path / f"s{number}.safetensors", tmp_path / f"d{number}.safetensors")
        require_equal(stio.sync.load(tmp_path / f"d{number}.safetensors"), made)


@pytest.mark.matrix
@pytest.mark.parametrize("max_shard_size", ["1MB", "100MB"])
def test_a_directory_in_place(tmp_path: Path, max_shard_size: str) -> None:
    made = tensors()
    source = sharded(tmp_path / "model", made)
    (source / "config.json").write_text("{}")
    before = {path.name for path in source.iterdir()}
    result = stio.sync.convert(source, source, max_shard_size=max_shard_size, hash="sha256")
    require_equal(stio.sync.load(source, verify=True), made)
    after = {path.name for path in source.glob("*.safetensors")}
    assert after == set(result.files)
    assert not after & before
    assert (source / "config.json").exists()


# Pickles.


@pytest.mark.matrix
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".weights"])
@pytest.mark.parametrize("new_format", [True, False])
def test_pickles(tmp_path: Path, suffix: str, new_format: bool) -> None:
    made = tensors()
    made["view"] = made["big"][3:5]
    if not new_format:  # torch itself cannot read these from an old file
        made = {name: tensor for name, tensor in made.items() if not re.search(r"\.(uint(16|32|64)|float8)", name)}
    torch.save(made, tmp_path / f"m{suffix}", _use_new_zipfile_serialization=new_format)
    stio.sync.convert(tmp_path / f"m{suffix}", tmp_path / "d.safetensors")
    found = stio.sync.load(tmp_path / "d.safetensors")
    require_equal(found, made)
    assert found["tied"] is found["big"]
    wide = {name: tensor for name, tensor in made.items() if "float8_e8m0" not in name}
    torch.save(wide, tmp_path / f"m{suffix}", _use_new_zipfile_serialization=new_format)
    stio.sync.convert(tmp_path / f"m{suffix}", tmp_path / "d", dtype="bfloat16")
    found = stio.sync.load(tmp_path / "d")
    require_equal(found, cast(wide, torch.bfloat16))
    assert found["tied"] is found["big"]


def pickled_shards(folder: Path) -> Tensors:
    folder.mkdir()
    made = {"a": ramp(5), "b": ramp(2, 2)}
    for name, tensor in made.items():
        torch.save({name: tensor}, folder / f"pytorch_model-{name}.bin")
    index = {"metadata": {}, "weight_map": {name: f"pytorch_model-{name}.bin" for name in made}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return made


def test_pickled_shards(tmp_path: Path) -> None:
    made = pickled_shards(tmp_path / "model")
    for number, source in enumerate([tmp_path / "model", tmp_path / "model" / "pytorch_model.bin.index.json"]):
        stio.sync.convert(source, tmp_path / f"{number}.safetensors")
        require_equal(stio.sync.load(tmp_path / f"{number}.safetensors"), made)
    stio.sync.convert(tmp_path / "model", tmp_path / "model")  # beside them; safetensors go first from now on
    require_equal(stio.sync.load(tmp_path / "model"), made)
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text("broken")
    stio.sync.convert(tmp_path / "model", tmp_path / "again")


def test_the_only_pickle_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    torch.save({"a": ramp(5)}, tmp_path / "m" / "model.pt")
    stio.sync.convert(tmp_path / "m", tmp_path / "d.safetensors")
    torch.save({"a": ramp(5)}, tmp_path / "m" / "other.pt")
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"model\.pt, other\.pt"):
        stio.sync.convert(tmp_path / "m", tmp_path / "d.safetensors")


def test_two_files_with_one_name(tmp_path: Path) -> None:
    pickled_shards(tmp_path / "m")
    torch.save({"a": ramp(1)}, tmp_path / "m" / "pytorch_model-b.bin")
    with pytest.raises(stio.IndexFormatError, match="two files hold the tensor .a., so they are"):
        stio.sync.convert(tmp_path / "m", tmp_path / "d")


def test_wrappers(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"epoch": 3, "model": {"a": ramp(5)}, "log": [1]}, path)
    with pytest.raises(
        stio.AmbiguousCheckpointError, match=r"under key='model' \(found 'epoch' \(int\), 'model' \(dict of 1\)"
    ):
        stio.sync.convert(path, tmp_path / "d.safetensors")
    stio.sync.convert(path, tmp_path / "d.safetensors", key="model")
    require_equal(stio.sync.load(tmp_path / "d.safetensors"), {"a": ramp(5)})
    with pytest.raises(stio.TensorNotFoundError, match="no such key"):
        stio.sync.convert(path, tmp_path / "d.safetensors", key="state_dict")
    with pytest.raises(stio.FormatError, match="no tensors by name"):
        stio.sync.convert(path, tmp_path / "d.safetensors", key="log")
    with pytest.raises(ValueError, match="a safetensors checkpoint is flat"):
        stio.sync.convert(tmp_path / "d.safetensors", tmp_path / "e.safetensors", key="model")


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": ramp(5), "b": _Runs()}, "m.pt")
    Path("raw.bin").write_bytes(pickle.dumps(_Runs(), protocol=2))
    for name in ("m.pt", "raw.bin"):
        with pytest.raises(stio.FormatError):
            stio.sync.convert(name, "d.safetensors")
    assert not Path("pwned").exists()
    torch.save(torch.nn.Linear(2, 3), "module.pt")
    with pytest.raises(stio.FormatError, match="trust_pickle"):
        stio.sync.convert("module.pt", "d.safetensors")
    with pytest.warns(RuntimeWarning, match="can run any code"):
        stio.sync.convert("module.pt", "d.safetensors", trust_pickle=True)
    assert set(stio.sync.load("d.safetensors")) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"a": torch.ones(2).to_sparse()}, "'a' is torch.sparse|'a' is sparse"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "'a'"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # torch.load's, from 2.15 on
def test_tensors_that_the_format_has_not(tmp_path: Path, made: Tensors, match: str) -> None:
    torch.save(made, tmp_path / "m.pt")
    with pytest.raises(stio.StioError, match=rf"m\.pt: .*({match})"):
        stio.sync.convert(tmp_path / "m.pt", tmp_path / "d.safetensors")


@needs_f4
def test_packed_pairs_are_not_cast(tmp_path: Path) -> None:
    """torch has no such cast, and says so by an error of its own."""
    made = {"a": torch.zeros(3, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "b": ramp(5)}
    torch.save(made, tmp_path / "m.pt")
    stio.sync.save(made, tmp_path / "m.safetensors")
    for name in ("m.pt", "m.safetensors"):
        with pytest.raises(stio.UnsupportedDtypeError, match="cannot cast packed pairs.*: a "):
            stio.sync.convert(tmp_path / name, tmp_path / "d.safetensors", dtype="bfloat16")
        stio.sync.convert(tmp_path / name, tmp_path / "e.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.safetensors", "m.pt", "m.safetensors"]


# OLMo's files.


def test_nested_state_of_tensors_is_joined_by_dots(tmp_path: Path) -> None:
    state = {"model": {"w": ramp(5), 0: {"b": ramp(2)}}}
    olmo.state_dict_to_safetensors_file(state, tmp_path / "o.safetensors")
    stio.sync.convert(tmp_path / "o.safetensors", tmp_path / "d.safetensors")
    require_equal(stio.sync.load(tmp_path / "d.safetensors"), {"model.w": ramp(5), "model.0.b": ramp(2)})


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": ramp(5), "lr": 0.1}, r"not tensors, which plain.*\['lr'\]"),
        ({"a": {"b": ramp(5)}, "a.b": ramp(5)}, r"the same name.*a\.b"),
    ],
)
def test_other_nested_state_is_refused(tmp_path: Path, state: dict[str, Any], match: str) -> None:
    olmo.state_dict_to_safetensors_file(state, tmp_path / "o.safetensors")
    with pytest.raises(stio.FormatError, match=match):
        stio.sync.convert(tmp_path / "o.safetensors", tmp_path / "d.safetensors")


# Refusals, and what is left behind.


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"dtype": "int8"}, ValueError),
        ({"dtype": "no_such"}, ValueError),
        ({"dtype": "nn"}, ValueError),
        ({"dtype": torch.int64}, ValueError),
        ({"dtype": "F4"}, ValueError),
        ({"dtype": 1}, TypeError),
        ({"budget_bytes": 0}, ValueError),
        ({"budget_bytes": "1 GBit"}, ValueError),
        ({"budget_bytes": True}, TypeError),
        ({"key": 1}, TypeError),
        ({"max_shard_size": "1MB"}, ValueError),
        ({"max_shard_size": "x"}, ValueError),
        ({"hash": "md5"}, ValueError),
        ({"durability": "some"}, ValueError),
        ({"progress": 1}, TypeError),
        ({"metadata": {"a": 1}}, TypeError),
        ({"no_such": 1}, TypeError),
    ],
)
def test_wrong_calls_before_anything_begins(tmp_path: Path, keywords: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):  # raised before the missing source is noticed
        stio.sync.convert(tmp_path / "absent", tmp_path / "d.safetensors", **keywords)


def test_a_key_is_for_pickles_only(tmp_path: Path) -> None:
    stio.sync.save({"a": ramp(5)}, tmp_path / "m.safetensors")
    for source in (tmp_path / "m.safetensors", "http://127.0.0.1:9/m.safetensors"):
        with pytest.raises(ValueError, match="key= is for files of torch"):
            stio.sync.convert(source, tmp_path / "d.safetensors", key="model")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")],
    ids=lambda error: type(error).__name__,
)
def test_a_pickle_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    torch.save({"a": ramp(5)}, tmp_path / "m.pt")
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(stio.HostMemoryError) as caught:
        stio.sync.convert(tmp_path / "m.pt", tmp_path / "d.safetensors")
    assert caught.value.path == str(tmp_path / "m.pt")


def test_a_file_into_itself(tmp_path: Path) -> None:
    made = {"a": ramp(5), "b": ramp(900_000)}
    source = sharded(tmp_path / "m", made)
    (tmp_path / "link.safetensors").symlink_to(source / "model-00001-of-00002.safetensors")
    torch.save(made, tmp_path / "x.safetensors.pt")
    for file in ("m/model-00001-of-00002.safetensors", "link.safetensors"):
        with pytest.raises(ValueError, match="is a file of the source"):
            stio.sync.convert(source, tmp_path / file)
    require_equal(stio.sync.load(source), made)
    os.link(tmp_path / "x.safetensors.pt", tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="is a file of the source"):
        stio.sync.convert(tmp_path / "x.safetensors.pt", tmp_path / "y.safetensors")


@pytest.mark.parametrize(
    "name", ["none", "none.safetensors", "none.pt", "none.bin.index.json", "none.safetensors.index.json"]
)
def test_nothing_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(stio.CheckpointNotFoundError):
        stio.sync.convert(tmp_path / name, tmp_path / "d.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(stio.CheckpointNotFoundError):
        stio.sync.convert(tmp_path / "empty", tmp_path / "d.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x.bin"}}',
        "[" * 9999,
    ],
)
def test_bad_indices_of_pickles(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.bin.index.json").write_text(text)
    with pytest.raises((stio.IndexFormatError, stio.UnsafePathError)):
        stio.sync.convert(tmp_path, tmp_path / "d.safetensors")


def test_a_source_that_breaks_off_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"a": ramp(900_000), "b": ramp(900_000)}
    source = sharded(tmp_path / "m", made)
    destination = tmp_path / "d.safetensors"
    destination.write_text("old")

    def spoil(event: ProgressEvent) -> None:  # called first when nothing has been read of the second shard
        path = source / "model-00002-of-00002.safetensors"
        if not event.done_bytes and path.stat().st_size > 1000:
            os.truncate(path, 1000)

    with pytest.raises((stio.TruncatedError, stio.ChangedDuringReadError)):
        stio.sync.convert(source, destination, budget_bytes=1, progress=spoil)
    assert destination.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["d.safetensors", "m"]


def test_progress(tmp_path: Path) -> None:
    source = sharded(tmp_path / "m", tensors())
    events: list[ProgressEvent] = []
    result = stio.sync.convert(source, tmp_path / "d.safetensors", progress=events.append)
    assert events[0].done_bytes == 0
    assert events[-1].done_bytes == events[-1].total_bytes == result.total_bytes
    assert [event.done_bytes for event in events] == sorted(event.done_bytes for event in events)


# On a loop.


@pytest.mark.matrix
@pytest.mark.anyio
async def test_awaitable(tmp_path: Path) -> None:
    made = tensors()
    source = tmp_path / "m"
    await stio.save(made, source, max_shard_size="2MB")
    result = await stio.convert(source, tmp_path / "d.safetensors", budget_bytes=4 * MIB)
    assert result.files == ("d.safetensors",)
    require_equal(await stio.load(tmp_path / "d.safetensors"), made)


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
async def test_a_cancel_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    made = {f"t{k}": ramp(300_000) for k in range(20)}
    source = tmp_path / "m.pt"
    if kind == "pickle":
        torch.save(made, source)
    else:
        source = tmp_path / "m"
        await stio.save(made, source, max_shard_size="2MB")
    begun: list[ProgressEvent] = []
    with anyio.CancelScope() as scope:
        token = anyio.lowlevel.current_token()

        def cancel(event: ProgressEvent) -> None:
            begun.append(event)
            if len(begun) == 2:
                anyio.from_thread.run_sync(scope.cancel, token=token)

        await stio.convert(source, tmp_path / "d", progress=cancel, budget_bytes=1, dtype="bfloat16")
    assert scope.cancelled_caught
    assert os.listdir(tmp_path) == [source.name]


def test_refusals_advise_nothing_that_it_does_not_take(tmp_path: Path) -> None:
    stio.sync.save({"a": ramp(3)}, tmp_path / "there.safetensors")
    (tmp_path / "m").mkdir()
    link = tmp_path / "m" / "model.safetensors"
    link.symlink_to(tmp_path / "there.safetensors")
    with pytest.raises(stio.UnsafePathError, match="out of the checkpoint; copy the file there if you trust"):
        stio.sync.convert(tmp_path / "m", tmp_path / "out")
    link.unlink()
    shutil.copy(tmp_path / "there.safetensors", link)  # the step
    stio.sync.convert(tmp_path / "m", tmp_path / "out")
    with tmp_path.joinpath("huge.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(200_000_100)
    with pytest.raises(stio.LimitError, match=r"save what stio.load returns with limits=stio.Limits\(header_bytes"):
        stio.sync.convert(tmp_path / "huge.safetensors", tmp_path / "other")
