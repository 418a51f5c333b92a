"""The changed elements of a tensor, in memory: found by comparing two images, and written into one.

Addresses are of host memory that the caller keeps. Everything runs on the calling thread, without the GIL where the
engine does the work; several threads may work on different memory at once. Without the engine numpy does the same,
slower (`plain_changes.py`).

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

    @property
    def nbytes(self) -> int:
        """Bytes of codes and values."""
        return self.codes.nbytes + self.values.nbytes


class Comparison:
    """Compares an image of one tensor with its new bytes, piece by piece, and brings the image up to date.

    Args:
        num_elements: Number of elements of the tensor.
        item_bytes: Bytes of an element: 1, 2, 4, 8 or 16.
        num_pieces: Number of pieces, which together are the tensor.
    """

    def __init__(self, num_elements: int, item_bytes: int, num_pieces: int) -> None:
        self._item_bytes = item_bytes
        make, _ = _implementation()
        self._pieces = make(num_elements, item_bytes, num_pieces)

    def compare(self, k: int, image: int, fresh: int, num_elements: int) -> None:
        """Compare piece `k`. Each piece once, in any order; several threads may compare different pieces.

        Args:
            k: Number of the piece in the order of the tensor.
            image: Address of its old bytes, which become the new ones in the same pass.
            fresh: Address of its new bytes.
            num_elements: Number of its elements.
        """
        self._pieces.compare(k, image, fresh, num_elements)

    def changes(self) -> Changes | None:
        """Return the changed elements of the whole tensor, when all pieces are compared.

        Returns:
            Codes of one or two bytes, whichever are shorter together; none may be changed. None: the tensor itself is
            not longer than codes and values, or there was no memory for them.
        """
        found = self._pieces.size()
        if found is None:
            return None
        count, code_bytes, codes_nbytes = found
        values_nbytes = count * self._item_bytes
        memory = allocate(values_nbytes + codes_nbytes)
        values, codes = memory.sub(0, values_nbytes), memory.sub(values_nbytes, codes_nbytes)
        self._pieces.write(codes.address, values.address)
        return Changes(codes, code_bytes, values, count, self._item_bytes)


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
    if not changes:
        return
    if any(first + length > after for (first, length, _), (after, *_) in pairwise(pieces)):
        raise ValueError("the pieces of a tensor ascend and do not overlap")
    item_bytes = changes[0].item_bytes
    found = [
        (one.codes.address, one.values.address, one.codes.nbytes // one.code_bytes, one.code_bytes, one.count)
        for one in changes
    ]
    fit = all(one.values.nbytes == one.count * item_bytes for one in changes)
    _, apply = _implementation()
    if not fit or not apply(found, item_bytes, num_elements, pieces):
        raise FormatError(
            "the positions of a delta lead past the end of its tensor, or are not as many as its values",
            expected=f"{', '.join(f'{one.count:,}' for one in changes)} of {num_elements:,} elements",
        )


def _implementation() -> Any:
    """Return the class that compares, and the function that applies."""
    if native.available():
        return native.EngineComparison, native.apply_changes
    plain = import_module("stio.storage.checkpoint.plain_changes")
    return plain.PlainComparison, plain.apply_changes
