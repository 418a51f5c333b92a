"""`stio diff A B`: what two checkpoints have in common and what not. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite, prod

import click

from stio.cli_common import NO, PATH, Bar, counted, matcher, one_line
from stio.codec.header import TensorInfo
from stio.comparison import Comparison, Difference, compare

__all__ = ["diff"]


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
