"""`stio diff A B`: compares two checkpoints. Imports torch only where values differ.

From top to bottom: the command, the comparison, the text of the result. The comparison matches tensors by name. Those
with equal dtype and shape are read in pieces by a few workers. Where the bytes differ, torch compares floats as
float64, and numpy integers. Floats of two dtypes, as a conversion leaves them, are compared too: float64 holds the
values of both.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import click

from stio.cli.output import (
    FILTER_OPTION,
    JSON_OPTION,
    NO,
    NO_PROGRESS_OPTION,
    PATH,
    ZERO_OR_MORE,
    Bar,
    joined,
    matcher,
    no_match,
    say,
    styled,
    table,
    width_of,
)
from stio.errors import one_line
from stio.format.dtypes import BITS
from stio.format.header import TensorInfo
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.runtime.memory import Region, allocate, libc
from stio.runtime.operation import Operation
from stio.runtime.text import counted, natural_key, without_secrets
from stio.runtime.workers import WorkerPool
from stio.storage.base import Source

PIECE_BYTES = 6 << 20
"""Bytes of one side that are read at once: a whole number of values of each dtype, also of packed 6-bit values."""

_MOST_ROWS = 20
"""Differences of each kind that are listed."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ"})
"""Dtypes that are compared with each other, as a conversion of a checkpoint changes them."""

_PART = 1 << 17
"""Values that become float64 at once."""

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
        raise no_match(f"{a} and {b}", pattern)
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
    max_abs: float | None = None
    """Largest absolute difference of values that are numbers on both sides; None: there are none."""
    num_nan: int = 0
    """Number of values that are NaN on one side only."""

    def with_piece(self, other: Difference) -> Difference:
        """Return the difference of two pieces together."""
        largest = [one for one in (self.max_abs, other.max_abs) if one is not None]
        return Difference(
            self.num_differing + other.num_differing, max(largest, default=None), self.num_nan + other.num_nan
        )


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
        return is_other and self.a.dtype in _FLOATS and self.b.dtype in _FLOATS

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
            of_a, of_b = _tensors(opened_a, is_selected), _tensors(opened_b, is_selected)
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
        )

    return Operation(body, name="diff").result()


def _tensors(opened: OpenCheckpoint, is_selected: Callable[[str], bool]) -> dict[str, tuple[TensorInfo, Source]]:
    """Return the selected tensors of a checkpoint by name, aliases too, each with the file of its data."""
    found = {
        name: (header.info(name), file)
        for header, file in zip(opened.headers, opened.files, strict=True)
        for name in header.names
    }
    for alias, target in opened.aliases.items():
        info, file = found[target]
        found[alias] = replace(info, name=alias), file
    return {name: one for name, one in found.items() if is_selected(name)}


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
                found = differences(pair.a.dtype, a.tobytes(), pair.b.dtype, b.tobytes(), tolerance)
                with pool.changed:
                    pair.difference = (pair.difference or Difference()).with_piece(found)
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


def differences(dtype_a: str, a: bytes, dtype_b: str, b: bytes, tolerance: float | None = None) -> Difference:
    """Compare two pieces of memory that hold as many values of one dtype, or of two floating ones.

    Floats become float64. Values of packed dtypes, and of dtypes that torch does not have, are compared bit by bit,
    whatever the tolerance.

    Args:
        dtype_a: Name in the format of the dtype of `a`.
        a: One side.
        dtype_b: That of the dtype of `b`.
        b: The other side.
        tolerance: Values differ if they are further apart, or one of them is NaN. None: if their bits differ; of two
            dtypes, if neither is what rounding the other one gives.
    """
    if not a:  # torch refuses an empty buffer
        return Difference()
    torch, numpy = import_module("torch"), import_module("numpy")
    known = import_module("stio.device.tensors").TORCH_DTYPES | {"BOOL": torch.uint8}
    if BITS[dtype_a] < 8 or dtype_a not in known or dtype_b not in known:
        bits = numpy.unpackbits(numpy.frombuffer(a, "u1") ^ numpy.frombuffer(b, "u1"), bitorder="little")
        return Difference(int(bits.reshape(-1, BITS[dtype_a]).any(1).sum()))
    raw_a, raw_b = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (a, b))
    if dtype_a == dtype_b:
        item = known[dtype_a].itemsize
        differing = (raw_a != raw_b).view(-1, item).any(1)
        raw_a, raw_b = (raw.view(-1, item)[differing].view(-1) for raw in (raw_a, raw_b))
    found = Difference()
    for part_a, part_b in zip(
        raw_a.view(known[dtype_a]).split(_PART), raw_b.view(known[dtype_b]).split(_PART), strict=True
    ):
        is_integer = not (part_a.is_floating_point() or part_a.is_complex())
        found = found.with_piece((_compared_integers if is_integer else _compared)(part_a, part_b, tolerance))
    return found


