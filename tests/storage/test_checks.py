"""Links and odd files: nothing outside the root is opened, nothing that is no regular file is read."""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path

import pytest

from stio.errors import CheckpointNotFoundError, StioError, StorageError, UnsafePathError
from stio.storage import local
from stio.storage.local import LocalFile, LocalRoot
from stio.testing import read_guarded

DATA = random.Random(1).randbytes(100_000)
NAME = "model.safetensors"

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own descriptors and calls")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)
    return directory


def content(root: LocalRoot, name: str, *, trusted: bool = False) -> bytes:
    file = root.open(name, trusted=trusted)
    try:
        return read_guarded(file, 0, file.identity.nbytes)
    finally:
        file.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Links.


def test_b77_link_inside_the_root(place: Path) -> None:
    (place / "real").mkdir()
    (place / NAME).rename(place / "real" / "x.safetensors")
    (place / NAME).symlink_to("real/x.safetensors")
    with LocalRoot(place) as root:
        assert content(root, NAME) == DATA


def test_b77_root_that_is_a_link(place: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(place)
    with LocalRoot(tmp_path / "latest") as root:
        assert content(root, NAME) == DATA


@pytest.mark.parametrize("subfolder", [".", "unet", "a/b"])
def test_b77_hub_cache(tmp_path: Path, subfolder: str) -> None:
    repository = tmp_path / "models--org--name"
    directory = repository / "snapshots" / "0a1b" / subfolder
    directory.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "cafe").write_bytes(DATA)
    (directory / NAME).symlink_to(os.path.relpath(repository / "blobs" / "cafe", directory))
    with LocalRoot(directory) as root:
        assert content(root, NAME) == DATA


def test_b77_blobs_of_another_repository(tmp_path: Path) -> None:
    directory = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    directory.mkdir(parents=True)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "cafe").write_bytes(DATA)
    (directory / NAME).symlink_to(other / "cafe")
    with LocalRoot(directory) as root, pytest.raises(UnsafePathError):
        root.open(NAME)


def test_b77_folder_that_is_named_like_the_cache(tmp_path: Path) -> None:
    directory = tmp_path / "backup" / "snapshots" / "0a1b"
    directory.mkdir(parents=True)
    (tmp_path / "backup" / "blobs").mkdir()
    (tmp_path / "backup" / "blobs" / "secret").write_bytes(DATA)
    (directory / NAME).symlink_to(tmp_path / "backup" / "blobs" / "secret")
    with LocalRoot(directory) as root, pytest.raises(UnsafePathError):
        root.open(NAME)


@pytest.fixture
def link_outside(place: Path, tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    (place / NAME).unlink()
    (place / NAME).symlink_to("../secret")
    return place


def test_b77_link_outside(link_outside: Path) -> None:
    before = num_descriptors()
    with LocalRoot(link_outside) as root, pytest.raises(UnsafePathError) as caught:
        root.open(NAME)
    assert caught.value.path == str(link_outside / NAME)
    assert "secret" in str(caught.value.found)
    assert num_descriptors() == before


def test_b77_link_outside_by_a_folder(place: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.safetensors").write_bytes(b"secret")
    (place / "sub").symlink_to(tmp_path / "other")
    with LocalRoot(place) as root, pytest.raises(UnsafePathError):
        root.open("sub/x.safetensors")


def test_b77_sibling_with_the_same_beginning(place: Path) -> None:
    sibling = place.with_name(place.name + "-private")
    sibling.mkdir()
    (sibling / "x").write_bytes(b"secret")
    (place / "x.safetensors").symlink_to(sibling / "x")
    with LocalRoot(place) as root, pytest.raises(UnsafePathError):
        root.open("x.safetensors")


def test_b77_trusted_links(link_outside: Path) -> None:
    with LocalRoot(link_outside, follow_symlinks=True) as root:
        assert content(root, NAME) == b"secret"
    with LocalRoot(link_outside) as root:
        assert content(root, NAME, trusted=True) == b"secret"
    file = LocalFile.open(str(link_outside / NAME))
    assert read_guarded(file, 0, 6) == b"secret"
    file.close()


def test_b77_without_proc(link_outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where descriptors cannot be asked for their path, the path itself is judged."""
    monkeypatch.setattr(local, "_HAVE_PROC", False)
    (link_outside / "inside.safetensors").write_bytes(DATA)
    with LocalRoot(link_outside) as root:
        assert content(root, "inside.safetensors") == DATA
        with pytest.raises(UnsafePathError):
            root.open(NAME)


def test_dangling_and_circular_links(place: Path) -> None:
    (place / "gone.safetensors").symlink_to("nowhere")
    (place / "round.safetensors").symlink_to("round.safetensors")
    with LocalRoot(place) as root:
        with pytest.raises(CheckpointNotFoundError):
            root.open("gone.safetensors")
        with pytest.raises(StorageError) as caught:
            root.open("round.safetensors")
    assert caught.value.errno == errno.ELOOP


# What is no regular file.


def make_odd(directory: Path, kind: str) -> str:
    path = directory / "odd.safetensors"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    return str(path)


@linux
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_b78_odd_files_never_hang(place: Path, kind: str) -> None:
    path = make_odd(place, kind)
    before = num_descriptors()
    with pytest.raises(StorageError, match="not a regular file") as caught:
        LocalFile.open(path)
    assert caught.value.errno in (errno.EINVAL, errno.EISDIR)
    with LocalRoot(place, follow_symlinks=True) as root, pytest.raises(StorageError, match="not a regular file"):
        root.open("odd.safetensors")
    with LocalRoot(place) as root, pytest.raises(UnsafePathError if kind == "device" else StorageError):
        root.open("odd.safetensors")
    assert num_descriptors() == before


@linux
def test_b78_untrusted_files_are_judged_before_they_are_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening some devices acts; a look at them does not."""
    make_odd(place, "device")
    flags: list[int] = []
    real = os.open

    def spy(path: str, flag: int, **more: int | None) -> int:
        flags.append(flag)
        return real(path, flag, **more)  # type: ignore[arg-type]

    with LocalRoot(place) as root:
        monkeypatch.setattr(os, "open", spy)
        with pytest.raises(StioError):
            root.open("odd.safetensors")
    assert all(flag & os.O_PATH for flag in flags)
