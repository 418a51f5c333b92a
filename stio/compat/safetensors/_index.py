"""Indices of slices, checked as in the original, for the cases in which torch does not do the indexing.

The original takes ints, slices, one Ellipsis and `[]`. An int or an explicit stop past the end is an error there,
although numpy would cut the stop; programs rely on it, so it is an error here. Negative bounds, empty ranges and, for
numpy, negative steps are errors in the original; here they give numpy's result.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from stio.compat.safetensors._errors import SafetensorError


def checked(index: Any, shape: Sequence[int], *, negative_steps: bool) -> tuple[int | slice, ...]:
    """Return the index as one int or slice for each of its dimensions, all of them in range.

    Args:
        index: The index as given in the brackets.
        shape: Dimensions of the tensor.
        negative_steps: Whether slices may have negative steps.

    Raises:
        SafetensorError: The index is of a kind that is not supported, or out of range.
    """
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        index = slice(0, 0)
    items = list(index) if isinstance(index, tuple) else [index]
    num_ellipses = sum(item is Ellipsis for item in items)
    if num_ellipses > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    if num_ellipses:
        place = next(k for k, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * max(0, len(shape) - len(items) + 1)
    terms = [_term(item, dim, shape, negative_steps) for dim, item in enumerate(items)]
    if len(terms) > len(shape):
        raise _out_of_range(terms, shape, "more slicing indexes than dimensions in tensor")
    for dim, (term, size) in enumerate(zip(terms, shape, strict=False)):
        wrong = _past_the_end(term, size)
        if wrong is not None:
            reason = f"index {wrong} out of bounds for tensor dimension #{dim} of size {size}"
            raise _out_of_range(terms, shape, reason)
    return tuple(terms)


def _term(item: Any, dim: int, shape: Sequence[int], negative_steps: bool) -> int | slice:
    size = shape[dim] if dim < len(shape) else 0
    if isinstance(item, slice):
        return _slice(item, size, negative_steps)
    try:
        number = operator.index(item)
    except TypeError:
        raise SafetensorError(f"Unsupported slice index at position {dim}: expected slice, int, or ellipsis") from None
    if number >= 0:
        return number
    if number + size < 0:
        raise SafetensorError(f"Invalid index {number} for dimension {dim} of size {size}")
    return number + size


def _slice(item: slice, size: int, negative_steps: bool) -> slice:
    start, stop, step = (
        None if bound is None else operator.index(bound) for bound in (item.start, item.stop, item.step)
    )
    if step is not None and (step == 0 or (step < 0 and not negative_steps)):
        raise SafetensorError(f"Slice step must be a positive integer, got {step}")
    if step is None or step > 0:
        start = start if start is None or start >= 0 else max(0, start + size)
        stop = stop if stop is None or stop >= 0 else max(0, stop + size)
    return slice(start, stop, step)


def _past_the_end(term: int | slice, size: int) -> int | None:
    """Return the first row past the end that a term selects, None if there is none."""
    if isinstance(term, int):
        return term if term >= size else None
    if (term.step is not None and term.step < 0) or term.stop is None or term.stop <= size:
        return None
    return term.start if term.start is not None and term.start >= size else int(term.stop) - 1


def _out_of_range(terms: Sequence[int | slice], shape: Sequence[int], reason: str) -> SafetensorError:
    shown = ", ".join(_shown(term) for term in terms)
    return SafetensorError(f"Error during slicing [{shown}] with shape {list(shape)}: {reason}")


def _shown(term: int | slice) -> str:
    if isinstance(term, int):
        return str(term)
    start, stop = ("" if bound is None else str(bound) for bound in (term.start, term.stop))
    return f"{start}:{stop}" + ("" if term.step in (None, 1) else f":{term.step}")
