"""`stio inspect PATH`: prints the tensors of a checkpoint as a table, a tree or JSON. Reads headers only.

Names are in natural order: `layers.2` before `layers.10`. Shards are numbers, such as 1/3, and their files are listed
below the table. The tree groups names by their dots; its depth is limited, whatever the names in a file are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from math import prod
from typing import Any

import click

from stio.cli.output import (
    FILTER_OPTION,
    JSON_OPTION,
    PATH,
    joined,
    matcher,
    no_match,
    print_result,
    say,
    styled,
    table,
    width_of,
)
from stio.errors import one_line, printable
from stio.format import ALIASES_KEY, LIBRARY_NAMES, TensorInfo
from stio.storage.checkpoint import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.text import counted, natural_key, show_bytes

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
def inspect(path: str, pattern: str | None, as_tree: bool, depth: int | None, wide: bool) -> None:
    """List the tensors of a checkpoint.

    It prints names, dtypes, shapes, sizes and shards, and reads headers only. PATH is a .safetensors file, a directory
    with a checkpoint, its index, or a URL of one of these. Dtypes have the names of the format, such as BF16; the
    totals show torch's names too. Of a delta it prints all tensors, those of its bases too, and the share of the
    elements that it changes. Exit status 3: nothing matches --filter.
    """
    is_selected = matcher(pattern)
    with closing(open_checkpoint(path, OpenOptions(strict=False))) as opened:
        tensors = [header.info(name) for header in opened.headers for name in header.names if is_selected(name)]
        aliases = {name: target for name, target in opened.aliases.items() if is_selected(name) or is_selected(target)}
        num_tensors = sum(map(len, opened.headers))
        sizes_of_data = {header.shard: header.data_bytes for header in opened.headers}
        sizes_of_files = [file.identity.nbytes for file in opened.files]
        chain, changed = _chain(opened)
    if pattern is not None and not tensors and not aliases:
        raise no_match(opened.path, pattern)
    result = {
        "path": opened.path,
        "num_tensors": len(tensors),
        "total_bytes": sum(tensor.nbytes for tensor in tensors),
        "dtypes": _totals(tensors),
        "shards": [
            {"name": name, "file_bytes": nbytes} for name, nbytes in zip(sizes_of_data, sizes_of_files, strict=True)
        ],
        "metadata": dict(opened.metadata),
        "aliases": aliases,
        "tensors": [asdict(tensor) | changed.get(tensor.name, {}) for tensor in tensors],
        **chain,
    }

    def show() -> Iterator[str]:
        ordered = sorted(tensors, key=lambda tensor: natural_key(tensor.name))
        width = None if wide else width_of(sys.stdout)
        say(_headline(result, num_tensors), bold=True)
        is_tree = as_tree or depth is not None
        lines = list(_tree(ordered, depth, width) if is_tree else _table(ordered, list(sizes_of_data), width, changed))
        if lines:
            click.echo("\n".join(lines), file=sys.stdout)
        shards = {} if is_tree or len(sizes_of_data) == 1 else sizes_of_data
        return _notes(result, shards, {tensor.shard for tensor in tensors}, is_whole=width is None)

    print_result(result, show)


def _chain(opened: OpenCheckpoint) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return what a delta is based on, and of each tensor that it changes how many elements and bytes are in it."""
    if not opened.links:
        return {"kind": "full"}, {}
    (*_, base, last), parts = opened.links, opened.apart()
    changed = {
        info.name: {"changed_elements": prod(info.shape), "changed_bytes": info.nbytes}
        for header in parts[-1].headers
        for info in map(header.info, header.names)
    }
    for one in last.delta.changed if last.delta else ():
        nbytes = opened.patches[one.name][-1].nbytes
        changed[one.name] = {"changed_elements": one.count, "changed_bytes": nbytes}
    links = [
        {
            "path": link.path,
            "id": link.id,
            "kind": "delta" if link.delta else "full",
            "file_bytes": sum(file.identity.nbytes for file in part.files),
        }
        for link, part in zip(opened.links, parts, strict=True)
    ]
    return {"kind": "delta", "base": base.path, "links": links}, changed


def _totals(tensors: list[TensorInfo]) -> dict[str, dict[str, int]]:
    """Return number and bytes of the tensors of each dtype, the largest share first."""
    totals: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        total = totals.setdefault(tensor.dtype, {"num_tensors": 0, "nbytes": 0})
        total["num_tensors"] += 1
        total["nbytes"] += tensor.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1]["nbytes"], item[0])))


