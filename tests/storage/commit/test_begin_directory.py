"""Directories that are published whole, and what is left when that fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import stio
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import LockTimeout, directory_lock
from stio.storage.commit.recovery import collect_garbage
from stio.storage.commit.retention import LIST_NAME, WrittenFiles
from stio.storage.commit.transaction import LocalTransaction, begin_directory
from tests.storage.transactions import Killed, System


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def fail_at(number: int, plain: Callable[..., None]) -> Callable[..., None]:
    """Let the call of this number fail, from 1 on."""
    count = 0

    def call(*arguments: Any, **keywords: Any) -> None:
        nonlocal count
        count += 1
        fail() if count == number else plain(*arguments, **keywords)

    return call


def staged_with(path: Path, text: str) -> LocalTransaction:
    staged = begin_directory(path, durable=True)
    (Path(staged.files_path) / "below").mkdir()
    (Path(staged.files_path) / "below" / "file").write_text(text)
    WrittenFiles.store_list(staged.files_path, "")
    return staged


def kept_in(directory: Path) -> Path:
    """Return the only thing that was kept of what was replaced."""
    (path,) = directory.glob(".stio-kept-*")
    return path


@pytest.mark.parametrize("durable", [True, False])
def test_nothing_is_seen_before_all_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    synced: list[int] = []
    plain = calls.fsync
    monkeypatch.setattr(calls, "fsync", lambda fd: (synced.append(fd), plain(fd)))
    staged = begin_directory(tmp_path / "new" / "home" / "whole", durable=durable)
    (Path(staged.files_path) / "file").touch()
    assert all(name.startswith(".stio-") for name in names_in(tmp_path / "new" / "home"))
    staged.commit(index=None)
    assert staged.path == str(tmp_path / "new" / "home" / "whole")
    assert names_in(tmp_path / "new" / "home") == ["whole"]
    assert names_in(tmp_path / "new" / "home" / "whole") == ["file"]
    assert len(synced) == durable
    staged.roll_back()


def test_what_a_save_wrote_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("old", "new"):
        staged_with(tmp_path / "one", text).commit(index=None)
    assert names_in(tmp_path) == ["one"]
    assert names_in(tmp_path / "one") == [LIST_NAME, "below"]
    assert (tmp_path / "one" / "below" / "file").read_text() == "new"
    assert not caplog.text


def test_of_a_directory_without_a_list_nothing_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one" / "below").mkdir(parents=True)
    (tmp_path / "one" / "below" / "file").write_text("theirs")
    (tmp_path / "one" / "other").write_text("theirs")
    staged_with(tmp_path / "one", "new").commit(index=None)
    assert names_in(tmp_path / "one") == [LIST_NAME, "below"]
    kept = kept_in(tmp_path)
    assert names_in(kept) == ["below", "other"]
    assert (kept / "below" / "file").read_text() == "theirs"
    collect_garbage(tmp_path)
    assert names_in(tmp_path) == [kept.name, "one"]
    assert [record.getMessage().count(kept.name) for record in caplog.records] == [1]


def test_a_copy_of_a_list_is_none(tmp_path: Path) -> None:
    staged_with(tmp_path / "one", "old").commit(index=None)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    staged_with(tmp_path / "two", "new").commit(index=None)
    assert names_in(kept_in(tmp_path)) == [LIST_NAME, "below"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_kept(tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").touch()
    (tmp_path / "one").write_text("mine") if kind == "file" else (tmp_path / "one").symlink_to("elsewhere")
    staged_with(tmp_path / "one", "new").commit(index=None)
    assert names_in(tmp_path / "elsewhere") == ["mine"]
    assert names_in(tmp_path / "one") == [LIST_NAME, "below"]
    kept = kept_in(tmp_path)
    assert kept.is_symlink() if kind == "link" else kept.read_text() == "mine"


def test_what_others_added_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tmp_path / "one"
    staged_with(one, "old").commit(index=None)
    added = ("results.json", "below/results.json", "plots/a/b.png")
    for name in added:
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_text("mine")
    (one / ".stio-lock").touch()
    staged_with(one, "new").commit(index=None)
    assert (one / "below" / "file").read_text() == "new"
    assert names_in(one) == [LIST_NAME, "below"]
    kept = kept_in(tmp_path)
    assert [(kept / name).read_text() for name in added] == ["mine"] * 3
    assert names_in(kept / "below") == ["results.json"]
    assert [record.getMessage().count(kept.name) for record in caplog.records] == [1]


def test_what_has_the_name_of_a_new_file_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tmp_path / "one"
    staged_with(one, "old").commit(index=None)
    (one / "below" / "file").write_text("replaced by others")
    (one / "mine").write_text("the old mine")
    (one / "free").write_text("kept too")
    staged = staged_with(one, "new")
    (Path(staged.files_path) / "mine").write_text("the new mine")
    staged.commit(index=None)
    assert (one / "mine").read_text() == "the new mine"
    kept = kept_in(tmp_path)
    assert names_in(kept) == ["below", "free", "mine"]
    assert (kept / "below" / "file").read_text() == "replaced by others"
    assert (kept / "mine").read_text() == "the old mine"
    assert len(caplog.records) == 1
    staged_with(tmp_path / "two", "new").commit(index=None)  # its recovery deletes nothing of this
    assert names_in(kept) == ["below", "free", "mine"]
    assert len(caplog.records) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_call_nothing_of_others_is_lost(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, every: int
) -> None:
    """The new checkpoint or the old one is there after recovery, and what others added and replaced is somewhere."""
    for name in ("fsync", "sync_directory"):  # no power cut here, so nothing has to reach the disk
        monkeypatch.setattr(calls, name, lambda fd: None)
    found = []
    for n in range(1, 400, every):
        home = fast_path / str(n)
        staged_with(home / "one", "old").commit(index=None)
        (home / "one" / "mine").write_text("mine")
        (home / "one" / "below" / "mine").write_text("mine too")
        staged = staged_with(home / "one", "new")
        (Path(staged.files_path) / "mine").write_text("new mine")
        with monkeypatch.context() as patch:
            system = System(patch, kill_at=n, kill_after=after)
            with suppress(Killed):
                staged.commit(index=None)
            system.bury()
        calls.unlock(staged._staging._lock._fd) if staged._staging._lock.is_held else None
        collect_garbage(home)
        collect_garbage(home)
        found.append((home / "one" / "below" / "file").read_text())
        texts = [path.read_text() for path in home.rglob("*mine") if path.is_file()]
        assert {"mine", "mine too"} <= set(texts), (n, system.hit)
        left = [name for name in names_in(home) if name.startswith(".stio-") and not name.startswith(".stio-kept-")]
        assert left == []
        if system.hit is None:
            break
    assert system.hit is None
    turn = found.index("new")
    assert 0 < turn < len(found) - 1
    assert set(found[:turn]) == {"old"} and set(found[turn:]) == {"new"}


def test_what_stood_there_stays_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged_with(tmp_path / "one", "old").commit(index=None)
    staged = staged_with(tmp_path / "one", "new")
    monkeypatch.setattr(calls, "rename", fail_at(2, calls.rename))  # the first moves the old one away
    with pytest.raises(stio.StorageError, match="publishing the checkpoint failed"):
        staged.commit(index=None)
    staged.roll_back()
    assert names_in(tmp_path) == ["one"]
    assert (tmp_path / "one" / "below" / "file").read_text() == "old"


def test_nothing_is_published_that_is_not_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = staged_with(tmp_path / "one", "new")
    monkeypatch.setattr(calls, "fsync", fail)
    with pytest.raises(stio.StorageError, match="Input/output error"):
        staged.commit(index=None)
    staged.roll_back()
    assert names_in(tmp_path) == []


def test_a_name_that_may_not_be_durable_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = staged_with(tmp_path / "one", "new")
    monkeypatch.setattr(calls, "sync_directory", fail_at(3, calls.sync_directory))  # after its own two
    with pytest.raises(stio.CommitUncertainError, match="after the commit"):
        staged.commit(index=None)
    assert names_in(tmp_path) == ["one"]


def test_the_dead_are_cleaned_up_after_and_the_living_left_alone(tmp_path: Path) -> None:
    alive = staged_with(tmp_path / "one", "alive")
    pid = os.fork()
    if not pid:
        staged_with(tmp_path / "two", "dead")
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(names_in(tmp_path)) == 2
    third = begin_directory(tmp_path / "three", durable=True)
    assert len(names_in(tmp_path)) == 2
    third.roll_back()
    alive.commit(index=None)
    assert names_in(tmp_path) == ["one"]


def test_a_home_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(stio.StorageError, match="beginning the save failed: Not a directory"):
        begin_directory(tmp_path / "file" / "one", durable=True)
    monkeypatch.setattr(calls, "make_directory", fail)
    with pytest.raises(stio.StorageError, match="beginning the save failed: Input/output error"):
        begin_directory(tmp_path / "one", durable=True)
    assert names_in(tmp_path) == ["file"]


def test_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a\0/one", "one\0"):
        with pytest.raises(stio.StorageError, match="examining the destination failed"):
            begin_directory(tmp_path / path, durable=True)
    (tmp_path / "left").mkdir()
    monkeypatch.chdir(tmp_path / "left")
    (tmp_path / "left").rmdir()
    with pytest.raises(stio.StorageError, match="examining the destination failed: No such file or directory"):
        begin_directory("one", durable=True)
    assert names_in(tmp_path) == []


def test_a_directory_with_the_longest_name_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    for text in ("old", "new"):
        staged_with(path, text).commit(index=None)
        assert names_in(tmp_path) == [path.name]
        assert (path / "below" / "file").read_text() == text


class Cancelled(BaseException):
    """A cancel of the operation that commits."""


def test_a_cancel_ends_the_wait_for_the_lock(tmp_path: Path) -> None:
    staged = staged_with(tmp_path / "one", "new")
    fd = os.open(tmp_path, os.O_RDONLY)

    def check() -> None:
        raise Cancelled

    try:
        with directory_lock(fd, str(tmp_path)), pytest.raises(Cancelled):
            staged.prepare_commit(check)
    finally:
        os.close(fd)
    staged.roll_back()
    assert names_in(tmp_path) == []


def test_the_lock_is_held_from_the_preparation_to_the_commit(tmp_path: Path) -> None:
    staged, other = staged_with(tmp_path / "one", "first"), staged_with(tmp_path / "one", "second")
    staged.prepare_commit()
    staged.prepare_commit()
    other._timeout = LockTimeout(0)
    with pytest.raises(stio.ConcurrentSaveError, match="publishing here"):
        other.commit(index=None)
    staged.commit(index=None)
    assert names_in(tmp_path) == ["one"]
    assert (tmp_path / "one" / "below" / "file").read_text() == "first"
