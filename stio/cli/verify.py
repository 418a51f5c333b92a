"""`stio verify PATH`: checks a checkpoint for damage. Imports no torch.

From top to bottom: the command, the examination, the text of the result. The examination opens the checkpoint, which
checks headers and index, compares each file with the manifest if there is one, and reads the tensors of dtype BOOL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace

import click

from stio.cli.output import JSON_OPTION, NO, NO_PROGRESS_OPTION, PATH, Bar, explained, print_result
from stio.errors import (
    FormatError,
    IndexFormatError,
    IntegrityError,
    MismatchError,
    StioError,
    UnsafePathError,
    listed,
    one_line,
    printable,
    without_path,
)
from stio.format import Header
from stio.format.files import FILE_SUFFIXES, INDEX_SUFFIX, FileName, Manifest
from stio.runtime import Operation
from stio.runtime.memory import allocate
from stio.storage import Source
from stio.storage.checkpoint import (
    OpenCheckpoint,
    OpenOptions,
    judge_files,
    open_checkpoint,
    read_manifest,
    wrong_changes,
)
from stio.text import counted, show_bytes, without_secrets

PIECE_BYTES = 4 << 20
"""Bytes of a BOOL tensor that are read at once."""

_OF_ALL = (FormatError, IndexFormatError, IntegrityError, MismatchError, UnsafePathError)
"""Damage of the whole checkpoint."""


@click.command()
@click.argument("path", type=PATH)
@click.option("--hash-required", is_flag=True, help="Fail if there is no manifest with hashes.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def verify(path: str, hash_required: bool) -> int:
    """Check a checkpoint for damage.

    Checks headers, index, gaps between tensors, and hashes if there is a manifest. PATH is a .safetensors file, a
    directory with a checkpoint, its index, or a URL of one of these. With a manifest, and in the hub's cache, all files
    are read. Otherwise only headers, tensors of dtype BOOL and the positions in deltas are read. The checkpoints that a
    delta is based on are checked too, each with its own manifest. Exit status 1: there is damage.
    """
    try:
        with Bar("verifying") as bar:
            report = examine(path, hash_required=hash_required, progress=bar.advance)
    except _OF_ALL as error:
        path, problem = without_secrets(path), error
        result = {"path": path, "ok": False, "problem": str(error), "algorithm": None, "files": [], "warnings": []}
        print_result(result, lambda: [f"{one_line(path)}: wrong: {_below(path, problem)}"])
        return NO
    files = [{**asdict(file), "ok": file.problem is None} for file in report.files]
    result = {**asdict(report), "ok": report.ok, "problem": None, "files": files}
    print_result(result, lambda: _lines(report))
    return 0 if report.ok else NO


# The examination.


@dataclass(frozen=True, slots=True)
class FileReport:
    """Result for one file."""

    name: str
    """Name of the shard."""
    file_bytes: int
    """Size of the file."""
    data_bytes: int
    """Bytes of its tensors."""
    num_tensors: int
    """Number of tensors in its header."""
    is_compared: bool
    """Whether its bytes were compared with a digest."""
    problem: str | None
    """Damage that was found; None: no damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of an examination. A checkpoint with a wrong header or index raises an error instead."""

    path: str
    """Path of the checkpoint."""
    files: tuple[FileReport, ...]
    """One for each shard, in the order of the checkpoint."""
    algorithm: str | None
    """Hash algorithm of the manifest; None: there is no manifest."""
    warnings: tuple[str, ...]
    """Facts that are no damage, but may surprise a reader; sentences."""

    @property
    def ok(self) -> bool:
        """Whether there is no damage. Warnings do not count."""
        return not any(file.problem for file in self.files)


def examine(
    path: str, *, hash_required: bool = False, progress: Callable[[int, int], object] = lambda nbytes, total: None
) -> Report:
    """Check all that a checkpoint shows without its author, and its hashes if it has a manifest.

    Blocks. A KeyboardInterrupt ends the work before it is raised.

    Args:
        path: See `open_checkpoint`.
        hash_required: Raise an error if there is no manifest.
        progress: Called with the bytes of each hashed piece and the bytes of all files; from several threads.

    Raises:
        StioError: It cannot be opened: a header, the index or the manifest is wrong, or a shard is missing.
        ImportError: The package of the hash algorithm is not installed.
    """

    def body(operation: Operation[Report]) -> Report:
        warnings: list[str] = []
        # A file alone may be one rank's part of a checkpoint, which is no damage: without `strict` that is a warning.
        strict = os.path.isdir(path) or not path.partition("?")[0].endswith(FILE_SUFFIXES)
        with closing(
            open_checkpoint(
                path,
                OpenOptions(
                    strict=strict,
                    with_manifest=True,
                    examine_others=True,
                    check=operation.check,
                    warn=warnings.append,
                ),
            )
        ) as opened:
            how = {"in_part": not hash_required, "is_required": hash_required}
            parts = [(part, read_manifest(part, **how)) for part in opened.apart()]
            total_bytes = sum(file.identity.nbytes for part, found in parts if found for file in part.files)
            for part, manifest in parts:
                if manifest is None and any(found for _, found in parts):
                    warnings.append(f"{part.path} has no manifest with hashes: headers and sizes were checked")
            files: list[FileReport] = []
            for part, manifest in parts:
                problems: dict[str, StioError | None] = {}
                if manifest is not None:
                    findings = judge_files(
                        *(part, manifest),
                        check=operation.check,
                        to_the_end=True,
                        advance=lambda nbytes: progress(nbytes, total_bytes),
                    )
                    problems = {finding.name: finding.error for finding in findings}
                files += _reports(part, manifest, problems, warnings, operation.check)
            for shard, problem in wrong_changes(opened, operation.check):
                if files[shard].problem is None:
                    files[shard] = replace(files[shard], problem=without_path(problem))
            algorithm = " and ".join(dict.fromkeys(found.algorithm for _, found in parts if found)) or None
            if below := _steps_below(path):
                warnings.append(f"these directories were not checked, and may be checkpoints: {listed(below)}")
            return Report(path=opened.path, files=tuple(files), algorithm=algorithm, warnings=tuple(warnings))

    return Operation(body, name="verify", about=without_secrets(path)).result()


def _reports(
    part: OpenCheckpoint,
    manifest: Manifest | None,
    problems: Mapping[str, StioError | None],
    warnings: list[str],
    check: Callable[[], None],
) -> Iterator[FileReport]:
    for shard, (file, header) in enumerate(zip(part.files, part.headers, strict=True)):
        problem = problems.get(header.shard)
        if problem is None:
            try:
                with ExitStack() as owned:
                    warnings += _odd_bools(part.open_files([shard], owned)[shard], header, check)
            except StioError as error:
                problem = error
        text = None if problem is None else without_path(problem)
        states = () if manifest is None or part.manifest is None else manifest.files.get(part.manifest.names[shard], ())
        is_compared = any(state.digest for state in states)
        size = file.identity.nbytes
        yield FileReport(header.shard, size, header.data_bytes, len(header), is_compared, text)


def _steps_below(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(one.name for one in entries if FileName(one.name).is_step and one.is_dir())
    except OSError:  # no directory of this machine
        return []


def _odd_bools(file: Source, header: Header, check: Callable[[], None]) -> Iterator[str]:
    """Yield a warning for each BOOL tensor with bytes other than 0 and 1.

    A load does not change such bytes. Their meaning differs between readers, and between operations of torch.
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


