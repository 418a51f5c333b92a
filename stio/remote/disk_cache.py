"""`DiskCache`: objects of remote stores as files of this machine, so that the next start reads them from its disk.

A file in the cache is one state of one object, whole: its name is made of the URL, the size and the ETag (or the time
of change) that the store gives. So a load requests the state of each object, with its first bytes, from the store, and
takes a file of that state from the cache (`DiskCache.replacement`). A file that is not there, and of which a load reads
at least half, is fetched before the load is planned (`DiskCache.fetch`). From then on the load reads a local file.

The cache is a directory that processes share. The process that fetches an object holds the lock file of it; others wait
for the file, and fetch other objects in the meantime. A process that was killed leaves its lock free, and its part of
the object, which the next one completes. A process that uses a file holds a shared lock on it, and mapped tensors hold
that lock too; only files that can be locked exclusively are evicted. All changes of the directory are renames and
removals of whole files, so no reader sees a part of one.

An error of the disk never fails a load: it reads from the store, and a line is logged.

A `Download` is a file of a hidden name, in its full size from the start, so that its space is reserved. Behind the
bytes of the object it has a mark for each block that is complete. Another process continues the download after a kill,
and reads the other blocks only. After a restart of the machine it reads all of them: a mark may then be on the disk
and its block may not. When all are there, the marks are cut off, the file is made durable and renamed. The name of the
file identifies the object and its state (`object_key`), so blocks of two states never mix. Its user holds a lock
(`FileLock`), and nothing else excludes a second writer. `pulls.py` copies by it too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from stio import clock, process
from stio.errors import ChangedDuringReadError, StioError, StorageError
from stio.format.files import FILE_SUFFIX
from stio.limits import checked_size
from stio.process import contextmanager, new_lock
from stio.runtime import Cancelled, Operation, WorkerPool, is_interrupted, memory
from stio.runtime.memory import Region
from stio.storage import Identity, LocalFile, RequestedSource, Requests, Source, local_directory, max_open_files
from stio.storage.checkpoint import CacheStats, add_counts
from stio.storage.commit import FileLock, LockTimeout, boot_id, status_at, write_whole
from stio.storage.commit import syscalls as calls
from stio.text import log, show_bytes

PART_SUFFIX = ".part"
"""End of the name of a file that is not complete."""

LOCK_SUFFIX = ".lock"
"""End of the name of a lock file."""

BLOCK_BYTES = 8 << 20
"""Bytes for which there is one mark."""

_MARKS_VERSION = b"stio-marks-1 "
_LOOK_SECONDS = 0.5

OLD_SECONDS = 86_400.0
"""A part whose process is dead is kept for so long, for a process that completes it."""

_DIRECTORY_LOCK = f"cache{LOCK_SUFFIX}"
_HEAD_BYTES = 128 << 10
_NAME = re.compile(rf"([0-9a-f]{{40}})({re.escape(FILE_SUFFIX)}|{re.escape(PART_SUFFIX)}|{re.escape(LOCK_SUFFIX)})")


class DiskCache:
    """Keeps what loads read from URLs as files on this machine's disk, for loads with `cache=`.

    A load takes an object from the cache if the store still has it in the same state (by its ETag, or by size and time
    of change). It still makes one small request for each file, which gives that state. An object that is not in the
    cache is fetched as a whole, before the first tensor is there, if the load reads at least half of it. Files in the
    cache are read as local files are: mapped, or with `memory=` as given.

    A file in the cache is compared with the store by its size and its first 128 KiB. Damage behind them, by a disk or
    by another program, is found if the header is malformed, and by loads with `verify=True`. That load fails and
    removes the file; the next one fetches it again.

    Processes of one machine may share the directory: each object is read from the store once. It may be removed when no
    process uses it. A user who may write to it can replace your models.

    An object that does not fit, a full disk or a directory that cannot be written means that the load reads from the
    store; a warning is logged under "stio".

    Args:
        path: The directory; it is made, for this user only, when the first object is fetched. It must be on a
            filesystem with locks (`flock`).
        max_bytes: Most bytes of files in it: a number, or text such as `"500GB"`. The files that were not used for the
            longest time are removed for others, but none that a process uses, and none if that does not make enough
            room.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `max_bytes` is not positive, or no size; or `path` is empty, a URL, or begins with `~`.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | str) -> None:
        self.path = local_directory(path, "path=")
        """The directory."""
        self.max_bytes = checked_size(max_bytes, "max_bytes")
        """Most bytes of files in it."""
        self._counts = CacheStats()

    def __repr__(self) -> str:
        return f"DiskCache({self.path!r}, max_bytes={self.max_bytes})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_counts": CacheStats()}  # the counters are those of one object

    def stats(self) -> CacheStats:
        """Return the files in the directory in numbers, and counters of this object since it was made."""
        found: list[_StoredFile] = []
        with suppress(OSError), opened_directory(self.path) as dir_fd:
            found = [file for file in _scan(dir_fd) if file.suffix == FILE_SUFFIX]
        return replace(self._counts, entries=len(found), held_bytes=sum(file.nbytes for file in found))

    def leftovers(self) -> list[str]:
        """Return the paths of parts of objects whose process was killed; the next load of the object completes them.

        They are removed when room is needed, after a day, and by `evict`.
        """

        def work() -> list[str]:
            with suppress(OSError), opened_directory(self.path) as dir_fd, ExitStack() as locked:
                return [os.path.join(self.path, part.name) for part in _abandoned(_scan(dir_fd), dir_fd, locked)]
            return []

        return Operation.result_of(work, name="evict")

    def evict(self) -> int:
        """Remove all files that no process uses, and what killed processes left; return their size in bytes."""

        def work() -> int:
            with suppress(OSError), opened_directory(self.path) as dir_fd, ExitStack() as locked:
                files = _scan(dir_fd)
                return self._remove([*_abandoned(files, dir_fd, locked), *_unused(files, dir_fd, locked)], dir_fd)
            return 0

        return Operation.result_of(work, name="evict")

    # Called by loads, on threads of stio.

    def replacement(self, source: Source) -> Source:
        """Return the file in the cache that has an object's content, and close the object; or the object itself."""
        key = self._key(source) if isinstance(source, RequestedSource) else ""
        if not key or not os.path.isdir(self.path):
            return source
        with self._without_cache(source), opened_directory(self.path) as dir_fd:
            found = self._open(key, source, dir_fd, compare=True)
            if found is not None:
                self._count(hits=1)
                source.close()
                return found
        return source

    def fetch(
        self, files: Sequence[Source], nbytes: Sequence[int], *, budget_bytes: int, owned: ExitStack
    ) -> list[Source]:
        """Return the files of a load, those in the cache in place of objects; objects are put into the cache first.

        Args:
            files: The open files.
            nbytes: Number of bytes of each that the load reads. An object of which it reads less than half is fetched
                only if another load has fetched it.
            budget_bytes: Memory that may be used.
            owned: Closes the files in the cache; the objects stay open.

        Raises:
            Cancelled: The calling thread should end.
            StioError: An object could not be read from the store.
        """
        found = list(files)
        left = [k for k, file in enumerate(files) if isinstance(file, RequestedSource) and nbytes[k]]
        left = [k for k in left if nbytes[k] * 2 >= files[k].identity.nbytes and self._key(files[k])]
        room = max(0, max_open_files() - sum(isinstance(file, LocalFile) for file in files))
        if len(left) > room:
            message = "%s: %s objects are read without the cache: they are more than this process may open (ulimit -n)"
            log(logging.WARNING, message, self.path, f"{len(left) - room:,}")
            left = left[:room]
        # First what no other process fetches.
        for waits in (False, True):
            busy: list[int] = []
            for k in left:
                source = files[k]
                assert isinstance(source, RequestedSource)
                with self._without_cache(source):
                    with opened_directory(self.path, make=True) as dir_fd:
                        file, is_busy = self._get(source, dir_fd, budget_bytes, waits=waits)
                    if is_busy:
                        busy.append(k)
                    if file is not None:
                        owned.callback(file.close)
                        found[k] = file
            left = busy
        return found

    def discard(self, error: StioError) -> None:
        """Remove the file that an error names if it is one of the cache, and note that in the error."""
        folder, name = os.path.split(error.path or "")
        if folder != self.path or not _NAME.fullmatch(name):
            return
        with suppress(OSError), opened_directory(self.path) as dir_fd:
            calls.unlink(name, dir_fd=dir_fd)
            error.message += "; it is removed from the cache, so load again"
            error.args = (error.message,)

    def _get(
        self, source: RequestedSource, dir_fd: int, budget_bytes: int, *, waits: bool
    ) -> tuple[LocalFile | None, bool]:
        """Return an object's file, None without one, and whether another process fetches it."""
        key = self._key(source)
        if (file := self._open(key, source, dir_fd)) is not None:
            self._count(hits=1)
            return file, False
        lock = FileLock(key + LOCK_SUFFIX, dir_fd)
        try:
            if not lock.try_lock():
                if not waits:
                    return None, True
                wait_until(lambda: calls.exists(key + FILE_SUFFIX, dir_fd=dir_fd) or lock.try_lock())
            if (file := self._open(key, source, dir_fd)) is not None:  # another process has fetched it
                self._count(hits=1)
                return file, False
            if not lock.is_held:  # it was published, and evicted at once
                return None, False
            self._count(misses=1)
            self._fetch_one(key, source, dir_fd, budget_bytes)
            return self._open(key, source, dir_fd), False
        finally:
            lock.release()

    def _fetch_one(self, key: str, source: RequestedSource, dir_fd: int, budget_bytes: int) -> None:
        """Put an object into the cache; the caller holds its lock.

        Raises:
            OSError: It does not fit, or the file could not be written; nothing is left of it.
        """
        nbytes = source.identity.nbytes
        if nbytes > self.max_bytes:
            raise OSError(errno.ENOSPC, f"{show_bytes(nbytes)} are more than max_bytes")
        directory = FileLock(_DIRECTORY_LOCK, dir_fd)
        wait_until(directory.try_lock)
        try:
            self._make_room(key, nbytes, dir_fd)
            part = Download(key + PART_SUFFIX, nbytes, dir_fd)
        finally:
            directory.release()
        with closing(part):
            try:
                with memory.reporting_shortage(source.path):
                    part.fill(source, source.requests.within(max(1, budget_bytes // 2)))
                source.check_unchanged()
                part.publish(key + FILE_SUFFIX)
            except (OSError, ChangedDuringReadError) as error:
                # Of another error of the store, or a cancel, the part stays, for the next load.
                if isinstance(error, ChangedDuringReadError) or not isinstance(error, StioError):
                    with suppress(OSError):
                        calls.unlink(key + PART_SUFFIX, dir_fd=dir_fd)
                raise

    def _make_room(self, key: str, nbytes: int, dir_fd: int) -> None:
        files = [file for file in _scan(dir_fd) if file.key != key]
        excess = sum(file.nbytes for file in files) + nbytes - self.max_bytes
        victims: list[_StoredFile] = []
        with ExitStack() as locked:
            for part in _abandoned(files, dir_fd, locked):
                if excess > 0 or clock.now() - part.used_at > OLD_SECONDS:
                    victims.append(part)
                    excess -= part.nbytes
            unused = _unused(files, dir_fd, locked)
            while excess > 0:
                file = next(unused, None)
                if file is None:  # nothing is removed for an object that does not fit then
                    raise OSError(errno.ENOSPC, "other processes use, or fetch, the rest of the cache")
                victims.append(file)
                excess -= file.nbytes
            self._remove(victims, dir_fd)

    def _remove(self, files: Sequence[_StoredFile], dir_fd: int) -> int:
        """Remove files whose locks the caller holds; return their size."""
        nbytes = 0
        for file in files:
            with suppress(OSError):
                calls.unlink(file.name, dir_fd=dir_fd)
                nbytes += file.nbytes
                if file.suffix == FILE_SUFFIX:
                    self._count(evictions=1)
                else:
                    log(logging.INFO, "%s: removed the part of an object that was left there", self.path)
        return nbytes

    def _open(self, key: str, source: Source, dir_fd: int, *, compare: bool = False) -> LocalFile | None:
        """Open an object's file and hold it; None if it is not there.

        Args:
            key: Of the object.
            source: The object.
            dir_fd: The directory.
            compare: Compare its first bytes, which a source has read when it was opened, with those of the object.

        Raises:
            OSError: The filesystem has no locks, or the file cannot be opened.
        """
        name = key + FILE_SUFFIX
        try:
            fd = calls.open_file(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=dir_fd)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            now, there = os.fstat(fd), status_at(dir_fd, name)
            if there is None or not os.path.samestat(now, there):
                return None  # it was evicted
            with suppress(OSError):  # another user's file, or a directory that is only read
                os.utime(fd, ns=(time.time_ns(), now.st_mtime_ns))
            file = _EntryFile(fd, os.path.join(self.path, name), source.identity)
            if now.st_size == source.identity.nbytes and not (compare and _differ(file, source)):
                fd = -1
                return file
            log(logging.WARNING, "%s: the file is damaged; it is fetched again", file.path)
            calls.unlink(name, dir_fd=dir_fd)
            return None
        except BlockingIOError:
            return None  # it is being evicted
        except StorageError as error:  # of this machine: the first bytes of an object that was just opened are there
            raise OSError(error.errno or errno.EIO, error.message) from error
        finally:
            if fd >= 0:
                os.close(fd)

    @contextmanager
    def _without_cache(self, source: Source) -> Iterator[None]:
        """Log an error of the disk inside the block; the load goes on without the cache."""
        try:
            yield
        except StioError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            log(logging.WARNING, "%s: read without the cache in %s: %s", source.path, self.path, reason)

    def _key(self, source: Source) -> str:
        identity = source.identity
        return object_key(source.path, identity) if identity.nbytes else ""

    def _count(self, **more: int) -> None:
        with _counting:
            self._counts = add_counts(self._counts, **more)


_counting = new_lock()  # for the counters of all caches


@process.after_fork_in_child
def _forget_parent() -> None:
    """Make a new lock in a forked child: a thread of the parent may hold the old one."""
    global _counting
    _counting = new_lock()


class _EntryFile(LocalFile):
    """A file in the cache, in place of the object whose content it has.

    Args:
        fd: Its descriptor, owned from here on (only if the constructor returns). It holds the shared lock, and a
            mapping of it does so too.
        path: Path of the file.
        identity: The state of the object.
    """

    def __init__(self, fd: int, path: str, identity: Identity) -> None:
        super().__init__(fd, path)
        self.identity = identity


def _differ(file: LocalFile, source: Source) -> bool:
    """Return whether the first bytes of two sources of one size differ."""
    nbytes = min(_HEAD_BYTES, source.identity.nbytes)
    region = memory.allocate(2 * nbytes)
    halves = region.sub(0, nbytes), region.sub(nbytes, nbytes)
    for one, half in zip((file, source), halves, strict=True):
        one.read_into(0, [half])
    return bytes(halves[0].view()) != bytes(halves[1].view())  # views are compared item by item


# The directory.


@dataclass(frozen=True, slots=True)
class _StoredFile:
    """A file of the cache's directory."""

    key: str
    suffix: str
    nbytes: int
    used_at: float

    @property
    def name(self) -> str:
        return self.key + self.suffix


def _scan(dir_fd: int) -> list[_StoredFile]:
    """Return the files of a cache; others in the directory are not its own."""
    found = []
    for name in os.listdir(dir_fd):
        match = _NAME.fullmatch(name)
        status = status_at(dir_fd, name) if match else None
        if match and status is not None:
            used_at = status.st_mtime if match[2] == PART_SUFFIX else status.st_atime
            found.append(_StoredFile(match[1], match[2], 0 if match[2] == LOCK_SUFFIX else status.st_size, used_at))
    return found


def _abandoned(files: Sequence[_StoredFile], dir_fd: int, locked: ExitStack) -> list[_StoredFile]:
    """Return the parts whose process is dead, the oldest first; each stays locked. Remove free locks."""
    parts = {file.key: file for file in files if file.suffix == PART_SUFFIX}
    abandoned = []
    for key in sorted({file.key for file in files if file.suffix == LOCK_SUFFIX} | parts.keys()):
        lock = FileLock(key + LOCK_SUFFIX, dir_fd)
        with suppress(OSError):
            if lock.try_lock():
                locked.callback(lock.release)
                # It may have been published since the directory was listed.
                if key in parts and calls.exists(parts[key].name, dir_fd=dir_fd):
                    abandoned.append(parts[key])
    return sorted(abandoned, key=lambda file: file.used_at)


def _unused(files: Sequence[_StoredFile], dir_fd: int, locked: ExitStack) -> Iterator[_StoredFile]:
    """Yield the files that no process uses, the least recently used first; each stays locked."""
    for file in sorted(files, key=lambda file: file.used_at):
        if file.suffix == FILE_SUFFIX:
            with suppress(OSError):
                fd = calls.open_file(file.name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=dir_fd)
                locked.callback(calls.close, fd)
                if calls.try_lock(fd):
                    locked.callback(calls.unlock, fd)
                    yield file


# Copies of objects.


def object_key(path: str, identity: Identity) -> str:
    """Return a name for one state of one object; "" if the store says nothing that identifies a state.

    Args:
        path: URL of the object without secrets.
        identity: Its state.
    """
    state = identity.etag or (identity.mtime_ns and str(identity.mtime_ns))
    if not state:
        return ""
    return hashlib.sha256(f"{path}\n{state}\n{identity.nbytes}".encode("utf-8", "surrogatepass")).hexdigest()[:40]


def check_interrupted() -> None:
    """Raise `Cancelled` if the calling thread should end (`stio.runtime.operation.is_interrupted`)."""
    if is_interrupted():
        raise Cancelled


def wait_until(ready: Callable[[], bool | None]) -> None:
    """Call `ready` again and again until it is true.

    Raises:
        Cancelled: The calling thread should end.
    """
    while not LockTimeout(_LOOK_SECONDS).wait_until(ready, check_interrupted):
        pass


class Download:
    """The file of an object that is being copied. One user at a time; close it before the lock is released.

    Args:
        name: Name of the file; it must identify the object and its state.
        nbytes: Size of the object.
        dir_fd: Its directory; the caller keeps it open.

    Raises:
        OSError: The file could not be made. ENOSPC: there is too little space; then nothing is left of it.
    """

    def __init__(self, name: str, nbytes: int, dir_fd: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._dir_fd = dir_fd
        self._num_blocks = -(-nbytes // BLOCK_BYTES)
        self._done = bytearray(self._num_blocks)
        self._seal = _MARKS_VERSION + boot_id().encode()[:36].ljust(36)
        self._fd = calls.open_file(name, os.O_RDWR | os.O_CREAT, dir_fd=dir_fd, mode=0o666)
        try:
            if not self._read_marks():
                os.ftruncate(self._fd, 0)
                calls.reserve(self._fd, self._nbytes + self._num_blocks + len(self._seal))
                write_whole(self._fd, bytes(self._num_blocks) + self._seal, self._nbytes)
        except BaseException:
            self.close()
            with suppress(OSError):
                calls.unlink(name, dir_fd=dir_fd)
            raise

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be read."""
        return sum(stop - begin for begin, stop in self._missing())

    def fill(
        self, source: Source, requests: Requests, *, report: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        """Read the missing blocks. Blocks; on an error or a cancel the blocks that are complete stay.

        Args:
            source: The object, in the state that the name stands for.
            requests: Size and number of the reads; so much memory is used as well (`Requests.buffer_bytes`).
            report: Called with the number of bytes after each block, on several threads.

        Raises:
            StioError: The object could not be read.
            OSError: The file could not be written.
            Cancelled: The calling thread should end.
        """
        blocks = list(self._missing())[::-1]
        step = min(requests.nbytes, BLOCK_BYTES)
        pool = WorkerPool("fetch")

        def work() -> None:
            region: Region | None = None
            for begin, stop in pool.items(blocks):
                check_interrupted()
                region = region or memory.allocate(min(step, self._nbytes))
                for at in range(begin, stop, step):
                    part = region.sub(0, min(step, stop - at))
                    source.read_into(at, [part])
                    write_whole(self._fd, part.view(), at)
                self._complete(begin, stop)
                report(stop - begin)

        if blocks:
            pool.run(work, min(len(blocks), requests.num_in_flight))

    def publish(self, name: str, *, read_only: bool = True) -> None:
        """Make the file durable and give it its name. All blocks must be there.

        Args:
            name: Its name, relative to the directory; it replaces a file of that name.
            read_only: Take the right to write it from all users.

        Raises:
            OSError: The file could not be made durable; its content must not be used.
        """
        os.ftruncate(self._fd, self._nbytes)
        if read_only:
            calls.fchmod(self._fd, os.fstat(self._fd).st_mode & 0o444)
        calls.fsync(self._fd)
        calls.rename(self._name, name, source_fd=self._dir_fd, target_fd=self._dir_fd)
        calls.sync_directory(self._dir_fd)

    def close(self) -> None:
        """Close the file; what is complete of it stays. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            calls.close(fd)

    def _missing(self) -> Iterator[tuple[int, int]]:
        for k, done in enumerate(self._done):
            if not done:
                yield k * BLOCK_BYTES, min(self._nbytes, (k + 1) * BLOCK_BYTES)

    def _complete(self, begin: int, stop: int) -> None:
        self._done[begin // BLOCK_BYTES] = 1
        calls.start_writeback(self._fd, begin, stop - begin)  # or the `fsync` at the end would write all of it
        write_whole(self._fd, b"\1", self._nbytes + begin // BLOCK_BYTES)

    def _read_marks(self) -> bool:
        """Read the marks of an earlier download; return whether there are any that hold."""
        raw = os.pread(self._fd, self._num_blocks + len(self._seal) + 1, self._nbytes)
        marks, seal = raw[: self._num_blocks], raw[self._num_blocks :]
        if not boot_id() or seal != self._seal or not set(marks) <= {0, 1}:
            return False
        self._done[:] = marks
        return True


@contextmanager
def opened_directory(path: str, *, make: bool = False, parent_fd: int | None = None) -> Iterator[int]:
    """Open a directory for the duration of a block.

    Args:
        path: Its path.
        make: Make it, for this user only, if it is not there.
        parent_fd: The path is a name in this directory, and no link is followed.

    Raises:
        OSError: It cannot be opened, or made.
    """
    if make:
        os.makedirs(path, mode=0o700, exist_ok=True)
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags) if parent_fd is None else calls.open_directory(path, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)
