"""`stio inspect PATH`: prints the tensors of a checkpoint as a table, a tree or JSON. Reads headers only.

Names are in natural order: `layers.2` before `layers.10`. Shards are numbers, such as 1/3, and their files are listed
below the table. The tree groups names by their dots; its depth is limited, whatever the names in a file are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field

import click

from stio.cli.output import FILTER_OPTION, JSON_OPTION, PATH, joined, matcher, no_match, say, styled, table, width_of
from stio.errors import one_line, printable
from stio.format.dtypes import LIBRARY_NAMES
from stio.format.header import TensorInfo
from stio.format.shared import ALIASES_KEY
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.runtime.text import counted, natural_key, show_bytes

MAX_LEVELS = 32
"""Depth of the tree; further dots are part of the last name."""

_MAX_LISTED = 8
"""Shards, and aliases, that are listed below a table on a terminal."""


@click.command()
@click.argument("path", type=PATH)
@FILTER_OPTION
@click.option("--tree", "as_tree", is_flag=True, help="Group names by their dots.")
@click.option("--depth", metavar="N", type=click.IntRange(min=1), help="Number of levels of the tree.")
@click.option("--wide", is_flag=True, help="Shorten nothing, and list all shards and aliases, as in a pipe.")
@JSON_OPTION
def inspect(path: str, pattern: str | None, as_tree: bool, depth: int | None, wide: bool, as_json: bool) -> None:
    """List the tensors of a checkpoint.

    It prints names, dtypes, shapes, sizes and shards, and reads headers only. PATH is a .safetensors file, a directory
    with a checkpoint, its index, or a URL of one of these. Dtypes have the names of the format, such as BF16; the
    totals show torch's names too. Exit status 3: nothing matches --filter.
    """
    with closing(open_checkpoint(path, strict=False)) as opened:
        listing = _list(opened, pattern)
        if pattern is not None and not listing.tensors and not listing.aliases:
            raise no_match(listing.path, pattern)
    if as_json:
        click.echo(json.dumps(listing.as_json(), indent=2))
        return
    listing.tensors.sort(key=lambda tensor: natural_key(tensor.name))
    width = None if wide else width_of(sys.stdout)
    is_tree = as_tree or depth is not None
    say(listing.headline(), bold=True)
    lines = list(_tree(listing, depth or MAX_LEVELS, width) if is_tree else _table(listing, width))
    if lines:
        click.echo("\n".join(lines), file=sys.stdout)
    if notes := list(listing.notes(with_shards=not is_tree, is_whole=width is None)):
        say("\n".join(notes), dim=True)


@dataclass(frozen=True, slots=True)
class _Listing:
    """Tensors and other facts of a checkpoint, to be printed."""

    path: str
    num_tensors: int
    shards: dict[str, tuple[int, int]]
    """Bytes of the tensors and of the file of each shard."""
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
        if self.aliases:  # a load returns them too
            count += f" and {len(self.aliases):,} alias{'es' if len(self.aliases) > 1 else ''}"
        return f"{one_line(self.path)}: {count}, {show_bytes(self.total_bytes)}, {counted(len(self.shards), 'shard')}"

    def notes(self, *, with_shards: bool, is_whole: bool) -> Iterator[str]:
        """Yield the lines below the tensors: shards with tensors that are shown, dtypes, aliases, metadata."""
        shown = {tensor.shard for tensor in self.tensors}
        if with_shards and len(self.shards) > 1:
            lines = [
                f"shard {k}/{len(self.shards)}: {one_line(name)}, {show_bytes(nbytes)}"
                for k, (name, (nbytes, _)) in enumerate(self.shards.items(), 1)
                if name in shown
            ]
            yield from _first(lines, "shards", is_whole=is_whole)
        for dtype, (count, nbytes) in self.by_dtype().items():
            in_torch = f" ({LIBRARY_NAMES[dtype]})" if dtype in LIBRARY_NAMES else ""
            yield f"{dtype}{in_torch}: {counted(count, 'tensor')}, {show_bytes(nbytes)}"
        escaped = one_line if is_whole else printable
        pairs = sorted(self.aliases.items(), key=lambda pair: natural_key(pair[0]))
        lines = [f"alias {escaped(alias)} = {escaped(target)}" for alias, target in pairs]
        yield from _first(lines, "aliases", is_whole=is_whole)
        for key, value in self.metadata.items():
            if key != ALIASES_KEY:
                yield f"metadata {escaped(key)}: {escaped(value if isinstance(value, str) else json.dumps(value))}"

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "num_tensors": len(self.tensors),
            "total_bytes": self.total_bytes,
            "dtypes": {d: {"num_tensors": count, "nbytes": nbytes} for d, (count, nbytes) in self.by_dtype().items()},
            "shards": [{"name": name, "file_bytes": nbytes} for name, (_, nbytes) in self.shards.items()],
            "metadata": self.metadata,
            "aliases": self.aliases,
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }


def _first(lines: list[str], what: str, *, is_whole: bool) -> list[str]:
    if is_whole or len(lines) <= _MAX_LISTED:
        return lines
    return [*lines[:_MAX_LISTED], f"{len(lines) - _MAX_LISTED:,} more {what}: --wide lists them"]


def _list(opened: OpenCheckpoint, pattern: str | None) -> _Listing:
    is_selected = matcher(pattern)
    return _Listing(
        path=opened.path,
        num_tensors=sum(len(header) for header in opened.headers),
        shards={h.shard: (h.data_bytes, f.identity.nbytes) for h, f in zip(opened.headers, opened.files, strict=True)},
        tensors=[header.info(name) for header in opened.headers for name in header.names if is_selected(name)],
        aliases={
            alias: target for alias, target in opened.aliases.items() if is_selected(alias) or is_selected(target)
        },
        metadata=dict(opened.metadata),
    )


def _table(listing: _Listing, width: int | None) -> Iterator[str]:
    numbers = {name: f"{k}/{len(listing.shards)}" for k, name in enumerate(listing.shards, 1)}
    rows = [["name", "dtype", "shape", "size", "shard"]]
    for one in listing.tensors:
        rows.append([one_line(one.name), one.dtype, str(list(one.shape)), show_bytes(one.nbytes), numbers[one.shard]])
    if len(numbers) == 1:
        rows = [row[:-1] for row in rows]
    for k, line in enumerate(table(rows, right={3}, width=width)):
        yield joined(line) if k else styled(joined(line), bold=True)


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


def _tree(listing: _Listing, depth: int, width: int | None) -> Iterator[str]:
    root = _Node()
    for tensor in listing.tensors:
        node = root
        for part in tensor.name.split(".", MAX_LEVELS - 1):
            node = node.children.setdefault(part, _Node())
            node.num_tensors += 1
            node.nbytes += tensor.nbytes
        node.tensor = tensor
    if rows := list(_branches(root, "", depth)):
        yield from map(joined, table(rows, width=width))


def _branches(node: _Node, before: str, levels: int) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line below a node."""
    for k, (part, child) in enumerate(node.children.items(), 1):
        is_last = k == len(node.children)
        names = [part]
        while child.tensor is None and len(child.children) == 1:  # a chain of single children is one line
            (following, child), *_ = child.children.items()
            names.append(following)
        yield f"{before}{'└─ ' if is_last else '├─ '}{one_line('.'.join(names))}", child.text()
        if levels > 1:
            yield from _branches(child, f"{before}{'   ' if is_last else '│  '}", levels - 1)
