"""Paths that are resolved one component at a time: as `os.path.realpath` does, except for links of other users."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path

import pytest

import stio
from stio.storage.checks import open_by_rule, open_resolved, resolve_links, stat_by_rule
from stio.storage.commit.recovery import collect_garbage

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives a link to another user")


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    directory = tmp_path / "sticky"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def plant(link: Path, target: str | Path) -> Path:
    link.symlink_to(target)
    os.lchown(link, NOBODY, NOBODY)
    return link


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_as_realpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In random trees with links of all kinds, chains and links to nothing, but without loops."""
    chance = random.Random(seed)
    names = ["a", "b", "c"]
    places = [tmp_path]
    for _ in range(12):
        path = chance.choice(places) / chance.choice(names)
        if os.path.lexists(path):
            continue
        kind = chance.choice(["directory", "directory", "file", "link", "link"])
        if kind == "directory":
            path.mkdir()
            places.append(path)
        elif kind == "file":
            path.touch()
        else:
            target = chance.choice([str(chance.choice(places)), "..", "../c", "a/b", "none", "./a/../b"])
            path.symlink_to(target)
    monkeypatch.chdir(tmp_path)
    for _ in range(50):
        parts = [chance.choice([*names, "..", ".", "", "none"]) for _ in range(chance.randint(1, 5))]
        for path in (str(tmp_path / "/".join(parts).lstrip("/")), "/".join(parts)):
            try:
                expected = os.path.realpath(path, strict=True)
            except OSError:
                continue  # what does not exist is compared below
            assert resolve_links(path) == expected


@pytest.mark.parametrize(
    "path", ["none", "none/a/b", "a/none/../x", "link/x", "dangling", "dangling/x", "file", "./a/.."]
)
def test_what_does_not_exist_is_kept(tmp_path: Path, path: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "dangling").symlink_to("gone")
    assert resolve_links(f"{tmp_path}/{path}") == os.path.realpath(f"{tmp_path}/{path}")


def test_a_loop_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        resolve_links(str(tmp_path / "a"))
    with pytest.raises(stio.StorageError, match="Too many levels"):
        stio.sync.save({}, tmp_path / "a")


@needs_root
@pytest.mark.parametrize("path", ["link", "link/x", "link/../x", "own", "own/x", "deep/../link"])
def test_a_planted_link_is_refused(tmp_path: Path, sticky: Path, path: str) -> None:
    plant(sticky / "link", tmp_path)
    (sticky / "own").symlink_to("link")
    (sticky / "deep").mkdir()
    with pytest.raises(stio.StorageError, match="link of another user") as caught:
        resolve_links(str(sticky / path))
    assert caught.value.path == str(sticky / "link")


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o1755, 0o777])
def test_it_takes_a_directory_that_is_sticky_and_open_to_all(tmp_path: Path, sticky: Path, mode: int) -> None:
    sticky.chmod(mode)
    plant(sticky / "link", tmp_path / "there")
    assert resolve_links(str(sticky / "link")) == str(tmp_path / "there")


def test_a_path_with_a_new_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    os.close(open_resolved(str(tmp_path / "a" / "b")))
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "a").symlink_to("c")
    for path in ("a", "a/b"):
        with pytest.raises(NotADirectoryError):
            open_resolved(str(tmp_path / path))
    with pytest.raises(FileNotFoundError):
        open_resolved(str(tmp_path / "c" / "none"))


@needs_root
def test_files_by_the_rule(tmp_path: Path, sticky: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "file").chmod(0o600)
    (sticky / "own").symlink_to("../file")
    plant(sticky / "planted", "../file")
    (sticky / "dangling").symlink_to("none/none")
    fd = os.open(sticky, os.O_RDONLY)
    try:
        with open(open_by_rule("own", os.O_RDONLY, dir_fd=fd)) as file:
            assert file.read() == "mine"
        assert stat.S_IMODE(stat_by_rule("own", dir_fd=fd).st_mode) == 0o600
        with pytest.raises(FileNotFoundError):
            stat_by_rule("dangling", dir_fd=fd)
        for refused in (
            lambda: open_by_rule("planted", os.O_RDONLY, dir_fd=fd),
            lambda: stat_by_rule("planted", dir_fd=fd),
        ):
            with pytest.raises(stio.StorageError, match="link of another user"):
                refused()
    finally:
        os.close(fd)


@needs_root
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors.manifest.json"])
def test_an_index_or_a_manifest_behind_a_planted_link(tmp_path: Path, sticky: Path, name: str) -> None:
    """A save reads them in the destination. It is refused; nothing is disclosed by the new ones."""
    (tmp_path / "theirs").write_text("{}")
    plant(sticky / name, tmp_path / "theirs")
    with pytest.raises(stio.StorageError, match="link of another user"):
        stio.sync.save({}, sticky, max_shard_size=20, hash="sha256")
    assert os.listdir(sticky) == [name]


@needs_root
def test_garbage_behind_a_planted_link(tmp_path: Path, sticky: Path) -> None:
    (tmp_path / "victim" / ".stio-trash-0123456789").mkdir(parents=True)
    link = plant(sticky / "model", tmp_path / "victim")
    with pytest.raises(stio.StorageError, match="link of another user"):
        collect_garbage(link)
    assert (tmp_path / "victim" / ".stio-trash-0123456789").exists()


def test_a_descriptor_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed twice, the number could be another thread's file by then."""
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    real_open, real_close, closed, opened = os.open, os.close, [], []

    def open_once(path: str, *args: object, **kwargs: object) -> int:
        if path == os.sep and opened:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        fd = real_open(path, *args, **kwargs)  # type: ignore[arg-type]
        opened.append(path)
        return fd

    def close(fd: int) -> None:
        closed.append(fd)
        real_close(fd)

    monkeypatch.setattr(os, "open", open_once)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(OSError) as info:
        resolve_links(str(tmp_path / "link"))
    assert info.value.errno == errno.EMFILE
    assert len(closed) == len(opened)