def _headline(result: dict[str, Any], num_tensors: int) -> str:
    shown, num_aliases = result["num_tensors"], len(result["aliases"])
    count = counted(shown, "tensor") if shown == num_tensors else f"{shown:,} of {num_tensors:,} tensors"
    if num_aliases:  # a load returns them too
        count += f" and {num_aliases:,} alias{'es' if num_aliases > 1 else ''}"
    shards = counted(len(result["shards"]), "shard")
    return f"{one_line(result['path'])}: {count}, {show_bytes(result['total_bytes'])}, {shards}"


def _notes(result: dict[str, Any], shards: dict[str, int], shown: set[str], *, is_whole: bool) -> Iterator[str]:
    """Yield the lines below the tensors: the chain, shards with tensors that are shown, dtypes, aliases, metadata."""
    if result["kind"] == "delta":
        yield f"delta {len(result['links']) - 1} of a chain, on {one_line(result['base'])}:"
        for link in result["links"]:
            yield f"{link['kind']}: {one_line(link['path'])}, {show_bytes(link['file_bytes'])}"
    lines = [
        f"shard {k}/{len(shards)}: {one_line(name)}, {show_bytes(nbytes)}"
        for k, (name, nbytes) in enumerate(shards.items(), 1)
        if name in shown
    ]
    yield from _first(lines, "shards", is_whole=is_whole)
    for dtype, total in result["dtypes"].items():
        in_torch = f" ({LIBRARY_NAMES[dtype]})" if dtype in LIBRARY_NAMES else ""
        yield f"{dtype}{in_torch}: {counted(total['num_tensors'], 'tensor')}, {show_bytes(total['nbytes'])}"
    escaped = one_line if is_whole else printable
    pairs = sorted(result["aliases"].items(), key=lambda pair: natural_key(pair[0]))
    lines = [f"alias {escaped(alias)} = {escaped(target)}" for alias, target in pairs]
    yield from _first(lines, "aliases", is_whole=is_whole)
    for key, value in result["metadata"].items():
        if key != ALIASES_KEY:
            yield f"metadata {escaped(key)}: {escaped(value if isinstance(value, str) else json.dumps(value))}"


def _first(lines: list[str], what: str, *, is_whole: bool) -> list[str]:
    if is_whole or len(lines) <= _MAX_LISTED:
        return lines
    return [*lines[:_MAX_LISTED], f"{len(lines) - _MAX_LISTED:,} more {what}: --wide lists them"]


def _table(
    tensors: list[TensorInfo], shards: list[str], width: int | None, changed: dict[str, dict[str, int]]
) -> Iterator[str]:
    numbers = {name: f"{k}/{len(shards)}" for k, name in enumerate(shards, 1)}
    rows = [["name", "dtype", "shape", "size", "shard"]]
    for one in tensors:
        rows.append([one_line(one.name), one.dtype, str(list(one.shape)), show_bytes(one.nbytes), numbers[one.shard]])
    if len(numbers) == 1:
        rows = [row[:-1] for row in rows]
    if changed:
        rows[0].append("changed")
        for row, one in zip(rows[1:], tensors, strict=True):
            share = changed.get(one.name)
            row.append(f"{share['changed_elements'] / max(1, prod(one.shape)):.2%}" if share else "")
    for k, line in enumerate(table(rows, right={3}, width=width)):
        yield joined(line) if k else styled(joined(line), bold=True)


def _tree(tensors: list[TensorInfo], depth: int | None, width: int | None) -> Iterator[str]:
    rows = [(tuple(tensor.name.split(".", MAX_LEVELS - 1)), tensor) for tensor in tensors]
    if labels := list(_branches(rows, depth or MAX_LEVELS)):
        yield from map(joined, table(labels, width=width))


def _branches(
    rows: list[tuple[tuple[str, ...], TensorInfo]], levels: int, before: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line of tensors, of which the parts of the names that are left are given."""
    groups: dict[str, list[tuple[tuple[str, ...], TensorInfo]]] = {}
    for (first, *rest), tensor in rows:
        groups.setdefault(first, []).append((tuple(rest), tensor))
    for k, (label, below) in enumerate(groups.items(), 1):
        while below[0][0] and len({rest[:1] for rest, _ in below}) == 1:  # a chain of single children is one line
            label += f".{below[0][0][0]}"
            below = [(rest[1:], tensor) for rest, tensor in below]
        text = f"{counted(len(below), 'tensor')}, {show_bytes(sum(tensor.nbytes for _, tensor in below))}"
        for tensor in (tensor for rest, tensor in below if not rest):
            text = f"{tensor.dtype} {list(tensor.shape)}  {show_bytes(tensor.nbytes)}"
        corner, line = ("└─ ", "   ") if k == len(groups) else ("├─ ", "│  ")
        yield f"{before}{corner}{one_line(label)}", text
        if levels > 1:
            yield from _branches([row for row in below if row[0]], levels - 1, before + line)
