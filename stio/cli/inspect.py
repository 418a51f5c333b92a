"""`stio inspect PATH`: prints the tensors of a checkpoint as a table, a tree or JSON. Reads headers only.

Names are in natural order: `layers.2` before `layers.10`. Shards are numbers, such as 1/3, and their files are listed
below the table. A terminal gets colours, and names that fit its width. A pipe gets whole names. The tree groups names
by their dots; its depth is limited, whatever the names in a file are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field

import click

from stio.cli.output import (
    FILTER_OPTION,
    JSON_OPTION,
    PATH,
    WholeNumber,
    cells,
    columns_of,
    has_colours,
    is_encodable,
    matcher,
    no_match,
    say,
    shortened,
    width_of,
    write,
)
from stio.errors import one_line
from stio.format.dtypes import LIBRARY_NAMES
from stio.format.header import TensorInfo
from stio.format.shared import ALIASES_KEY
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.runtime.text import counted, natural_key, show_bytes

MAX_LEVELS = 32
"""Depth of the tree; further dots are part of the last name."""

_MAX_SHARDS = 8
"""Shards that are listed below a table on a terminal; of more, the first and the last."""

_MAX_ALIASES = 8
"""Aliases that are listed below a table on a terminal."""

_PADDED = 48
"""Labels in a tree are padded to this width; a longer label moves its own line only."""


@click.command()
@click.argument("path", type=PATH)
@FILTER_OPTION
@click.option("--tree", "as_tree", is_flag=True, help="Group names by their dots.")
@click.option("--depth", metavar="N", type=WholeNumber(min=1), help="Number of levels of the tree.")
@click.option("--wide", is_flag=True, help="Shorten nothing. Only a terminal gets shortened names.")
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
            raise no_match(listing.path, pattern, [name for header in opened.headers for name in header.names])
    width = None if wide else width_of(sys.stdout)
    if as_json:
        click.echo(json.dumps(listing.as_json(), indent=2))
    elif as_tree or depth is not None:
        _print(listing, _tree(listing, depth, width), [], width)
    else:
        _print(listing, _table(listing, width), listing.shard_names(is_whole=width is None), width)


def _print(listing: _Listing, lines: Iterable[str], shards: list[str], width: int | None) -> None:
    """Print the headline, lines that fit the terminal, and the notes below them."""
    say(listing.headline(), style="bold")
    if text := "\n".join(lines):
        write(text, has_style=has_colours())
    notes = [*shards, *listing.dtypes(), *listing.alias_lines(width), *listing.metadata_lines(width)]
    if notes:
        say("\n".join(notes), style="dim")


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

    def columns(self) -> list[str]:
        return ["name", "dtype", "shape", "size", *(["shard"] if len(self.shards) > 1 else [])]

    def rows(self) -> Iterator[list[str]]:
        numbers = {name: f"{k}/{len(self.shards)}" for k, name in enumerate(self.shards, 1)}
        for tensor in self.in_order():
            row = [one_line(tensor.name), tensor.dtype, str(list(tensor.shape)), show_bytes(tensor.nbytes)]
            yield [*row, numbers[tensor.shard]] if len(self.shards) > 1 else row

    def in_order(self) -> list[TensorInfo]:
        return sorted(self.tensors, key=lambda tensor: natural_key(tensor.name))

    def shard_names(self, *, is_whole: bool) -> list[str]:
        """Return a line for each shard with tensors of the table; else, of many shards, the first and the last one."""
        if len(self.shards) < 2:
            return []
        shown = {tensor.shard for tensor in self.tensors}
        lines = [
            f"shard {k}/{len(self.shards)}: {one_line(name)}, {show_bytes(nbytes)}"
            for k, (name, (nbytes, _)) in enumerate(self.shards.items(), 1)
            if name in shown
        ]
        if is_whole or len(lines) <= _MAX_SHARDS:
            return lines
        return [lines[0], f"{len(lines) - 2:,} more shards: --wide lists them", lines[-1]]

    def dtypes(self) -> Iterator[str]:
        """Yield a line for each dtype."""
        for dtype, (count, nbytes) in self.by_dtype().items():
            in_torch = f" ({LIBRARY_NAMES[dtype]})" if dtype in LIBRARY_NAMES else ""
            yield f"{dtype}{in_torch}: {counted(count, 'tensor')}, {show_bytes(nbytes)}"

    def alias_lines(self, width: int | None) -> Iterator[str]:
        """Yield a line for each alias; with a width, names are shortened, and the first ones of many are shown."""
        pairs = sorted(self.aliases.items(), key=lambda pair: natural_key(pair[0]))
        if width is None:
            yield from (f"alias {one_line(alias)} = {one_line(target)}" for alias, target in pairs)
            return
        rest = max(2 * _SHORTEST_LABEL, width - len("alias  = "))
        for alias, target in pairs[:_MAX_ALIASES]:
            first = shortened(one_line(alias), max(rest // 2, rest - cells(one_line(target))))
            yield f"alias {first} = {shortened(one_line(target), rest - cells(first))}"
        if len(pairs) > _MAX_ALIASES:
            yield f"{len(pairs) - _MAX_ALIASES:,} more aliases: --wide lists them"

    def metadata_lines(self, width: int | None) -> Iterator[str]:
        """Yield a line for each entry of the metadata but the aliases; with a width, long values are cut."""
        for key, value in self.metadata.items():
            if key == ALIASES_KEY:
                continue
            line = f"metadata {one_line(key)}: {one_line(value if isinstance(value, str) else json.dumps(value))}"
            if width is not None and cells(line) > width:
                number = f"... ({len(line):,} characters)"
                line = line[: max(0, min(width, len(line)) - len(number))] + number
            yield line

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
    is_styled = has_colours()
    for k, row in enumerate(columns_of([listing.columns(), *listing.rows()], right={3}, width=width)):
        if is_styled:
            row = [click.style(cell, bold=True) for cell in row] if not k else row
            row[1] = click.style(row[1], fg="cyan") if k else row[1]
        yield "  ".join(row).rstrip()


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


def _tree(listing: _Listing, depth: int | None, width: int | None) -> Iterator[str]:
    root = _Node()
    for tensor in listing.tensors:
        node = root
        for part in tensor.name.split(".", MAX_LEVELS - 1):
            node = node.children.setdefault(part, _Node())
            node.num_tensors += 1
            node.nbytes += tensor.nbytes
        node.tensor = tensor
    guides = _guides()
    lines = []
    for before, label, text in _branches(root, "", depth or MAX_LEVELS):
        drawn = before.translate(guides)
        if width is not None:
            label = shortened(label, max(_SHORTEST_LABEL, width - len(drawn) - len(text) - 2))
        lines.append((drawn + label, text))
    most = min(_PADDED, max((cells(label) for label, _ in lines), default=0))
    for label, text in lines:
        padded = most if width is None else min(most, width - len(text) - 2)
        yield f"{label}{' ' * (padded - cells(label))}  {text}"


_SHORTEST_LABEL = 12


def _branches(node: _Node, before: str, levels: int) -> Iterator[tuple[str, str, str]]:
    r"""Yield guides, label and text of each line below a node. `\0` to `\3` stand for the guides."""
    ordered = sorted(node.children.items(), key=lambda item: natural_key(item[0]))
    for k, (part, child) in enumerate(ordered):
        is_last = k == len(ordered) - 1
        names = [part]
        while child.tensor is None and len(child.children) == 1:  # a chain of single children is one line
            (following, child), *_ = child.children.items()
            names.append(following)
        yield before + ("\1" if is_last else "\0"), one_line(".".join(names)), child.text()
        if levels > 1:
            yield from _branches(child, before + ("\3" if is_last else "\2"), levels - 1)


def _guides() -> dict[int, str]:
    drawn = ("├─ ", "└─ ", "│  ", "   ")
    if not is_encodable("".join(drawn)):
        drawn = ("|- ", "`- ", "|  ", "   ")
    return dict(enumerate(drawn))
