"""Whether a checkpoint's files are what its manifest says: hashed whole, in pieces, on a few threads. No torch here."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stio.errors import IntegrityError, StioError
from stio.format.manifest import Manifest, merge_states, parse_manifest
from stio.loading.open import OpenCheckpoint
from stio.runtime.hashing import new_hasher
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region, allocate
from stio.runtime.operation import start_thread
from stio.storage.base import Source

__all__ = ["Finding", "judge_files", "no_manifest", "read_manifest", "verify_files"]

MOST_WORKERS = 8
"""Threads that hash, on a machine with as many cores: at 2 GB/s each they keep up with a fast disk."""

PIECE_BYTES = 16 << 20
"""Read, then hashed, without a return to Python, which may cost 5 ms beside a busy thread. SHA-256 of two warm files on
two cores: 2.6 GB/s with 4 MiB, 2.2 with 16; beside a busy thread 0.6-0.9 and 0.7-1.1."""

_LEAST_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What a comparison of one file with the manifest found."""

    name: str
    """The file, as the checkpoint calls it."""
    error: StioError | None
    """What is wrong with it; None: it is as the manifest says."""


def read_manifest(opened: OpenCheckpoint) -> Manifest | None:
    """Return the manifest of a checkpoint that was opened `with_manifest`, None if there is none.

    Where a save changed it while the files were opened, the states before and after are acceptable.

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
    """Hold every file of an open checkpoint against its manifest; blocks.

    Args:
        opened: Opened `with_manifest`.
        check: Called between pieces, from several threads; may raise to end it.
        budget_bytes: Most memory that is used meanwhile.

    Raises:
        IntegrityError: A file is not what the manifest says, or not in it; or there is no manifest.
        FormatError: The manifest is malformed.
        ImportError: Its digests are made with a package that is not installed.
        StioError: A file could not be read, or changed meanwhile.
    """
    manifest = read_manifest(opened)
    if manifest is None:
        raise no_manifest(opened)
    judge_files(opened, manifest, check=check, budget_bytes=budget_bytes, to_the_end=False)


def no_manifest(opened: OpenCheckpoint) -> IntegrityError:
    """Return the error for a checkpoint that cannot be verified."""
    return IntegrityError(
        "the checkpoint has no manifest to be verified against; a save makes one with hash='sha256'",
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
        manifest: What the files should be.
        check: See `verify_files`.
        budget_bytes: See `verify_files`.
        to_the_end: Return what is wrong with each file, instead of raising what is found first.
        advance: Called with the bytes of each piece that was hashed, from several threads.

    Returns:
        What was found of each file, in the checkpoint's order.

    Raises:
        StioError: See `to_the_end`.
        ImportError: See `verify_files`.
    """
    new_hasher(manifest.algorithm)  # raises where its package is missing, before anything is read
    comparison = _Comparison(opened, manifest, check=check, to_the_end=to_the_end, advance=advance)
    comparison.run(budget_bytes)
    return [Finding(header.shard, comparison.wrong.get(k)) for k, header in enumerate(opened.headers)]


class _Comparison:
    """Files on their way through a few threads, the caller's own among them; see `judge_files`."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        manifest: Manifest,
        *,
        check: Callable[[], None],
        to_the_end: bool,
        advance: Callable[[int], object],
    ) -> None:
        assert opened.manifest is not None
        self._files = opened.files
        self._states = [manifest.files.get(name, ()) for name in opened.manifest.names]
        self._algorithm = manifest.algorithm
        self._manifest_path = opened.manifest.path
        self._check = check
        self._to_the_end = to_the_end
        self._advance = advance
        self._changed = threading.Condition()
        self._ahead: deque[int] = deque()
        self._workers = 0
        self._stopped = False
        self._error: BaseException | None = None
        self.wrong: dict[int, StioError] = {}
        """By position of the file, what is wrong with it."""

    def run(self, budget_bytes: int) -> None:
        """Work until all is known, or until the first error."""
        for k, file in enumerate(self._files):
            self._judge_size(k, file.identity.nbytes)
        self._ahead.extend(k for k in range(len(self._files)) if k not in self.wrong)
        num_workers = max(
            1, min(len(self._ahead), os.cpu_count() or 1, MOST_WORKERS, budget_bytes // _LEAST_PIECE_BYTES)
        )
        piece_bytes = max(PAGE_BYTES, min(PIECE_BYTES, budget_bytes // num_workers))
        self._workers = 1
        for k in range(1, num_workers):
            with self._changed:
                self._workers += 1
            try:
                start_thread(lambda: self._work(piece_bytes), name=f"hash-{k}")
            except RuntimeError:  # the limit of threads: this one can do it all
                with self._changed:
                    self._workers -= 1
                break
        self._work(piece_bytes)
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def _work(self, piece_bytes: int) -> None:
        try:
            memory = allocate(piece_bytes)
            while (k := self._take()) is not None:
                self._judge_digest(k, memory)
        except BaseException as error:
            with self._changed:
                if self._error is None:
                    self._error = error
                self._stopped = True
        with self._changed:
            self._workers -= 1
            self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            return None if self._stopped or not self._ahead else self._ahead.popleft()

    def _judge_size(self, k: int, nbytes: int) -> None:
        states, path = self._states[k], self._files[k].path
        if not states:
            self._blame(k, IntegrityError("the manifest does not name this file", path=path, found=self._manifest_path))
        elif all(state.nbytes != nbytes for state in states):
            message = "the file has another size than the manifest says"
            expected = _either(state.nbytes for state in states)
            self._blame(k, IntegrityError(message, path=path, expected=expected, found=nbytes))

    def _judge_digest(self, k: int, memory: Region) -> None:
        file = self._files[k]
        try:
            found = self._digest(file, memory)
        except StioError as error:
            self._blame(k, error)
            return
        expected = [state.digest for state in self._states[k] if state.nbytes == file.identity.nbytes]
        if found is not None and found not in expected:
            message = f"the file is damaged or another one: its {self._algorithm} is not what the manifest says"
            self._blame(k, IntegrityError(message, path=file.path, expected=_either(expected), found=found))

    def _digest(self, file: Source, memory: Region) -> str | None:
        """Return the digest of a file as it was opened; None if it is no longer wanted."""
        hasher, nbytes = new_hasher(self._algorithm), file.identity.nbytes
        for offset in range(0, nbytes, memory.nbytes):
            if self._stopped:
                return None
            self._check()
            piece = memory.sub(0, min(memory.nbytes, nbytes - offset))
            file.read_into(offset, [piece])
            hasher.update(piece.view())
            self._advance(piece.nbytes)
        file.check_unchanged()  # what was rewritten meanwhile is not damaged
        return hasher.hexdigest()

    def _blame(self, k: int, error: StioError) -> None:
        if not self._to_the_end:
            raise error
        self.wrong[k] = error


def _either(values: Iterable[object]) -> str:
    return " or ".join(map(str, values))
