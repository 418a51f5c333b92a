"""A save to a local directory: each way from what stands there to the new checkpoint, and who may disturb it."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import shutil
import socket
import stat
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.zygote import Zygote

import stio.sync
from stio.errors import CommitUncertainError, ConcurrentSaveError, NoSpaceError, StioError, StorageError
from stio.storage.base import Note, Transaction
from stio.storage.commit import destination, directory_lock, publication
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import DIRECTORY_LOCK_NAME
from stio.storage.commit.files import closing
from tests.storage.transactions import (
    CHANGES,
    FALLIBLE,
    FILES_CHANGE,
    HUB_FILES,
    INDEX,
    INFALLIBLE,
    NOTE,
    OTHER,
    SINGLE,
    Change,
    System,
    begin_local,
    content,
    fill,
    index_of,
    names_in,
    note,
    read,
    require_clean,
    save,
    sweep,
    whole,
)

ALL_CHANGES = [*CHANGES, FILES_CHANGE]
changes = pytest.mark.parametrize("change", ALL_CHANGES, ids=lambda change: change.name)
not_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# What stands there afterwards.


@changes
def test_every_commit_ends_with_the_new_checkpoint(tmp_path: Path, change: Change) -> None:
    destination = change.prepare(tmp_path / "place")
    require_clean(destination, [change.old])
    before = num_descriptors()
    change.carry_out(destination)
    require_clean(destination, ["new"])
    assert num_descriptors() == before
    if change.kind == "dir":
        assert (destination / OTHER).read_text() == "{}"
    if change.notes:
        assert ((destination if change.kind != "file" else destination.parent) / NOTE).read_text() == "new"


@changes
def test_every_way_without_durability(tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = change.prepare(tmp_path / "place")
    for name in ("fsync", "sync_directory"):
        monkeypatch.setattr(calls, name, lambda fd: pytest.fail("synced"))
    notes = [note("new")] if change.notes else []
    save(destination, "new", change.new_shards, notes=notes, durability="none", **change.options)
    require_clean(destination, ["new"])


def test_fresh_directory_has_the_hubs_names(tmp_path: Path) -> None:
    done: Transaction = save(tmp_path / "a" / "b" / "fresh", "new", 2)
    assert done.shard_names == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert whole(tmp_path / "a" / "b" / "fresh") == ("new", {INDEX, *done.shard_names})
    assert names_in(tmp_path) == {"a"}


def test_pattern_names_all_files(tmp_path: Path) -> None:
    done = save(tmp_path / "fresh", "new", 2, filename_pattern="weights{suffix}.safetensors")
    assert names_in(tmp_path / "fresh") == {*done.shard_names, "weights.safetensors.index.json"}
    assert done.shard_names[0] == "weights-00001-of-00002.safetensors"


def test_checkpoints_of_two_patterns_live_side_by_side(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    before = names_in(tmp_path / "c")
    save(tmp_path / "c", "ema", 2, filename_pattern="ema{suffix}.safetensors")
    save(tmp_path / "c", "ema", 3, filename_pattern="ema{suffix}.safetensors")
    assert before < names_in(tmp_path / "c")
    assert read(tmp_path / "c") == "old"


def test_shards_beside_old_ones_carry_the_saves_id(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    first = save(tmp_path / "c", "new", 2)
    second = save(tmp_path / "c", "newer", 1)
    assert len({*first.shard_names, *second.shard_names}) == 3
    assert not any(name.startswith("model-0000") for name in first.shard_names)
    assert first.takes_index and second.takes_index
    assert names_in(tmp_path / "c") == {INDEX, *second.shard_names}


def test_stray_files_of_a_checkpoint_go_others_stay(tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir()
    for name in ("model-00001-of-00009.safetensors", "model-0123456789-00001-of-00002.safetensors"):
        (place / name).write_bytes(b"stray")
    for name in ("adapter.safetensors", "model.safetensors.bak", "model-1-of-2.safetensors"):
        (place / name).write_bytes(b"mine")
    (place / "model-00003-of-00009.safetensors").mkdir()  # no file: not for us
    save(place, "new", 1)
    assert read(place) == "new"
    assert names_in(place) == {
        SINGLE, "adapter.safetensors", "model.safetensors.bak", "model-1-of-2.safetensors",
        "model-00003-of-00009.safetensors",
    }  # fmt: skip


def test_old_index_is_believed_about_names_in_the_directory_only(tmp_path: Path) -> None:
    place = tmp_path / "c"
    (place / "sub").mkdir(parents=True)
    outside = tmp_path / "outside.safetensors"
    for path in (outside, place / "odd.safetensors", place / "sub" / "x.safetensors"):
        path.write_bytes(b"x")
    os.symlink(outside, place / "link.safetensors")
    (place / INDEX).write_text(
        '{"weight_map": {"a": "odd.safetensors", "b": "sub/x.safetensors", "c": "link.safetensors"}}'
    )
    save(place, "new", 1)
    assert read(place) == "new"
    assert outside.exists() and (place / "sub" / "x.safetensors").exists()
    assert not (place / "odd.safetensors").exists() and not os.path.lexists(place / "link.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        '{"weight_map": {"a": "../outside.safetensors"}}',
        pytest.param(f'{{"weight_map": {{"a": "{"n" * 300}.safetensors"}}}}', id="a name that is too long"),
    ],
)
def test_broken_index_is_saved_over(tmp_path: Path, text: str) -> None:
    place = tmp_path / "c"
    place.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"x")
    (place / INDEX).write_text(text)
    (place / "model-00001-of-00001.safetensors").write_bytes(b"x")
    save(place, "new", 2)
    assert read(place) == "new" and len(names_in(place)) == 3
    assert (tmp_path / "outside.safetensors").exists()


def test_c117_readers_keep_the_old_bytes(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 1)
    with open(tmp_path / "c" / SINGLE, "rb") as file:
        save(tmp_path / "c", "new", 1)
        assert file.read() == content("old", 0)


def test_directory_may_be_renamed_meanwhile(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    transaction = begin_local(tmp_path / "c", num_shards=2)
    fill(transaction, "new")
    (tmp_path / "c").rename(tmp_path / "moved")
    transaction.commit(index=index_of(transaction, "new"))
    require_clean(tmp_path / "moved", ["new"])


# The hub's names over a checkpoint.


def test_hub_names_over_a_checkpoint_must_be_allowed(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    with pytest.raises(ValueError, match='commit="files"'):
        begin_local(tmp_path / "c", num_shards=2, shard_names="hub")
    assert names_in(tmp_path) == {"c"}
    require_clean(tmp_path / "c", ["old"])


def test_hub_names_over_a_checkpoint(tmp_path: Path) -> None:
    for tag, num_shards in (("a", 2), ("b", 2), ("c", 3), ("d", 1), ("e", 1), ("f", 2)):
        done = save(tmp_path / "c", tag, num_shards, **HUB_FILES)
        require_clean(tmp_path / "c", [tag])
        hub = [f"model-{k + 1:05d}-of-{num_shards:05d}.safetensors" for k in range(num_shards)]
        assert list(done.shard_names) == (hub if num_shards > 1 else [SINGLE])


def test_interrupted_replacement_is_said_and_finished_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = FILES_CHANGE.prepare(tmp_path / "place")
    real, renamed = calls.rename, []

    def rename(source: str, target: str, **fds: int) -> None:
        if target.endswith(".safetensors"):
            renamed.append(target)
            if len(renamed) == 2:
                raise OSError(errno.EIO, "")
        real(source, target, **fds)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "rename", rename)
        with pytest.raises(CommitUncertainError, match="completes it"):
            FILES_CHANGE.carry_out(destination)
    begin_local(destination, num_shards=2).roll_back()
    require_clean(destination, ["new"])


# Modes and links.


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_c118_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "fresh", "new", 2)
        save(tmp_path / "one.safetensors", "new")
        (tmp_path / "dir").mkdir()
        save(tmp_path / "dir", "new", 2, notes=[note("new")])
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "fresh") == 0o777 & ~umask
    files = [*(tmp_path / "fresh").iterdir(), tmp_path / "one.safetensors", *(tmp_path / "dir").iterdir()]
    assert {mode_of(path) for path in files} == {0o666 & ~umask}


def test_c118_modes_of_the_old_checkpoint_are_kept(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    (tmp_path / "c" / NOTE).write_text("old")
    for path, mode in ((INDEX, 0o604), (NOTE, 0o600)):
        os.chmod(tmp_path / "c" / path, mode)
    for name in names_in(tmp_path / "c") - {INDEX, NOTE}:
        os.chmod(tmp_path / "c" / name, 0o640)
    save(tmp_path / "c", "new", 3, notes=[note("new")])
    modes = {name: mode_of(tmp_path / "c" / name) for name in names_in(tmp_path / "c")}
    assert modes.pop(INDEX) == 0o604 and modes.pop(NOTE) == 0o600
    assert set(modes.values()) == {0o640}


@pytest.mark.parametrize("kind", ["dir", "file"])
def test_c118_mode_of_the_old_file_is_kept(tmp_path: Path, kind: str) -> None:
    destination = tmp_path / ("x.safetensors" if kind == "file" else "c")
    save(destination, "old")
    file = destination if kind == "file" else destination / SINGLE
    os.chmod(file, 0o640)
    save(destination, "new")
    assert read(destination) == "new" and mode_of(file) == 0o640


def test_c116_links_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "real" / "x.safetensors", "old")
    save(tmp_path / "real" / "c", "old", 2)
    for name in ("x.safetensors", "c"):
        os.symlink(f"real/{name}", tmp_path / name)
        save(tmp_path / name, "new", 1 if name != "c" else 2)
        assert os.path.islink(tmp_path / name)
        assert read(tmp_path / "real" / name) == "new"
    assert names_in(tmp_path / "real") == {"x.safetensors", "c"}


@pytest.mark.parametrize("name", ["x.safetensors", "c"])
def test_c116_dangling_links_create_their_target(tmp_path: Path, name: str) -> None:
    os.symlink(f"deep/down/{name}", tmp_path / name)
    save(tmp_path / name, "new")
    assert os.path.islink(tmp_path / name)
    require_clean(tmp_path / "deep" / "down" / name, ["new"])


def test_link_that_stands_for_the_single_file_is_replaced(tmp_path: Path) -> None:
    """As in a cache of the hub: the blob belongs to others."""
    (tmp_path / "blob").write_bytes(content("old", 0))
    (tmp_path / "c").mkdir()
    os.symlink("../blob", tmp_path / "c" / SINGLE)
    save(tmp_path / "c", "new")
    assert (tmp_path / "blob").read_bytes() == content("old", 0)
    assert read(tmp_path / "c") == "new" and not (tmp_path / "c" / SINGLE).is_symlink()


# Destinations and arguments that cannot be.


def refusals(tmp_path: Path) -> dict[str, tuple[str, int]]:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    return {
        "a file where a directory is wanted": ("file", errno.ENOTDIR),
        "a directory where a file is wanted": ("dir.safetensors", errno.EISDIR),
        "a FIFO where a file is wanted": ("fifo.safetensors", errno.EINVAL),
        "a FIFO where a directory is wanted": ("fifo", errno.EINVAL),
        "a loop of links": ("loop", errno.ELOOP),
        "a name that is too long": ("n" * 300, errno.ENAMETOOLONG),
        "a file on the way": ("file/below/c", errno.ENOTDIR),
    }


def test_c116_destination_is_something_else(tmp_path: Path) -> None:
    cases = refusals(tmp_path)
    before, fds = names_in(tmp_path), num_descriptors()
    for case, (name, number) in cases.items():
        with pytest.raises(StorageError) as caught:
            begin_local(tmp_path / name, num_shards=1)
        assert caught.value.errno == number, case
        assert caught.value.path == str(tmp_path / name), case
    assert names_in(tmp_path) == before and num_descriptors() == fds


def test_c116_impossible_paths() -> None:
    for path in ("a\0b", "", "/dev/null", "/dev/null/x.safetensors"):
        with pytest.raises(StorageError):
            begin_local(path, num_shards=1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("name", ["x.safetensors", "fresh", "there", "new/deep"])
def test_c116_parent_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    (tmp_path / "there").mkdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(calls, "make_directory", refuse)
    with pytest.raises(StorageError) as caught:
        begin_local(tmp_path / name, num_shards=1)
    assert caught.value.errno == number and caught.value.path == str(tmp_path / name)
    assert isinstance(caught.value, NoSpaceError) == (number == errno.ENOSPC)
    assert names_in(tmp_path) == {"there"}


@not_root
def test_c116_parent_is_read_only(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o555)
    with pytest.raises(StorageError) as caught:
        begin_local(tmp_path / "x.safetensors", num_shards=1)
    assert caught.value.errno == errno.EACCES


def test_several_shards_in_one_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one file cannot hold 2 shards"):
        begin_local(tmp_path / "x.safetensors", num_shards=2)
    assert not names_in(tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"filename_pattern": "model.safetensors"}, "suffix"),
        ({"shard_names": "other"}, "shard_names"),
        ({"commit": "never"}, "commit"),
        ({"durability": "some"}, "durability"),
        ({"lock_timeout": -1}, "lock_timeout"),
        ({"lock_timeout": float("nan")}, "lock_timeout"),
        ({"lock_timeout": float("inf")}, "lock_timeout"),
        ({"lock_timeout": -float("inf")}, "lock_timeout"),
        ({"lock_timeout": 10**400}, "lock_timeout"),
        ({"lock_timeout": -(10**5000)}, "lock_timeout"),
        ({"lock_timeout": 1e300}, "lock_timeout"),
    ],
)
def test_wrong_keywords_of_a_save(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        stio.sync.save({"a": torch.ones(1)}, tmp_path / "c", **options)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("value", [None, "60", True])
def test_a_time_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="lock_timeout"):
        stio.sync.save({"a": torch.ones(1)}, tmp_path / "c", lock_timeout=value)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("value", [5, "text", [("key", "value")], {"key"}])
def test_metadata_that_is_no_mapping_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="metadata= takes a mapping from text to text"):
        stio.sync.save({"a": torch.ones(1)}, tmp_path / "c", metadata=value)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("value", [5, None, b"c", [], {"c": 1}])
def test_a_destination_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a destination is a path, a URL or a RemoteRoot, not"):
        stio.sync.save({"a": torch.ones(1)}, value)


def test_wrong_order_of_calls_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    transaction = begin_local(tmp_path / "c", num_shards=2)
    with pytest.raises(ValueError, match="not all files"):
        transaction.commit(index=b"{}")
    with pytest.raises(ValueError, match="2 shards"):
        transaction.create([1])
    fill(transaction, "new")
    with pytest.raises(ValueError, match="once"):
        transaction.create([1, 1])
    with pytest.raises(ValueError, match="index is missing"):
        transaction.commit(index=None)
    with pytest.raises(ValueError, match="must not contain a directory"):
        transaction.commit(index=b"{}", notes=[Note("../x", None, None)])
    transaction.commit(index=index_of(transaction, "new"))
    require_clean(tmp_path / "c", ["new"])
    for act in (lambda: transaction.commit(index=b"{}"), lambda: transaction.create([1, 1])):
        with pytest.raises(ValueError, match="ended"):
            act()


# Notes.


def test_notes_are_right_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", "old", 2)
    (tmp_path / "c" / NOTE).write_text("old")
    seen: list[tuple[str, str]] = []
    real = calls.rename

    def rename(source: str, target: str, **fds: int) -> None:
        if target == INDEX:
            seen.append(("at the commit", (tmp_path / "c" / NOTE).read_text()))
        real(source, target, **fds)

    monkeypatch.setattr(calls, "rename", rename)
    transaction = begin_local(tmp_path / "c", num_shards=2)
    fill(transaction, "new")
    assert transaction.read_note(NOTE) == b"old"
    assert transaction.read_note("none.json") is None
    transaction.commit(index=index_of(transaction, "new"), notes=[note("new")])
    assert seen == [("at the commit", "old new")]
    assert (tmp_path / "c" / NOTE).read_text() == "new"


@pytest.mark.matrix
@pytest.mark.parametrize("was", [None, b"was"])
@pytest.mark.parametrize("before", [None, b"was", b"before"])
@pytest.mark.parametrize("after", [None, b"was", b"before", b"after"])
@pytest.mark.parametrize("fails", [False, True])
def test_notes_come_and_go(
    fast_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    was: bytes | None,
    before: bytes | None,
    after: bytes | None,
    fails: bool,
) -> None:
    save(fast_path / "c", "old", 2)
    if was is not None:
        (fast_path / "c" / NOTE).write_bytes(was)
    real = calls.rename

    def rename(source: str, target: str, **fds: int) -> None:
        if target == INDEX and fails:
            raise OSError(errno.EIO, "")
        real(source, target, **fds)

    monkeypatch.setattr(calls, "rename", rename)
    notes = [Note("first.json", None, None), Note(NOTE, before, after)]
    if fails:
        with pytest.raises(StorageError):
            save(fast_path / "c", "new", 2, notes=notes)
    else:
        save(fast_path / "c", "new", 2, notes=notes)
    found = (fast_path / "c" / NOTE).read_bytes() if (fast_path / "c" / NOTE).exists() else None
    assert found == (was if fails else after)


def test_large_and_odd_notes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", "old")
    (tmp_path / "c" / "big.json").write_bytes(b"x" * 11)
    os.mkfifo(tmp_path / "c" / "fifo.json")
    monkeypatch.setattr("stio.storage.commit.transaction.MAX_NOTE_BYTES", 10)
    transaction = begin_local(tmp_path / "c", num_shards=1)
    for name in ("big.json", "fifo.json"):
        with pytest.raises(StorageError) as caught:
            transaction.read_note(name)
        assert caught.value.path == str(tmp_path / "c" / name)
    for name in ("../x", "", "a/b", "a\0"):
        with pytest.raises(ValueError):
            transaction.read_note(name)
    transaction.roll_back()
    assert begin_local(tmp_path / "fresh", num_shards=1).read_note(NOTE) is None


# Giving up.


@pytest.mark.matrix
@changes
@pytest.mark.parametrize("stage", ["begun", "created", "written", "finished"])
def test_c110_roll_back_leaves_nothing(tmp_path: Path, change: Change, stage: str) -> None:
    destination = change.prepare(tmp_path / "place")
    before = num_descriptors()
    transaction = begin_local(destination, num_shards=change.new_shards, **change.options)
    if stage == "created":
        transaction.create([100] * change.new_shards)
    if stage == "written":
        transaction.create([100] * change.new_shards)[0]._opened()
    if stage == "finished":
        fill(transaction, "new")
    transaction.roll_back()
    transaction.roll_back()
    require_clean(destination, [change.old])
    assert num_descriptors() == before


def test_c103_missing_space_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    transaction = begin_local(tmp_path / "c", num_shards=2)
    with pytest.raises(NoSpaceError):
        transaction.create([1000, 1 << 50])
    transaction.roll_back()
    require_clean(tmp_path / "c", ["old"])


# Others at the same place.


@changes
def test_c114_the_first_to_commit_wins(tmp_path: Path, change: Change) -> None:
    destination = change.prepare(tmp_path / "place")
    one = begin_local(destination, num_shards=change.new_shards, **change.options)
    two = begin_local(destination, num_shards=change.new_shards, **change.options)
    for transaction, tag in ((one, "new"), (two, "other")):
        fill(transaction, tag)
    one.commit(index=index_of(one, "new"), notes=[note("new")] if change.notes else [])
    with pytest.raises(ConcurrentSaveError):
        two.commit(index=index_of(two, "other"), notes=[note("other")])
    two.roll_back()
    require_clean(destination, ["new"])


DISTURBANCES: dict[str, Callable[[Path], object]] = {
    "the file": lambda place: (place / SINGLE).write_bytes(b"changed by hand"),
    "an index": lambda place: (place / INDEX).write_text("{}"),
    "its end": lambda place: (place / SINGLE).unlink(),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_c114_another_program_changes_the_destination(tmp_path: Path, disturbance: str, num_shards: int) -> None:
    save(tmp_path / "c", "old")
    transaction = begin_local(tmp_path / "c", num_shards=num_shards)
    fill(transaction, "new")
    DISTURBANCES[disturbance](tmp_path / "c")
    before = {path: path.read_bytes() for path in (tmp_path / "c").iterdir() if path.is_file()}
    with pytest.raises(ConcurrentSaveError):
        transaction.commit(index=index_of(transaction, "new"))
    assert {path: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before


def test_fresh_directory_that_appears_is_not_touched(tmp_path: Path) -> None:
    transaction = begin_local(tmp_path / "c", num_shards=1)
    fill(transaction, "new")
    (tmp_path / "c").mkdir()
    with pytest.raises(ConcurrentSaveError):
        transaction.commit(index=None)
    assert names_in(tmp_path) == {"c"} and not names_in(tmp_path / "c")


@pytest.mark.matrix
@changes
def test_c114_the_first_to_commit_wins_without_locks(
    tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "try_lock", lambda fd: None)
    test_c114_the_first_to_commit_wins(tmp_path, change)


@pytest.mark.parametrize("change", ALL_CHANGES, ids=lambda change: change.name)
def test_c114_threads_at_one_destination(tmp_path: Path, change: Change) -> None:
    destination = change.prepare(tmp_path / "place")
    begun, ready = threading.Barrier(4), threading.Barrier(4)

    def compete(k: int) -> str:
        transaction = begin_local(destination, num_shards=change.new_shards, **change.options)
        begun.wait()
        try:
            fill(transaction, f"t{k}")
            ready.wait()
            transaction.commit(index=index_of(transaction, f"t{k}"))
        except ConcurrentSaveError:
            return "lost"
        finally:
            transaction.roll_back()
        return f"t{k}"

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(compete, range(4)))
    winners = [outcome for outcome in outcomes if outcome != "lost"]
    assert len(winners) == 1
    (destination.parent / NOTE).unlink(missing_ok=True)
    (destination / NOTE).unlink(missing_ok=True) if destination.is_dir() else None
    require_clean(destination, winners)


def test_c114_processes_at_one_destination(zygote: Zygote, tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from stio.errors import ConcurrentSaveError
        from tests.storage.transactions import begin_local
        from tests.storage.transactions import fill, index_of
        transaction = begin_local(sys.argv[1], num_shards=2)
        fill(transaction, sys.argv[2])
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            transaction.commit(index=index_of(transaction, sys.argv[2]))
            print("won")
        except ConcurrentSaveError:
            print("lost")
        """
    )
    root = Path(__file__).resolve().parents[3]
    processes = [
        subprocess.Popen(
            [zygote.python, "-c", script, str(tmp_path / "c"), f"p{k}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        )
        for k in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate()[0].strip() for process in processes]
    assert sorted(outcomes) == ["lost", "lost", "won"]
    require_clean(tmp_path / "c", [f"p{outcomes.index('won')}"])


def test_saves_to_different_files_of_a_directory_do_not_meet(tmp_path: Path) -> None:
    names = [f"rank-{k}.safetensors" for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: save(tmp_path / name, name[:6]), names))
    assert names_in(tmp_path) == set(names)


def test_directory_that_stays_locked_is_given_up(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    fd = calls.open_directory(str(tmp_path / "c"))
    try:
        with directory_lock.directory_lock(fd, str(tmp_path / "c")):
            for seconds in (0, 0.05):
                with pytest.raises(
                    ConcurrentSaveError, match=rf"publishing here.* {seconds:g} s .*lock_timeout"
                ) as caught:
                    save(tmp_path / "c", "new", 2, lock_timeout=seconds)
                assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
                assert caught.value.path == str(tmp_path / "c")
            assert read(tmp_path / "c") == "old"
    finally:
        os.close(fd)
    require_clean(tmp_path / "c", ["old"])


# A system without the calls that Linux has.


@changes
def test_every_commit_on_a_plain_system(tmp_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_renameat2", "_fallocate", "_sync_file_range"):
        monkeypatch.setattr(calls, name, None)
    monkeypatch.setattr(calls, "try_lock", lambda fd: None)
    monkeypatch.setattr(destination, "is_local", lambda fd: False)
    test_every_commit_ends_with_the_new_checkpoint(tmp_path, change)


def test_rename_new_refuses_on_every_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "")

    fd = calls.open_directory(str(tmp_path))
    try:
        for k, attribute in enumerate([None, "_renameat2", "link"]):
            if attribute == "link":
                monkeypatch.setattr(os, "link", no_links)
            elif attribute:
                monkeypatch.setattr(calls, attribute, None)
            for name in (f"a{k}", f"b{k}"):
                (tmp_path / name).write_text(name)
            with pytest.raises(FileExistsError):
                calls.rename_new(f"a{k}", f"b{k}", source_fd=fd, target_fd=fd)
            calls.rename_new(f"a{k}", f"c{k}", source_fd=fd, target_fd=fd)
            assert (tmp_path / f"b{k}").read_text() == f"b{k}" and (tmp_path / f"c{k}").read_text() == f"a{k}"
            assert not (tmp_path / f"a{k}").exists()
        (tmp_path / "full" / "x").mkdir(parents=True)
        (tmp_path / "new").mkdir()
        with pytest.raises(OSError):
            calls.rename_new("new", "full", source_fd=fd, target_fd=fd, is_directory=True)
    finally:
        os.close(fd)


# Each call fails once, or from then on.


def test_the_name_of_a_directory_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that was removed and made again may have the same path and inode, and its name is synced again."""
    home, now, synced = tmp_path / "home", time.time(), []

    def num_syncs_of_parent() -> int:
        synced.clear()
        save(home / "x.safetensors", "new")
        return synced.count(os.stat(tmp_path).st_ino)

    def sync_directory(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(calls, "sync_directory", sync_directory)
    home.mkdir()
    assert [num_syncs_of_parent(), num_syncs_of_parent()] == [1, 1], "too young to be told from a later one"
    monkeypatch.setattr("stio.clock.now", lambda: now + 60)
    with closing(calls.open_directory(str(home))) as fd:
        birth = calls.birth_of(fd)
    if birth is None:
        pytest.skip("the system does not say when a directory was made")
    assert [num_syncs_of_parent(), num_syncs_of_parent()] == [1, 0]
    shutil.rmtree(home)
    time.sleep(0.02)  # two ticks of the filesystem's clock
    home.mkdir()
    assert [num_syncs_of_parent(), num_syncs_of_parent()] == [1, 0]


def test_all_calls_are_known() -> None:
    """A call that no test stands before would be a hole in what follows."""
    functions = [
        name for name, one in inspect.getmembers(calls, inspect.isfunction) if one.__module__ == calls.__name__
    ]
    assert sorted(FALLIBLE + INFALLIBLE) == [name for name in functions if not name.startswith("_")]


def outcome_of(change: Change, destination: Path) -> str:
    try:
        change.carry_out(destination)
    except CommitUncertainError:
        return "uncertain"
    except StioError:
        return "failed"
    return "saved"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "persistent"),
    [
        pytest.param(errno.EIO, False, id="EIO-once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC-from then on"),
        pytest.param(errno.EIO, True, id="EIO-from then on", marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, False, id="ENOSPC-once", marks=pytest.mark.slow),
    ],
)
@changes
def test_c105_c107_each_call_fails(
    fast_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Change,
    number: int,
    persistent: bool,
) -> None:
    caplog.set_level(logging.CRITICAL)
    outcomes: dict[str, set[str]] = {}
    for n in range(1, 200):
        destination = change.prepare(fast_path / str(n))
        with monkeypatch.context() as patch:
            system = System(patch, fail_at=n, persistent=persistent, error_number=number)
            outcome = outcome_of(change, destination)
        assert system.num_open == 0
        if system.hit is None:
            assert outcome == "saved"
            break
        outcomes.setdefault(outcome, set()).add(system.hit)
        expected = {"saved": ["new"], "failed": [change.old], "uncertain": ["new"]}[outcome]
        if change is FILES_CHANGE and outcome == "uncertain":
            expected = ["old", "new"]  # half replaced perhaps, until somebody comes by
        else:
            assert read(destination) in expected, f"call {n}, {system.hit}"
        sweep(monkeypatch, destination)
        require_clean(destination, expected)
    assert system.hit is None
    assert {"fsync", "reserve", "write", "open_file", "make_directory"} <= outcomes["failed"]
    assert outcomes["uncertain"] >= {"sync_directory"}


def test_rename_that_failed_and_was_done_is_uncertain(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k, change in enumerate(ALL_CHANGES):
        destination = change.prepare(fast_path / str(k))
        with monkeypatch.context() as patch:
            for name in ("rename", "rename_new"):
                real = getattr(calls, name)

                def done_but_failed(
                    source: str, target: str, *, real: Callable[..., None] = real, **options: object
                ) -> None:
                    real(source, target, **options)
                    if target in (INDEX, destination.name) or (target == SINGLE and change.new_shards == 1):  # noqa: B023
                        raise OSError(errno.EIO, "")

                patch.setattr(calls, name, done_but_failed)
            with pytest.raises(CommitUncertainError):
                change.carry_out(destination)
        sweep(monkeypatch, destination)
        require_clean(destination, ["new"])


def test_c107_old_shards_stay_while_the_commit_is_uncertain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(tmp_path / "c", "old", 2)
    real = calls.sync_directory

    def sync_directory(fd: int) -> None:
        if INDEX in os.listdir(fd) and read(tmp_path / "c") == "new":
            raise OSError(errno.EIO, "")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "sync_directory", sync_directory)
        with pytest.raises(CommitUncertainError) as caught:
            save(tmp_path / "c", "new", 2)
        assert caught.value.errno == errno.EIO
        assert set(old.shard_names) < names_in(tmp_path / "c")
        assert sweep(monkeypatch, tmp_path / "c").kept, "a recovery waits until it is certain"
        assert set(old.shard_names) < names_in(tmp_path / "c")
    assert len(sweep(monkeypatch, tmp_path / "c").finished) == 1
    require_clean(tmp_path / "c", ["new"])


def test_failed_cleaning_is_logged_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "c", "old", 2)

    def unlink(name: str, *, dir_fd: int) -> None:
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch:
        patch.setattr(calls, "unlink", unlink)
        save(tmp_path / "c", "new", 2)
    assert "cleaning up failed" in caplog.text
    assert read(tmp_path / "c") == "new" and len(names_in(tmp_path / "c") - {DIRECTORY_LOCK_NAME}) == 6
    assert len(sweep(monkeypatch, tmp_path / "c").finished) == 1
    require_clean(tmp_path / "c", ["new"])


def unreadable(*arguments: object) -> None:
    raise OSError(errno.EIO, "")


@pytest.mark.parametrize("name", ["one_to_one_noted", "many_to_many"])
def test_a_failed_rename_after_which_nothing_can_be_read_is_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (change,) = (one for one in CHANGES if one.name == name)
    destination = change.prepare(tmp_path / "place")
    plain = calls.rename

    def rename(source: str, target: str, **where: int) -> None:
        if target in (INDEX, "model.safetensors"):
            raise OSError(errno.EIO, "")
        plain(source, target, **where)

    with monkeypatch.context() as patch:
        patch.setattr(calls, "rename", rename)
        patch.setattr(publication, "is_committed", unreadable)
        with pytest.raises(CommitUncertainError, match="cannot be read whether the new checkpoint is in place"):
            change.carry_out(destination)
    sweep(monkeypatch, destination)
    require_clean(destination, ["old"])


def test_an_interrupted_replacement_after_which_nothing_can_be_read_is_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = FILES_CHANGE.prepare(tmp_path / "place")
    with monkeypatch.context() as patch:

        def make_visible(*arguments: object, **options: object) -> None:
            patch.setattr(publication, "stamp_of", unreadable)
            raise OSError(errno.EIO, "")

        patch.setattr(publication, "make_visible", make_visible)
        with pytest.raises(CommitUncertainError, match="replacing the files was interrupted"):
            FILES_CHANGE.carry_out(destination)
    sweep(monkeypatch, destination)
    require_clean(destination, ["new"])
