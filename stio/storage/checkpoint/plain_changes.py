"""What `changes.py` needs of the engine, by numpy: slower. Used where there is no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stio.runtime.memory import Region

_WINDOW_BYTES = 4 << 20


class PlainComparison:
    """The same as `stio.native.EngineComparison`."""

    def __init__(self, num_elements: int, item_bytes: int, num_pieces: int) -> None:
        self._num_elements = num_elements
        self._item_bytes = item_bytes
        self._lengths = [0] * num_pieces
        self._positions: list[Any] = [np.zeros(0, np.int64)] * num_pieces
        self._values = [b""] * num_pieces
        self._codes = b""

    def compare(self, k: int, image: int, fresh: int, num_elements: int) -> None:
        """Compare piece `k`."""
        old, new = (_items(address, num_elements, self._item_bytes) for address in (image, fresh))
        step = max(1, _WINDOW_BYTES // self._item_bytes)
        found = [
            start + np.flatnonzero(_differ(old[start : start + step], new[start : start + step]))
            for start in range(0, num_elements, step)
        ]
        self._positions[k] = np.concatenate(found) if found else np.zeros(0, np.int64)
        values = new[self._positions[k]]  # a copy
        self._values[k] = values.tobytes()
        self._lengths[k] = num_elements
        old[self._positions[k]] = values  # the image is what it was with the changes

    def size(self) -> tuple[int, int, int] | None:
        """Return the number of changed elements, the bytes of a code, and the bytes of all codes."""
        if sum(self._lengths) != self._num_elements:
            raise ValueError("the pieces are not the whole tensor")
        starts = np.cumsum([0, *self._lengths])
        positions = np.concatenate([np.zeros(0, np.int64), *map(np.add, self._positions, starts)])
        gaps = np.diff(positions, prepend=-1) - 1
        self._codes, code_bytes = min(((_coded(gaps, width), width) for width in (1, 2)), key=lambda one: len(one[0]))
        whole = self._num_elements * self._item_bytes
        if whole and len(self._codes) + len(positions) * self._item_bytes >= whole:
            return None
        return len(positions), code_bytes, len(self._codes)

    def write(self, codes: int, values: int) -> None:
        """Write codes and values to these addresses, after `size`."""
        for address, data in ((codes, self._codes), (values, b"".join(self._values))):
            Region(address, len(data)).write(0, data)


def apply_changes(
    changes: Sequence[tuple[int, int, int, int, int]],
    item_bytes: int,
    num_elements: int,
    pieces: Sequence[tuple[int, int, int]],
) -> bool:
    """The same as `stio.native.apply_changes`."""
    decoded = [
        _positions(codes, num_codes, code_bytes, count, num_elements)
        for codes, _, num_codes, code_bytes, count in changes
    ]
    if any(positions is None for positions in decoded):
        return False
    for (_, address_of_values, *_, count), positions in zip(changes, decoded, strict=True):
        values = _items(address_of_values, count, item_bytes)
        for first, length, address in pieces:
            begin, end = np.searchsorted(positions, (first, first + length))
            _items(address, length, item_bytes)[positions[begin:end] - first] = values[begin:end]
    return True


def _positions(address: int, num_codes: int, code_bytes: int, count: int, num_elements: int) -> Any:
    dtype = np.uint8 if code_bytes == 1 else np.dtype("<u2")
    codes = _items(address, num_codes, code_bytes).reshape(-1).view(dtype).astype(np.int64)
    is_element = codes < (1 << 8 * code_bytes) - 1
    positions = np.cumsum(codes + is_element)[is_element] - 1
    if len(positions) != count or not is_element[-1:].all():
        return None
    return None if len(positions) and positions[-1] >= num_elements else positions


def _coded(gaps: Any, code_bytes: int) -> bytes:
    largest = (1 << 8 * code_bytes) - 1
    skips = gaps // largest
    codes = np.full(int(len(gaps) + skips.sum()), largest, np.uint8 if code_bytes == 1 else np.dtype("<u2"))
    codes[np.cumsum(skips + 1) - 1] = gaps % largest
    return codes.tobytes()


def _differ(old: Any, new: Any) -> Any:
    words = f"u{min(old.shape[1], 8)}"  # as integers: floats would compare NaN and zeros by value
    differ = old.view(words) != new.view(words)
    return differ[:, 0] if differ.shape[1] == 1 else differ.any(axis=1)


def _items(address: int, count: int, item_bytes: int) -> Any:
    nbytes = count * item_bytes
    flat = np.frombuffer(Region(address, nbytes).view(), np.uint8) if nbytes else np.zeros(0, np.uint8)
    return flat.reshape(-1, item_bytes)
