"""`stio verify PATH`: looks for damage, and says what it found. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import click

from stio.cli_common import NO, PATH, Bar, CommandError, counted, explained, one_line
from stio.errors import FormatError, IndexFormatError, IntegrityError, StioError, UnsafePathError, printable
from stio.spans import show_bytes
from stio.verification import FileReport, Report, examine

__all__ = ["verify"]


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
