"""Compares a checkpoint's files with its manifest: names and sizes first, then digests, on a few threads.

Each file is hashed as a whole, in pieces. This module imports no torch, for `stio verify`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from stio.errors import IntegrityError, StioError
from stio.format.files import FileState, Manifest, new_hasher
from stio.limits import PAGE_BYTES
from stio.runtime import Cancelled, WorkerPool
from stio.runtime.memory import allocate, default_budget_bytes, num_processors
from stio.storage.base import Source, digest_of_source
from stio.storage.checkpoint.shards import OpenCheckpoint
from stio.storage.checks import advice_for_hub_cache, digest_in_name

MAX_WORKERS = 8
"""Most threads that hash, on a machine with as many cores: at 2 GB/s each they are as fast as a fast disk."""

PIECE_BYTES = 16 << 20
"""Bytes that are read and then hashed at once: each return to Python may cost 5 ms beside a busy thread. SHA-256 of two
warm files on two cores: 2.6 GB/s with 4 MiB, 2.2 with 16; beside a busy thread 0.6-0.9 and 0.7-1.1."""

_MIN_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the comparison of one file with the manifest."""

    name: str
    """Name of the file in the checkpoint."""
    error: StioError | None
    """The difference; None: the file is equal to its entry in the manifest."""


def read_manifest(opened: OpenCheckpoint, *, in_part: bool = False, is_required: bool = False) -> Manifest | None:
    """Return the manifest of a checkpoint that was opened `with_manifest`, None if there is none.

    If a save changed it while the files were opened, the states before and after are both acceptable. Without a
    manifest, files of the hub's cache are compared with their names there: all of them have a digest as name, or, with
    `in_part`, some of them.

    Raises:
        FormatError: It is malformed.
        IntegrityError: There is none, and it `is_required`.
    """
    text = opened.manifest
    if text is not None and text.texts:
        manifest, *earlier = [Manifest.parse(raw, path=text.path) for raw in reversed(text.texts)]
        for one in earlier:
            manifest = one.merged(manifest)
        return manifest
    if text is not None:
        digests = [digest_in_name(file.path) for file in opened.files]
        states = [(FileState(file.identity.nbytes, one),) for file, one in zip(opened.files, digests, strict=True)]
        if (any if in_part else all)(digests or [""]):
            return Manifest("sha256", dict(zip(text.names, states, strict=True)), in_names=True)
    if is_required:
        message = "the checkpoint has no manifest to verify it; a save makes one with hash='sha256'"
        raise IntegrityError(message, path=opened.path, expected=None if text is None else os.path.basename(text.path))
    return None


def verify_files(
    opened: OpenCheckpoint, *, check: Callable[[], None] = lambda: None, budget_bytes: int = MAX_WORKERS * PIECE_BYTES
) -> None:
    """Compare every file of an open checkpoint with its manifest, those of each link of a chain with its own; blocks.

    Args:
        opened: Opened `with_manifest`.
        check: Called between pieces, from several threads; may raise to end it.
        budget_bytes: Most memory that the comparison uses.

    Raises:
        IntegrityError: A file differs from the manifest, or is not in it; or there is no manifest.
        FormatError: The manifest is malformed.
        ImportError: The package of its hash algorithm is not installed.
        StioError: A file could not be read, or was changed during the comparison.
    """
    for part, manifest in [(part, read_manifest(part, is_required=True)) for part in opened.apart()]:
        if manifest is not None:
            judge_files(part, manifest, check=check, budget_bytes=budget_bytes, to_the_end=False)


def judge_files(
    opened: OpenCheckpoint,
    manifest: Manifest,
    *,
    check: Callable[[], None],
    budget_bytes: int = MAX_WORKERS * PIECE_BYTES,
    to_the_end: bool,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> list[Finding]:
    """Compare all files of a checkpoint with a manifest: names and sizes first, then digests on a few threads.

    Args:
        opened: Opened `with_manifest`.
        manifest: Expected state of the files.
        check: See `verify_files`.
        budget_bytes: See `verify_files`.
        to_the_end: Return the difference of each file, instead of raising the first one.
        advance: Called with the bytes of each piece that is hashed next, from several threads.

    Returns:
        The result for each file, in the checkpoint's order.

    Raises:
        StioError: See `to_the_end`.
        ImportError: See `verify_files`.
    """
    new_hasher(manifest.algorithm)  # raises if its package is missing, before any file is read
    assert opened.manifest is not None
    files, place = opened.files, opened.manifest.path
    states = [manifest.files.get(name, ()) for name in opened.manifest.names]
    wrong: dict[int, StioError] = {}
    workers = WorkerPool("hash")

    def judge(k: int, error: StioError | None) -> None:
        if error is not None:
            if not to_the_end:
                raise error
            wrong[k] = error

    for k, file in enumerate(files):
        judge(k, _wrong_size(file, states[k], place))
    left = [k for k in reversed(range(len(files))) if k not in wrong]
    budget_bytes = min(budget_bytes, default_budget_bytes(sum(files[k].identity.nbytes for k in left)))
    num_workers = max(1, min(len(left), num_processors(), MAX_WORKERS, budget_bytes // _MIN_PIECE_BYTES))
    piece_bytes = max(PAGE_BYTES, min(PIECE_BYTES, budget_bytes // num_workers))

    def before_piece(nbytes: int) -> None:
        if workers.stopped:
            raise Cancelled
        check()
        advance(nbytes)

    def work() -> None:
        memory = allocate(piece_bytes)
        for k in workers.items(left):
            try:
                with ExitStack() as owned:
                    file = opened.open_files([k], owned)[k]
                    found = digest_of_source(file, new_hasher(manifest.algorithm), memory, before_piece)
                judge(k, _wrong_digest(file, found, states[k], manifest))
            except StioError as error:
                judge(k, error)

    workers.run(work, num_workers)
    return [Finding(header.shard, wrong.get(k)) for k, header in enumerate(opened.headers)]


def require_digest(file: Source, digest: str, name: str, manifest: Manifest) -> None:
    """Raise `IntegrityError` unless a file that was read as a whole has the size and the digest of its entry."""
    states = manifest.files.get(name, ())
    error = _wrong_size(file, states, name) or _wrong_digest(file, digest, states, manifest)
    if error is not None:
        raise error


def _wrong_size(file: Source, states: Sequence[FileState], place: str) -> StioError | None:
    if not states:
        return IntegrityError("the manifest does not name this file", path=file.path, found=place)
    if all(state.nbytes != file.identity.nbytes for state in states):
        message, expected = "the file has another size than in the manifest", _either(state.nbytes for state in states)
        return IntegrityError(message, path=file.path, expected=expected, found=file.identity.nbytes)
    return None


def _wrong_digest(file: Source, found: str, states: Sequence[FileState], manifest: Manifest) -> StioError | None:
    expected = [state.digest for state in states if state.nbytes == file.identity.nbytes]
    if found in expected or (manifest.in_names and "" in expected):
        return None
    other = "its name in the cache" if manifest.in_names else "the manifest"
    message = f"the file is damaged or another one: its {manifest.algorithm} differs from {other}"
    message += advice_for_hub_cache(file.path)
    return IntegrityError(message, path=file.path, expected=_either(expected), found=found)


def _either(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))
