"""Copies a checkpoint from a URL to a new directory: resumed after an interruption, verified, published by one rename.

The files are fetched into a directory beside the new one, which later takes its name. A record there names the state of
each file in the store. So another call fetches only what is missing, as long as the store has the same states; a call
that finds the new directory complete fetches nothing. Before the rename, headers and index are checked, files are
compared with the manifest if there is one, and the store is asked whether it still has the same states.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

from stio.errors import CheckpointNotFoundError, StioError, StorageError, UnsafePathError
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX
from stio.loading.integrity import judge_files, read_manifest
from stio.loading.open import OpenCheckpoint, choose, open_checkpoint
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.urls import is_url, without_secrets
from stio.storage.base import RequestedSource, Root, Source
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.small_files import status_at
from stio.storage.download import (
    LOCK_SUFFIX,
    PART_SUFFIX,
    Download,
    FileLock,
    check_interrupted,
    object_key,
    opened_directory,
    wait_until,
)
from stio.storage.open import is_hub, open_url

RECORD_NAME = "stio-pull.json"
"""File of a pulled directory that names the state of each of its files in the store."""

_STAGING_SUFFIX = ".stio-pull"
_MAX_RECORD_BYTES = 64 << 20
_OTHER_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
"""Files of a directory that are not fetched unless they belong to the checkpoint, by the ends of their names."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did."""

    url: str
    """The source, without secrets."""
    path: str
    """The directory."""
    files: dict[str, int]
    """Size of each file in bytes, by its name."""
    fetched_bytes: int
    """Bytes that were read from the store; the rest was there from an earlier call."""
    verified: str
    """`"sha256"` or `"xxh3"`: all files of the checkpoint have the digests of its manifest. `"headers"`: there is no
    manifest; sizes, headers and index were checked."""

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())


