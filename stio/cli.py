"""The command line: `stio inspect PATH`, `stio verify PATH`, and `stio convert SOURCE DESTINATION` (`cli_convert.py`).

Imports no torch, so that an answer is there at once. A terminal gets a drawn table; a pipe gets plain columns,
whole names and no colours. Names and metadata come out of files that nobody vouches for: control characters are
escaped before they reach a terminal. Exit status: 0, 1 for what a checkpoint or the system refuses, 2 for a call
that is wrong.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stio import __version__
from stio.cli_convert import convert
from stio.codec.header import TensorInfo
from stio.engine.opened import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.errors import StioError, printable
from stio.verification import Report, examine

__all__ = ["main"]

MOST_DRAWN_ROWS = 2_000
"""Above it the terminal gets plain columns too: drawing costs 0.3 ms a row."""


class _Command(click.Group):
    """Turns errors of stio into one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except StioError as error:
            raise click.ClickException(_line(str(error))) from error


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stio")
def main() -> None:
    """Look at safetensors checkpoints, and make them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")


main.add_command(convert)


@main.command()
@click.argument("path")
@click.option("--filter", "pattern", metavar="PATTERN", help="Only tensors whose name matches, as in 'model.*.bias'.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: everything, sizes in bytes.")
def inspect(path: str, pattern: str | None, as_json: bool) -> None:
    """List the tensors of a checkpoint: names, dtypes, shapes, sizes, shards.

    PATH is a .safetensors file, a directory that holds a checkpoint, or its index. Only headers are read.
    """
    opened = open_checkpoint(path, OpenOptions(strict=False))
    try:
        listing = _list(opened, pattern)
    finally:
        opened.close()
    if as_json:
        click.echo(json.dumps(listing.as_json(), indent=2))
        return
    # rich drops colours for NO_COLOR and keeps bold; whoever sets it wants neither.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(color_system=colours, highlight=False, emoji=False, markup=False)
    if console.is_terminal and len(listing.tensors) <= MOST_DRAWN_ROWS:
        _draw(listing, console)
    else:
        click.echo("\n".join(_plain(listing)))


@main.command()
@click.argument("path")
@click.option("--hash-required", is_flag=True, help="Fail where no manifest holds hashes to compare with.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def verify(path: str, hash_required: bool, as_json: bool) -> None:
    """Look for damage: headers, index, holes, and hashes where a manifest holds them.

    PATH is a .safetensors file, a directory that holds a checkpoint, or its index. Files are read whole where there
    is a manifest; otherwise headers only, and tensors of dtype BOOL.
    """
    try:
        report = examine(path, hash_required=hash_required)
    except ImportError as error:  # the package that made the hashes
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_report_as_json(report), indent=2))
    else:
        click.echo("\n".join(_report_lines(report)))
    if not report.ok:
        sys.exit(1)


def _report_lines(report: Report) -> Iterator[str]:
    """Yield a line for each file, then one for each warning, then the verdict."""
    for file in report.files:
        if file.problem is not None:
            yield f"{_line(file.name)}: {_line(file.problem)}"
            continue
        hashed = "not compared with a hash" if report.algorithm is None else f"{report.algorithm} as in the manifest"
        size = f"{_count(file.num_tensors, 'tensor')}, {_size(file.nbytes)}"
        yield f"{_line(file.name)}: header and sizes fit, {hashed} ({size})"
    for warning in report.warnings:
        yield f"warning: {_line(warning)}"
    if report.algorithm is None:
        yield "no manifest: nothing says what the bytes should be"
    wrong = sum(file.problem is not None for file in report.files)
    verdict = "ok" if report.ok else f"{wrong} of {_count(len(report.files), 'file')} wrong"
    yield f"{_line(report.path)}: {verdict}"


def _report_as_json(report: Report) -> dict[str, object]:
    return {
        "path": report.path,
        "ok": report.ok,
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


@dataclass(frozen=True, slots=True)
class _Listing:
    """What `inspect` found, ready to be shown."""

    path: str
    num_tensors: int
    shards: dict[str, int]
    tensors: list[TensorInfo]
    aliases: dict[str, str]
    metadata: dict[str, object]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Return number and bytes of the tensors of each dtype, the largest share first."""
        totals: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            count, nbytes = totals.get(tensor.dtype, (0, 0))
            totals[tensor.dtype] = count + 1, nbytes + tensor.nbytes
        return dict(sorted(totals.items(), key=lambda item: (-item[1][1], item[0])))

    def headline(self) -> str:
        shown = len(self.tensors)
        count = _count(shown, "tensor") if shown == self.num_tensors else f"{shown:,} of {self.num_tensors:,} tensors"
        return f"{_line(self.path)}: {count}, {_size(self.total_bytes)}, {_count(len(self.shards), 'shard')}"

    def columns(self) -> list[str]:
        return ["name", "dtype", "shape", "size", *(["shard"] if len(self.shards) > 1 else [])]

    def rows(self) -> Iterator[list[str]]:
        for tensor in self.tensors:
            shape = ", ".join(map(str, tensor.shape))
            row = [_line(tensor.name), tensor.dtype, f"[{shape}]", _size(tensor.nbytes)]
            yield [*row, _line(tensor.shard)] if len(self.shards) > 1 else row

    def notes(self) -> Iterator[str]:
        """Yield a line for each dtype, alias and entry of the metadata."""
        for dtype, (count, nbytes) in self.by_dtype().items():
            yield f"{dtype}: {_count(count, 'tensor')}, {_size(nbytes)}"
        for alias, target in self.aliases.items():
            yield f"alias {_line(alias)} = {_line(target)}"
        for key, value in self.metadata.items():
            yield f"metadata {_line(key)}: {_line(value if isinstance(value, str) else json.dumps(value))}"

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "num_tensors": len(self.tensors),
            "total_bytes": self.total_bytes,
            "dtypes": {d: {"num_tensors": count, "nbytes": nbytes} for d, (count, nbytes) in self.by_dtype().items()},
            "shards": [{"name": name, "file_bytes": nbytes} for name, nbytes in self.shards.items()],
            "metadata": self.metadata,
            "aliases": self.aliases,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "nbytes": tensor.nbytes,
                    "shard": tensor.shard,
                    "file_offset": tensor.file_offset,
                }
                for tensor in self.tensors
            ],
        }


