"""`stio diff A B`: compares two checkpoints. Imports torch only where values differ.

From top to bottom: the command, the comparison, the text of the result. The comparison matches tensors by name. Those
of one shape whose dtypes are equal, or both floating, are read in pieces by a few workers. Where the bytes differ,
floats are compared as float64, integers exactly, and values of packed dtypes bit by bit.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
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
    print_result,
    say,
    styled,
    table,
    width_of,
)
from stio.errors import one_line
from stio.format import BITS, TensorInfo
from stio.runtime import Operation, WorkerPool
from stio.runtime.memory import Region, allocate, libc
from stio.storage import Source
from stio.storage.checkpoint import Changes, OpenCheckpoint, OpenOptions, apply_changes, changes_of, open_checkpoint
from stio.text import counted, natural_key, without_secrets

PIECE_BYTES = 6 << 20
"""Bytes of one side that are read at once: a whole number of values of each dtype, also of packed 6-bit values."""

_MAX_ROWS = 20
"""Differences of each kind that are listed."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ"})
"""Dtypes that are compared with each other, as a conversion of a checkpoint changes them."""

_PART = 1 << 17
"""Values that become float64 at once."""

NUM_WORKERS = 2
"""Workers. With their pieces, and the numbers made from them, a comparison holds about 100 MB at most."""

