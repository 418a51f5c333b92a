"""Directories that are published whole, and what is left when that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stio
from stio.storage.commit import syscalls as calls
from stio.storage.commit.transaction import LocalTransaction, begin_directory


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
    return staged


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


def test_what_stood_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one" / "deep").mkdir(parents=True)
    staged_with(tmp_path / "one", "new").commit(index=None)
    assert names_in(tmp_path) == ["one"]
    assert names_in(tmp_path / "one") == ["below"]


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
