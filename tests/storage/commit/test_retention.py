"""Deletions that compare first: files and directories that are exchanged, added or removed at any moment stay."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stio.storage.commit import destination
from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage
from stio.storage.commit.retention import WrittenFiles, describe_file, remove_checkpoint, survey
from stio.storage.commit.written_list import LIST_NAME, read_list, write_list
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


@pytest.fixture
def at_rename(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that lets something happen right before the next rename: after all comparisons."""

    def register(happens: Callable[[], object]) -> None:
        plain, ahead = calls.rename, [happens]

        def rename(*names: str, **fds: int) -> None:
            if ahead:
                ahead.pop()()
            plain(*names, **fds)

        monkeypatch.setattr(calls, "rename", rename)

    return register


def test_what_is_unchanged_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = made(tmp_path / "x")
    remove_checkpoint(written)
    remove_checkpoint(written)  # is not there
    assert names_in(tmp_path) == []
    assert not caplog.text


def test_a_directory_that_is_exchanged_after_the_comparison(
    tmp_path: Path, at_rename: Callable[[Callable[[], object]], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x"
    written = made(path)

    def exchange() -> None:
        path.rename(tmp_path / "away")
        path.mkdir()
        (path / "theirs").touch()

    at_rename(exchange)
    remove_checkpoint(written)
    assert names_in(path) == ["theirs"]
    assert len(names_in(tmp_path / "away")) == 3
    assert "x stays" in caplog.text


@pytest.mark.parametrize("name", ["theirs", "deep/theirs"])
def test_a_file_that_is_added_after_the_comparison(
    tmp_path: Path, at_rename: Callable[[Callable[[], object]], None], name: str
) -> None:
    written = made(tmp_path / "x")
    at_rename((tmp_path / "x" / name).touch)
    remove_checkpoint(written)
    assert [found for found in names_in(tmp_path) if not (tmp_path / found).is_dir()] == [f"x/{name}"]


def test_a_file_that_is_exchanged_after_the_comparison(
    tmp_path: Path, at_rename: Callable[[Callable[[], object]], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("ours")
    written = describe_file(str(path))

    def exchange() -> None:
        (tmp_path / "new").write_text("mine")
        (tmp_path / "new").rename(path)

    at_rename(exchange)
    remove_checkpoint(written)
    assert path.read_text() == "mine"
    assert names_in(tmp_path) == ["x.safetensors"]
    assert caplog.text.count("x.safetensors stays") == 1


def test_a_file_that_is_exchanged_twice(
    tmp_path: Path, at_rename: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one was found in its place: the first one gets another name, and none is lost."""
    path, plain = tmp_path / "x.safetensors", calls.rename_new
    path.write_text("ours")
    written = describe_file(str(path))

    def rename_new(*names: str, **fds: Any) -> None:
        path.write_text("second")
        plain(*names, **fds)

    def exchange() -> None:
        path.unlink()
        path.write_text("first!")

    at_rename(exchange)
    monkeypatch.setattr(calls, "rename_new", rename_new)
    remove_checkpoint(written)
    assert sorted(found.read_text() for found in tmp_path.iterdir()) == ["first!", "second"]


def test_a_full_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "x.safetensors"
    path.write_text("ours")
    written = describe_file(str(path))
    monkeypatch.setattr(calls, "make_directory", refuse)
    remove_checkpoint(written)
    assert names_in(tmp_path) == []


def test_a_recovery_that_deletes_at_the_same_time(
    tmp_path: Path, at_rename: Callable[[Callable[[], object]], None]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("ours")
    written = describe_file(str(path))
    at_rename(lambda: next(tmp_path.glob(".stio-aside-*")).rmdir())
    remove_checkpoint(written)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_a_recovery_while_something_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What took the place of the checkpoint after its comparison is not deleted by the recovery of another save."""
    path, plain, is_done = tmp_path / name, calls.rename, []
    if name == "x":
        written = made(path)
    else:
        path.write_text("ours")
        written = describe_file(str(path))

    def rename(*names: str, **fds: int) -> None:
        if is_done:
            plain(*names, **fds)
            return
        is_done.append(1)
        mine = path / "mine" if name == "x" else path
        mine.unlink(missing_ok=True)
        mine.write_text("mine")
        plain(*names, **fds)
        collect_garbage(tmp_path)

    monkeypatch.setattr(calls, "rename", rename)
    remove_checkpoint(written)
    assert [found.read_text() for found in tmp_path.rglob("*") if found.is_file()] == ["mine"]
    assert not [*tmp_path.glob(".stio-*")]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["directory", "file", "exchanged file"])
def test_killed_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: bool) -> None:
    """A checkpoint is there or not; what others put in its place always is."""
    for n in range(1, 100):
        home = tmp_path / str(n)
        home.mkdir()
        path = home / "x"
        if kind == "directory":
            written = made(path)
        else:
            path.write_text("ours")
            written = describe_file(str(path))
        whole = names_in(home)
        with monkeypatch.context() as patch:
            system = System(patch, kill_at=n, kill_after=after)
            if kind == "exchanged file":
                wrapped = calls.rename

                def exchange(*names: str, to: Path = path, ahead: Any = wrapped, **fds: int) -> None:
                    to.unlink(missing_ok=True)
                    to.write_text("mine")
                    ahead(*names, **fds)

                patch.setattr(calls, "rename", exchange)
            with suppress(Killed):
                remove_checkpoint(written)
            system.bury()
        collect_garbage(home)
        if kind == "exchanged file" and (system.hit is None or path.read_text() != "ours"):
            assert path.read_text() == "mine"
        elif kind == "directory":
            assert names_in(home) in ([], whole)
        assert not [*home.glob(".stio-*")]
        if system.hit is None:
            break
    assert system.hit is None


def test_what_cannot_be_put_back_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".stio-aside-0123456789").mkdir()
    (tmp_path / ".stio-aside-0123456789" / "x").write_text("first")
    (tmp_path / "x").write_text("second")
    assert collect_garbage(tmp_path).undone == (str(tmp_path / ".stio-aside-0123456789"),)
    (kept,) = tmp_path.glob(".stio-kept-*")
    assert (kept.read_text(), (tmp_path / "x").read_text()) == ("first", "second")
    assert str(kept) in caplog.text
    assert collect_garbage(tmp_path).kept == ()
    assert kept.exists()


def test_names_that_a_filesystem_gives_to_open_files(tmp_path: Path) -> None:
    """They do not bring the directory back; it goes with the next recovery."""
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".nfs000001").touch()
    remove_checkpoint(written)
    assert [Path(name).name for name in names_in(tmp_path)][1:] == [".nfs000001"]
    assert not (tmp_path / "x").exists()


def test_a_lock_file_that_a_crash_left(tmp_path: Path) -> None:
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".stio-lock").touch(mode=0o600)
    remove_checkpoint(written)
    assert names_in(tmp_path) == []