# The text of the result.


def _below(path: str, problem: StioError) -> str:
    """Return the text of a problem after a line's path: a file below that path is named without it."""
    text, where = explained(problem), (problem.path or "").rstrip("/")
    folder = (os.path.dirname(path) if path.endswith(INDEX_SUFFIX) else path).rstrip("/")
    if not where.startswith(folder):
        return text
    name = where.removeprefix(folder).lstrip("/") if where != path.rstrip("/") else ""
    shown = f"{one_line(printable(name))}: " if name else ""
    return shown + text.removeprefix(f"{one_line(printable(problem.path))}: ")


def _lines(report: Report) -> Iterator[str]:
    """Yield a line for each file, one for each warning, and the verdict. A single file has the verdict only.

    A shard without damage is a number: the name of its file would fill the line.
    """
    is_single = [os.path.basename(report.path)] == [file.name for file in report.files]
    if not is_single:
        for k, file in enumerate(report.files, 1):
            number = f"shard {k}/{len(report.files)}" if len(report.files) > 1 else ""
            is_named = file.problem is not None or not number or file.name.startswith("../")  # of a delta's base
            name = ", ".join(filter(None, [number, one_line(file.name) if is_named else ""]))
            yield f"{name}: {_finding(file, report)}"
    for warning in report.warnings:
        yield f"warning: {one_line(warning)}"
    if report.algorithm is None:
        yield "there is no manifest with hashes: headers and sizes were checked, and not the values of tensors"
    wrong = sum(file.problem is not None for file in report.files)
    verdict = "ok" if report.ok else f"{wrong} of {counted(len(report.files), 'file')} wrong"
    if is_single:
        verdict = f"{'ok, ' if report.ok else 'wrong: '}{_finding(report.files[0], report)}"
    yield f"{one_line(report.path)}: {verdict}"


def _finding(file: FileReport, report: Report) -> str:
    if file.problem is not None:
        return one_line(file.problem)
    fits = f"header, sizes and {report.algorithm} fit" if file.is_compared else "header and sizes fit"
    return f"{fits} ({counted(file.num_tensors, 'tensor')}, {show_bytes(file.data_bytes)})"
