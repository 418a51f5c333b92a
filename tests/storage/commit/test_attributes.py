"""What a new file keeps of the file that it replaces: mode, owner, lists, attributes; never wider rights."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def rights(path: Path) -> dict[tuple[int, int], int]:
    """Return the rights of each entry of a file's list, the mask applied; without a list those of its mode."""
    if ACCESS_LIST not in os.listxattr(path):
        mode = path.stat().st_mode
        return {(tag, NO_ID): mode >> shift & 7 for tag, shift in ((USER_OBJ, 6), (GROUP_OBJ, 3), (OTHER, 0))}
    entries = list(struct.iter_unpack("<HHI", os.getxattr(path, ACCESS_LIST)[4:]))
    mask = next((allowed for tag, allowed, _ in entries if tag == MASK), 7)
    masked = (USER, GROUP_OBJ, GROUP)
    return {(tag, one): allowed & mask if tag in masked else allowed for tag, allowed, one in entries if tag != MASK}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    try:
        (tmp_path / "probe").touch()
        os.setxattr(tmp_path / "probe", ACCESS_LIST, LIST)
    except OSError as error:
        pytest.skip(f"the filesystem has no lists: {error}")
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def made(path: Path, mode: int = 0o644, access: bytes | None = None, **attributes: bytes) -> Path:
    path.touch()
    path.chmod(mode)
    if access is not None:
        os.setxattr(path, ACCESS_LIST, access)
    for name, value in attributes.items():
        os.setxattr(path, f"user.{name}", value)
    return path


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
@pytest.mark.parametrize("access", [None, LIST, WIDE])
def test_the_same_attributes(place: int, tmp_path: Path, mode: int, access: bytes | None) -> None:
    old = made(tmp_path / "old", mode, access, origin=b"run 7", empty=b"", large=b"x" * 900)
    new = made(tmp_path / "new", 0o600)
    replaced(place, "old", new)
    assert new.stat().st_mode == old.stat().st_mode
    assert {name: os.getxattr(new, name) for name in os.listxattr(new)} == {
        name: os.getxattr(old, name) for name in os.listxattr(old)
    }


def test_a_list_that_the_new_file_inherits_goes_if_the_old_one_had_none(place: int, tmp_path: Path) -> None:
    os.setxattr(tmp_path, DEFAULT_LIST, WIDE)
    old = made(tmp_path / "old", 0o640)
    os.removexattr(old, ACCESS_LIST)
    old.chmod(0o640)
    new = made(tmp_path / "new")
    assert ACCESS_LIST in os.listxattr(new)
    replaced(place, "old", new)
    assert os.listxattr(new) == []
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def refusing(*refused: str) -> Callable[..., bool]:
    """Return a system call that sets other attributes only."""

    def write(fd: int, name: str, value: bytes) -> bool:
        if name not in refused:
            os.setxattr(fd, name, value)
        return name not in refused

    return write


@pytest.mark.parametrize(
    ("access", "mode"),
    [
        (LIST, 0o600),
        (packed((USER_OBJ, 6, NO_ID), (USER, 6, 9), (GROUP_OBJ, 4, NO_ID), (MASK, 6, NO_ID), (OTHER, 4, NO_ID)), 0o644),
        (packed((USER_OBJ, 6, NO_ID), (USER, 0, 9), (GROUP_OBJ, 4, NO_ID), (MASK, 4, NO_ID), (OTHER, 4, NO_ID)), 0o600),
        (
            packed((USER_OBJ, 6, NO_ID), (GROUP_OBJ, 6, NO_ID), (GROUP, 4, 9), (MASK, 6, NO_ID), (OTHER, 6, NO_ID)),
            0o644,
        ),
    ],
)
def test_without_its_list_a_file_has_the_rights_of_all(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: bytes, mode: int
) -> None:
    made(tmp_path / "old", access=access, origin=b"x")
    new = made(tmp_path / "new")
    monkeypatch.setattr(calls, "write_attribute", refusing(ACCESS_LIST))
    replaced(place, "old", new)
    assert stat.S_IMODE(new.stat().st_mode) == mode
    assert os.listxattr(new) == ["user.origin"]


def test_an_inherited_list_that_stays_grants_nothing(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "old", 0o644)
    new = made(tmp_path / "new", access=WIDE)
    monkeypatch.setattr(calls, "remove_attribute", lambda fd, name: False)
    replaced(place, "old", new)
    assert {entry: allowed for entry, allowed in rights(new).items() if allowed} == {
        (USER_OBJ, NO_ID): 6,
        (OTHER, NO_ID): 4,
    }


