"""`stio diff A B`: compares two checkpoints. Imports no torch.

From top to bottom: the command, the comparison, the text of the result. The comparison matches tensors by name. Those
with equal dtype and shape are read in pieces by a few workers; where the bytes differ, `numbers.py` compares values.
Floats of two dtypes, as a conversion leaves them, are compared too: as float64, which holds the values of both.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite, prod
from typing import Any, NamedTuple

import click

from stio.cli.output import (
    FILTER_OPTION,
    JSON_OPTION,
    NO,
    NO_PROGRESS_OPTION,
    PATH,
    READABLE_NAME,
    ZERO_OR_MORE,
    Bar,
    broken,
    cells,
    columns_of,
    has_colours,
    matcher,
    no_match,
    room_for_names,
    say,
    shortened,
    width_of,
    write,
)
from stio.errors import one_line
from stio.format.dtypes import BITS
from stio.format.header import TensorInfo
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.runtime.memory import Region, allocate, libc
from stio.runtime.operation import Operation
from stio.runtime.text import counted, natural_key
from stio.runtime.urls import without_secrets
from stio.runtime.workers import WorkerPool
from stio.storage.base import Source

PIECE_BYTES = 6 << 20
"""Bytes of one side that are read at once: a whole number of values of each dtype, also of packed 6-bit values."""

_MOST_ROWS = 20
"""Differences of each kind that are listed."""

_FLOATS = ("F", "BF")
"""Starts of the names of floating dtypes."""

NUM_WORKERS = 2
"""Workers. With their pieces, and the numbers made from them, a comparison holds about 100 MB at most."""


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@FILTER_OPTION
@click.option("--header-only", is_flag=True, help="Compare names, dtypes and shapes, and read no values.")
@click.option(
    "--tolerance",
    metavar="NUMBER",
    type=ZERO_OR_MORE,
    help="Values that differ by at most this count as equal, and so do two NaN. Without it, bits are compared.",
)
@click.option("--all", "show_all", is_flag=True, help=f"List all differences, and not {_MOST_ROWS} of each kind.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def diff(
    a: str,
    b: str,
    pattern: str | None,
    header_only: bool,
    tolerance: float | None,
    show_all: bool,
    as_json: bool,
    no_progress: bool,
) -> int:
    """Compare two checkpoints.

    Compares names, dtypes, shapes, and values bit by bit, but not metadata. Floats of two dtypes, such as those of a
    converted checkpoint, are compared as the wider one: with --tolerance by that, otherwise by what rounding to the
    narrower one can change. A and B are .safetensors files, directories with checkpoints, their indices, or URLs of
    these. The number of shards does not matter, and memory does not depend on their size.
    Exit status: 0 equal, 1 different, 2 an error, 3 nothing matches --filter.
    """
    if tolerance is not None and header_only:
        raise click.UsageError("--tolerance compares values, and --header-only reads none: give one of the two")
    is_selected = matcher(pattern)
    with Bar("comparing", is_wanted=not no_progress) as bar:
        found = compare(
            a, b, is_selected=is_selected, header_only=header_only, tolerance=tolerance, progress=bar.advance
        )
    a, b = without_secrets(a), without_secrets(b)
    if pattern is not None and found.equal and not found.num_same:
        raise no_match(f"{a} and {b}", pattern, found.left_out)
    if as_json:
        click.echo(json.dumps(_as_json(found, a, b, header_only, tolerance), indent=2))
    else:
        _print(found, a, b, header_only, tolerance, None if show_all else _MOST_ROWS)
    return 0 if found.equal else NO


# The comparison.


class Difference(NamedTuple):
    """Difference between the values of one tensor, or of a piece of it, in two checkpoints."""

    num_differing: int = 0
    """Number of values with different bits; with a tolerance, of those beyond it."""
    max_abs: float | int | None = None
    """Largest absolute difference of values that are numbers on both sides; None: there are none."""
    num_nan: int = 0
    """Number of values that are NaN on one side only."""

    @classmethod
    def together(cls, parts: Iterable[tuple[int, float | int | None, int]]) -> Difference:
        """Return the difference of several pieces together, each given by the fields above."""
        counts, distances, nans = zip((0, None, 0), *parts, strict=True)
        return cls(sum(counts), max((one for one in distances if one is not None), default=None), sum(nans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of the comparison of two checkpoints, A and B."""

    only_a: tuple[TensorInfo, ...]
    """Tensors of A whose names B does not have."""
    only_b: tuple[TensorInfo, ...]
    """Tensors of B whose names A does not have."""
    changed: tuple[tuple[TensorInfo, TensorInfo], ...]
    """Tensors with the same name and another dtype or shape whose values are not compared."""
    num_same: int
    """Number of tensors with the same name, dtype and shape; with a tolerance, also those of two floating dtypes."""
    differing: tuple[tuple[TensorInfo, TensorInfo, Difference], ...]
    """Those among them with different values; empty if only headers are compared."""
    within: tuple[tuple[TensorInfo, TensorInfo, Difference], ...] = ()
    """With a tolerance: those with other bits, but no value beyond it."""
    cast: tuple[tuple[TensorInfo, TensorInfo, Difference], ...] = ()
    """Without a tolerance: tensors of two floating dtypes. Their values differ beyond rounding, or not at all."""
    left_out: frozenset[str] = frozenset()
    """Names on either side that were not selected."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.only_a or self.only_b or self.changed or self.differing or self.cast)


@dataclass(slots=True)
class _Pair:
    """One tensor in both checkpoints, with its files."""

    a: TensorInfo
    file_a: Source
    b: TensorInfo
    file_b: Source
    difference: Difference | None = None
    """Difference of the pieces with other bits; None: there are none."""

    @property
    def is_same_kind(self) -> bool:
        return (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)

    @property
    def is_cast(self) -> bool:
        """Whether both are floats, of two dtypes and one shape."""
        is_other = self.a.dtype != self.b.dtype and self.a.shape == self.b.shape
        return is_other and self.a.dtype.startswith(_FLOATS) and self.b.dtype.startswith(_FLOATS)

    @property
    def values_in_piece(self) -> int:
        """Number of values that are read at once."""
        return PIECE_BYTES * 8 // max(BITS[self.a.dtype], BITS[self.b.dtype])


def compare(
    a: str,
    b: str,
    *,
    is_selected: Callable[[str], bool] = lambda name: True,
    header_only: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> Comparison:
    """Compare two checkpoints. Blocks. A KeyboardInterrupt ends the work before it is raised.

    Args:
        a: See `open_checkpoint`.
        b: See `open_checkpoint`.
        is_selected: Whether to compare the tensors of a name.
        header_only: Compare no values.
        tolerance: Largest absolute difference of values that count as equal; None: their bits must be equal.
        progress: Called with the bytes of each compared piece of A and the bytes of all; from several threads.

    Raises:
        StioError: One of them cannot be opened or read, or was changed during the read.
    """
    has_tolerance = tolerance is not None

    def body(operation: Operation[Comparison]) -> Comparison:
        check = operation.check
        with (
            closing(open_checkpoint(a, strict=False, check=check)) as opened_a,
            closing(open_checkpoint(b, strict=False, check=check)) as opened_b,
            ExitStack() as owned,
        ):
            for opened in (opened_a, opened_b) if not header_only else ():
                opened.files = list(opened.open_files(range(len(opened.files)), owned))
            every_a, every_b = _tensors(opened_a), _tensors(opened_b)
            of_a, of_b = ({name: one for name, one in of.items() if is_selected(name)} for of in (every_a, every_b))
            pairs = [_Pair(*of_a[name], *of_b[name]) for name in of_a if name in of_b]
            cast = [pair for pair in pairs if pair.is_cast and not header_only]
            if not header_only:
                alike = [pair for pair in pairs if pair.is_same_kind or pair.is_cast]
                _compare_values(alike, tolerance, progress, check)
                for file in (*opened_a.files, *opened_b.files):
                    file.check_unchanged()
        same = [pair for pair in pairs if pair.is_same_kind or (has_tolerance and pair.is_cast)]
        compared = [(pair.a, pair.b, one) for pair in same if (one := pair.difference)]
        return Comparison(
            only_a=tuple(info for name, (info, _) in of_a.items() if name not in of_b),
            only_b=tuple(info for name, (info, _) in of_b.items() if name not in of_a),
            changed=tuple((one.a, one.b) for one in pairs if not one.is_same_kind and one not in cast),
            num_same=len(same),
            differing=tuple(one for one in compared if one[2].num_differing),
            within=tuple(one for one in compared if not one[2].num_differing),
            cast=() if has_tolerance else tuple((pair.a, pair.b, pair.difference or Difference()) for pair in cast),
            left_out=frozenset((every_a.keys() | every_b.keys()) - of_a.keys() - of_b.keys()),
        )

    return Operation(body, name="diff").result()


def _tensors(opened: OpenCheckpoint) -> dict[str, tuple[TensorInfo, Source]]:
    """Return the tensors of a checkpoint by name, aliases too, each with the file of its data."""
    found = {
        name: (header.info(name), file)
        for header, file in zip(opened.headers, opened.files, strict=True)
        for name in header.names
    }
    for alias, target in opened.aliases.items():
        info, file = found[target]
        found[alias] = replace(info, name=alias), file
    return found


def _compare_values(
    pairs: list[_Pair], tolerance: float | None, progress: Callable[[int, int], object], check: Callable[[], None]
) -> None:
    """Add the differences of all values to the pairs; `check` is called between pieces, and may raise to end it."""
    total_bytes = sum(pair.a.nbytes for pair in pairs)
    pieces = ((pair, start) for pair in pairs for start in range(0, prod(pair.a.shape), pair.values_in_piece))
    pool = WorkerPool("diff")

    def work() -> None:
        memory_a, memory_b = allocate(PIECE_BYTES), allocate(PIECE_BYTES)
        while not pool.stopped:
            with pool.changed:
                piece = next(pieces, None)
            if piece is None:
                return
            check()
            pair, start = piece
            a = _read_piece(pair.file_a, pair.a, start, pair.values_in_piece, memory_a)
            b = _read_piece(pair.file_b, pair.b, start, pair.values_in_piece, memory_b)
            if pair.is_cast or not _same(a, b):
                numbers: Any = import_module("stio.cli.numbers")  # it imports numpy: equal checkpoints do not need that
                found = numbers.differences(pair.a.dtype, a.tobytes(), pair.b.dtype, b.tobytes(), tolerance)
                with pool.changed:
                    pair.difference = Difference.together([pair.difference or Difference(), *found])
            progress(a.nbytes, total_bytes)

    pool.run(work, NUM_WORKERS)


def _read_piece(file: Source, info: TensorInfo, start: int, count: int, memory: Region) -> Region:
    """Read at most `count` values of a tensor, from the value `start` on; both are at whole bytes."""
    first = start * BITS[info.dtype] // 8
    piece = memory.sub(0, min(count * BITS[info.dtype] // 8, info.nbytes - first))
    file.read_into(info.file_offset + first, [piece])
    return piece


def _same(a: Region, b: Region) -> bool:
    return not libc.memcmp(*map(ctypes.c_void_p, (a.address, b.address)), ctypes.c_size_t(a.nbytes))


# The text of the result.


_STYLES = {"only in A": "red", "only in B": "green", "changed": "yellow", "differs": "yellow"}
"""Kinds of differences, in the order in which they are listed, and their colours."""


def _print(
    found: Comparison, a: str, b: str, header_only: bool, tolerance: float | None, most_rows: int | None
) -> None:
    """Print the verdict, then a table of the differences; on a terminal with short names and colours."""
    sides = (one_line(a), one_line(b)) if found.equal else (f"{one_line(a)} (A)", f"{one_line(b)} (B)")
    say(f"{' and '.join(sides)}: {_verdict(found, header_only, tolerance)}", style=None if found.equal else "bold")
    width = width_of(sys.stdout)
    rows, notes = [["", "name", "dtype and shape", "values"]], []
    for kind, every in _rows(found):
        rows += [[kind, one_line(name), *others] for name, *others in every[:most_rows]]
        if most_rows is not None and len(every) > most_rows:
            rows.append([kind, "", "", ""])
            notes.append(f"{len(every) - most_rows:,} more; --all lists them")
    if len(rows) == 1:
        return
    table = [[name, kind, *others] for kind, name, *others in rows]
    names = [cells(name) for name, *_ in table]
    if width is not None and room_for_names(table, width) < min(READABLE_NAME, max(names)):
        lines = _pairs_of_lines(table, width)
    else:
        lines = (
            [kind, _GAP.join([name, *others])] for name, kind, *others in columns_of(table, right=set(), width=width)
        )
    waiting = iter(notes)
    is_styled = has_colours()
    for has_name, (kind, rest) in zip(names, lines, strict=True):
        line = f"{kind}  {rest}".rstrip() if has_name else f"{kind}  {next(waiting)}"
        line = line if width is None else "\n".join(broken(one, width) for one in line.split("\n"))
        style = _STYLES.get(kind.strip())
        if is_styled:
            line = click.style(kind, fg=style) + line[len(kind) :] if style else click.style(line, bold=True)
        write(line, has_style=is_styled)


_GAP = "  "


def _pairs_of_lines(table: Sequence[Sequence[str]], width: int) -> Iterator[list[str]]:
    """Yield kind and text of rows for which a terminal is too narrow: two lines each, the first one with the name."""
    most_kind, most_shape = (max(cells(row[k]) for row in table) for k in (1, 2))
    for name, kind, shape, values in table:
        before = " " * (most_kind + 2 * len(_GAP))
        details = f"{shape.ljust(min(most_shape, _MAX_SHAPE))}{_GAP}{values}".rstrip()
        yield [kind.ljust(most_kind), f"{shortened(name, width - most_kind - len(_GAP))}\n{before}{details}"]


_MAX_SHAPE = 28
"""Columns of the longest dtype and shape that others are aligned with: the values need 40 of a narrow terminal's 80."""