def _compared_integers(a: Any, b: Any, tolerance: float | None) -> Difference:
    """Compare two tensors of integers of one dtype, which all differ."""
    numpy: Any = import_module("numpy")
    a, b = a.numpy(), b.numpy()
    if not len(a):
        return Difference()
    # The distance of two integers of 64 bits has 64 bits without a sign: it is their difference modulo 2**64.
    wide = "i8" if a.dtype.kind == "i" else "u8"
    gaps = numpy.maximum(a, b).astype(wide).view("u8") - numpy.minimum(a, b).astype(wide).view("u8")
    return Difference(len(a) if tolerance is None else int((gaps > tolerance).sum()), float(gaps.max()))


def _compared(a: Any, b: Any, tolerance: float | None) -> Difference:
    """Compare two tensors of floats; those of one dtype have other bits."""
    torch: Any = import_module("torch")
    wide_a, wide_b = (one.to(torch.complex128 if one.is_complex() else torch.float64) for one in (a, b))
    nan_a, nan_b = wide_a.isnan(), wide_b.isnan()
    is_number = ~(nan_a | nan_b)
    gaps = torch.where(wide_a == wide_b, 0, wide_a - wide_b).abs().nan_to_num(inf, inf)
    num_nan = int((nan_a != nan_b).sum())
    if tolerance is not None:
        num_differing = int((is_number & (gaps > tolerance)).sum()) + num_nan
    elif a.dtype == b.dtype:
        num_differing = len(a)  # NaNs of other bits too
    else:
        is_rounded = (wide_a.to(b.dtype).to(wide_a.dtype) == wide_b) | (wide_b.to(a.dtype).to(wide_a.dtype) == wide_a)
        is_beyond = ~is_rounded | (wide_a.isinf() != wide_b.isinf())
        num_differing = int((is_number & is_beyond).sum()) + num_nan
    return Difference(num_differing, float(gaps[is_number].max()) if is_number.any() else None, num_nan)


# The text of the result.


_STYLES = {"only in A": "red", "only in B": "green", "changed": "yellow", "differs": "yellow"}
"""Kinds of differences, in the order in which they are listed, and their colours."""


def _print(
    found: Comparison, a: str, b: str, header_only: bool, tolerance: float | None, most_rows: int | None
) -> None:
    """Print the verdict, then a table of the differences; on a terminal with colours."""
    sides = (one_line(a), one_line(b)) if found.equal else (f"{one_line(a)} (A)", f"{one_line(b)} (B)")
    say(f"{' and '.join(sides)}: {_verdict(found, header_only, tolerance)}", bold=not found.equal)
    rows = [["", "name", "dtype and shape", "differing", "by at most"]]
    for kind, every in _rows(found):
        rows += [[kind, one_line(name), *others] for name, *others in every[:most_rows]]
        if most_rows is not None and len(every) > most_rows:
            rows.append([kind, f"{len(every) - most_rows:,} more; --all lists them", "", "", ""])
    if len(rows) == 1:
        return
    for kind, *others in table(rows, names=1, width=width_of(sys.stdout)):
        style = {"fg": _STYLES[kind.strip()]} if kind.strip() else {}
        click.echo(joined([styled(kind, **style), *others]), file=sys.stdout)


def _rows(found: Comparison) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each kind of difference with the cells of its tensors, in natural order."""
    for kind, tensors in (("only in A", found.only_a), ("only in B", found.only_b)):
        yield kind, [[info.name, _kind(info), "", ""] for info in sorted(tensors, key=_order)]
    changed = [(a, [_change(a, b), "", ""]) for a, b in found.changed]
    changed += [(a, [_change(a, b), *_amount(a, one)]) for a, b, one in found.cast]
    yield "changed", [[info.name, *cells] for info, cells in sorted(changed, key=lambda row: _order(row[0]))]
    differing = sorted(found.differing, key=lambda row: _order(row[0]))
    yield "differs", [[a.name, _change(a, b), *_amount(a, one)] for a, b, one in differing]


def _order(info: TensorInfo) -> tuple[list[Any], str]:
    return natural_key(info.name)


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _change(a: TensorInfo, b: TensorInfo) -> str:
    if a.shape != b.shape:
        return f"{_kind(a)} -> {_kind(b)}"
    return _kind(a) if a.dtype == b.dtype else f"{a.dtype} -> {_kind(b)}"


def _amount(info: TensorInfo, difference: Difference) -> list[str]:
    """Return how many values differ, and by how much."""
    largest = "" if difference.max_abs is None or not difference.num_differing else f"{difference.max_abs:.6g}"
    return [f"{difference.num_differing:,} of {prod(info.shape):,}", largest]


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
