"""Copies a checkpoint from a URL to a new directory: resumed after an interruption, verified, published by one rename.

The files are fetched into a directory beside the new one, which later takes its name. It has a list of the states that
they have in the store, so another call fetches only what is missing or has changed, and a call that finds the new
directory complete fetches nothing. Files of the Hugging Face hub come from the hub's own cache. Before the rename,
headers and index are checked, files are compared with the manifest if there is one, and the states in the store are
compared once more.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from stio.errors import StioError, StorageError, UnsafePathError
from stio.format.files import FILE_SUFFIX, FILE_SUFFIXES, PICKLE_SUFFIXES, FileName
from stio.limits import DEFAULT_BUDGET_BYTES
from stio.remote import hub
from stio.remote.disk_cache import (
    LOCK_SUFFIX,
    PART_SUFFIX,
    Download,
    check_interrupted,
    object_key,
    opened_directory,
    wait_until,
)
from stio.schemes import scheme_of
from stio.storage import (
    LocalFile,
    ParallelRoot,
    RequestedSource,
    Requests,
    SingleFileRoot,
    Source,
    local_directory,
    refusals,
)
from stio.storage.checkpoint import OpenCheckpoint, OpenOptions, judge_files, open_checkpoint, read_manifest
from stio.storage.commit import FileLock, read_small, status_at, write_small
from stio.storage.commit import syscalls as calls
from stio.text import is_url, without_secrets

_HOW = OpenOptions(with_manifest=True, strict=False, check=check_interrupted)

RECORD_NAME = "stio-pull.json"
"""File of a pulled directory that names its source, and the state of each of its files in the store."""

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
    """Size of each file in bytes, by its name; of a delta not those of what it is based on."""
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

    Calls for one directory, in several processes of one machine, wait for each other. What a delta is based on is
    copied too, to directories beside the new one, as it is beside the delta's URL.

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
        ValueError: It is no URL.
        IntegrityError: A file differs from the checkpoint's manifest. It is fetched again by the next call.
        ChangedDuringReadError: The store has other files by now.
        StorageError: The directory holds something else, or cannot be written; what was fetched stays for another call.
        FormatError: It is the URL of a file of `torch.save`.
        StioError: The checkpoint cannot be read; see `stio.load`.
        Cancelled: The calling thread should end.
    """
    target = _destination(url, directory)
    with ExitStack() as owned, refusals("writing", target, caught=(OSError,)):
        parent_fd = _locked(target, owned)
        shown = without_secrets(url)
        if scheme_of(url) == "hf":  # a commit never changes, so a copy of it needs no further request
            root, name = hub.open_url(url)
            shown = root.resolve()
            url = f"{shown}/{name}"
            record, sizes = _found(target)
            if record["place"] == url.rstrip("/") and record["sizes"] == sizes and sizes.keys() >= {*also}:
                with suppress(StioError):  # what a delta is based on may be missing
                    open_checkpoint(target, _HOW).close()
                    progress(sum(sizes.values()), sum(sizes.values()))
                    return PullResult(shown, target, sizes, 0, record["verified"])
        opened = open_checkpoint(url, _HOW)
        owned.callback(opened.close)
        before = fetched_bytes = 0
        for base, directory_of_base in _bases(opened, target):
            with ExitStack() as locked:
                fd = _locked(directory_of_base, locked)
                found = _pulled(base, directory_of_base, fd, (), budget_bytes, _shifted(progress, before))
                before, fetched_bytes = before + found.total_bytes, fetched_bytes + found.fetched_bytes
        last = opened.apart()[-1]
        found = _pulled(last, target, parent_fd, also, budget_bytes, _shifted(progress, before))
        return replace(found, url=shown, fetched_bytes=found.fetched_bytes + fetched_bytes)


def _locked(target: str, owned: ExitStack) -> int:
    """Return a descriptor of the directory that holds the new one, when no other call copies there."""
    parent, name = os.path.split(target)
    with refusals("writing", target):
        os.makedirs(parent, exist_ok=True)
    parent_fd = owned.enter_context(opened_directory(parent))
    lock = FileLock(f".{name}{_STAGING_SUFFIX}{LOCK_SUFFIX}", parent_fd)
    owned.callback(lock.release)
    wait_until(lock.try_lock)
    return parent_fd


def _bases(opened: OpenCheckpoint, target: str) -> list[tuple[OpenCheckpoint, str]]:
    """Return what a delta is based on, each with its directory here, the full checkpoint first.

    Raises:
        StorageError: The copy of the delta would not find them.
    """
    parts, found, place = opened.apart(), list[tuple[OpenCheckpoint, str]](), target
    for base, own, link in zip(parts[-2::-1], opened.links[-2::-1], opened.links[:0:-1], strict=True):
        assert link.delta is not None
        if not link.delta.is_directory:
            message = (
                "the delta is a file, with its base beside it; `stio convert` writes a full checkpoint from its URL"
            )
            raise StorageError(message, path=link.path, errno=errno.EOPNOTSUPP)
        place = os.path.join(os.path.dirname(place), link.delta.base)
        found.append((replace(base, headers=own.headers), place))
    if len({target, *(place for _, place in found)}) <= len(found):
        message = "what this delta is based on is copied beside it, to a directory of this name; give another name"
        raise StorageError(message, path=target, errno=errno.EEXIST)
    return found[::-1]