def _list(opened: OpenCheckpoint, pattern: str | None) -> _Listing:
    def wanted(name: str) -> bool:
        return pattern is None or fnmatchcase(name, pattern)

    return _Listing(
        path=opened.path,
        num_tensors=sum(len(header) for header in opened.headers),
        shards={h.shard: f.identity.nbytes for h, f in zip(opened.headers, opened.files, strict=True)},
        tensors=[header.info(name) for header in opened.headers for name in header.names if wanted(name)],
        aliases={alias: target for alias, target in opened.aliases.items() if wanted(alias) or wanted(target)},
        metadata=dict(opened.metadata),
    )


def _plain(listing: _Listing) -> Iterator[str]:
    """Yield columns of text, nothing cut."""
    yield listing.headline()
    rows = [listing.columns(), *listing.rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(_padded(row, widths)).rstrip()
    yield from listing.notes()


def _padded(row: Sequence[str], widths: Iterable[int]) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if number == 3 else cell.ljust(width)


def _draw(listing: _Listing, console: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(listing.columns()):
        table.add_column(column, justify="right" if number == 3 else "left", overflow="fold", no_wrap=number in (1, 3))
    for name, dtype, *rest in listing.rows():
        table.add_row(Text(name), Text(dtype, "cyan"), *map(Text, rest))
    console.print(Text(listing.headline(), "bold"))
    console.print(table)
    for note in listing.notes():
        console.print(Text(printable(note), "dim"))


def _line(text: str) -> str:
    """Return text on one line, what a terminal would obey escaped."""
    return text if text.isprintable() else "".join(map(printable, text))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(nbytes: int) -> str:
    """Return a size in decimal units, as disks and hubs state it."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size, units = float(nbytes), ["TB", "GB", "MB", "kB"]
    while True:
        size, unit = size / 1000, units.pop()
        if size < 999.95 or not units:
            return f"{size:,.1f} {unit}"
