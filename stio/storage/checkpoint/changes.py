"""The changed elements of a tensor, in memory: found by comparing two images, and written into one.

Addresses are of host memory that the caller keeps. Everything runs on the calling thread, in the engine without the
GIL; several threads may work on different memory at once. Without the engine numpy does the same, slower.

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
from itertools import accumulate, pairwise
from typing import Any

from stio import native
from stio.errors import FormatError
from stio.runtime.memory import Region, allocate

_WINDOW_BYTES = 4 << 20
"""What numpy compares at once."""


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


class Comparison:
    """Compares an image of one tensor with its new bytes, piece by piece, and brings the image up to date.

    Args:
        num_elements: Number of elements of the tensor.
        item_bytes: Bytes of an element: 1, 2, 4, 8 or 16.
        num_pieces: Number of pieces, which together are the tensor.
    """

    def __init__(self, num_elements: int, item_bytes: int, num_pieces: int) -> None:
        kind = native.EngineComparison if native.available() else _PlainComparison
        self._found = kind(num_elements, item_bytes, num_pieces)
        self._item_bytes = item_bytes
        self.compare = self._found.compare
        """Compares one piece; see `native.EngineComparison.compare`."""

    def changes(self) -> Changes | None:
        """Return the changed elements of the whole tensor, when all pieces are compared.

        Returns:
            Codes of one or two bytes, whichever are shorter together; none may be changed. None: the tensor itself is
            not longer than codes and values, or there was no memory for them.
        """
        found = self._found.size()
        if found is None:
            return None
        count, code_bytes, codes_nbytes = found
        values_nbytes = count * self._item_bytes
        memory = allocate(values_nbytes + codes_nbytes)
        values, codes = memory.sub(0, values_nbytes), memory.sub(values_nbytes, codes_nbytes)
        self._found.write(codes.address, values.address)
        return Changes(codes, code_bytes, values, count, self._item_bytes)


class _PlainComparison:
    """The same as `native.EngineComparison`, by numpy."""

    def __init__(self, num_elements: int, item_bytes: int, num_pieces: int) -> None:
        self._num_elements, self._item_bytes = num_elements, item_bytes
        self._pieces: list[tuple[int, Any, Any]] = [(0, (), b"")] * num_pieces  # elements, positions, values
        self._codes = b""

    def compare(self, k: int, image: int, fresh: int, num_elements: int) -> None:
        np = import_module("numpy")
        nbytes, words = num_elements * self._item_bytes, max(1, self._item_bytes // 8)
        # As integers: floats would compare NaN and zeros by value.
        old, new = (
            _array(Region(address, nbytes), f"u{min(self._item_bytes, 8)}").reshape(-1, words)
            for address in (image, fresh)
        )
        step = _WINDOW_BYTES // self._item_bytes
        found = [
            start + np.flatnonzero((old[start : start + step] != new[start : start + step]).any(axis=1))
            for start in range(0, num_elements, step)
        ]
        positions = np.concatenate([np.zeros(0, "i8"), *found])
        values = new[positions]  # a copy
        old[positions] = values  # the image is what it was with the changes
        self._pieces[k] = num_elements, positions, values.tobytes()

    def size(self) -> tuple[int, int, int] | None:
        np = import_module("numpy")
        starts = [0, *accumulate(length for length, *_ in self._pieces)]
        if starts[-1] != self._num_elements:
            raise ValueError("the pieces are not the whole tensor")
        moved = (start + np.asarray(found, "i8") for start, (_, found, _) in zip(starts, self._pieces, strict=False))
        positions = np.concatenate([np.zeros(0, "i8"), *moved])
        gaps = np.diff(positions, prepend=-1) - 1
        self._codes, code_bytes = min(((_coded(gaps, width), width) for width in (1, 2)), key=lambda one: len(one[0]))
        nbytes = self._num_elements * self._item_bytes
        is_shorter = not nbytes or len(self._codes) + len(positions) * self._item_bytes < nbytes
        return (len(positions), code_bytes, len(self._codes)) if is_shorter else None

    def write(self, codes: int, values: int) -> None:
        for address, data in ((codes, self._codes), (values, b"".join(found for *_, found in self._pieces))):
            Region(address, len(data)).write(0, data)


def _coded(gaps: Any, code_bytes: int) -> bytes:
    np = import_module("numpy")
    largest = (1 << 8 * code_bytes) - 1
    skips = gaps // largest
    codes = np.full(int(len(gaps) + skips.sum()), largest, f"<u{code_bytes}")
    codes[np.cumsum(skips + 1) - 1] = gaps % largest
    return bytes(codes.tobytes())


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
