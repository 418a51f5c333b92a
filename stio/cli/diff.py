"""`stio diff A B`: what two checkpoints have in common and what not. Imports no torch."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite, prod
from typing import Any

import click

from stio.cli.output import NO, PATH, Bar, counted, matcher, one_line
from stio.format.header import TensorInfo
from stio.loading.open import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.runtime.memory import Region, allocate, libc
from stio.runtime.operation import Operation
from stio.storage.base import Source

__all__ = ["Comparison", "Difference", "compare", "diff"]


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--filter", "pattern", metavar="PATTERN", help="Only names that match 'a.*.glob' or '/an expression/'.")
@click.option("--header-only", is_flag=True, help="Compare names, dtypes and shapes, and read no values.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--no-progress", is_flag=True, help="Draw no bar. Pipes get none anyway.")
def diff(a: str, b: str, pattern: str | None, header_only: bool, as_json: bool, no_progress: bool) -> int:
    """Compare two checkpoints.

    By names, dtypes, shapes, and values by their bits; metadata do not count. A and B are .safetensors files,
    directories that hold checkpoints, or their indices, cut into shards as they may. They are read piece by piece,
    whatever their size. Exit status: 0 equal, 1 different, 2 an error.
    """
    wanted = matcher(pattern)
    with Bar("comparing", is_wanted=not no_progress) as bar:
        found = compare(a, b, wanted=wanted, header_only=header_only, progress=bar.advance)
    if as_json:
        click.echo(json.dumps(_as_json(found, a, b, header_only), indent=2))
    else:
        click.echo("\n".join(_lines(found, a, b, header_only)))
    return 0 if found.equal else NO


def _lines(found: Comparison, a: str, b: str, header_only: bool) -> Iterator[str]:
    """Yield a line for each difference, then the verdict."""
    for side, tensors in ((a, found.only_a), (b, found.only_b)):
        for info in tensors:
            yield f"only in {one_line(side)}: {one_line(info.name)}  {_kind(info)}"
    for of_a, of_b in found.changed:
        yield f"changed: {one_line(of_a.name)}  {_kind(of_a)} -> {_kind(of_b)}"
    for info, difference in found.differing:
        yield f"differs: {one_line(info.name)}  {_kind(info)}  {_amount(info, difference)}"
    yield f"{one_line(a)} and {one_line(b)}: {_verdict(found, header_only)}"


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _amount(info: TensorInfo, difference: Difference) -> str:
    text = f"{difference.num_differing:,} of {counted(prod(info.shape), 'value')}"
    if difference.max_abs is not None:
        text += f", by at most {difference.max_abs:.6g}"
    if difference.num_nan:
        text += f", {difference.num_nan:,} NaN on one side"
    return text


def _verdict(found: Comparison, header_only: bool) -> str:
    values = "names, dtypes and shapes" if header_only else "values"
    if found.equal:
        return f"equal, {counted(found.num_same, 'tensor')} compared by {values}"
    parts = []
    if only := len(found.only_a) + len(found.only_b):
        parts.append(f"{counted(only, 'name')} on one side only")
    if found.changed:
        parts.append(f"{counted(len(found.changed), 'tensor')} of another dtype or shape")
    if not header_only:
        parts.append(f"{len(found.differing):,} of {counted(found.num_same, 'tensor')} of other values")
    return f"different, {', '.join(parts)}"


def _as_json(found: Comparison, a: str, b: str, header_only: bool) -> dict[str, object]:
    def listed(tensors: tuple[TensorInfo, ...]) -> list[dict[str, object]]:
        return [{"name": info.name, "dtype": info.dtype, "shape": list(info.shape)} for info in tensors]

    return {
        "a": a,
        "b": b,
        "equal": found.equal,
        "header_only": header_only,
        "num_compared": found.num_same,
        "only_in_a": listed(found.only_a),
        "only_in_b": listed(found.only_b),
        "changed": [
            {"name": one.name, "a": listed((one,))[0], "b": listed((other,))[0]} for one, other in found.changed
        ],
        "values": [
            {
                "name": info.name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "num_values": prod(info.shape),
                "num_differing": difference.num_differing,
                "num_nan_on_one_side": difference.num_nan,
                "max_abs_difference": _plain(difference.max_abs),
            }
            for info, difference in found.differing
        ],
    }


def _plain(number: float | int | None) -> float | int | str | None:
    """Return a number that JSON can hold: it has no infinity."""
    return number if number is None or isfinite(number) else "Infinity"


PIECE_BYTES = 6 << 20
"""Of one side, read at a time: a whole number of values of every dtype, three bytes of packed 6-bit ones too."""

NUM_WORKERS = 2
"""Threads; with their pieces and the numbers made of them a comparison holds some 100 MB at the most."""


@dataclass(slots=True)
class Difference:
    """How the values of one tensor differ between two checkpoints."""

    num_differing: int = 0
    """Values whose bits differ."""
    max_abs: float | int | None = None
    """Largest absolute difference among those that are numbers on both sides; None: there are none."""
    num_nan: int = 0
    """Values that are NaN on one side only."""

    def add(self, other: Difference) -> None:
        """Take in what was found in another piece."""
        self.num_differing += other.num_differing
        self.num_nan += other.num_nan
        if other.max_abs is not None and (self.max_abs is None or other.max_abs > self.max_abs):
            self.max_abs = other.max_abs


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two checkpoints, A and B, have in common and what not."""

    only_a: tuple[TensorInfo, ...]
    """Tensors whose name B has not."""
    only_b: tuple[TensorInfo, ...]
    """Tensors whose name A has not."""
    changed: tuple[tuple[TensorInfo, TensorInfo], ...]
    """Tensors of one name and another dtype or shape; their values were not compared."""
    num_same: int
    """Tensors of one name, dtype and shape."""
    differing: tuple[tuple[TensorInfo, Difference], ...]
    """Those among them whose values differ; empty if only headers were compared."""

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not (self.only_a or self.only_b or self.changed or self.differing)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One tensor on both sides."""

    name: str
    a: TensorInfo
    file_a: Source
    b: TensorInfo
    file_b: Source
    difference: Difference = field(default_factory=Difference)


def compare(
    a: str,
    b: str,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    header_only: bool = False,
    progress: Callable[[int, int], object] = lambda nbytes, total: None,
) -> Comparison:
    """Compare two checkpoints. Blocks; a KeyboardInterrupt ends it before it comes out.

    Args:
        a: See `open_checkpoint`.
        b: Likewise.
        wanted: Which names count.
        header_only: Compare no values.
        progress: Called with the bytes of each piece of A that was compared and those of all, from several threads.

    Raises:
        StioError: One of them cannot be opened or read, or changed meanwhile.
    """

    def body(operation: Operation[Comparison]) -> Comparison:
        options = OpenOptions(strict=False)
        with (
            closing(open_checkpoint(a, options, check=operation.check)) as opened_a,
            closing(open_checkpoint(b, options, check=operation.check)) as opened_b,
        ):
            return _compare(opened_a, opened_b, wanted, header_only, progress, operation.check)

    operation: Operation[Comparison] = Operation(body, name="diff")
    return operation.start().result()


def _compare(
    a: OpenCheckpoint,
    b: OpenCheckpoint,
    wanted: Callable[[str], bool],
    header_only: bool,
    progress: Callable[[int, int], object],
    check: Callable[[], None],
) -> Comparison:
    of_a, of_b = _tensors(a, wanted), _tensors(b, wanted)
    pairs = [_Pair(name, *of_a[name], *of_b[name]) for name in of_a if name in of_b]
    same = [pair for pair in pairs if (pair.a.dtype, pair.a.shape) == (pair.b.dtype, pair.b.shape)]
    if not header_only:
        _Reading(same, progress, check).run()
        for file in (*a.files, *b.files):
            file.check_unchanged()
    return Comparison(
        only_a=tuple(info for name, (info, _) in of_a.items() if name not in of_b),
        only_b=tuple(info for name, (info, _) in of_b.items() if name not in of_a),
        changed=tuple(
            (pair.a, pair.b) for pair in pairs if (pair.a.dtype, pair.a.shape) != (pair.b.dtype, pair.b.shape)
        ),
        num_same=len(same),
        differing=tuple((pair.a, pair.difference) for pair in same if pair.difference.num_differing),
    )


def _tensors(opened: OpenCheckpoint, wanted: Callable[[str], bool]) -> dict[str, tuple[TensorInfo, Source]]:
    """Return what a checkpoint has, aliases too, each under its own name and with the file of its data."""
    found = {
        name: (header.info(name), file)
        for header, file in zip(opened.headers, opened.files, strict=True)
        for name in header.names
    }
    for alias, target in opened.aliases.items():
        info, file = found[target]
        found[alias] = TensorInfo(alias, info.dtype, info.shape, info.nbytes, info.shard, info.file_offset), file
    return {name: tensor for name, tensor in found.items() if wanted(name)}


class _Reading:
    """Pairs of tensors on their way through a few threads.

    Args:
        pairs: What to compare; what is found is added to their differences.
        progress: See `compare`.
        check: Called between pieces; may raise to end it.
    """

    def __init__(self, pairs: list[_Pair], progress: Callable[[int, int], object], check: Callable[[], None]) -> None:
        self._ahead = self._pieces(pairs)
        self._total_bytes = sum(pair.a.nbytes for pair in pairs)
        self._progress = progress
        self._check = check
        self._lock = threading.Lock()

    def run(self) -> None:
        """Read all, or up to the first error."""
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            futures = [pool.submit(self._work) for _ in range(NUM_WORKERS)]
        for future in futures:
            future.result()

    @staticmethod
    def _pieces(pairs: list[_Pair]) -> Iterator[tuple[_Pair, int, int]]:
        for pair in pairs:
            for start in range(0, pair.a.nbytes, PIECE_BYTES):
                yield pair, start, min(PIECE_BYTES, pair.a.nbytes - start)

    def _take(self) -> tuple[_Pair, int, int] | None:
        with self._lock:
            return next(self._ahead, None)

    def _work(self) -> None:
        memory_a, memory_b = allocate(PIECE_BYTES), allocate(PIECE_BYTES)
        try:
            while (piece := self._take()) is not None:
                self._check()
                pair, start, nbytes = piece
                a, b = memory_a.sub(0, nbytes), memory_b.sub(0, nbytes)
                pair.file_a.read_into(pair.a.file_offset + start, [a])
                pair.file_b.read_into(pair.b.file_offset + start, [b])
                if not _same(a, b):
                    found = _differences(pair.a.dtype, a, b)
                    with self._lock:
                        pair.difference.add(found)
                self._progress(nbytes, self._total_bytes)
        except BaseException:
            with self._lock:
                self._ahead = iter(())  # the others end too
            raise


def _same(a: Region, b: Region) -> bool:
    if libc is None:
        return a.tobytes() == b.tobytes()
    return not libc.memcmp(*map(ctypes.c_void_p, (a.address, b.address)), ctypes.c_size_t(a.nbytes))


def _differences(dtype: str, a: Region, b: Region) -> Difference:
    module: Any = import_module("stio.cli.numbers")  # numpy, wanted once something differs
    return Difference(*module.differences(dtype, a.tobytes(), b.tobytes()))
