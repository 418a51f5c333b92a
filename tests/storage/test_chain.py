"""A delta and its bases opened as one checkpoint: what is found, by which names, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deltas import State, id_of, next_state, write_chain, write_checkpoint, write_delta
from fakes.roots import MemoryRoot

import stio
from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    LimitError,
    MismatchError,
    StorageError,
    UnsafePathError,
)
from stio.format import parse_header
from stio.format.delta import DELTA_KEY, DELTA_POINTER, DELTA_TENSOR, FORMAT, ID_KEY, Delta, parse_delta
from stio.format.files import FileState, Manifest
from stio.limits import Limits
from stio.storage import open as opening
from stio.storage.checkpoint import OpenCheckpoint, OpenOptions, open_checkpoint, verify_files
from stio.storage.checkpoint import chain as chains
from stio.storage.checkpoint.chain import digest_of, read_tensor
from stio.storage.checkpoint.open import base_of
from stio.storage.local import LocalRoot
from stio.storage.open import SingleFileRoot

NUM = 4


def states(num: int = NUM) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    first = {
        "w": torch.randn(40, 70, generator=generator),
        "b": torch.randn(600, generator=generator).bfloat16(),
        "same": torch.arange(5),
        "small": torch.ones(3),
        "none": torch.zeros(0, 4),
    }
    found = [first]
    for _ in range(num - 1):
        found.append(next_state(found[-1], 0.03, generator) | {"same": first["same"]})
        found[-1]["small"] = found[-2]["small"] + 1
    return found


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Write a full checkpoint and three deltas, `step-0` to `step-3`."""
    written = states()
    write_chain(tmp_path / "run", written)
    return tmp_path / "run", written


def read(source: object, options: OpenOptions | None = None) -> dict[str, bytes]:
    opened = open_checkpoint(source, options or OpenOptions())  # type: ignore[arg-type]
    try:
        return {name: read_tensor(opened, opened.info(name)).tobytes() for name in opened.dtypes_and_shapes()}
    finally:
        opened.close()


def bytes_of(state: State) -> dict[str, bytes]:
    return {name: bytes(one.flatten().view(torch.uint8).numpy()) if one.numel() else b"" for name, one in state.items()}


def rewritten(path: Path, change: Callable[[Delta], Delta], **metadata: str) -> None:
    """Write the file of a delta again, with another description."""
    file = path / "model.safetensors"
    raw = file.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + nbytes])
    delta = parse_delta(header["__metadata__"][DELTA_KEY].encode(), path="")
    header["__metadata__"] |= {DELTA_KEY: change(delta).encode().decode(), **metadata}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + nbytes :])


# What is found.