def _shifted(progress: Callable[[int, int], object], before: int) -> Callable[[int, int], object]:
    return lambda nbytes, total_bytes: progress(nbytes, before + total_bytes)


def _pulled(
    opened: OpenCheckpoint,
    target: str,
    parent_fd: int,
    also: Sequence[str],
    budget_bytes: int,
    progress: Callable[[int, int], object],
) -> PullResult:
    """Copy one checkpoint: a full one, or the files of a delta alone."""
    with ExitStack() as owned:
        sources = _sources(opened, also, owned)
        files = {name: file.identity.nbytes for name, file in sorted(sources.items())}
        states = {name: object_key(file.path, file.identity) for name, file in sources.items()}
        result = PullResult(opened.path, target, files, 0, "headers")
        record, sizes = _found(target)
        if record["files"] == states and sizes == files:
            progress(result.total_bytes, result.total_bytes)
            return replace(result, verified=record["verified"])
        if os.path.lexists(target) and (os.path.islink(target) or not os.path.isdir(target) or os.listdir(target)):
            message = (
                "the destination holds something else, or an earlier state of the checkpoint; give a new directory"
            )
            raise StorageError(message, path=target, errno=errno.EEXIST)

        def report(nbytes: int) -> None:
            progress(nbytes, result.total_bytes)

        record = {"place": opened.path, "verified": "headers", "files": states, "sizes": files}
        parent, name = os.path.split(target)
        staging = f".{name}{_STAGING_SUFFIX}"
        path = os.path.join(parent, staging)
        with suppress(FileExistsError):
            calls.make_directory(staging, dir_fd=parent_fd)
        with opened_directory(staging, parent_fd=parent_fd) as fd:
            fetched_bytes = 0
            ready = _prepare(record, path, fd)
            for one, source in sources.items():
                if one in ready:
                    report(source.identity.nbytes)
                else:
                    fetched_bytes += _fetch(source, one, fd, budget_bytes, report)
            for source in sources.values():
                check_interrupted()
                source.check_unchanged()
            try:
                record["verified"] = _verify(opened, path, [*sources], budget_bytes)
            except StioError as error:
                if not isinstance(error, StorageError):  # the files are wrong: they are fetched again
                    calls.remove_tree(staging, dir_fd=parent_fd)
                raise
            _sync_folders(path, files)
            _write_record(record, fd)
        calls.rename(staging, name, source_fd=parent_fd, target_fd=parent_fd)
        calls.sync_directory(parent_fd)
        return replace(result, fetched_bytes=fetched_bytes, verified=record["verified"])


def _destination(url: str, directory: str | os.PathLike[str]) -> str:
    """Return the path of the new directory; see `pull` for the errors."""
    if not is_url(url):
        raise ValueError(f"pull copies from a URL, such as s3://bucket/model, and {without_secrets(url)!r} is no URL")
    target = local_directory(directory, "pull")
    if os.path.ismount(target):
        message = "this is a mount point, which a complete directory cannot replace; give a directory below it"
        raise StorageError(message, path=target, errno=errno.EBUSY)
    return target


def _sources(opened: OpenCheckpoint, also: Sequence[str], owned: ExitStack) -> dict[str, Source]:
    """Open all files of a checkpoint and those beside it; return them by their names in the new directory."""
    root = opened.root
    assert root is not None
    shards = [header.shard for header in opened.headers]
    if isinstance(root, SingleFileRoot):
        shards = [_loadable(root.name)]
    others = [*also]
    if opened.index is not None:
        others.append(opened.index)
    if opened.manifest is not None and opened.manifest.texts:
        others.append(os.path.basename(opened.manifest.path))
    if opened.path == root.path and not root.path.startswith("http"):  # a directory; a server of http lists none
        names = root.list_all() if isinstance(root, hub.HubRoot) else root.listdir()
        others += [one for one in names if not (one.endswith(_OTHER_WEIGHTS) or FileName(one).is_index or _is_own(one))]
    for one in others:
        if one in ("", ".", "..") or _is_own(one) or {*one} & {"/", os.sep, "\0"}:
            message = "this name of a file is not allowed: it is no plain name, or one of stio's own"
            raise UnsafePathError(message, path=opened.path, found=one)
    sources = dict(zip(shards, opened.open_files(range(len(opened.files)), owned), strict=True))
    others = [one for one in dict.fromkeys(others) if one not in sources]
    if isinstance(root, ParallelRoot):
        root.open_ahead(others)
    for one in others:
        check_interrupted()
        sources[one] = root.open(one)
        owned.callback(sources[one].close)
    return sources


