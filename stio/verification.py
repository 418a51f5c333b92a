"""What `stio verify` looks at: headers, index, holes, hashes, and bytes that readers may disagree about. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stio.codec.header import Header
from stio.engine.opened import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.engine.runtime import Operation
from stio.errors import StioError, printable, without_path
from stio.integrity import judge_files, no_manifest, read_manifest
from stio.memory import allocate
from stio.storage.base import Source

__all__ = ["FileReport", "Report", "examine"]

PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileReport:
    """What is known of one file."""

    name: str
    """The shard."""
    nbytes: int
    """Its size."""
    num_tensors: int
    """How many tensors its header lists."""
    problem: str | None
    """What is wrong with its bytes; None: nothing that was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an examination found; a checkpoint whose headers or index are wrong raises instead."""

    path: str
    """What was asked for."""
    files: tuple[FileReport, ...]
    """One for each shard, in the checkpoint's order."""
    algorithm: str | None
    """How the files were hashed; None: there is no manifest to compare them with."""
    warnings: tuple[str, ...]
    """What a reader may stumble over, as sentences."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings do not count."""
        return not any(file.problem for file in self.files)


def examine(
    path: str, *, hash_required: bool = False, progress: Callable[[int, int], object] = lambda nbytes, total: None
) -> Report:
    """Examine a checkpoint: all that can be known without its maker, and its hashes where it has a manifest.

    Blocks; a KeyboardInterrupt ends it before it comes out.

    Args:
        path: See `open_checkpoint`.
        hash_required: A checkpoint without a manifest is an error.
        progress: Called with the bytes of each piece that was hashed and those of all files, from several threads.

    Raises:
        StioError: It cannot be opened: a header, the index or the manifest is wrong, or a shard is missing.
        ImportError: Its hashes are made with a package that is not installed.
    """

    def body(operation: Operation[Report]) -> Report:
        with _warnings() as warnings:
            opened = open_checkpoint(path, OpenOptions(with_manifest=True), check=operation.check)
        try:
            return _examine(opened, hash_required, warnings, operation.check, progress)
        finally:
            opened.close()

    operation: Operation[Report] = Operation(body, name="verify", about=path)
    return operation.start().result()


def _examine(
    opened: OpenCheckpoint,
    hash_required: bool,
    warnings: list[str],
    check: Callable[[], None],
    progress: Callable[[int, int], object],
) -> Report:
    manifest = read_manifest(opened)
    if manifest is None and hash_required:
        raise no_manifest(opened)
    problems: dict[str, StioError | None] = {}
    if manifest is not None:
        total_bytes = sum(file.identity.nbytes for file in opened.files)
        findings = judge_files(
            *(opened, manifest), check=check, to_the_end=True, advance=lambda nbytes: progress(nbytes, total_bytes)
        )
        problems = {finding.name: finding.error for finding in findings}
    files = []
    for file, header in zip(opened.files, opened.headers, strict=True):
        problem = problems.get(header.shard)
        if problem is None:
            try:
                warnings += _odd_bools(file, header, check)
            except StioError as error:
                problem = error
        text = None if problem is None else without_path(problem)
        files.append(FileReport(header.shard, file.identity.nbytes, len(header), text))
    algorithm = None if manifest is None else manifest.algorithm
    return Report(path=opened.path, files=tuple(files), algorithm=algorithm, warnings=tuple(warnings))


def _odd_bools(file: Source, header: Header, check: Callable[[], None]) -> Iterator[str]:
    """Yield a warning for each BOOL tensor with bytes that are neither 0 nor 1.

    They are kept as they are; what they mean differs from reader to reader, and from one operation to the next.
    """
    memory = None
    for name, dtype in zip(header.names, header.dtypes, strict=True):
        if dtype != "BOOL":
            continue
        memory = memory or allocate(PIECE_BYTES)
        info = header.info(name)
        end = info.file_offset + info.nbytes
        for offset in range(info.file_offset, end, PIECE_BYTES):
            check()
            piece = memory.sub(0, min(PIECE_BYTES, end - offset))
            file.read_into(offset, [piece])
            content = piece.tobytes()
            odd = content.translate(None, b"\0\1")
            if odd:
                at = offset + content.index(odd[:1])
                yield (
                    f"the BOOL tensor {printable(name)!r} holds bytes other than 0 and 1, "
                    f"the first one {odd[0]} at byte {at:,} of {printable(header.shard)}"
                )
                break


class _Listener(logging.Handler):
    """Collects what the opening would log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of stio while the block runs."""
    logger, listener = logging.getLogger("stio"), _Listener()
    logger.addHandler(listener)
    try:
        yield listener.messages
    finally:
        logger.removeHandler(listener)
