"""Files in an open directory: small ones read, written, compared, removed; what a new one keeps of the one it replaces.

Each function takes the descriptor of a directory and a name in it. Functions that compare or remove a file never follow
a link: they compare or remove the link itself.

Kept are owner, mode, access control list, extended attributes. All of it is set before the new file is visible. What
the system refuses is left out, and then no user gets wider rights than before: a mode shows the mask of an access
control list as the rights of the group, so without its list the file gets only the rights that the list grants to all.
The same holds for the group's rights if the group cannot be kept. Not kept: capabilities and signatures, which are
about the old content; attributes in `trusted.`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from stio.errors import StorageError
from stio.runtime.process import contextmanager
from stio.storage.checks import OPEN_FLAGS, open_by_rule, require_regular, stat_by_rule
from stio.storage.commit import syscalls as calls

ACCESS_LIST = "system.posix_acl_access"
_DEFAULT_LIST = "system.posix_acl_default"
"""The list that new files in a directory get."""

_OF_CONTENT = frozenset({"security.capability", "security.ima", "security.evm"})
_VERSION_BYTES = 4
_ENTRY = struct.Struct("<HHI")  # tag, rights, id; linux/posix_acl_xattr.h
USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
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
            for name in (ACCESS_LIST, _DEFAULT_LIST)
            if name in present and name not in extended
        )
        same_group = os.fstat(fd).st_gid == self.status.st_gid
        entries = entries_of(extended.get(ACCESS_LIST))
        mode, rights = self.mode, _rights_of_all(self.mode, entries)
        if entries or not same_group or self.extended is None:
            mode = mode & ~0o077 | rights << 3 | rights
        if not is_narrow:
            mode &= ~0o070  # the mask of the list that could not be removed
        if stat.S_ISDIR(self.status.st_mode):
            mode |= 0o300
        calls.fchmod(fd, mode)
        for name, value in _by_kind(extended, "system.", "security."):
            if name == ACCESS_LIST and not same_group:
                value = _narrowed(entries, rights)
            is_label = name.startswith("security.")  # mostly the one that the system gives each file
            if name not in _OF_CONTENT and not (is_label and present.get(name) == value):
                calls.write_attribute(fd, name, value)


def attributes_at(dir_fd: int, name: str, *, follow_symlinks: bool = True) -> FileAttributes | None:
    """Return the attributes of a file or a directory, None if there is neither of this name.

    Args:
        dir_fd: The directory that holds it.
        name: Its name; a link is followed by the rule of `stio.storage.checks`.
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
        if is_directory:
            with closing(calls.open_directory(name, dir_fd=new_fd)) as fd:
                keep_tree(old_fd, name, fd)
        else:
            with closing(calls.open_file(name, _READ_FLAGS, dir_fd=new_fd)) as fd:
                attributes.apply(fd)


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


def entries_of(access_list: bytes | None) -> list[tuple[int, int, int]]:
    """Return tag, rights and id of each entry of an access control list; nothing for None."""
    raw = b"" if access_list is None else access_list[_VERSION_BYTES:]
    return list(_ENTRY.iter_unpack(raw[: len(raw) - len(raw) % _ENTRY.size]))


def _rights_of_all(mode: int, entries: list[tuple[int, int, int]]) -> int:
    """Return the rights that all users except the owner have."""
    rights = mode >> 3 & mode & 7
    for tag, allowed, _ in entries:
        if tag not in (USER_OBJ, _MASK):
            rights &= allowed
    return rights


def _narrowed(entries: list[tuple[int, int, int]], rights: int) -> bytes:
    """Return a list in which the owning group, which is another one, and all others have only these rights."""
    changed = ((tag, rights if tag in (_GROUP_OBJ, _OTHER) else allowed, number) for tag, allowed, number in entries)
    return packed_list(changed)