def test_attributes_that_cannot_be_read_leave_the_rights_of_all(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "old", 0o664)
    new = made(tmp_path / "new")
    monkeypatch.setattr("stio.storage.commit.files._extended_at", lambda *_, **__: None)
    replaced(place, "old", new)
    assert stat.S_IMODE(new.stat().st_mode) == 0o644


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
    assert stat.S_IMODE(new.stat().st_mode) == new_mode
    os.setxattr(
        old, ACCESS_LIST, packed(*((t, 7 if t != OTHER else 4, i) for t, _, i in struct.iter_unpack("<HHI", WIDE[4:])))
    )
    replaced(place, "old", new)
    assert rights(new)[GROUP_OBJ, NO_ID] == rights(new)[OTHER, NO_ID] == 4
    assert rights(new)[USER, 4321] == 7


@as_root
def test_owner_and_group_are_kept(place: int, tmp_path: Path) -> None:
    os.chown(made(tmp_path / "old", 0o640), 1234, 4321)
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    found = new.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, 0o640)


@as_root
def test_capabilities_are_not_kept(place: int, tmp_path: Path) -> None:
    """The new content is another program's."""
    old = made(tmp_path / "old")
    try:
        os.setxattr(old, "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))
    except OSError as error:
        pytest.skip(f"no capabilities of files: {error}")
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert os.listxattr(new) == []


def test_attributes_are_those_of_a_links_target(place: int, tmp_path: Path) -> None:
    made(tmp_path / "target", access=LIST, origin=b"x")
    (tmp_path / "old").symlink_to("target")
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert os.getxattr(new, ACCESS_LIST) == LIST
    assert attributes_at(place, "old", follow_symlinks=False) is None
    assert attributes_at(place, "none") is None


def test_files_of_a_checkpoint_keep_each_its_own(place: int, tmp_path: Path) -> None:
    """With the hub's names the new files replace the old ones one by one."""
    where = tmp_path / "x"
    save(where, "old", 2)
    names = sorted(path.name for path in where.iterdir())
    for mode, name in zip((0o644, 0o600, 0o640), names, strict=True):
        (where / name).chmod(mode)
        os.setxattr(where / name, "user.name", name.encode())
    save(where, "new", 2, **HUB_FILES)
    for mode, name in zip((0o644, 0o600, 0o640), names, strict=True):
        assert stat.S_IMODE((where / name).stat().st_mode) == mode
        assert os.getxattr(where / name, "user.name") == name.encode()


def test_new_shards_are_not_wider_than_the_narrowest_old_one(place: int, tmp_path: Path) -> None:
    where = tmp_path / "x"
    save(where, "old", 3)
    made(where / "model-00002-of-00003.safetensors", 0o600, origin=b"2")
    save(where, "new", 2)
    shards = [path for path in where.iterdir() if path.name != INDEX]
    assert [stat.S_IMODE(path.stat().st_mode) for path in shards] == [0o600] * 2
    assert [os.getxattr(path, "user.origin") for path in shards] == [b"2"] * 2


def test_a_directory_in_the_place_of_another_keeps_its_attributes(place: int, tmp_path: Path) -> None:
    old = tmp_path / "one"
    (old / "below").mkdir(parents=True)
    made(old / "below" / "file", 0o600, LIST, origin=b"x")
    made(old / "state", 0o640)
    made(old / "gone")
    os.setxattr(old / "below", "user.note", b"y")
    os.setxattr(old, DEFAULT_LIST, LIST)
    (old / "below").chmod(0o711)
    old.chmod(0o2750)
    staged = begin_directory(old, durable=False)
    new = Path(staged.files_path)
    (new / "below").mkdir()
    for name in ("below/file", "below/more", "state"):
        (new / name).write_text("new")
    assert rights(new / "state") == {**rights(new / "state"), (USER, 1234): 4}
    staged.commit(index=None)
    assert (old / "state").read_text() == "new"
    assert stat.S_IMODE(old.stat().st_mode) == 0o2750
    assert os.getxattr(old, DEFAULT_LIST) == LIST
    assert stat.S_IMODE((old / "below").stat().st_mode) == 0o711
    assert os.getxattr(old / "below", "user.note") == b"y"
    assert os.getxattr(old / "below" / "file", ACCESS_LIST) == LIST
    assert os.getxattr(old / "below" / "file", "user.origin") == b"x"
    assert stat.S_IMODE((old / "state").stat().st_mode) == 0o640
    assert ACCESS_LIST not in os.listxattr(old / "state")


def test_the_home_s_default_list_is_not_for_a_directory_that_had_none(place: int, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    os.setxattr(tmp_path, DEFAULT_LIST, WIDE)
    staged = begin_directory(tmp_path / "one", durable=False)
    made(Path(staged.files_path) / "file")
    staged.commit(index=None)
    assert os.listxattr(tmp_path / "one") == os.listxattr(tmp_path / "one" / "file") == []


def test_a_system_without_attributes(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOTSUP, "no attributes")

    for name in ("listxattr", "getxattr", "setxattr", "removexattr"):
        monkeypatch.setattr(os, name, refused)
    made(tmp_path / "old", 0o640)
    new = made(tmp_path / "new")
    replaced(place, "old", new)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
