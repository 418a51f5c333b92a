"""`stio inspect PATH`: the tensors of a checkpoint as a table, a tree or JSON. Reads headers only.

A terminal gets a drawn table; a pipe gets plain columns, whole names and no colours. The tree groups names by their
dots, to a depth that no hostile name exceeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stio.cli.output import PATH, aligned, console, counted, matcher, one_line
from stio.errors import printable
from stio.format.header import TensorInfo
from stio.loading.open import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.runtime.spans import show_bytes

__all__ = ["inspect"]

MOST_DRAWN_ROWS = 2_000
"""Above it the terminal gets plain columns too: drawing costs 0.3 ms a row."""

MOST_LEVELS = 32
"""Dots beyond it are part of the last name: a tree is at most so deep, whatever a file's names are."""

_PADDED = 48
"""Labels in a tree are filled up to this; a longer one pushes its own line only."""


@click.command()
@click.argument("path", type=PATH)
@click.option("--filter", "pattern", metavar="PATTERN", help="Only names that match 'a.*.glob' or '/an expression/'.")
@click.option("--tree", "as_tree", is_flag=True, help="Group names by their dots.")
@click.option("--depth", metavar="N", type=click.IntRange(min=1), help="Levels of the tree that are shown.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: everything, sizes in bytes.")
def inspect(path: str, pattern: str | None, as_tree: bool, depth: int | None, as_json: bool) -> None:
    """List the tensors of a checkpoint.

    Names, dtypes, shapes, sizes and shards; only headers are read. PATH is a .safetensors file, a directory that holds
    a checkpoint, or its index.
    """
    opened = open_checkpoint(path, OpenOptions(strict=False))
    try:
        listing = _list(opened, pattern)
    finally:
        opened.close()
    screen = console()
    if as_json:
        click.echo(json.dumps(listing.as_json(), indent=2))
    elif as_tree or depth is not None:
        click.echo("\n".join([listing.headline(), *_tree(listing, depth), *listing.notes()]))
    elif screen.is_terminal and len(listing.tensors) <= MOST_DRAWN_ROWS:
        _draw(listing, screen)
    else:
        columns = aligned([listing.columns(), *listing.rows()], right={3})
        click.echo("\n".join([listing.headline(), *columns, *listing.notes()]))


@dataclass(frozen=True, slots=True)
class _Listing:
    """What was found, ready to be shown."""

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
        count = counted(shown, "tensor") if shown == self.num_tensors else f"{shown:,} of {self.num_tensors:,} tensors"
        return f"{one_line(self.path)}: {count}, {show_bytes(self.total_bytes)}, {counted(len(self.shards), 'shard')}"

    def columns(self) -> list[str]:
        return ["name", "dtype", "shape", "size", *(["shard"] if len(self.shards) > 1 else [])]

    def rows(self) -> Iterator[list[str]]:
        for tensor in self.tensors:
            row = [one_line(tensor.name), tensor.dtype, str(list(tensor.shape)), show_bytes(tensor.nbytes)]
            yield [*row, one_line(tensor.shard)] if len(self.shards) > 1 else row

    def notes(self) -> Iterator[str]:
        """Yield a line for each dtype, alias and entry of the metadata."""
        for dtype, (count, nbytes) in self.by_dtype().items():
            yield f"{dtype}: {counted(count, 'tensor')}, {show_bytes(nbytes)}"
        for alias, target in self.aliases.items():
            yield f"alias {one_line(alias)} = {one_line(target)}"
        for key, value in self.metadata.items():
            yield f"metadata {one_line(key)}: {one_line(value if isinstance(value, str) else json.dumps(value))}"

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
    wanted = matcher(pattern)
    return _Listing(
        path=opened.path,
        num_tensors=sum(len(header) for header in opened.headers),
        shards={h.shard: f.identity.nbytes for h, f in zip(opened.headers, opened.files, strict=True)},
        tensors=[header.info(name) for header in opened.headers for name in header.names if wanted(name)],
        aliases={alias: target for alias, target in opened.aliases.items() if wanted(alias) or wanted(target)},
        metadata=dict(opened.metadata),
    )


def _draw(listing: _Listing, screen: Console) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(listing.columns()):
        table.add_column(column, justify="right" if number == 3 else "left", overflow="fold", no_wrap=number in (1, 3))
    for name, dtype, *rest in listing.rows():
        table.add_row(Text(name), Text(dtype, "cyan"), *map(Text, rest))
    screen.print(Text(listing.headline(), "bold"))
    screen.print(table)
    for note in listing.notes():
        screen.print(Text(printable(note), "dim"))


# The tree.


@dataclass(slots=True)
class _Node:
    """What begins with one prefix."""

    children: dict[str, _Node] = field(default_factory=dict)
    tensor: TensorInfo | None = None
    num_tensors: int = 0
    nbytes: int = 0

    def text(self) -> str:
        if self.tensor is not None:
            return f"{self.tensor.dtype} {list(self.tensor.shape)}  {show_bytes(self.tensor.nbytes)}"
        return f"{counted(self.num_tensors, 'tensor')}, {show_bytes(self.nbytes)}"


def _tree(listing: _Listing, depth: int | None) -> Iterator[str]:
    root = _Node()
    for tensor in listing.tensors:
        node = root
        for part in tensor.name.split(".", MOST_LEVELS - 1):
            node = node.children.setdefault(part, _Node())
            node.num_tensors += 1
            node.nbytes += tensor.nbytes
        node.tensor = tensor
    guides = _guides()
    lines = [(label.translate(guides), text) for label, text in _branches(root, "", depth or MOST_LEVELS)]
    width = min(_PADDED, max((len(label) for label, _ in lines), default=0))
    for label, text in lines:
        yield f"{label.ljust(width)}  {text}"


def _branches(node: _Node, before: str, levels: int) -> Iterator[tuple[str, str]]:
    r"""Yield label and text of each line below a node, guides written as `\\0` to `\\3`, which no shown name holds."""
    ordered = sorted(node.children.items(), key=lambda item: _natural(item[0]))
    for k, (part, child) in enumerate(ordered):
        is_last = k == len(ordered) - 1
        names = [part]
        while child.tensor is None and len(child.children) == 1:  # a chain is one line
            (following, child), *_ = child.children.items()
            names.append(following)
        yield before + ("\1" if is_last else "\0") + one_line(".".join(names)), child.text()
        if levels > 1:
            yield from _branches(child, before + ("\3" if is_last else "\2"), levels - 1)


def _natural(part: str) -> tuple[bool, int, str]:
    """Sort numbers by value, before names."""
    is_number = part.isascii() and part.isdecimal() and len(part) < 20
    return not is_number, int(part) if is_number else 0, part


def _guides() -> dict[int, str]:
    drawn = ("├─ ", "└─ ", "│  ", "   ")
    try:
        "".join(drawn).encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        drawn = ("|- ", "`- ", "|  ", "   ")
    return dict(enumerate(drawn))