def _is_own(name: str) -> bool:
    return name == RECORD_NAME or name.startswith(".stio-")


def _loadable(name: str) -> str:
    """Return the name of the copy of a file, by which a load of its directory finds it."""
    if FileName(name).is_checkpoint:
        return name
    stem = next((name.removesuffix(end) for end in PICKLE_SUFFIXES if name.endswith(end)), name)
    is_plain = re.fullmatch(r"\w[\w.-]*", stem, re.ASCII) and FileName(stem).shard is None
    return f"{stem if is_plain else 'model'}{FILE_SUFFIX}"


def _found(directory: str, *, parent_fd: int | None = None) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the record in a directory, and the size of each of its files that is there.

    The record is empty if there is none that can be read. A file's name came with a rename, when it was whole.
    """
    unreadable = (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError)
    with suppress(*unreadable), opened_directory(directory, parent_fd=parent_fd) as fd:
        raw = json.loads(read_small(fd, RECORD_NAME, _MAX_RECORD_BYTES) or b"")
        record = {key: raw[key] for key in ("place", "verified", "files", "sizes")}
        found = {name: status_at(fd, name) for name in sorted(record["files"].keys())}
        return record, {name: status.st_size for name, status in found.items() if status is not None}
    return {"place": "", "verified": "", "files": {}, "sizes": {}}, {}


def _write_record(record: Mapping[str, Any], fd: int) -> None:
    temporary = RECORD_NAME + PART_SUFFIX
    write_small(fd, temporary, json.dumps(record, indent=1).encode())
    calls.rename(temporary, RECORD_NAME, source_fd=fd, target_fd=fd)
    calls.sync_directory(fd)


def _prepare(record: Mapping[str, Any], path: str, fd: int) -> Collection[str]:
    """Remove what is not of the states in a record, and write it; return the names of the files that are there."""
    states = record["files"]
    before, sizes = _found(".", parent_fd=fd)
    ready = {
        name
        for name, state in states.items()
        if state and before["files"].get(name) == state and sizes.get(name) == record["sizes"][name]
    }
    for name in states.keys() - ready:
        calls.unlink(name, dir_fd=fd)
    kept = {name.partition("/")[0] for name in ready} | {state + PART_SUFFIX for state in states.values() if state}
    for name in {*os.listdir(fd)} - kept - {RECORD_NAME}:
        calls.remove_tree(name, dir_fd=fd)
        with suppress(OSError):
            calls.unlink(name, dir_fd=fd)
    _sync_folders(path, states)
    _write_record(record, fd)  # after the removals: what it names is of the state that it names
    return ready


def _sync_folders(path: str, names: Iterable[str]) -> None:
    """Make the folders of shards, and make durable what was done there."""
    for folder in {os.path.dirname(name) for name in names} - {""}:
        os.makedirs(os.path.join(path, folder), exist_ok=True)
        with opened_directory(os.path.join(path, folder)) as fd:
            calls.sync_directory(fd)


def _verify(opened: OpenCheckpoint, path: str, names: Sequence[str], budget_bytes: int) -> str:
    """Check the files on this machine, those of the checkpoint first; return what they were compared by."""
    verified = "headers"
    main = opened.index or (names[0] if len(opened.files) == 1 else "")
    with closing(open_checkpoint(os.path.join(path, main), _HOW)) as copy:  # the bases of a delta are there by now
        for one in (opened, copy.apart()[-1]):
            manifest = read_manifest(one)
            if manifest is not None and (one is not opened or manifest.in_names):
                judge_files(one, manifest, check=check_interrupted, budget_bytes=budget_bytes, to_the_end=False)
                verified = manifest.algorithm
    return verified


def _fetch(source: Source, name: str, fd: int, budget_bytes: int, report: Callable[[int], object]) -> int:
    """Give a file its name in a directory, when it is whole and durable; return how many bytes were fetched."""
    nbytes = source.identity.nbytes
    if _linked(source, name, fd):
        report(nbytes)
        return nbytes
    requests = source.requests if isinstance(source, RequestedSource) else _LOCAL
    part = Download(f"{object_key(source.path, source.identity) or 'unknown'}{PART_SUFFIX}", nbytes, fd)
    with closing(part):
        missing_bytes = part.missing_bytes
        report(nbytes - missing_bytes)
        part.fill(source, requests.within(max(1, budget_bytes // 2)), report=report)
        part.publish(name, read_only=False)
    return missing_bytes


def _linked(source: Source, name: str, fd: int) -> bool:
    """Give a file of this machine its name here too, if it is one of those that are not edited; or return False."""
    if not isinstance(source, LocalFile) or not name.endswith(FILE_SUFFIXES):
        return False
    with suppress(OSError):  # another filesystem, or one without hard links
        calls.fsync(source.fd)
        os.link(os.path.realpath(source.path), name, dst_dir_fd=fd)
        return os.path.samestat(os.stat(name, dir_fd=fd, follow_symlinks=False), os.fstat(source.fd))
    return False
