"""`stio inspect PATH`: prints the tensors of a checkpoint as a table, a tree or JSON. Reads headers only.

A terminal gets a table with colours. A pipe gets plain columns with whole names. The tree groups names by their dots;
its depth is limited, whatever the names in a file are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stio.cli.output import FILTER_OPTION, JSON_OPTION, PATH, aligned, console, matcher
from stio.errors import one_line, printable
from stio.format.header import TensorInfo
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.runtime.units import counted, show_bytes

MAX_TABLE_ROWS = 2_000
"""With more rows a terminal gets plain columns too: a row of a table costs 0.3 ms."""

MAX_LEVELS = 32
"""Depth of the tree; further dots are part of the last name."""

_PADDED = 48
"""Labels in a tree are padded to this width; a longer label moves its own line only."""


@click.command()
@click.argument("path", type=PATH)
@FILTER_OPTION
@click.option("--tree", "as_tree", is_flag=True, help="Group names by their dots.")
@click.option("--depth", metavar="N", type=click.IntRange(min=1), help="Number of levels of the tree.")
@JSON_OPTION
def inspect(path: str, pattern: str | None, as_tree: bool, depth: int | None, as_json: bool) -> None:
    """List the tensors of a checkpoint.

    It prints names, dtypes, shapes, sizes and shards, and reads headers only. PATH is a .safetensors file, a directory
    with a checkpoint, or its index.
    """
    with closing(open_checkpoint(path, strict=False)) as opened:
        listing = _list(opened, pattern)
    screen = console()
    if as_json:
        click.echo(json.dumps(listing.as_json(), indent=2))
    elif as_tree or depth is not None:
        click.echo("\n".join([listing.headline(), *_tree(listing, depth), *listing.notes()]))
    elif screen.is_terminal and len(listing.tensors) <= MAX_TABLE_ROWS:
        _draw(listing, screen)
    else:
        columns = aligned([listing.columns(), *listing.rows()], right={3})
        click.echo("\n".join([listing.headline(), *columns, *listing.notes()]))


@dataclass(frozen=True, slots=True)
class _Listing:
    """Tensors and other facts of a checkpoint, to be printed."""

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
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }


def _list(opened: OpenCheckpoint, pattern: str | None) -> _Listing:
    is_selected = matcher(pattern)
    return _Listing(
        path=opened.path,
        num_tensors=sum(len(header) for header in opened.headers),
        shards={h.shard: f.identity.nbytes for h, f in zip(opened.headers, opened.files, strict=True)},
        tensors=[header.info(name) for header in opened.headers for name in header.names if is_selected(name)],
        aliases={
            alias: target for alias, target in opened.aliases.items() if is_selected(alias) or is_selected(target)
        },
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
    """All tensors whose names start with one prefix."""

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
        for part in tensor.name.split(".", MAX_LEVELS - 1):
            node = node.children.setdefault(part, _Node())
            node.num_tensors += 1
            node.nbytes += tensor.nbytes
        node.tensor = tensor
    guides = _guides()
    lines = [(label.translate(guides), text) for label, text in _branches(root, "", depth or MAX_LEVELS)]
    width = min(_PADDED, max((len(label) for label, _ in lines), default=0))
    for label, text in lines:
        yield f"{label.ljust(width)}  {text}"


def _branches(node: _Node, before: str, levels: int) -> Iterator[tuple[str, str]]:
    r"""Yield label and text of each line below a node. `\0` to `\3` are the lines of the tree, which no label has."""
    ordered = sorted(node.children.items(), key=lambda item: _natural(item[0]))
    for k, (part, child) in enumerate(ordered):
        is_last = k == len(ordered) - 1
        names = [part]
        while child.tensor is None and len(child.children) == 1:  # a chain of single children is one line
            (following, child), *_ = child.children.items()
            names.append(following)
        yield before + ("\1" if is_last else "\0") + one_line(".".join(names)), child.text()
        if levels > 1:
            yield from _branches(child, before + ("\3" if is_last else "\2"), levels - 1)


def _natural(part: str) -> tuple[bool, int, str]:
    """Return a key that sorts numbers by value, and before names."""
    is_number = part.isascii() and part.isdecimal() and len(part) < 20
    return not is_number, int(part) if is_number else 0, part


def _guides() -> dict[int, str]:
    drawn = ("├─ ", "└─ ", "│  ", "   ")
    try:
        "".join(drawn).encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        drawn = ("|- ", "`- ", "|  ", "   ")
    return dict(enumerate(drawn))
