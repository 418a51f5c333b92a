"""`stio verify PATH`: looks for damage, and says what it found. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from stio.cli.output import NO, PATH, Bar, CommandError, counted, explained, one_line
from stio.errors import (
    FormatError,
    IndexFormatError,
    IntegrityError,
    StioError,
    UnsafePathError,
    printable,
    without_path,
)
from stio.format.header import Header
from stio.loading.integrity import judge_files, no_manifest, read_manifest
from stio.loading.open import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation
from stio.runtime.spans import show_bytes
from stio.storage.base import Source

__all__ = ["FileReport", "Report", "examine", "verify"]


@click.command()
@click.argument("path", type=PATH)
@click.option("--hash-required", is_flag=True, help="Fail where no manifest holds hashes to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--no-progress", is_flag=True, help="Draw no bar. Pipes get none anyway.")
def verify(path: str, hash_required: bool, as_json: bool, no_progress: bool) -> int:
    """Look for damage in a checkpoint.

    In headers, index, holes, and hashes where a manifest holds them. PATH is a .safetensors file, a directory that
    holds a checkpoint, or its index. Files are read whole where there is a manifest; otherwise headers only, and
    tensors of dtype BOOL. Exit status 1: there is damage.
    """
    problem: StioError | None = None
    try:
        with Bar("verifying", is_wanted=not no_progress) as bar:
            report = examine(path, hash_required=hash_required, progress=bar.advance)
    except (FormatError, IndexFormatError, IntegrityError, UnsafePathError) as error:  # of all of it, not of one file
        problem = error
        report = Report(path=path, files=(), algorithm=None, warnings=())
    except ImportError as error:  # the package that made the hashes
        raise CommandError(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_json(report, problem), indent=2))
    elif problem is not None:
        text = explained(problem)
        if problem.path == path:  # named once
            text = text.removeprefix(f"{one_line(printable(path))}: ")
        click.echo(f"{one_line(path)}: wrong: {text}")
    else:
        click.echo("\n".join(_lines(report)))
    return 0 if report.ok and problem is None else NO


def _lines(report: Report) -> Iterator[str]:
    """Yield a line for each file, then one for each warning, then the verdict; it is a single file's line too."""
    is_single = [os.path.basename(report.path)] == [file.name for file in report.files]
    if not is_single:
        yield from (f"{one_line(file.name)}: {_finding(file, report)}" for file in report.files)
    for warning in report.warnings:
        yield f"warning: {one_line(warning)}"
    if report.algorithm is None:
        yield "no manifest: nothing says what the bytes should be"
    wrong = sum(file.problem is not None for file in report.files)
    verdict = "ok" if report.ok else f"{wrong} of {counted(len(report.files), 'file')} wrong"
    if is_single:
        verdict = f"{'ok, ' if report.ok else 'wrong: '}{_finding(report.files[0], report)}"
    yield f"{one_line(report.path)}: {verdict}"


def _finding(file: FileReport, report: Report) -> str:
    if file.problem is not None:
        return one_line(file.problem)
    hashed = "not compared with a hash" if report.algorithm is None else f"{report.algorithm} as in the manifest"
    return f"header and sizes fit, {hashed} ({counted(file.num_tensors, 'tensor')}, {show_bytes(file.nbytes)})"


def _as_json(report: Report, problem: StioError | None) -> dict[str, object]:
    return {
        "path": report.path,
        "ok": report.ok and problem is None,
        "problem": None if problem is None else str(problem),
        "algorithm": report.algorithm,
        "files": [
            {
                "name": file.name,
                "file_bytes": file.nbytes,
                "num_tensors": file.num_tensors,
                "ok": file.problem is None,
                "problem": file.problem,
            }
            for file in report.files
        ],
        "warnings": list(report.warnings),
    }


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
