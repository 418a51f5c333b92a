"""Changed elements of a delta (`stio.format.delta`), written into memory of a device by torch's operators.

Elements are moved as integers of their width, or of parts of it where memory is not aligned to it: no bit changes.
Positions need 8 bytes a code for a while, so callers pass so many codes as their memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

_CODES_AT_ONCE = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def positions_of(codes: torch.Tensor, code_bytes: int) -> torch.Tensor:
    """Return the positions of changed elements, int64 `[count]`, of codes given as uint8."""
    largest = (1 << 8 * code_bytes) - 1
    gaps = codes.to(torch.int64) if code_bytes == 1 else codes.view(torch.int16).to(torch.int64) & largest
    is_element = gaps < largest
    return gaps.add_(is_element).cumsum(0)[is_element].sub_(1)


def write_changes(
    memory: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    item_bytes: int,
    pieces: Sequence[tuple[int, int, int]],
) -> None:
    """Write changed elements into memory that holds parts of a tensor; queued on the current stream.

    Args:
        memory: uint8; a view of bytes of the device.
        positions: Of the elements in the whole tensor, ascending.
        values: The elements, uint8 `[count * item_bytes]`, with a storage of their own.
        item_bytes: Bytes of an element.
        pieces: The parts: first element, number of elements, offset in `memory`. Ascending and apart from each other,
            each a whole number of elements behind the first one.
    """
    start = pieces[0][2]
    stop = max(at + number * item_bytes for _, number, at in pieces)
    word = gcd(item_bytes, int(memory.storage_offset()) + start, 8)
    rows = memory[start:stop].view(_WORDS[word]).view(-1, item_bytes // word)
    new = values.view(_WORDS[word]).view(-1, item_bytes // word)
    firsts, numbers, places = (
        torch.tensor(column, dtype=torch.int64, device=memory.device) for column in zip(*pieces, strict=True)
    )
    piece = torch.searchsorted(firsts, positions, right=True).sub_(1).clamp_(min=0)
    within = positions - firsts[piece]
    is_here = (within >= 0) & (within < numbers[piece])
    places = (places - start) // item_bytes
    rows.index_copy_(0, (within + places[piece])[is_here], new[is_here])


def copy_elements(target: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
    """Write changed elements into a whole tensor, some codes at a time; the calling thread waits for the device.

    Args:
        target: Contiguous; of a dtype below a byte, its elements are bytes.
        codes: U8 or U16, on the CPU; they were checked.
        values: The elements, of the target's dtype.
    """
    word = gcd(target.itemsize, 8)
    rows, values = (
        one.detach().view(-1).view(_WORDS[word]).view(-1, target.itemsize // word) for one in (target, values)
    )
    largest, first, done = (1 << 8 * codes.itemsize) - 1, 0, 0
    for begin in range(0, len(codes), _CODES_AT_ONCE):
        part = codes[begin : begin + _CODES_AT_ONCE]
        positions = positions_of(part.view(torch.uint8).to(target.device), codes.itemsize).add_(first)
        rows.index_copy_(0, positions, values[done : done + len(positions)].to(target.device))
        gaps = part if codes.itemsize == 1 else part.view(torch.int16).to(torch.int32) & largest
        first += int(gaps.sum(dtype=torch.int64)) + len(positions)
        done += len(positions)
