"""Copies a checkpoint from a URL to a new directory: resumed after an interruption, verified, published by one rename.

The files are fetched into a directory beside the new one, which later takes its name. A record there names the state of
each file in the store. So another call fetches only what is missing, as long as the store has the same states; a call
that finds the new directory complete fetches nothing. Files of the Hugging Face hub come by the hub's own cache. Before
the rename, headers and index are checked, files are compared with the manifest if there is one, and the states in the
store are compared once more.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    StioError,
    StorageError,
    UnsafePathError,
    printable,
)
from stio.format.directory import NamedCheckpoint, choose, of_index
from stio.format.naming import (
    FILE_SUFFIX,
    FILE_SUFFIXES,
    PICKLE_SUFFIXES,
    advice_for_destination,
    is_index,
    names_checkpoint,
    shard_number,
)
from stio.format.other_sources import advice_for_slash
from stio.loading.integrity import judge_files, read_manifest
from stio.loading.open import OpenCheckpoint, at_url, chosen, open_checkpoint
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.text import SCHEMES, is_url, without_secrets
from stio.storage.base import Identity, ParallelRoot, RequestedSource, Requests, Root, Source
from stio.storage.checks import local_directory, refusals
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import FileLock
from stio.storage.commit.files import status_at
from stio.storage.download import (
    LOCK_SUFFIX,
    PART_SUFFIX,
    Download,
    check_interrupted,
    object_key,
    opened_directory,
    wait_until,
)
from stio.storage.hub import HubRoot
from stio.storage.local import LocalFile
from stio.storage.open import SingleFileRoot, open_url

RECORD_NAME = "stio-pull.json"
"""File of a pulled directory that names the state of each of its files in the store."""

_Record: TypeAlias = dict[str, list[object]]
"""Key and size of each file, by its name."""

_LOCAL = Requests(nbytes=8 << 20, num_in_flight=4, gap_bytes=0)
"""How a file of this machine is copied."""
_STAGING_SUFFIX = ".stio-pull"
_MAX_RECORD_BYTES = 64 << 20
_OTHER_WEIGHTS = (*FILE_SUFFIXES, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
"""Files of a directory that are not fetched unless they belong to the checkpoint, by the ends of their names. An index
is not either."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did."""

    url: str
    """The source, without secrets; of the hub with the commit."""
    path: str
    """The directory."""
    files: dict[str, int]
    """Size of each file in bytes, by its name."""
    fetched_bytes: int
    """Bytes that were read from the store, or from the hub's cache; the rest was there from an earlier call."""
    verified: str
    """`"sha256"` or `"xxh3"`: all files of the checkpoint had the digests of its manifest, or those in the hub's cache,
    when the directory got its name; a later call that finds it complete compares sizes only. `"headers"`: there are no
    digests; sizes, headers and index were checked."""

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
        url: URL of a file, an index or a directory; see `stio.load`. A file with another name is stored as
            NAME.safetensors. Of a directory that the store can list, all other files are copied too (configuration,
            tokenizer), except for those of other weights. The hub's files are in its cache then too; shards are hard
            links to that on one filesystem.
        directory: The directory. It must not exist, be empty, or be the result of an earlier call.
        also: Names of further files beside the checkpoint, for servers that list no directories.
        budget_bytes: Memory that may be used.
        progress: Called with a number of bytes that are there, and that of all, on several threads.

    Raises:
        ValueError: It is no URL, or the directory is named like a file.
        IntegrityError: A file differs from the checkpoint's manifest. It is fetched again by the next call.
        ChangedDuringReadError: The store has other files by now.
        StorageError: The directory holds something else, or cannot be written; what was fetched stays for another call.
        FormatError: It is the URL of a file of `torch.save`.
        StioError: The checkpoint cannot be read; see `stio.load`.
        Cancelled: The calling thread should end.
    """
    if not is_url(url):
        advice = advice_for_slash(url, SCHEMES)
        why = f"{without_secrets(url)!r} is no URL" + f": {advice}" * bool(advice)
        raise ValueError(f"pull copies from a URL, such as s3://bucket/model; {why}")
    target = local_directory(directory, "pull")
    parent, name = os.path.split(target)
    if not name or os.path.ismount(target):
        raise StorageError(
            "this is a mount point, which a complete directory cannot replace; give a directory below it",
            path=target,
            errno=errno.EBUSY,
        )
    looks_like_file = name.endswith(FILE_SUFFIX) or advice_for_destination(name)
    if looks_like_file and not os.fsdecode(directory).endswith(os.sep) and not os.path.isdir(target):
        raise ValueError(
            f"pull copies into a directory, and {printable(name)!r} looks like a file; give the name of a directory, "
            "or add a slash"
        )
    staging = f".{name}{_STAGING_SUFFIX}"
    with ExitStack() as closing_all:
        parent_fd = -1
        with refusals("writing", target):
            os.makedirs(parent, exist_ok=True)
            parent_fd = closing_all.enter_context(opened_directory(parent))
            lock = FileLock(staging + LOCK_SUFFIX, parent_fd)
            closing_all.callback(lock.release)
            wait_until(lock.try_lock)
        root, object_name = open_url(url)
        closing_all.callback(root.close)
        fixed = root.resolve() if isinstance(root, HubRoot) else ""  # the URL with the commit
        one = _Pull(fixed or url, object_name, frozenset(also), target, staging, parent_fd, budget_bytes, progress)
        with refusals("writing", target, caught=(OSError,)):
            if fixed:  # the state of all files is known before one is opened
                found = one.complete(
                    lambda record: record == _states(fixed, object_name, _sizes(record)) and record.keys() >= set(also)
                )
                if found is not None:
                    return found
            one.objects, one.name, one.verified = at_url(
                url, root, object_name, lambda root, name: _open_objects(url, root, name, also, closing_all)
            )
            if fixed:
                sizes = {name: source.identity.nbytes for name, source in sorted(one.objects.items())}
                wanted = _states(fixed, object_name, sizes)
            else:  # "": the store does not identify the state
                wanted = {
                    name: [object_key(source.path, source.identity), source.identity.nbytes]
                    for name, source in sorted(one.objects.items())
                }
            one.record = wanted
            return one.complete(lambda record: record == wanted) or one.run()


# What is fetched.


def _states(url: str, object_name: str, sizes: Mapping[str, int]) -> _Record:
    """Return keys and sizes of files of one state, which a URL names, such as one with a commit."""
    return {
        name: [object_key(f"{url}\n{object_name}\n{name}", Identity(0, 0, nbytes, 0, etag=url)), nbytes]
        for name, nbytes in sizes.items()
    }


def _open_objects(
    url: str, root: Root, name: str, also: Sequence[str], owned: ExitStack
) -> tuple[dict[str, Source], str, str]:
    """Open all objects; return them by their names in the new directory, and `_Pull.name` and `verified`."""
    listed: list[str] = []
    if not name and not url.lower().startswith("http"):
        listed = list(root.list_all() if isinstance(root, HubRoot) else root.listdir())
    named = NamedCheckpoint(None, (name,), name)
    if not name:
        named = chosen(root)[1]
    elif is_index(name):
        named = of_index(name)
    # The index is opened first and compared at the end: all shards are of one state of it.
    index = named.index
    found = {index: _opened_object(root, index, owned)} if index is not None else {}
    if isinstance(root, HubRoot):
        url = f"{root.resolve()}/{name}"  # the same commit; a slash at its end means a directory
    is_link = bool(name) and not (names_checkpoint(name) or is_index(name))  # its content alone says that it is a file
    opened = open_checkpoint(
        SingleFileRoot(root, name) if is_link else url,
        with_manifest=not is_link,
        strict=False,
        check=check_interrupted,
    )
    owned.callback(opened.close)
    verified = "headers"
    if (manifest := read_manifest(opened)) is not None and manifest.in_names:
        judge_files(opened, manifest, check=check_interrupted, to_the_end=False)
        verified = manifest.algorithm
    if opened.index is None:  # its shards are gone, and a whole file was opened instead
        found = {}
    files = opened.open_files(range(len(opened.files)), owned)
    shards = [_loadable(name)] if is_link else [header.shard for header in opened.headers]
    found |= dict(zip(shards, files, strict=True))
    skipped = (RECORD_NAME, ".stio-lock")
    others = [one for one in listed if not one.endswith(_OTHER_WEIGHTS) and not is_index(one) and one not in skipped]
    if opened.manifest is not None and opened.manifest.texts:
        others.append(os.path.basename(opened.manifest.path))
    names = dict.fromkeys([*found, *others, *also])
    for one in names:
        _require_plain(one, without_secrets(url), in_index=index is not None)
    left = [one for one in names if one not in found]
    if isinstance(root, ParallelRoot):
        root.open_ahead(left)
    main = opened.index or (shards[0] if len(shards) == 1 else "")
    return found | {one: _opened_object(root, one, owned) for one in left}, main, verified


def _loadable(name: str) -> str:
    """Return the name of a copy, by which a load of its directory finds it, of a file with another name."""
    stem = next((name.removesuffix(end) for end in PICKLE_SUFFIXES if name.endswith(end)), name)
    is_plain = re.fullmatch(r"\w[\w.-]*", stem, re.ASCII) and shard_number(stem) is None
    return f"{stem if is_plain else 'model'}{FILE_SUFFIX}"


def _opened_object(root: Root, name: str, owned: ExitStack) -> Source:
    check_interrupted()
    file = root.open(name)
    owned.callback(file.close)
    return file


def _require_plain(name: str, path: str, *, in_index: bool) -> None:
    """Raise `UnsafePathError` for a name that leads out of a directory, or hides a file of stio there."""
    parts = name.split("/")
    is_plain = len(parts) == 1 or (in_index and name.endswith(FILE_SUFFIXES))
    is_own = parts[0].startswith(".stio-") or name == RECORD_NAME
    leads_out = any(part in ("", ".", "..") for part in parts) or os.sep in parts[-1]
    if not is_plain or is_own or leads_out or "\0" in name:
        raise UnsafePathError(
            "this name of a file is not allowed: it leads out of the directory, has a folder, or is one of stio's own",
            path=path,
            found=name,
        )


# One call.


@dataclass(slots=True)
class _Pull:
    url: str
    name: str
    """Name of the index, or of the only file, of the checkpoint; "": it is not known yet, or there is none."""
    also: frozenset[str]
    """Files that the caller wants beside the checkpoint."""
    target: str
    staging: str
    parent_fd: int
    budget_bytes: int
    progress: Callable[[int, int], object]
    objects: dict[str, Source] = field(default_factory=dict)
    """All objects, by their names."""
    record: _Record = field(default_factory=dict)
    """Their states."""
    verified: str = "headers"
    """`PullResult.verified` before the files were copied."""
    fetched_bytes: int = 0

    def complete(self, is_wanted: Callable[[_Record], bool]) -> PullResult | None:
        """Return the result if the directory is complete, and its record is wanted."""
        with suppress(OSError), opened_directory(self.target) as fd:
            record = _read_record(fd)
            if record and is_wanted(record) and all(_is_complete(fd, name, record) for name in record):
                self.record = record
                self.progress(self._total_bytes, self._total_bytes)
                with closing(self._opened(self.target)) as opened:
                    manifest = read_manifest(opened)
                return self._result("headers" if manifest is None else manifest.algorithm)
        return None

    def run(self) -> PullResult:
        record = self.record
        if os.path.lexists(self.target):
            if not os.path.isdir(self.target) or os.path.islink(self.target) or os.listdir(self.target):
                raise StorageError(
                    "the destination holds something else, or an earlier state of the checkpoint; give a new directory",
                    path=self.target,
                    errno=errno.EEXIST,
                )
        path = os.path.join(os.path.dirname(self.target), self.staging)
        with suppress(FileExistsError):
            calls.make_directory(self.staging, dir_fd=self.parent_fd)
        with opened_directory(self.staging, parent_fd=self.parent_fd) as fd:
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
        return sum(_sizes(self.record).values())

    def _prepare(self, record: _Record, fd: int) -> None:
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

    def _fetch(self, name: str, source: Source, state: list[object], fd: int) -> None:
        nbytes = source.identity.nbytes
        if state[0] and _is_complete(fd, name, {name: state}):
            self.progress(nbytes, self._total_bytes)
            return
        if "/" in name:
            os.makedirs(os.path.join(os.path.dirname(self.target), self.staging, os.path.dirname(name)), exist_ok=True)
        if self._linked(name, source, fd):
            self.fetched_bytes += nbytes
            self.progress(nbytes, self._total_bytes)
            return
        requests = source.requests if isinstance(source, RequestedSource) else _LOCAL
        part = Download(f"{state[0] or 'unknown'}{PART_SUFFIX}", nbytes, fd)
        counting = threading.Lock()

        def report(done: int) -> None:
            with counting:
                self.fetched_bytes += done
            self.progress(done, self._total_bytes)

        with closing(part):
            self.progress(nbytes - part.missing_bytes, self._total_bytes)
            part.fill(source, requests.within(max(1, self.budget_bytes // 2)), report=report)
            part.publish(name, read_only=False)

    def _linked(self, name: str, source: Source, fd: int) -> bool:
        """Give a file of this machine its name here too, if it is one of those that are not edited; or return False."""
        if not isinstance(source, LocalFile) or not name.endswith(FILE_SUFFIXES):
            return False
        with suppress(OSError):  # another filesystem, or one without hard links
            calls.fsync(source.fd)
            with suppress(FileNotFoundError):
                calls.unlink(name, dir_fd=fd)
            os.link(os.path.realpath(source.path), name, dst_dir_fd=fd)
            calls.sync_directory(fd)
            return os.path.samestat(os.stat(name, dir_fd=fd, follow_symlinks=False), os.fstat(source.fd))
        return False

    def _opened(self, path: str) -> OpenCheckpoint:
        where = os.path.join(path, self.name or self._checkpoint)
        return open_checkpoint(where, with_manifest=True, strict=False, check=check_interrupted)

    @property
    def _checkpoint(self) -> str:
        """The name as `name`, by those of all files.

        A further file of the caller's may be another checkpoint, such as an adapter.
        """
        names = [name for name in self.record if name not in self.also]
        try:
            found = choose(names, path=self.target)
        except (CheckpointNotFoundError, AmbiguousCheckpointError):  # the caller has named files of the checkpoint too
            found = choose(self.record, path=self.target)
        return found.index or (found.files[0] if len(found.files) == 1 else "")

    def _verify(self, path: str) -> str:
        """Check the files on this machine; return the algorithm of their manifest."""
        with closing(self._opened(path)) as opened:
            manifest = read_manifest(opened)
            if manifest is None:
                return self.verified
            judge_files(opened, manifest, check=check_interrupted, budget_bytes=self.budget_bytes, to_the_end=False)
            return manifest.algorithm

    def _result(self, verified: str) -> PullResult:
        return PullResult(without_secrets(self.url), self.target, _sizes(self.record), self.fetched_bytes, verified)


def _sizes(record: _Record) -> dict[str, int]:
    return {name: nbytes for name, (_, nbytes) in record.items() if isinstance(nbytes, int)}


def _read_record(fd: int) -> _Record | None:
    """Return the record in a directory, None if there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        with open(calls.open_file(RECORD_NAME, os.O_RDONLY, dir_fd=fd), "rb") as file:
            found = json.loads(file.read(_MAX_RECORD_BYTES))
        if isinstance(found, dict) and all(isinstance(state, list) and len(state) == 2 for state in found.values()):
            if not any(not name or os.path.isabs(name) or ".." in name.split("/") or "\0" in name for name in found):
                return found
    return None


def _is_complete(fd: int, name: str, record: _Record) -> bool:
    """Return whether a file of a record is there: its name came with a rename, when it was whole."""
    with suppress(OSError):
        found = status_at(fd, name)
        return found is not None and found.st_size == record[name][1]
    return False
