"""What a new file keeps of the file that it replaces: owner, mode, access control list, extended attributes.

All of it is set before the new file is visible. What the system refuses is left out, and then no user gets wider rights
than before: a mode shows the mask of an access control list as the rights of the group, so without its list the file
gets only the rights that the list grants to all. The same holds for the group's rights if the group cannot be kept.

Not kept: capabilities and signatures, which are about the old content; attributes in `trusted.`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from stio.storage.commit import syscalls as calls
from stio.storage.paths import open_by_rule, stat_by_rule

_ACCESS_LIST = "system.posix_acl_access"
_DEFAULT_LIST = "system.posix_acl_default"
"""The list that new files in a directory get."""

_OF_CONTENT = frozenset({"security.capability", "security.ima", "security.evm"})
_VERSION_BYTES = 4
_ENTRY = struct.Struct("<HHI")  # tag, rights, id; linux/posix_acl_xattr.h
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_DIRECTORY_FLAGS = _READ_FLAGS | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class FileAttributes:
    """Owner, mode, access control lists and extended attributes of a file or a directory."""

    status: os.stat_result
    """Owner, group and mode."""
    extended: dict[str, bytes] | None = field(default_factory=dict)
    """Extended attributes by name, access control lists among them; None if they could not be read."""

    @property
    def mode(self) -> int:
        """The bits that `chmod` sets: of a directory also the sticky bit and the one that its group is inherited."""
        return self.status.st_mode & (0o3777 if stat.S_ISDIR(self.status.st_mode) else 0o777)

    def apply(self, fd: int) -> None:
        """Give a file, or a directory, these attributes as far as the system allows. Not for one that is visible.

        A directory stays writable for its owner: otherwise it could not be renamed.
        """
        calls.copy_owner(self.status, fd)
        extended, present = self.extended or {}, calls.read_attributes(fd)
        for name, value in _by_kind(extended, "user."):  # before the mode: they need the right to write
            calls.write_attribute(fd, name, value)
        is_narrow = all(
            calls.remove_attribute(fd, name)  # inherited from the directory
            for name in (_ACCESS_LIST, _DEFAULT_LIST)
            if name in present and name not in extended
        )
        same_group = os.fstat(fd).st_gid == self.status.st_gid
        entries = _entries(extended.get(_ACCESS_LIST))
        mode, rights = self.mode, _rights_of_all(self.mode, entries)
        if entries or not same_group or self.extended is None:
            mode = mode & ~0o077 | rights << 3 | rights
        if not is_narrow:
            mode &= ~0o070  # the mask of the list that could not be removed
        if stat.S_ISDIR(self.status.st_mode):
            mode |= 0o300
        calls.fchmod(fd, mode)
        for name, value in _by_kind(extended, "system.", "security."):
            if name == _ACCESS_LIST and not same_group:
                value = _narrowed(entries, rights)
            is_label = name.startswith("security.")  # mostly the one that the system gives each file
            if name not in _OF_CONTENT and not (is_label and present.get(name) == value):
                calls.write_attribute(fd, name, value)


def attributes_at(dir_fd: int, name: str, *, follow_symlinks: bool = True) -> FileAttributes | None:
    """Return the attributes of a file or a directory, None if there is neither of this name.

    Args:
        dir_fd: The directory that holds it.
        name: Its name; a link is followed by the rule of `stio.storage.paths`.
        follow_symlinks: False: there is neither if this is the name of a link.

    Raises:
        OSError: The operating system reported an error.
    """
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link and follow_symlinks:
            found = stat_by_rule(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return None
    return FileAttributes(found, _extended_at(dir_fd, name, found, is_link=is_link))


def keep_default_list(dir_fd: int, name: str, files_fd: int) -> None:
    """Give a new directory, still empty, the list for new files of the directory that it will replace. Never raises."""
    try:
        replaced = attributes_at(dir_fd, name, follow_symlinks=False)
    except OSError:
        return
    if replaced is None or replaced.extended is None or not stat.S_ISDIR(replaced.status.st_mode):
        return
    if _DEFAULT_LIST in replaced.extended:
        calls.write_attribute(files_fd, _DEFAULT_LIST, replaced.extended[_DEFAULT_LIST])
    elif _DEFAULT_LIST in calls.read_attributes(files_fd):
        calls.remove_attribute(files_fd, _DEFAULT_LIST)


def keep_tree(dir_fd: int, name: str, files_fd: int) -> None:
    """Give a new directory, and what is in it, the attributes of the directory that it will replace.

    Args:
        dir_fd: The directory that holds the old one.
        name: The old one; if it does not exist, nothing is done.
        files_fd: The new one, complete.

    Raises:
        OSError: The operating system reported an error.
    """
    attributes = attributes_at(dir_fd, name, follow_symlinks=False)
    if attributes is None or not stat.S_ISDIR(attributes.status.st_mode):
        return
    old_fd = -1
    with suppress(PermissionError):  # then its own attributes alone are kept
        old_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=dir_fd)
    if old_fd >= 0:
        try:
            _keep_entries(old_fd, files_fd)
        finally:
            os.close(old_fd)
    attributes.apply(files_fd)


def _keep_entries(old_fd: int, new_fd: int) -> None:
    with os.scandir(new_fd) as listed:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listed if not entry.is_symlink()]
    for name, is_directory in names:
        attributes = attributes_at(old_fd, name, follow_symlinks=False)
        if attributes is None or stat.S_ISDIR(attributes.status.st_mode) != is_directory:
            continue
        fd = calls.open_directory(name, dir_fd=new_fd) if is_directory else _opened_file(name, new_fd)
        try:
            if is_directory:
                keep_tree(old_fd, name, fd)
            else:
                attributes.apply(fd)
        finally:
            calls.close(fd)


def _opened_file(name: str, dir_fd: int) -> int:
    return calls.open_file(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0), dir_fd=dir_fd)


def _extended_at(dir_fd: int, name: str, found: os.stat_result, *, is_link: bool) -> dict[str, bytes] | None:
    """Return the extended attributes of a file whose status is known, None if they cannot be read."""
    try:
        fd = open_by_rule(name, _READ_FLAGS, dir_fd=dir_fd)
    except OSError:
        # Without the right to read the file. With O_PATH a link itself would be opened.
        if is_link or not hasattr(os, "O_PATH"):
            return None if hasattr(os, "listxattr") else {}
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        except OSError:
            return None
        try:
            is_same = os.path.samestat(os.fstat(fd), found) and os.path.exists(f"/proc/self/fd/{fd}")
            return calls.read_attributes(f"/proc/self/fd/{fd}") if is_same else None
        finally:
            os.close(fd)
    try:
        return calls.read_attributes(fd) if os.path.samestat(os.fstat(fd), found) else None
    finally:
        os.close(fd)


def _by_kind(extended: dict[str, bytes], *prefixes: str) -> Iterator[tuple[str, bytes]]:
    return ((name, value) for name, value in extended.items() if name.startswith(prefixes))


def _entries(access_list: bytes | None) -> list[tuple[int, int, int]]:
    """Return tag, rights and id of each entry of an access control list; nothing for None."""
    raw = b"" if access_list is None else access_list[_VERSION_BYTES:]
    return list(_ENTRY.iter_unpack(raw[: len(raw) - len(raw) % _ENTRY.size]))


def _rights_of_all(mode: int, entries: list[tuple[int, int, int]]) -> int:
    """Return the rights that all users except the owner have."""
    rights = mode >> 3 & mode & 7
    for tag, allowed, _ in entries:
        if tag not in (_USER_OBJ, _MASK):
            rights &= allowed
    return rights


def _narrowed(entries: list[tuple[int, int, int]], rights: int) -> bytes:
    """Return a list in which the owning group, which is another one, and all others have only these rights."""
    changed = ((tag, rights if tag in (_GROUP_OBJ, _OTHER) else allowed, number) for tag, allowed, number in entries)
    return (2).to_bytes(_VERSION_BYTES, "little") + b"".join(_ENTRY.pack(*entry) for entry in changed)
