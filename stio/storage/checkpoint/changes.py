"""The changed elements of a tensor, in memory: found by comparing two images, and written into one.

Addresses are of host memory that the caller keeps. Everything runs on the calling thread, in the engine without the
GIL; several threads may work on different memory at once. Only the engine compares. Without it numpy applies, slower.

An image of a tensor may lie in several blocks of memory, and its new bytes may arrive block by block. A `Comparison`
takes them as pieces, in any order and on any threads:

    comparison = Comparison(num_elements, item_bytes, num_pieces=2)
    comparison.compare(0, image, fresh, 1000)                # the first 1000 elements
    comparison.compare(1, other_image, other_fresh, num_elements - 1000)
    changes = comparison.changes()                           # of the whole tensor; None: write it whole

Every piece has whole elements. The image is up to date once all pieces are compared, whatever `changes` returns; a
tensor that is written whole should be written from it, so that file and image agree even if somebody changes the tensor
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

from stio import native
from stio.errors import FormatError
from stio.runtime.memory import Region, allocate


@dataclass(frozen=True, slots=True)
class Changes:
    """Changed elements of one tensor; see `stio.format.delta` for the codes."""

    codes: Region
    """The gaps between the elements."""
    code_bytes: int
    """Bytes of a code: 1 or 2."""
    values: Region
    """The elements, in ascending order of their positions."""
    count: int
    """Number of elements."""
    item_bytes: int
    """Bytes of an element."""
    path: str | None = None
    """File of the delta, for errors."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and values."""
        return self.codes.nbytes + self.values.nbytes

    def positions(self) -> Any:
        """Return the positions of the elements, as an array of numpy; less or more than `count` of malformed codes."""
        gaps = _array(self.codes, f"<u{self.code_bytes}").astype("i8")
        is_element = gaps < (1 << 8 * self.code_bytes) - 1
        return (gaps + is_element).cumsum()[is_element] - 1


class Comparison(native.EngineComparison):
    """Compares an image of one tensor with its new bytes, piece by piece, and brings the image up to date.

    Args:
        num_elements: Number of elements of the tensor.
        item_bytes: Bytes of an element: 1, 2, 4, 8 or 16.
        num_pieces: Number of pieces, which together are the tensor.
    """

    def changes(self) -> Changes | None:
        """Return the changed elements of the whole tensor, when all pieces are compared.

        Returns:
            Codes of one or two bytes, whichever are shorter together; none may be changed. None: the tensor itself is
            not longer than codes and values, or there was no memory for them.
        """
        found = self.size()
        if found is None:
            return None
        count, code_bytes, codes_nbytes = found
        values_nbytes = count * self.item_bytes
        memory = allocate(values_nbytes + codes_nbytes)
        values, codes = memory.sub(0, values_nbytes), memory.sub(values_nbytes, codes_nbytes)
        self.write(codes.address, values.address)
        return Changes(codes, code_bytes, values, count, self.item_bytes)


def apply_changes(changes: Sequence[Changes], num_elements: int, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Write changed elements into memory that holds a tensor, or parts of it.

    Args:
        changes: Of the same tensor, the oldest first; all are checked before the first element is written.
        num_elements: Number of elements of the whole tensor.
        pieces: Parts of the tensor that are in memory: first element, number of elements, address. Ascending, and
            apart from each other. Several threads may write different pieces of a tensor: each call checks all codes,
            and passes over those before its pieces at a small part of the cost.

    Raises:
        FormatError: Codes lead past the end of the tensor, or are not of `count` elements.
        ValueError: The pieces do not ascend.
    """
    if any(first + length > after for (first, length, _), (after, *_) in pairwise(pieces)):
        raise ValueError("the pieces of a tensor ascend and do not overlap")
    if not changes:
        return
    item_bytes = changes[0].item_bytes
    wrong = next((k for k, one in enumerate(changes) if one.values.nbytes != one.count * item_bytes), None)
    if wrong is None and not native.available():
        wrong = _apply_by_numpy(changes, num_elements, pieces)
    elif wrong is None:
        rows = [
            (one.codes.address, one.values.address, one.codes.nbytes // one.code_bytes, one.code_bytes, one.count)
            for one in changes
        ]
        wrong = native.apply_changes(rows, item_bytes, num_elements, pieces)
    if wrong is not None:
        raise FormatError(
            "the positions of a delta lead past the end of its tensor, or are not as many as its values",
            path=changes[wrong].path,
            expected=f"{changes[wrong].count:,} of {num_elements:,} elements",
        )


def _apply_by_numpy(
    changes: Sequence[Changes], num_elements: int, pieces: Sequence[tuple[int, int, int]]
) -> int | None:
    """The same as `native.apply_changes`."""
    positions = [one.positions() for one in changes]
    for k, (one, found) in enumerate(zip(changes, positions, strict=True)):
        ends_well = one.codes.tobytes()[-one.code_bytes :] != b"\xff" * one.code_bytes
        if len(found) != one.count or not ends_well or (found[-1:] >= num_elements).any():
            return k
    for one, found in zip(changes, positions, strict=True):
        values = _array(one.values, f"V{one.item_bytes}")
        for first, length, address in pieces:
            begin, end = found.searchsorted((first, first + length))
            target = _array(Region(address, length * one.item_bytes), f"V{one.item_bytes}")
            target[found[begin:end] - first] = values[begin:end]
    return None


def _array(region: Region, dtype: str) -> Any:
    numpy = import_module("numpy")
    return numpy.frombuffer(region.view() if region.nbytes else bytearray(), dtype)