def packed_list(entries: Iterable[tuple[int, int, int]]) -> bytes:
    """Return an access control list with these entries."""
    return (2).to_bytes(_VERSION_BYTES, "little") + b"".join(_ENTRY.pack(*entry) for entry in entries)


_ABSENT = {errno.ENOENT, errno.ENAMETOOLONG}
"""Errors of a name that nothing has. With the second one nothing can have it; an index may hold such a name."""

MAX_INDEX_BYTES = 256 << 20
"""Longest index that a save reads; a load has a smaller limit."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Distinguishes two files of one name. Without an inode: some FUSE filesystems assign a new one at each call."""

    nbytes: int
    """Size."""
    mtime_ns: int
    """Time of the last change, nanoseconds; a rename does not change it."""


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Give an open file or directory to a block, and close it at the end of the block."""
    try:
        yield fd
    finally:
        calls.close(fd)


def write_small(
    dir_fd: int, name: str, data: bytes, *, attributes: FileAttributes | None = None, durable: bool = True
) -> None:
    """Write a small new file.

    Args:
        dir_fd: Its directory.
        name: Its name, which must be free.
        data: Its content.
        attributes: Those of the file that it will replace; None: those that a new file gets.
        durable: Whether its content survives a power cut (its name needs a sync of the directory).

    Raises:
        OSError: The operating system reported an error; part of the file may be there.
    """
    with closing(calls.open_file(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=dir_fd)) as fd:
        write_whole(fd, data, 0)
        if attributes is not None:
            attributes.apply(fd)
        if durable:
            calls.fsync(fd)


def write_whole(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of an open file.

    Raises:
        OSError: The operating system reported an error, or wrote nothing; some of the bytes may be there.
    """
    done = 0
    while done < len(data):
        count = calls.write_bytes(fd, data[done:] if done else data, offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote no bytes")
        done += count


def read_small(dir_fd: int, name: str, limit_bytes: int, *, where: str = "") -> bytes | None:
    """Return the bytes of a small file, None if it does not exist.

    Args:
        dir_fd: Its directory.
        name: Its name; a link is followed by the rule of `stio.storage.checks`.
        limit_bytes: Its largest allowed size.
        where: Path of the directory, for messages.

    Raises:
        StorageError: It is larger, or no regular file.
        OSError: The operating system reported an error.
    """
    path = os.path.join(where, name)
    try:
        # Checked before it is opened: to open a device may have an effect.
        require_regular(stat_by_rule(name, dir_fd=dir_fd), path)
        fd = open_by_rule(name, OPEN_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None
    with open(fd, "rb") as file:
        require_regular(os.fstat(fd), path)
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise StorageError(f"the file is larger than {limit_bytes:,} bytes", path=path, errno=errno.EOVERFLOW)
    return data


def remove_file(dir_fd: int, name: str) -> None:
    """Remove a file; if it does not exist, do nothing.

    Raises:
        OSError: The operating system reported an error.
    """
    with suppress(FileNotFoundError):
        calls.unlink(name, dir_fd=dir_fd)


def digest_of(data: bytes | None) -> str | None:
    """Return the SHA-256 of bytes, None for None."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def status_at(dir_fd: int, name: str, *, follow_symlinks: bool = False) -> os.stat_result | None:
    """Return the status of what has a name, None if nothing has it.

    Raises:
        OSError: The operating system reported an error.
    """
    try:
        if follow_symlinks:
            return stat_by_rule(name, dir_fd=dir_fd)
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def file_at(dir_fd: int, name: str) -> os.stat_result | None:
    """Return the status of a regular file or a link, None if there is neither of this name.

    Raises:
        OSError: The operating system reported an error.
    """
    found = status_at(dir_fd, name)
    return found if found and (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)) else None


def stamp_of(dir_fd: int, name: str) -> Stamp | None:
    """Return the stamp of a regular file or a link, None if there is neither of this name."""
    found = file_at(dir_fd, name)
    return None if found is None else Stamp(found.st_size, found.st_mtime_ns)