def _rows(found: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each kind of difference with name, dtype and shape, and values of its tensors, in natural order."""
    for kind, tensors in (("only in A", found.only_a), ("only in B", found.only_b)):
        yield kind, [[info.name, _kind(info), ""] for info in sorted(tensors, key=_order)]
    changed = [(a, b, "") for a, b in found.changed]
    changed += [(a, b, _amount(a, one, "beyond rounding") or "equal after rounding") for a, b, one in found.cast]
    yield "changed", [[a.name, _change(a, b), text] for a, b, text in sorted(changed, key=lambda row: _order(row[0]))]
    differing = sorted(found.differing, key=lambda row: _order(row[0]))
    yield "differs", [[a.name, _change(a, b), _amount(a, difference)] for a, b, difference in differing]


def _order(info: TensorInfo) -> tuple[list[Any], str]:
    return natural_key(info.name)


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _change(a: TensorInfo, b: TensorInfo) -> str:
    if a.shape != b.shape:
        return f"{_kind(a)} -> {_kind(b)}"
    return _kind(a) if a.dtype == b.dtype else f"{a.dtype} -> {_kind(b)}"


def _amount(info: TensorInfo, difference: Difference, beyond: str = "") -> str:
    """Return how many values differ, and by how much; empty: none does."""
    if not difference.num_differing:
        return ""
    text = " ".join(filter(None, [f"{difference.num_differing:,} of {prod(info.shape):,}", beyond]))
    if difference.max_abs is not None:
        text += f", by at most {difference.max_abs:.6g}"
    if difference.num_nan:
        text += f", {difference.num_nan:,} NaN on one side"
    return text


def _verdict(found: Comparison, header_only: bool, tolerance: float | None) -> str:
    values = "names, dtypes and shapes" if header_only else "values"
    near = ""
    if tolerance is not None:
        largest = max((one.max_abs for _, _, one in found.within if one.max_abs is not None), default=0)
        near = f", with a tolerance of {tolerance:g}"
        if found.within:
            near += f"; differences up to {largest:.6g} were tolerated, in {counted(len(found.within), 'tensor')}"
    if found.equal:
        return f"equal, {counted(found.num_same, 'tensor')} compared by {values}{near}"
    parts = [
        f"{counted(len(only), 'name')} only in {side}"
        for side, only in (("A", found.only_a), ("B", found.only_b))
        if only
    ]
    if found.changed:
        parts.append(f"{counted(len(found.changed), 'tensor')} of another dtype or shape")
    beyond = sum(one.num_differing > 0 for _, _, one in found.cast)
    if len(found.cast) > beyond:
        parts.append(f"{counted(len(found.cast) - beyond, 'tensor')} of another dtype and equal after rounding")
    if beyond:
        parts.append(f"{counted(beyond, 'tensor')} of another dtype and other values")
    if found.differing or (found.num_same and not header_only):
        parts.append(f"{len(found.differing):,} of {counted(found.num_same, 'tensor')} of other values{near}")
    return f"different, {', '.join(parts)}"


def _as_json(found: Comparison, a: str, b: str, header_only: bool, tolerance: float | None) -> dict[str, object]:
    def described(info: TensorInfo) -> dict[str, object]:
        return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape)}

    def values(pairs: Iterable[tuple[TensorInfo, TensorInfo, Difference]]) -> list[dict[str, object]]:
        return [
            {
                **described(info),
                **({"dtype_in_b": other.dtype} if other.dtype != info.dtype else {}),
                "num_values": prod(info.shape),
                "num_differing": difference.num_differing,
                "num_nan_on_one_side": difference.num_nan,
                "max_abs_difference": _plain(difference.max_abs),
            }
            for info, other, difference in pairs
        ]

    return {
        "a": a,
        "b": b,
        "equal": found.equal,
        "header_only": header_only,
        "tolerance": _plain(tolerance),
        "num_compared": found.num_same,
        "only_in_a": [described(info) for info in found.only_a],
        "only_in_b": [described(info) for info in found.only_b],
        "changed": [
            {"name": a.name, "a": described(a), "b": described(b)}
            for a, b in (*((a, b) for a, b, _ in found.cast), *found.changed)
        ],
        "cast": values(found.cast),
        "values": values(found.differing),
        "within_tolerance": values(found.within),
    }


def _plain(number: float | int | None) -> float | int | str | None:
    """Return a number for JSON, which has no infinity."""
    return number if number is None or isfinite(number) else "Infinity"