_KINDS = {
    "only in A": ("red", "only in A"),
    "only in B": ("green", "only in B"),
    "changed": ("yellow", "with another dtype or shape"),
    "differs": ("yellow", "with other values"),
}
"""Kinds of differences in the order in which they are listed: color, and text of the verdict."""


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
@click.option("--all", "show_all", is_flag=True, help=f"List all differences, and not {_MAX_ROWS} of each kind.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def diff(a: str, b: str, pattern: str | None, header_only: bool, tolerance: float | None, show_all: bool) -> int:
    """Compare two checkpoints.

    Compares names, dtypes, shapes, and values bit by bit, but not metadata. Floats of two dtypes, such as those of a
    converted checkpoint, count as different unless --tolerance is given; the largest difference of their values is
    shown. A and B are .safetensors files, directories with checkpoints, their indices, or URLs of these. The number of
    shards does not matter, nor whether they are deltas, and memory does not depend on their size.
    Exit status: 0 equal, 1 different, 2 an error, 3 nothing matches --filter.
    """
    if tolerance is not None and header_only:
        raise click.UsageError("--tolerance compares values, and --header-only reads none: give one of the two")
    is_selected = matcher(pattern)
    with Bar("comparing") as bar:
        pairs = compare(
            a, b, is_selected=is_selected, header_only=header_only, tolerance=tolerance, progress=bar.advance
        )
    a, b = without_secrets(a), without_secrets(b)
    if pattern is not None and not pairs:
        raise no_match(f"{a} and {b}", pattern)
    is_equal = not any(pair.kind in _KINDS for pair in pairs)
    result = {"a": a, "b": b, "equal": is_equal, "header_only": header_only, "tolerance": _plain(tolerance)}
    result |= {
        "num_compared": sum(pair.is_compared for pair in pairs),
        "differences": [pair.as_json() for pair in pairs if pair.kind],
    }

    def show() -> tuple[()]:
        sides = (one_line(a), one_line(b)) if is_equal else (f"{one_line(a)} (A)", f"{one_line(b)} (B)")
        say(f"{' and '.join(sides)}: {_verdict(pairs, header_only, tolerance)}", bold=not is_equal)
        if lines := list(_table(pairs, None if show_all else _MAX_ROWS)):
            click.echo("\n".join(lines), file=sys.stdout)
        return ()

    print_result(result, show)
    return 0 if is_equal else NO


# The comparison.


class Difference(NamedTuple):
    """Difference between the values of one tensor, or of a piece of it, in two checkpoints."""

    num_differing: int = 0
    """Number of values with different bits; of two dtypes, with different values; with a tolerance, of those beyond it.
    A value that is NaN on one side only always counts."""
    max_abs: float | None = None
    """Largest absolute difference of values that are numbers on both sides; None: there are none, or all are equal."""

    def with_piece(self, other: Difference) -> Difference:
        """Return the difference of two pieces together."""
        known = [value for value in (self.max_abs, other.max_abs) if value is not None]
        return Difference(self.num_differing + other.num_differing, max(known, default=None))


class _Side:
    """A tensor in one checkpoint, with its file, and the elements that deltas have changed since."""

    def __init__(self, info: TensorInfo, file: Source, opened: OpenCheckpoint) -> None:
        self.info, self.file, self._opened = info, file, opened

    @cached_property
    def changes(self) -> list[Changes]:
        """Read the changed elements, which are few."""
        return [changes_of(self._opened, patch) for patch in self._opened.patches.get(self.info.name, ())]


@dataclass(slots=True)
class Pair:
    """The tensors of one name in both checkpoints."""

    name: str
    """The name."""
    a: _Side | None
    """The tensor in A; None: it has none."""
    b: _Side | None
    """The tensor in B; None: it has none."""
    kind: str = ""
    """How the sides differ: one of `_KINDS`; `tolerated`, if no value is beyond the tolerance; or nothing."""
    difference: Difference | None = None
    """Difference of the pieces with other bits; None: there are none, or values are not compared."""

    def add(self, piece: Difference) -> None:
        """Add the difference of a piece."""
        self.difference = (self.difference or Difference()).with_piece(piece)
        if self.kind != "changed":
            self.kind = "differs" if self.difference.num_differing else "tolerated"

    @property
    def dtypes(self) -> tuple[str, str] | None:
        """The dtypes, if values can be compared: of one shape, and of one dtype or two floating ones."""
        if self.a is None or self.b is None or self.a.info.shape != self.b.info.shape:
            return None
        dtypes = self.a.info.dtype, self.b.info.dtype
        return dtypes if dtypes[0] == dtypes[1] or {*dtypes} <= _FLOATS else None

    @property
    def is_compared(self) -> bool:
        """Whether equal values make the sides equal."""
        return self.kind in ("", "differs", "tolerated")

    def as_json(self) -> dict[str, object]:
        """Return all facts; JSON has no infinity."""
        sides = [one and {"dtype": one.info.dtype, "shape": list(one.info.shape)} for one in (self.a, self.b)]
        values = self.difference and self.difference._asdict() | {"max_abs": _plain(self.difference.max_abs)}
        return {"kind": self.kind, "name": self.name, "a": sides[0], "b": sides[1], "difference": values}


def compare(
    a: str,
    b: str,
    *,
    is_selected: Callable[[str], bool] = lambda name: True,
    header_only: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> list[Pair]:
    """Compare two checkpoints. Blocks. A KeyboardInterrupt ends the work before it is raised.

    Args:
        a: See `open_checkpoint`.
        b: See `open_checkpoint`.
        is_selected: Whether to compare the tensors of a name.
        header_only: Compare no values.
        tolerance: Largest absolute difference of values that count as equal; None: their bits must be equal.
        progress: Called with the bytes of each compared piece of A and the bytes of all; from several threads.

    Returns:
        All selected tensors, also those that are equal, in the natural order of their names.

    Raises:
        StioError: One of them cannot be opened or read, or was changed during the read.
    """

    def body(operation: Operation[list[Pair]]) -> list[Pair]:
        check = operation.check
        how = OpenOptions(strict=False, check=check)
        with (
            closing(open_checkpoint(a, how)) as opened_a,
            closing(open_checkpoint(b, how)) as opened_b,
            ExitStack() as owned,
        ):
            for opened in (opened_a, opened_b) if not header_only else ():
                opened.files = list(opened.open_files(range(len(opened.files)), owned))
            of_a, of_b = _tensors(opened_a), _tensors(opened_b)
            names = sorted(filter(is_selected, of_a.keys() | of_b.keys()), key=natural_key)
            pairs = [Pair(name, of_a.get(name), of_b.get(name)) for name in names]
            for pair in pairs:
                if pair.a is None or pair.b is None:
                    pair.kind = "only in B" if pair.a is None else "only in A"
                elif pair.dtypes is None or (pair.dtypes[0] != pair.dtypes[1] and tolerance is None):
                    pair.kind = "changed"
            if not header_only:
                _compare_values(pairs, tolerance, progress, check)
                for file in (*opened_a.files, *opened_b.files):
                    file.check_unchanged()
        return pairs

    return Operation(body, name="diff").result()


def _tensors(opened: OpenCheckpoint) -> dict[str, _Side]:
    """Return the tensors of a checkpoint by name, aliases too, each with the file of its data."""
    tensors = {
        name: _Side(header.info(name), file, opened)
        for header, file in zip(opened.headers, opened.files, strict=True)
        for name in header.names
    }
    return tensors | {alias: tensors[target] for alias, target in opened.aliases.items()}


def _compare_values(
    pairs: list[Pair],
    tolerance: float | None,
    progress: Callable[[int, int], object],
    check: Callable[[], None],
) -> None:
    """Add the differences of all values to the pairs; `check` is called between pieces, and may raise to end it."""
    wanted = [(pair, pair.dtypes, pair.a, pair.b) for pair in pairs if pair.dtypes and pair.a and pair.b]
    total_bytes = sum(a.info.nbytes for _, _, a, _ in wanted)
    pieces = [
        (*one, start, count)
        for one in wanted
        for count in [PIECE_BYTES * 8 // max(BITS[dtype] for dtype in one[1])]
        for start in range(0, prod(one[2].info.shape), count)
    ][::-1]
    pool = WorkerPool("diff")

    def work() -> None:
        memory = allocate(PIECE_BYTES), allocate(PIECE_BYTES)
        for pair, dtypes, side_a, side_b, start, count in pool.items(pieces):
            check()
            a, b = _read_piece(side_a, start, count, memory[0]), _read_piece(side_b, start, count, memory[1])
            if dtypes[0] != dtypes[1] or not _same(a, b):
                difference = differences(dtypes[0], a.tobytes(), dtypes[1], b.tobytes(), tolerance)
                with pool.changed:
                    pair.add(difference)
            progress(a.nbytes, total_bytes)

    pool.run(work, NUM_WORKERS)


def _read_piece(side: _Side, start: int, count: int, memory: Region) -> Region:
    """Read at most `count` values of a tensor, from the value `start` on; both are at whole bytes."""
    bits, first = BITS[side.info.dtype], start * BITS[side.info.dtype] // 8
    piece = memory.sub(0, min(count * bits // 8, side.info.nbytes - first))
    side.file.read_into(side.info.file_offset + first, [piece])
    if side.changes:
        item_bytes = side.changes[0].item_bytes
        place = first // item_bytes, piece.nbytes // item_bytes, piece.address
        apply_changes(side.changes, side.info.nbytes // item_bytes, [place])
    return piece


def _same(a: Region, b: Region) -> bool:
    return not libc.memcmp(*map(ctypes.c_void_p, (a.address, b.address)), ctypes.c_size_t(a.nbytes))


def differences(dtype_a: str, a: bytes, dtype_b: str, b: bytes, tolerance: float | None = None) -> Difference:
    """Compare two pieces of memory that hold as many values of one dtype, or of two floating ones.

    Values of packed dtypes, and of dtypes that torch does not have, are compared bit by bit, whatever the tolerance.

    Args:
        dtype_a: Name in the format of the dtype of `a`.
        a: One side.
        dtype_b: That of the dtype of `b`.
        b: The other side.
        tolerance: Values differ if they are further apart, or one of them is NaN. None: see `num_differing`.
    """
    torch, numpy = import_module("torch"), import_module("numpy")
    dtypes = import_module("stio.device.tensors").TORCH_DTYPES | {"BOOL": torch.uint8}
    sides = [numpy.frombuffer(side, "u1") for side in (a, b)]
    if BITS[dtype_a] < 8 or not {dtype_a, dtype_b} <= dtypes.keys():
        bits = numpy.unpackbits(sides[0] ^ sides[1], bitorder="little")
        return Difference(int(bits.reshape(-1, BITS[dtype_a]).any(1).sum()))
    if dtype_a == dtype_b:
        rows = [side.reshape(-1, BITS[dtype_a] // 8) for side in sides]
        is_other = (rows[0] != rows[1]).any(1)
        sides = [side[is_other].reshape(-1) for side in rows]
    total = Difference()
    tensors = [torch.tensor(side).view(dtypes[dtype]) for side, dtype in zip(sides, (dtype_a, dtype_b), strict=True)]
    for parts in zip(*(tensor.split(_PART) for tensor in tensors), strict=True):
        total = total.with_piece(_difference(*map(_exact, parts), tolerance=tolerance, bits_differ=dtype_a == dtype_b))
    return total


def _exact(values: Any) -> Any:
    """Return values of a tensor as an array of numpy that holds them exactly: float64, complex128, or integers."""
    torch: Any = import_module("torch")
    if values.is_complex():
        return values.to(torch.complex128).numpy()
    return (values.double() if values.is_floating_point() else values).numpy()


def _difference(a: Any, b: Any, *, tolerance: float | None, bits_differ: bool) -> Difference:
    numpy: Any = import_module("numpy")
    is_nan = numpy.isnan(a) | numpy.isnan(b)
    with numpy.errstate(invalid="ignore", over="ignore"):
        if a.dtype.kind in "iu":  # the distance of two integers of 64 bits is their difference modulo 2**64
            wide = "i8" if a.dtype.kind == "i" else "u8"
            gaps = numpy.maximum(a, b).astype(wide).view("u8") - numpy.minimum(a, b).astype(wide).view("u8")
        else:
            gaps = numpy.nan_to_num(numpy.where(a == b, 0, abs(a - b)), nan=inf, posinf=inf)
    if tolerance is None and bits_differ:
        num_differing = len(a)
    else:
        is_beyond = numpy.where(is_nan, numpy.isnan(a) != numpy.isnan(b), gaps > (tolerance or 0))
        num_differing = int(is_beyond.sum())
    numbers = gaps[~is_nan]
    return Difference(num_differing, float(numbers.max()) if len(numbers) else None)


# The text of the result.


def _table(pairs: list[Pair], max_rows: int | None) -> Iterator[str]:
    """Yield the lines of a table of the differences."""
    rows = [["", "name", "dtype and shape", "differing", "by at most"]]
    for kind in _KINDS:
        every = [pair for pair in pairs if pair.kind == kind]
        rows += [[kind, one_line(pair.name), _tensor_text(pair), *_amount(pair)] for pair in every[:max_rows]]
        if max_rows is not None and len(every) > max_rows:
            rows.append([kind, f"{len(every) - max_rows:,} more; --all lists them", "", "", ""])
    for kind, *others in table(rows, names=1, width=width_of(sys.stdout)) if len(rows) > 1 else ():
        style = {"fg": _KINDS[kind.strip()][0]} if kind.strip() else {}
        yield joined([styled(kind, **style), *others])


def _tensor_text(pair: Pair) -> str:
    texts = [f"{side.info.dtype} {list(side.info.shape)}" for side in (pair.a, pair.b) if side is not None]
    return " -> ".join(dict.fromkeys(texts))


def _amount(pair: Pair) -> list[str]:
    """Return how many values differ, and by how much."""
    if pair.difference is None or pair.a is None:
        return ["", ""]
    num_differing, max_abs = pair.difference
    largest = f"{max_abs:.6g}" if num_differing and max_abs is not None else ""
    return [f"{num_differing:,} of {prod(pair.a.info.shape):,}", largest]


def _verdict(pairs: list[Pair], header_only: bool, tolerance: float | None) -> str:
    counts = Counter(pair.kind for pair in pairs)
    parts = [f"{counted(counts[kind], 'tensor')} {text}" for kind, (_, text) in _KINDS.items() if counts[kind]]
    by = "names, dtypes and shapes" if header_only else "values"
    compared = f"{counted(sum(pair.is_compared for pair in pairs), 'tensor')} compared by {by}"
    if tolerance is not None:
        compared += f", with a tolerance of {tolerance:g}"
        tolerated = [pair.difference.max_abs or 0 for pair in pairs if pair.kind == "tolerated" and pair.difference]
        if tolerated:
            where = counted(len(tolerated), "tensor")
            compared += f"; differences up to {max(tolerated):.6g} were tolerated, in {where}"
    return f"different: {', '.join(parts)}; {compared}" if parts else f"equal, {compared}"


def _plain(number: float | None) -> float | str | None:
    """Return a number for JSON, which has no infinity."""
    return number if number is None or isfinite(number) else "Infinity"