def test_each_step_is_what_was_saved(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, written = run
    for step, state in enumerate(written):
        assert read(folder / f"step-{step}") == bytes_of(state)
    with_open = open_checkpoint(folder / "step-3")
    assert [Path(link.path).name for link in with_open.links] == ["step-0", "step-1", "step-2", "step-3"]
    assert [link.id for link in with_open.links] == [id_of(step) for step in range(NUM)]
    assert [link.delta is None for link in with_open.links] == [True, False, False, False]
    assert [header.shard for header in with_open.headers] == [
        *(f"../step-{step}/model.safetensors" for step in range(3)),
        "model.safetensors",
    ]
    assert with_open.metadata == {"format": "pt", ID_KEY: id_of(3)}
    assert len(with_open.patches["w"]) == 3
    assert "small" not in with_open.patches
    assert with_open.info("small").shard == "model.safetensors"
    files = list(with_open.files)
    with_open.close()
    assert all(file.fd == -1 for file in files)  # type: ignore[attr-defined]


def test_alone_the_files_hold_no_weights(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    opened = open_checkpoint(run[0] / "step-3", OpenOptions(joins=False))
    assert not opened.links
    assert opened.metadata["format"] == FORMAT
    with pytest.raises(stio.UnsupportedDtypeError, match="stio convert"):
        opened.require_plain()


@pytest.mark.parametrize("relative", [False, True])
def test_names_of_one_delta(
    run: tuple[Path, list[dict[str, torch.Tensor]]], relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = run
    expected = bytes_of(written[3])
    other = folder.parent / "other"
    other.mkdir()
    (folder / "latest").symlink_to("step-3")
    (other / "latest").symlink_to("../run/step-3")
    (other / "latest.safetensors").symlink_to("../run/step-3/model.safetensors")
    (folder / "run-again").symlink_to(".")
    names = ["step-3", "step-3/model.safetensors", "latest", "latest/model.safetensors", "../other/latest"]
    monkeypatch.chdir(folder)
    for name in [*names, "../other/latest.safetensors", "run-again/step-3", "../run/step-3/", "step-2/../step-3"]:
        assert read(name if relative else folder / name) == expected, name
    monkeypatch.chdir(folder / "step-3")
    for name in (".", "model.safetensors", "./model.safetensors"):
        assert read(name) == expected, name


def test_an_index_and_shards(tmp_path: Path) -> None:
    """Saved by hand: a delta whose positions and values are in two files, with an index and a long description."""
    before, after = states(2)
    write_chain(tmp_path, [before, after])
    opened = open_checkpoint(tmp_path / "step-1", OpenOptions(joins=False))
    tensors = {
        name: torch.frombuffer(bytearray(read_tensor(opened, opened.info(name)).tobytes()), dtype=torch.uint8).view(
            {"U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16}[dtype]
        )
        for name, (dtype, _) in opened.dtypes_and_shapes().items()
    }
    text = str(opened.metadata[DELTA_KEY]).encode()
    shutil.rmtree(tmp_path / "step-1")
    tensors[DELTA_TENSOR] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    metadata = {"format": FORMAT, ID_KEY: id_of(1), DELTA_KEY: DELTA_POINTER}
    files = {f"model-{k:05}-of-00002.safetensors": sorted(tensors)[k - 1 :: 2] for k in (1, 2)}
    for name, held in files.items():
        write_checkpoint(tmp_path / "part", {one: tensors[one] for one in held}, metadata)
        (tmp_path / "step-1").mkdir(exist_ok=True)
        (tmp_path / "part" / "model.safetensors").rename(tmp_path / "step-1" / name)
        (tmp_path / "part").rmdir()
    index = tmp_path / "step-1" / "model.safetensors.index.json"
    weight_map = {one: name for name, held in files.items() for one in held}
    index.write_text(json.dumps({"metadata": metadata | {"total_size": 7}, "weight_map": weight_map}))
    assert read(tmp_path / "step-1") == read(index) == bytes_of(after)
    with pytest.raises(LimitError, match="header_bytes"):
        read(tmp_path / "step-1", OpenOptions(limits=Limits(header_bytes=len(text) - 1)))
    with pytest.raises(FormatError, match="open the delta's directory or index|the tensor with the description"):
        read(tmp_path / "step-1" / [*files][1])
    index.write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    with pytest.raises((FormatError, stio.IndexFormatError)):
        read(index)


def test_files_beside_each_other(tmp_path: Path) -> None:
    """Deltas that were saved as files: the base is in the same directory, and may be a directory there."""
    before, middle, after = states(3)
    write_chain(tmp_path, [before, middle, after])
    for step in (1, 2):
        base = "step-0" if step == 1 else "step-1.safetensors"
        rewritten(tmp_path / f"step-{step}", lambda delta, base=base: replace(delta, base=base, is_directory=False))
        (tmp_path / f"step-{step}" / "model.safetensors").rename(tmp_path / f"step-{step}.safetensors")
        (tmp_path / f"step-{step}").rmdir()
    (tmp_path / "newest.safetensors").symlink_to("step-2.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "newest.safetensors").symlink_to("../step-2.safetensors")
    for name in ("step-2.safetensors", "newest.safetensors", "other/newest.safetensors"):
        assert read(tmp_path / name) == bytes_of(after)
    opened = open_checkpoint(tmp_path / "step-2.safetensors")
    names = [header.shard for header in opened.headers]
    assert names == ["step-0/model.safetensors", "step-1.safetensors", "step-2.safetensors"]
    opened.close()


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_snapshot_in_the_hubs_cache(tmp_path: Path, is_directory: bool) -> None:
    """Its files are links to blobs, which nothing is beside."""
    before, after = states(2)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    write_chain(snapshot, [before, after])
    if not is_directory:
        rewritten(
            snapshot / "step-1", lambda delta: replace(delta, base="step-0.safetensors", is_directory=is_directory)
        )
    for step in (0, 1):
        name = f"step-{step}/model.safetensors" if is_directory else f"step-{step}.safetensors"
        (snapshot / f"step-{step}" / "model.safetensors").rename(blobs / str(step))
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(step), (snapshot / name).parent))
    last = snapshot / ("step-1" if is_directory else "step-1.safetensors")
    assert read(last) == bytes_of(after)


def test_many_files_are_opened_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = states(9)
    paths = write_chain(tmp_path, written)
    monkeypatch.setattr(chains, "max_open_files", lambda: 3)
    opened = open_checkpoint(paths[-1])
    assert sum(file.fd >= 0 for file in opened.files) <= 3  # type: ignore[attr-defined]
    monkeypatch.setattr(opening, "max_open_files", lambda: 3)
    assert {name: read_tensor(opened, opened.info(name)).tobytes() for name in opened.dtypes_and_shapes()} == bytes_of(
        written[-1]
    )
    shutil.rmtree(paths[3])
    with pytest.raises(ChangedDuringReadError):
        read_tensor(opened, opened.info("w"))
    opened.close()


def test_a_base_of_other_programs_is_known_by_its_digest(tmp_path: Path) -> None:
    before, after = states(2)
    write_checkpoint(tmp_path / "full", before, {"format": "pt"})
    opened = open_checkpoint(tmp_path / "full")
    digest = digest_of(opened, "sha256")
    opened.close()
    write_delta(tmp_path / "step-1", before, after, base="full", step=1)
    rewritten(tmp_path / "step-1", lambda delta: replace(delta, base_id=f"sha256:{digest}"))
    assert read(tmp_path / "step-1") == bytes_of(after)
    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(tmp_path / "step-1", OpenOptions(check=_interrupting(4)))
    shutil.rmtree(tmp_path / "full")
    write_checkpoint(tmp_path / "full", after, {"format": "pt"})
    with pytest.raises(MismatchError, match="was replaced"):
        read(tmp_path / "step-1")


def _interrupting(calls: int) -> Callable[[], None]:
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return check


# What is refused.


def test_a_missing_base_is_named(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, _ = run
    shutil.rmtree(folder / "step-1")
    with pytest.raises(CheckpointNotFoundError) as caught:
        read(folder / "step-3")
    assert caught.value.path == str(folder / "step-2")
    assert f"{folder}/step-1, with the id {id_of(1)}" in str(caught.value)


@pytest.mark.parametrize("id_there", ["f" * 32, None])
def test_another_base(run: tuple[Path, list[dict[str, torch.Tensor]]], id_there: str | None) -> None:
    """Of another run, or saved again: both have all tensors, dtypes and shapes."""
    folder, written = run
    shutil.rmtree(folder / "step-0")
    write_checkpoint(folder / "step-0", written[0], {"format": "pt"} | ({ID_KEY: id_there} if id_there else {}))
    with pytest.raises(MismatchError) as caught:
        read(folder / "step-2")
    text = str(caught.value)
    assert str(folder / "step-1") in text
    assert str(folder / "step-0") in text
    assert f"expected id {id_of(0)}, found {f'id {id_there}' if id_there else 'no id'}" in text


def test_a_base_of_which_a_shard_was_replaced(tmp_path: Path) -> None:
    before, after = states(2)
    write_chain(tmp_path, [before, after])
    names = sorted(before)
    weight_map: dict[str, str] = {}
    for k, held in enumerate((names[:2], names[2:]), 1):
        write_checkpoint(tmp_path / "part", {name: before[name] for name in held}, {ID_KEY: id_of(0 if k == 1 else 9)})
        name = f"model-{k:05}-of-00002.safetensors"
        (tmp_path / "part" / "model.safetensors").rename(tmp_path / "step-0" / name)
        (tmp_path / "part").rmdir()
        weight_map |= dict.fromkeys(held, name)
    (tmp_path / "step-0" / "model.safetensors").unlink()
    index = {"metadata": {ID_KEY: id_of(0)}, "weight_map": weight_map}
    (tmp_path / "step-0" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MismatchError, match="not in all of its files"):
        read(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (1, lambda delta: replace(delta, base="step-3", base_id=id_of(3))),
        (1, lambda delta: replace(delta, base="step-1", base_id=id_of(1))),
        (1, lambda delta: replace(delta, depth=2)),
        (2, lambda delta: replace(delta, depth=1)),
        (3, lambda delta: replace(delta, depth=64)),
        (3, lambda delta: replace(delta, base="step-0", base_id=id_of(0))),
    ],
)
def test_circles_and_wrong_depths(
    run: tuple[Path, list[dict[str, torch.Tensor]]], step: int, change: Callable[[Delta], Delta]
) -> None:
    rewritten(run[0] / f"step-{step}", change)
    with pytest.raises(FormatError, match="depth|shorter"):
        read(run[0] / "step-3")


def test_the_longest_chain_and_a_longer_one(tmp_path: Path) -> None:
    state = {"w": torch.arange(4096)}
    write_checkpoint(tmp_path / "step-0", state, {ID_KEY: id_of(0)})
    for step in range(1, 66):
        after = {"w": state["w"].clone()}
        after["w"][step] = -step
        write_delta(tmp_path / f"step-{step}", state, after, base=f"step-{step - 1}", step=step)
        state = after
    with pytest.raises(LimitError, match="too long"):
        read(tmp_path / "step-65")
    state["w"][65] = 65
    assert read(tmp_path / "step-64") == bytes_of(state)


@pytest.mark.parametrize("name", ["base", "folder/base"])
def test_a_base_that_is_a_link_to_elsewhere(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path, name: str
) -> None:
    folder, written = run
    (tmp_path / "secret").mkdir()
    (folder / "step-0").rename(tmp_path / "secret" / "base")
    if "/" in name:
        (folder / "folder").symlink_to("../secret")
    else:
        (folder / "base").symlink_to("../secret/base")
    rewritten(folder / "step-1", lambda delta: replace(delta, base=name))
    with pytest.raises(UnsafePathError, match="leads out of"):
        read(folder / "step-1")
    assert read(folder / "step-1", OpenOptions(follow_symlinks=True)) == bytes_of(written[1])


def test_a_base_of_a_storage_of_ones_own(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    root = MemoryRoot({"model.safetensors": (run[0] / "step-1" / "model.safetensors").read_bytes()})
    with pytest.raises(StorageError, match="a delta in it has no base"):
        read(root)


def test_one_file_of_a_local_directory_is_one_of_ones_own(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    """As integrations open it."""
    with LocalRoot(run[0] / "step-3") as root:
        assert read(root) == read(SingleFileRoot(root, "model.safetensors")) == bytes_of(run[1][3])


def test_another_name_of_the_file(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    """One that no other library looks for."""
    folder, written = run
    for step in (1, 2, 3):
        (folder / f"step-{step}" / "model.safetensors").rename(folder / f"step-{step}" / "delta.safetensors")
        (folder / f"step-{step}" / "config.json").write_text("{}")
    assert read(folder / "step-3") == bytes_of(written[3])
    assert stio.latest(folder) == str(folder / "step-3")


# The newest one.


def test_latest_takes_a_delta_whose_chain_is_whole(
    run: tuple[Path, list[dict[str, torch.Tensor]]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = run
    assert stio.latest(folder) == str(folder / "step-3")
    assert not caplog.records
    assert base_of(str(folder / "step-3")) == str(folder / "step-2")
    assert base_of(str(folder / "step-0")) is None


@pytest.mark.parametrize("fault", ["missing", "replaced", "truncated", "description"])
def test_latest_leaves_out_a_broken_chain(
    run: tuple[Path, list[dict[str, torch.Tensor]]], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Of steps 0 to 3, where 2 is broken; what is based on it is too."""
    folder, written = run
    file = folder / "step-2" / "model.safetensors"
    if fault == "missing":
        shutil.rmtree(folder / "step-2")
    elif fault == "replaced":
        shutil.rmtree(folder / "step-2")
        write_checkpoint(folder / "step-2", written[2], {ID_KEY: "f" * 32})
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        rewritten(folder / "step-2", lambda delta: replace(delta, base_id="nonsense"))
    newest = folder / ("step-2" if fault == "replaced" else "step-1")
    assert stio.latest(folder) == str(newest)
    reason = {"missing": "base of this delta is missing", "replaced": "was replaced"}.get(fault, "")
    assert "step-3" in caplog.text
    assert reason in caplog.text
    shutil.rmtree(folder / "step-0")
    if fault != "replaced":
        assert stio.latest(folder, default=None) is None


def _without(names: Sequence[str]) -> Callable[[dict[str, object]], None]:
    def change(header: dict[str, object]) -> None:
        for name in names:
            header["__metadata__"].pop(name)  # type: ignore[attr-defined]

    return change


@pytest.mark.parametrize("dropped", [[DELTA_KEY], [DELTA_KEY, "format"], [DELTA_KEY, "format", ID_KEY]])
def test_a_copy_without_metadata_is_no_model(
    run: tuple[Path, list[dict[str, torch.Tensor]]], dropped: list[str]
) -> None:
    file = run[0] / "step-1" / "model.safetensors"
    raw = file.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + nbytes])
    _without(dropped)(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + nbytes :])
    with pytest.raises(FormatError, match="a part of a delta, or a copy without its metadata"):
        read(run[0] / "step-1")


@pytest.mark.parametrize(
    "base",
    [
        {"w": torch.zeros(40, 70), "b": torch.zeros(600).bfloat16(), "small": torch.ones(3), "same": torch.ones(1)},
        {"w": torch.zeros(70, 40), "b": torch.zeros(600).bfloat16(), "small": torch.ones(3)},
        {"w": torch.zeros(40, 70), "b": torch.zeros(600).half(), "small": torch.ones(3)},
        {"w": torch.zeros(40, 70), "b": torch.zeros(600).bfloat16()},
        {"w": torch.zeros(40, 70), "b": torch.zeros(600).bfloat16(), "small": torch.ones(1, 3)},
    ],
)
def test_tensors_that_do_not_fit_the_base(
    run: tuple[Path, list[dict[str, torch.Tensor]]], base: dict[str, torch.Tensor]
) -> None:
    folder, _ = run
    shutil.rmtree(folder / "step-0")
    write_checkpoint(folder / "step-0", base, {ID_KEY: id_of(0)})
    if "same" in base:
        assert read(folder / "step-1")["same"] == bytes_of(base)["same"]
        return
    with pytest.raises(FormatError, match="does not fit its base"):
        read(folder / "step-1")


def test_trailing_bytes_of_a_base(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    with (run[0] / "step-0" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match="bytes after the last tensor"):
        read(run[0] / "step-1")
    assert read(run[0] / "step-1", OpenOptions(allow_trailing=True)) == bytes_of(run[1][1])


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_base_that_is_replaced_after_the_opening(run: tuple[Path, list[dict[str, torch.Tensor]]], step: int) -> None:
    """What is open stays what it was; a file that is written in place is noticed."""
    folder, written = run
    opened = open_checkpoint(folder / "step-3")
    other = folder / "other"
    write_checkpoint(other, written[0], {ID_KEY: "f" * 32})
    file = folder / f"step-{step}" / "model.safetensors"
    os.replace(other / "model.safetensors", file)
    assert read_tensor(opened, opened.info("w")).tobytes() == bytes_of(written[3])["w"]
    opened.close()
    with pytest.raises(MismatchError) if step < 3 else pytest.MonkeyPatch.context():
        read(folder / "step-3")


def test_hostile_positions_are_refused_before_anything_is_written(
    run: tuple[Path, list[dict[str, torch.Tensor]]],
) -> None:
    file = run[0] / "step-1" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    nbytes = int.from_bytes(raw[:8], "little")
    header = parse_header(bytes(raw[8 : 8 + nbytes]), file_bytes=len(raw), path="", shard="")
    info = header.info("/stio.delta/0/positions")
    raw[info.file_offset : info.file_offset + info.nbytes] = b"\xfe" * info.nbytes
    file.write_bytes(raw)
    with pytest.raises(FormatError, match="lead past the end"):
        read(run[0] / "step-1")


# Manifests.


def _with_manifests(folder: Path) -> OpenCheckpoint:
    return open_checkpoint(folder / "step-3", OpenOptions(with_manifest=True))


def test_each_link_has_its_own_manifest(run: tuple[Path, list[dict[str, torch.Tensor]]]) -> None:
    folder, _ = run
    opened = _with_manifests(folder)
    with pytest.raises(IntegrityError, match="no manifest") as caught:
        verify_files(opened)
    opened.close()
    assert caught.value.path == str(folder / "step-0")
    for step in range(NUM):
        _write_manifest(folder / f"step-{step}")
    opened = _with_manifests(folder)
    verify_files(opened)
    opened.close()
    file = folder / "step-1" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    opened = _with_manifests(folder)
    with pytest.raises(IntegrityError, match="damaged") as caught:
        verify_files(opened)
    opened.close()
    assert caught.value.path == str(file)


def _write_manifest(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    state = (FileState(len(data), hashlib.sha256(data).hexdigest()),)
    text = Manifest("sha256", {"model.safetensors": state}).encode()
    (path / "model.safetensors.manifest.json").write_bytes(text)
