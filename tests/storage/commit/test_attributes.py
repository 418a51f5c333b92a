"""What a new file keeps of the file that it replaces: mode, owner and group, and never wider rights."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage.transactions import HUB_FILES, INDEX, save

from stio.storage.commit import syscalls as calls
from stio.storage.commit.files import attributes_at
from stio.storage.commit.transaction import begin_directory

ACCESS_LIST, DEFAULT_LIST = "system.posix_acl_access", "system.posix_acl_default"
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
NO_ID = 0xFFFFFFFF
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def packed(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


LIST = packed((USER_OBJ, 6, NO_ID), (USER, 4, 1234), (GROUP_OBJ, 0, NO_ID), (MASK, 4, NO_ID), (OTHER, 0, NO_ID))
WIDE = packed((USER_OBJ, 7, NO_ID), (USER, 7, 4321), (GROUP_OBJ, 7, NO_ID), (MASK, 7, NO_ID), (OTHER, 7, NO_ID))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def made(path: Path, mode: int = 0o644, access: bytes | None = None) -> Path:
    path.touch()
    path.chmod(mode)
    if access is not None:
        set_list(path, ACCESS_LIST, access)
    return path


def set_list(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"the filesystem has no lists: {error}")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def replaced(place: int, old: str, new: Path) -> None:
    """Give a file the attributes of another one."""
    attributes = attributes_at(place, old)
    assert attributes is not None
    fd = os.open(new, os.O_RDWR)
    try:
        attributes.apply(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o444, 0o666, 0o200, 0o755])
def test_the_same_mode(place: int, tmp_path: Path, mode: int) -> None:
    made(tmp_path / "old", mode)
    new = made(tmp_path / "new", 0o600)
    replaced(place, "old", new)
    assert mode_of(new) == mode


@pytest.mark.parametrize(
    ("access", "mode"),
    [
        (LIST, 0o600),
        (packed((USER_OBJ, 6, NO_ID), (USER, 6, 9), (GROUP_OBJ, 4, NO_ID), (MASK, 6, NO_ID), (OTHER, 4, NO_ID)), 0o644),
        (
            packed((USER_OBJ, 6, NO_ID), (GROUP_OBJ, 0, NO_ID), (GROUP, 6, 9), (MASK, 6, NO_ID), (OTHER, 0, NO_ID)),
            0o600,
        ),
    ],
)
def test_the_mask_of_a_list_is_not_taken_for_the_rights_of_the_group(
    place: int, tmp_path: Path, access: bytes, mode: int
) -> None:
    made(tmp_path / "old", access=access)
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert mode_of(new) == mode
    assert ACCESS_LIST not in os.listxattr(new)


def test_a_list_that_all_files_of_a_directory_get_stays_theirs(place: int, tmp_path: Path) -> None:
    """Readers by the default list of the directory can read the new file, since the mode is the mask of its list."""
    set_list(tmp_path, DEFAULT_LIST, WIDE)
    old, new = tmp_path / "old", tmp_path / "new"
    for path in (old, new):
        path.touch()
    old.chmod(0o640)
    replaced(place, "old", new)
    assert mode_of(new) == 0o640
    assert os.getxattr(new, ACCESS_LIST) == os.getxattr(old, ACCESS_LIST)


@pytest.mark.parametrize(("old_mode", "new_mode"), [(0o640, 0o600), (0o664, 0o644), (0o604, 0o600), (0o660, 0o600)])
@as_root
def test_another_group_gets_no_rights_of_the_old_one(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_mode: int, new_mode: int
) -> None:
    old = made(tmp_path / "old", old_mode)
    os.chown(old, -1, 4321)
    new = made(tmp_path / "new")
    monkeypatch.setattr(calls, "copy_owner", lambda found, fd: None)
    replaced(place, "old", new)
    assert mode_of(new) == new_mode


@as_root
def test_owner_and_group_are_kept(place: int, tmp_path: Path) -> None:
    os.chown(made(tmp_path / "old", 0o640), 1234, 4321)
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    found = new.stat()
    assert (found.st_uid, found.st_gid, mode_of(new)) == (1234, 4321, 0o640)


def test_attributes_are_those_of_a_links_target(place: int, tmp_path: Path) -> None:
    made(tmp_path / "target", 0o604)
    (tmp_path / "old").symlink_to("target")
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert mode_of(new) == 0o604
    assert attributes_at(place, "old", follow_symlinks=False) is None
    assert attributes_at(place, "none") is None


def test_files_of_a_checkpoint_keep_each_its_own(tmp_path: Path) -> None:
    """With the hub's names the new files replace the old ones one by one."""
    where = tmp_path / "x"
    save(where, "old", 2)
    names = sorted(path.name for path in where.iterdir())
    for mode, name in zip((0o644, 0o600, 0o640), names, strict=True):
        (where / name).chmod(mode)
    save(where, "new", 2, **HUB_FILES)
    for mode, name in zip((0o644, 0o600, 0o640), names, strict=True):
        assert mode_of(where / name) == mode


def test_new_shards_are_not_wider_than_the_narrowest_old_one(tmp_path: Path) -> None:
    where = tmp_path / "x"
    save(where, "old", 3)
    (where / "model-00002-of-00003.safetensors").chmod(0o600)
    save(where, "new", 2)
    assert [mode_of(path) for path in where.iterdir() if path.name != INDEX] == [0o600] * 2


def test_a_directory_in_the_place_of_another_keeps_its_modes(tmp_path: Path) -> None:
    old = tmp_path / "one"
    (old / "below").mkdir(parents=True)
    made(old / "below" / "file", 0o600)
    made(old / "state", 0o640)
    made(old / "gone")
    (old / "kind").mkdir(0o700)
    (old / "below").chmod(0o711)
    old.chmod(0o2750)
    staged = begin_directory(old, durable=False)
    new = Path(staged.files_path)
    (new / "below").mkdir()
    (new / "link").symlink_to("state")
    for name in ("below/file", "below/more", "state", "kind"):
        made(new / name).write_text("new")
    staged.commit(index=None)
    assert (old / "state").read_text() == "new"
    modes = {name: mode_of(old / name) for name in ("", "below", "below/file", "below/more", "state", "kind")}
    assert modes == {
        "": 0o2750, "below": 0o711, "below/file": 0o600, "below/more": 0o644, "state": 0o640, "kind": 0o644,
    }  # fmt: skip
    assert (old / "link").is_symlink()


def test_a_system_without_lists(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    for name in ("listxattr", "removexattr"):
        monkeypatch.setattr(os, name, unsupported)
    made(tmp_path / "old", 0o640)
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert mode_of(new) == 0o640
    save(tmp_path / "x", "new", 2)
    save(tmp_path / "x", "newer", 2)