def test_a_save_under_way_in_the_directory(tmp_path: Path) -> None:
    written = made(tmp_path / "x")
    (tmp_path / "x" / ".stio-0123456789").mkdir()
    remove_checkpoint(written)
    assert names_in(tmp_path) == ["x", "x/.stio-0123456789"]


def test_a_filesystem_without_stable_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "is_local", lambda fd: False)
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "one")
    remove_checkpoint(one)
    (tmp_path / "two" / FILES[0]).write_text("theirs")
    remove_checkpoint(two)
    assert names_in(tmp_path) == ["two", f"two/{FILES[0]}"]


# The list of a checkpoint's files.


@pytest.mark.parametrize("within", ["deep", "none", ""])
def test_a_list_that_is_stored(tmp_path: Path, within: str) -> None:
    made(tmp_path / "staged")
    write_list(str(tmp_path / "staged"), within)
    (tmp_path / "staged").rename(tmp_path / "x")
    found = read_list(str(tmp_path / "x"), within)
    assert found is not None
    assert found.made == {str(tmp_path / "x"), str(tmp_path / "x" / "deep")}
    assert len(found.files) == 3
    remove_checkpoint(found)
    assert names_in(tmp_path) == []


def test_a_list_of_a_copy_is_none(tmp_path: Path) -> None:
    made(tmp_path / "x")
    write_list(str(tmp_path / "x"), "")
    (tmp_path / "copy").mkdir()
    for name in (*FILES[:1], LIST_NAME):
        (tmp_path / "copy" / name).write_bytes((tmp_path / "x" / name).read_bytes())
    assert read_list(str(tmp_path / "copy"), "") is None
    assert read_list(str(tmp_path / "none"), "") is None


@pytest.mark.parametrize("name", ["../mine", "/mine", "deep/../../mine", "", ".", "a//b"])
@pytest.mark.parametrize("kind", ["files", "directories"])
def test_a_list_that_leads_out(tmp_path: Path, name: str, kind: str) -> None:
    made(tmp_path / "x")
    write_list(str(tmp_path / "x"), "")
    file = tmp_path / "x" / LIST_NAME
    text = json.loads(file.read_text())
    if kind == "directories" and name == "":
        pytest.skip("the directory itself")
    text[kind][name] = [1, 1, 1] if kind == "files" else 1
    file.write_text(json.dumps(text))
    found = read_list(str(tmp_path / "x"), "")
    assert found is None or all(path.startswith(f"{tmp_path}/x/") for path in found.files)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": 2}', '{"version": 1}', "[" * 100_000])
def test_a_list_that_is_none(tmp_path: Path, text: str) -> None:
    made(tmp_path / "x")
    (tmp_path / "x" / LIST_NAME).write_text(text)
    assert read_list(str(tmp_path / "x"), "") is None


def test_a_link_in_the_place_of_the_directory_has_no_list(tmp_path: Path) -> None:
    made(tmp_path / "x")
    write_list(str(tmp_path / "x"), "")
    (tmp_path / "x").rename(tmp_path / "archive")
    (tmp_path / "x").symlink_to("archive")
    assert read_list(str(tmp_path / "archive"), "") is not None
    assert read_list(str(tmp_path / "x"), "") is None
