"""Compares a checkpoint's files with its manifest: names and sizes first, then digests, on a few threads.

Each file is hashed as a whole, in pieces. This module imports no torch, for `stio verify`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from stio.errors import IntegrityError, StioError
from stio.format.manifest import FileState, Manifest, merge_states, parse_manifest
from stio.loading.open import ManifestText, OpenCheckpoint
from stio.runtime.control_groups import num_processors
from stio.runtime.hashing import new_hasher
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region, allocate, default_budget_bytes
from stio.runtime.operation import Cancelled
from stio.runtime.workers import WorkerPool
from stio.storage.base import digest_of_source

MOST_WORKERS = 8
"""Most threads that hash, on a machine with as many cores: at 2 GB/s each they are as fast as a fast disk."""

PIECE_BYTES = 16 << 20
"""Bytes that are read and then hashed at once: each return to Python may cost 5 ms beside a busy thread. SHA-256 of two
warm files on two cores: 2.6 GB/s with 4 MiB, 2.2 with 16; beside a busy thread 0.6-0.9 and 0.7-1.1."""

_LEAST_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the comparison of one file with the manifest."""

    name: str
    """Name of the file in the checkpoint."""
    error: StioError | None
    """The difference; None: the file is equal to its entry in the manifest."""


def read_manifest(opened: OpenCheckpoint) -> Manifest | None:
    """Return the manifest of a checkpoint that was opened `with_manifest`, None if there is none.

    If a save changed it while the files were opened, the states before and after are both acceptable.

    Raises:
        FormatError: It is malformed.
    """
    text = opened.manifest
    if text is None or not text.texts:
        return None
    manifest, *earlier = [parse_manifest(raw, path=text.path) for raw in reversed(text.texts)]
    for one in earlier:
        if one.algorithm == manifest.algorithm:
            manifest = Manifest(manifest.algorithm, merge_states(one.files, manifest.files))
    return manifest


def verify_files(
    opened: OpenCheckpoint, *, check: Callable[[], None] = lambda: None, budget_bytes: int = MOST_WORKERS * PIECE_BYTES
) -> None:
    """Compare every file of an open checkpoint with its manifest; blocks.

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
    manifest = read_manifest(opened)
    if manifest is None:
        raise no_manifest(opened)
    judge_files(opened, manifest, check=check, budget_bytes=budget_bytes, to_the_end=False)


def no_manifest(opened: OpenCheckpoint) -> IntegrityError:
    """Return the error for a checkpoint that cannot be verified."""
    return IntegrityError(
        "the checkpoint has no manifest to verify it; a save makes one with hash='sha256'",
        path=opened.path,
        expected=os.path.basename(opened.manifest.path) if opened.manifest is not None else None,
        found=None if opened.manifest is None else "no such file",
    )


def judge_files(
    opened: OpenCheckpoint,
    manifest: Manifest,
    *,
    check: Callable[[], None],
    budget_bytes: int = MOST_WORKERS * PIECE_BYTES,
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
    comparison = _Comparison(opened, manifest, opened.manifest, check, to_the_end, advance)
    comparison.run(budget_bytes)
    return [Finding(header.shard, comparison.wrong.get(k)) for k, header in enumerate(opened.headers)]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Files that a few workers compare with a manifest; see `judge_files`."""

    opened: OpenCheckpoint
    manifest: Manifest
    text: ManifestText
    check: Callable[[], None]
    to_the_end: bool
    advance: Callable[[int], object]
    wrong: dict[int, StioError] = field(default_factory=dict)
    """Difference of a file, by its position."""
    waiting: deque[int] = field(default_factory=deque)
    workers: WorkerPool = field(default_factory=lambda: WorkerPool("hash"))

    def run(self, budget_bytes: int) -> None:
        """Compare all files, or until the first error."""
        files = self.opened.files
        for k, file in enumerate(files):
            self._compare_size(k, file.identity.nbytes)
        self.waiting.extend(k for k in range(len(files)) if k not in self.wrong)
        total_bytes = sum(files[k].identity.nbytes for k in self.waiting)
        budget_bytes = min(budget_bytes, default_budget_bytes(total_bytes))
        num_workers = max(1, min(len(self.waiting), num_processors(), MOST_WORKERS, budget_bytes // _LEAST_PIECE_BYTES))
        piece_bytes = max(PAGE_BYTES, min(PIECE_BYTES, budget_bytes // num_workers))
        self.workers.run(lambda: self._work(piece_bytes), num_workers)

    def _work(self, piece_bytes: int) -> None:
        memory = allocate(piece_bytes)
        while not self.workers.stopped:
            try:
                k = self.waiting.popleft()
            except IndexError:
                return
            self._compare_digest(k, memory)

    def _states(self, k: int) -> Sequence[FileState]:
        return self.manifest.files.get(self.text.names[k], ())

    def _compare_size(self, k: int, nbytes: int) -> None:
        states, path = self._states(k), self.opened.files[k].path
        if not states:
            self._record(k, IntegrityError("the manifest does not name this file", path=path, found=self.text.path))
        elif all(state.nbytes != nbytes for state in states):
            message = "the file has another size than in the manifest"
            expected = _either(state.nbytes for state in states)
            self._record(k, IntegrityError(message, path=path, expected=expected, found=nbytes))

    def _compare_digest(self, k: int, memory: Region) -> None:
        file = self.opened.files[k]
        try:
            with ExitStack() as owned:
                file = self.opened.open_files([k], owned)[k]
                found = digest_of_source(file, new_hasher(self.manifest.algorithm), memory, self._before_piece)
        except StioError as error:
            self._record(k, error)
            return
        expected = [state.digest for state in self._states(k) if state.nbytes == file.identity.nbytes]
        if found not in expected:
            message = f"the file is damaged or another one: its {self.manifest.algorithm} differs from the manifest"
            self._record(k, IntegrityError(message, path=file.path, expected=_either(expected), found=found))

    def _before_piece(self, nbytes: int) -> None:
        if self.workers.stopped:
            raise Cancelled
        self.check()
        self.advance(nbytes)

    def _record(self, k: int, error: StioError) -> None:
        if not self.to_the_end:
            raise error
        self.wrong[k] = error


def _either(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))