def pull(
    url: str,
    directory: str | os.PathLike[str],
    *,
    also: Sequence[str] = (),
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Callable[[int, int], object] = lambda nbytes, total_bytes: None,
) -> PullResult:
    """Copy a checkpoint from a URL to a directory; blocks.

    Calls for one directory, in several processes of one machine, wait for each other.

    Args:
        url: URL of a file, an index or a directory; see `stio.load`. Of a directory that the store can list, all other
            files are copied too (configuration, tokenizer), except for those of other weights.
        directory: The directory. It must not exist, be empty, or be the result of an earlier call.
        also: Names of further files beside the checkpoint, for servers that list no directories.
        budget_bytes: Memory that may be used.
        progress: Called with a number of bytes that are there, and that of all, on several threads.

    Raises:
        ValueError: It is no URL.
        IntegrityError: A file differs from the checkpoint's manifest. It is fetched again by the next call.
        ChangedDuringReadError: The store has other files by now.
        StorageError: The directory holds something else, or cannot be written; what was fetched stays for another call.
        StioError: The checkpoint cannot be read; see `stio.load`.
        Cancelled: The calling thread should end.
    """
    if not is_url(url):
        raise ValueError(f"pull copies from a URL, such as s3://bucket/model; {without_secrets(url)!r} is none")
    if is_hub(url):
        raise ValueError("the hub's own command copies its repositories: `hf download OWNER/NAME --local-dir DIR`")
    target = os.path.abspath(os.fsdecode(directory))
    parent, name = os.path.split(target)
    if not name or os.path.ismount(target):
        raise StorageError(
            "this is a mount point, which a complete directory cannot replace; give a directory below it",
            path=target,
            errno=errno.EBUSY,
        )
    staging = f".{name}{_STAGING_SUFFIX}"
    with ExitStack() as closing_all:
        parent_fd = -1
        with _translated(target):
            os.makedirs(parent, exist_ok=True)
            parent_fd = closing_all.enter_context(opened_directory(parent))
            lock = FileLock(staging + LOCK_SUFFIX, parent_fd)
            closing_all.callback(lock.release)
            wait_until(lock.try_lock)
        objects = _open_objects(url, also, closing_all)
        one = _Pull(url, target, staging, objects, parent_fd, budget_bytes, progress)
        with _translated(target):
            return one.run()


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise an error of the operating system in a block as one of stio."""
    try:
        yield
    except StioError:
        raise
    except OSError as error:
        raise refused("writing", path, error) from error


# What is fetched.


def _open_objects(url: str, also: Sequence[str], owned: ExitStack) -> dict[str, RequestedSource]:
    """Open all objects; return them by their names in the new directory."""
    root, name = open_url(url)
    owned.callback(root.close)
    with _advised(url):
        listed = [] if name or url.lower().startswith("http") else list(root.listdir())
        index: str | None = name if name.endswith(INDEX_SUFFIX) else None
        if not name:
            index, name = choose(root)
    # The index is opened first and compared at the end: all shards are of one state of it.
    found = {index: _requested(root, index, owned)} if index is not None else {}
    opened = open_checkpoint(url, with_manifest=True, strict=False, check=check_interrupted)
    owned.callback(opened.close)
    files = opened.open_files(range(len(opened.files)), owned)
    for header, file in zip(opened.headers, files, strict=True):
        shard = header.shard if index is not None else name
        assert isinstance(file, RequestedSource)
        found[shard] = file
    skipped = (RECORD_NAME, ".stio-lock")
    others = [one for one in listed if not one.endswith(_OTHER_WEIGHTS) and one not in skipped]
    if opened.manifest is not None and opened.manifest.texts:
        others.append(os.path.basename(opened.manifest.path))
    names = dict.fromkeys([*found, *others, *also])
    for one in names:
        _require_plain(one, without_secrets(url), in_index=index is not None)
    found |= {one: _requested(root, one, owned) for one in names if one not in found}
    return found


def _requested(root: Root, name: str, owned: ExitStack) -> RequestedSource:
    check_interrupted()
    file: Source = root.open(name)
    owned.callback(file.close)
    assert isinstance(file, RequestedSource)
    return file


def _require_plain(name: str, path: str, *, in_index: bool) -> None:
    """Raise `UnsafePathError` for a name that leads out of a directory, or hides a file of stio there."""
    parts = name.split("/")
    is_plain = len(parts) == 1 or (in_index and name.endswith(FILE_SUFFIX))
    if not is_plain or "\0" in name or os.sep in parts[-1] or parts[0].startswith(".stio-"):
        raise UnsafePathError("this name of a file is not allowed", path=path, found=name)
    if any(part in ("", ".", "..") for part in parts):
        raise UnsafePathError("this name leads out of the directory", path=path, found=name)


@contextmanager
def _advised(url: str) -> Iterator[None]:
    try:
        yield
    except CheckpointNotFoundError as error:
        error.path = error.path or without_secrets(url)
        raise


# One call.


@dataclass(slots=True)
class _Pull:
    url: str
    target: str
    staging: str
    objects: dict[str, RequestedSource]
    parent_fd: int
    budget_bytes: int
    progress: Callable[[int, int], object]
    fetched_bytes: int = 0

    def run(self) -> PullResult:
        record = self._record()
        if os.path.lexists(self.target):
            with suppress(OSError), opened_directory(self.target) as fd:
                if _read_record(fd) == record and all(_is_complete(fd, name, record) for name in record):
                    self.progress(self._total_bytes, self._total_bytes)
                    with closing(self._opened(self.target)) as opened:
                        manifest = read_manifest(opened)
                    return self._result("headers" if manifest is None else manifest.algorithm)
            if not os.path.isdir(self.target) or os.path.islink(self.target) or os.listdir(self.target):
                raise StorageError(
                    "something else is there; remove it, or give a new directory for each state of a checkpoint",
                    path=self.target,
                    errno=errno.EEXIST,
                )
        path = os.path.join(os.path.dirname(self.target), self.staging)
        with suppress(FileExistsError):
            calls.make_directory(self.staging, dir_fd=self.parent_fd)
        with opened_directory(path) as fd:
            self._prepare(record, fd)
            for name, source in self.objects.items():
                self._fetch(name, source, record[name], fd)
            for source in self.objects.values():
                check_interrupted()
                source.check_unchanged()
            try:
                verified = self._verify(path)
            except StioError as error:
                if not isinstance(error, StorageError):  # the files are wrong: they are fetched again
                    calls.remove_tree(self.staging, dir_fd=self.parent_fd)
                raise
            for folder in {os.path.dirname(name) for name in self.objects} - {""}:
                with opened_directory(os.path.join(path, folder)) as below:
                    calls.sync_directory(below)
            calls.sync_directory(fd)
        calls.rename(self.staging, os.path.basename(self.target), source_fd=self.parent_fd, target_fd=self.parent_fd)
        calls.sync_directory(self.parent_fd)
        return self._result(verified)

    @property
    def _total_bytes(self) -> int:
        return sum(source.identity.nbytes for source in self.objects.values())

    def _record(self) -> dict[str, list[object]]:
        """Return key and size of each object; "" is the key of one whose state the store does not identify."""
        return {
            name: [object_key(source.path, source.identity), source.identity.nbytes]
            for name, source in sorted(self.objects.items())
        }

    def _prepare(self, record: dict[str, list[object]], fd: int) -> None:
        """Remove from the directory what is not of these states, and write the record."""
        before = _read_record(fd) or {}
        keys = {str(key) + PART_SUFFIX for key, _ in record.values() if key}
        same = {name for name, state in record.items() if before.get(name) == state and state[0]}
        for name in {*before} - same:
            with suppress(OSError):
                calls.unlink(name, dir_fd=fd)
        for name in os.listdir(fd):
            if name.endswith(PART_SUFFIX) and name not in keys:
                calls.unlink(name, dir_fd=fd)
        temporary = RECORD_NAME + PART_SUFFIX
        data = json.dumps(record, indent=1).encode()
        with open(calls.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=fd), "wb") as file:
            file.write(data)
            file.flush()
            calls.fsync(file.fileno())
        # After the removals: what a record names is of the state that it names.
        calls.rename(temporary, RECORD_NAME, source_fd=fd, target_fd=fd)
        calls.sync_directory(fd)

    def _fetch(self, name: str, source: RequestedSource, state: list[object], fd: int) -> None:
        nbytes = source.identity.nbytes
        if state[0] and _is_complete(fd, name, {name: state}):
            self.progress(nbytes, self._total_bytes)
            return
        if "/" in name:
            os.makedirs(os.path.join(os.path.dirname(self.target), self.staging, os.path.dirname(name)), exist_ok=True)
        part = Download(f"{state[0] or 'unknown'}{PART_SUFFIX}", nbytes, fd)
        counting = threading.Lock()

        def report(done: int) -> None:
            with counting:
                self.fetched_bytes += done
            self.progress(done, self._total_bytes)

        with closing(part):
            self.progress(nbytes - part.missing_bytes, self._total_bytes)
            part.fill(source, source.requests.within(max(1, self.budget_bytes // 2)), report=report)
            part.publish(name, read_only=False)

    def _opened(self, path: str) -> OpenCheckpoint:
        index = next((name for name in self.objects if name.endswith(INDEX_SUFFIX)), None)
        single = next(name for name in self.objects if name.endswith(FILE_SUFFIX))
        return open_checkpoint(
            os.path.join(path, index or single), with_manifest=True, strict=False, check=check_interrupted
        )

    def _verify(self, path: str) -> str:
        """Check the files on this machine; return the algorithm of their manifest, or "headers"."""
        with closing(self._opened(path)) as opened:
            manifest = read_manifest(opened)
            if manifest is None:
                return "headers"
            judge_files(opened, manifest, check=check_interrupted, budget_bytes=self.budget_bytes, to_the_end=False)
            return manifest.algorithm

    def _result(self, verified: str) -> PullResult:
        files = {name: source.identity.nbytes for name, source in sorted(self.objects.items())}
        return PullResult(without_secrets(self.url), self.target, files, self.fetched_bytes, verified)


def _read_record(fd: int) -> dict[str, list[object]] | None:
    """Return the record in a directory, None if there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        with open(calls.open_file(RECORD_NAME, os.O_RDONLY, dir_fd=fd), "rb") as file:
            found = json.loads(file.read(_MAX_RECORD_BYTES))
        if isinstance(found, dict) and all(_is_record_name(name) for name in found):
            return found
    return None


def _is_record_name(name: str) -> bool:
    return bool(name) and not os.path.isabs(name) and ".." not in name.split("/") and "\0" not in name


def _is_complete(fd: int, name: str, record: dict[str, list[object]]) -> bool:
    """Return whether a file of a record is there: its name came with a rename, when it was whole."""
    with suppress(OSError):
        found = status_at(fd, name)
        return found is not None and found.st_size == record[name][1]
    return False
