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
from stio.storage.commit.staged_directory import StagedDirectory


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


def staged_with(home: Path, text: str) -> StagedDirectory:
    staged = StagedDirectory(str(home), durable=True)
    (Path(staged.path) / "below").mkdir()
    (Path(staged.path) / "below" / "file").write_text(text)
    return staged


@pytest.mark.parametrize("durable", [True, False])
def test_nothing_is_seen_before_all_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    synced: list[int] = []
    plain = calls.fsync
    monkeypatch.setattr(calls, "fsync", lambda fd: (synced.append(fd), plain(fd)))
    staged = StagedDirectory(str(tmp_path / "new" / "home"), durable=durable)
    (Path(staged.path) / "file").touch()
    assert all(name.startswith(".stio-") for name in names_in(tmp_path / "new" / "home"))
    assert staged.publish("whole") == str(tmp_path / "new" / "home" / "whole")
    assert names_in(tmp_path / "new" / "home") == ["whole"]
    assert names_in(tmp_path / "new" / "home" / "whole") == ["file"]
    assert len(synced) == durable
    staged.remove()


def test_what_stood_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "one" / "deep").mkdir(parents=True)
    staged_with(tmp_path, "new").publish("one")
    assert names_in(tmp_path) == ["one"]
    assert names_in(tmp_path / "one") == ["below"]


def test_what_stood_there_stays_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged_with(tmp_path, "old").publish("one")
    staged = staged_with(tmp_path, "new")
    monkeypatch.setattr(calls, "rename", fail_at(2, calls.rename))  # the first moves the old one away
    with pytest.raises(stio.StorageError, match="publishing the checkpoint failed"):
        staged.publish("one")
    staged.remove()
    assert names_in(tmp_path) == ["one"]
    assert (tmp_path / "one" / "below" / "file").read_text() == "old"


def test_nothing_is_published_that_is_not_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = staged_with(tmp_path, "new")
    monkeypatch.setattr(calls, "fsync", fail)
    with pytest.raises(stio.StorageError, match="Input/output error"):
        staged.publish("one")
    staged.remove()
    assert names_in(tmp_path) == []


def test_a_name_that_may_not_be_durable_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = staged_with(tmp_path, "new")
    monkeypatch.setattr(calls, "sync_directory", fail_at(3, calls.sync_directory))  # after its own two
    with pytest.raises(stio.CommitUncertainError, match="is in place"):
        staged.publish("one")
    assert names_in(tmp_path) == ["one"]


def test_the_dead_are_cleaned_up_after_and_the_living_left_alone(tmp_path: Path) -> None:
    alive = staged_with(tmp_path, "alive")
    pid = os.fork()
    if not pid:
        staged_with(tmp_path, "dead")
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(names_in(tmp_path)) == 2
    third = StagedDirectory(str(tmp_path), durable=True)
    assert len(names_in(tmp_path)) == 2
    third.remove()
    alive.publish("one")
    assert names_in(tmp_path) == ["one"]


def test_a_home_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(stio.StorageError, match="making the checkpoint's directory"):
        StagedDirectory(str(tmp_path / "file"), durable=True)
    monkeypatch.setattr(calls, "make_directory", fail)
    with pytest.raises(stio.StorageError, match="staging the checkpoint"):
        StagedDirectory(str(tmp_path), durable=True)
