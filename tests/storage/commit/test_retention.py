"""Deletions that compare first: files and directories that were exchanged or added stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from stio.storage.commit import destination
from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage
from stio.storage.commit.retention import (
    LIST_NAME,
    WrittenFiles,
    survey,
)
from tests.storage.transactions import Killed, System

FILES = ("model.safetensors", "deep/state.safetensors")


def names_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def made(path: Path) -> WrittenFiles:
    """Make a directory with files, as a save that made it."""
    for name in FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("ours")
    fd = os.open(path, os.O_RDONLY)
    try:
        return survey(fd, str(path))
    finally:
        os.close(fd)


def test_what_is_unchanged_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = made(tmp_path / "x")
    written.remove()
    written.remove()  # is not there
    assert names_in(tmp_path) == []
    assert not caplog.text


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_a_full_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / name
    if name == "x":
        written = made(path)
    else:
        path.write_text("ours")
        written = WrittenFiles.of_file(str(path))
    for call in ("make_directory", "rename"):
        monkeypatch.setattr(calls, call, refuse)
    written.remove()
    assert names_in(tmp_path) == []


def test_a_recovery_that_deletes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, plain = made(tmp_path / "x"), calls.rename

    def rename(*names: str, **fds: int) -> None:
        plain(*names, **fds)
        collect_garbage(tmp_path)

    monkeypatch.setattr(calls, "rename", rename)
    written.remove()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_what_others_have_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    if name == "x":
        written = made(path)
    else:
        path.write_text("ours")
        written = WrittenFiles.of_file(str(path))
    call = "rename" if name == "x" else "unlink"
    plain = getattr(calls, call)

    def remove(*names: str, **fds: int) -> None:
        shutil.rmtree(path) if name == "x" else path.unlink()
        plain(*names, **fds)

    monkeypatch.setattr(calls, call, remove)
    written.remove()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_killed_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool) -> None:
    """A checkpoint is there or not."""
    for n in range(1, 100):
        home = tmp_path / str(n)
        home.mkdir()
        path = home / "x"
        if kind == "directory":
            written = made(path)
        else:
            path.write_text("ours")
            written = WrittenFiles.of_file(str(path))
        whole = names_in(home)
        with monkeypatch.context() as patch:
            system = System(patch, kill_at=n, kill_after=after)
            with suppress(Killed):
                written.remove()
            system.bury()
        collect_garbage(home)
        assert names_in(home) in ([], whole)
        if system.hit is None:
            break
    assert system.hit is None


def test_what_cannot_be_put_back_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    staging = tmp_path / ".stio-0123456789"
    (staging / "aside").mkdir(parents=True)
    (staging / "aside" / "x").write_text("first")
    (staging / "lock").touch()
    (tmp_path / "x").write_text("second")
    assert collect_garbage(tmp_path).undone == (str(staging),)
    (kept,) = tmp_path.glob(".stio-kept-*")
    assert (kept.read_text(), (tmp_path / "x").read_text()) == ("first", "second")
    assert str(kept) in caplog.text
    assert collect_garbage(tmp_path).kept == ()
    assert kept.exists()


def test_names_that_a_filesystem_gives_to_open_files(tmp_path: Path) -> None:
    """They do not keep the directory from being deleted."""
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".nfs000001").touch()
    written.remove()
    assert names_in(tmp_path) == []


def test_a_lock_file_that_a_crash_left(tmp_path: Path) -> None:
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".stio-lock").touch(mode=0o600)
    written.remove()
    assert names_in(tmp_path) == []


def test_a_save_under_way_in_the_directory(tmp_path: Path) -> None:
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".stio-0123456789").mkdir()
    written.remove()
    assert names_in(tmp_path) == ["x", "x/.stio-0123456789"]


def test_a_filesystem_without_stable_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "is_local", lambda fd: False)
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "one")
    one.remove()
    (tmp_path / "two" / FILES[0]).write_text("theirs")
    two.remove()
    assert names_in(tmp_path) == ["two", f"two/{FILES[0]}"]


# The list of a checkpoint's files.


@pytest.mark.parametrize("within", ["deep", "none", ""])
def test_a_list_that_is_stored(tmp_path: Path, within: str) -> None:
    made(tmp_path / "staged")
    WrittenFiles.store_list(str(tmp_path / "staged"), within)
    (tmp_path / "staged").rename(tmp_path / "x")
    found = WrittenFiles.listed_in(str(tmp_path / "x"))
    assert found is not None
    assert found.made == {str(tmp_path / "x"), str(tmp_path / "x" / "deep")}
    assert len(found.files) == 3
    found.remove()
    assert names_in(tmp_path) == []


def test_a_list_of_a_copy_is_none(tmp_path: Path) -> None:
    made(tmp_path / "x")
    WrittenFiles.store_list(str(tmp_path / "x"), "")
    (tmp_path / "copy").mkdir()
    for name in (*FILES[:1], LIST_NAME):
        (tmp_path / "copy" / name).write_bytes((tmp_path / "x" / name).read_bytes())
    assert WrittenFiles.listed_in(str(tmp_path / "copy")) is None
    assert WrittenFiles.listed_in(str(tmp_path / "none")) is None


@pytest.mark.parametrize("name", ["../mine", "/mine", "deep/../../mine", "", ".", "a//b"])
@pytest.mark.parametrize("kind", ["files", "directories"])
def test_a_list_that_leads_out(tmp_path: Path, name: str, kind: str) -> None:
    made(tmp_path / "x")
    WrittenFiles.store_list(str(tmp_path / "x"), "")
    file = tmp_path / "x" / LIST_NAME
    text = json.loads(file.read_text())
    if kind == "directories" and name == "":
        pytest.skip("the directory itself")
    text[kind][name] = [1, 1, 1] if kind == "files" else 1
    file.write_text(json.dumps(text))
    found = WrittenFiles.listed_in(str(tmp_path / "x"))
    assert found is None or all(path.startswith(f"{tmp_path}/x/") for path in found.files)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": 2}', '{"version": 1}', "[" * 100_000])
def test_a_list_that_is_none(tmp_path: Path, text: str) -> None:
    made(tmp_path / "x")
    (tmp_path / "x" / LIST_NAME).write_text(text)
    assert WrittenFiles.listed_in(str(tmp_path / "x")) is None


def test_a_link_in_the_place_of_the_directory_has_no_list(tmp_path: Path) -> None:
    made(tmp_path / "x")
    WrittenFiles.store_list(str(tmp_path / "x"), "")
    (tmp_path / "x").rename(tmp_path / "archive")
    (tmp_path / "x").symlink_to("archive")
    assert WrittenFiles.listed_in(str(tmp_path / "archive")) is not None
    assert WrittenFiles.listed_in(str(tmp_path / "x")) is None
