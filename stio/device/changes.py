"""Changed elements of a delta (`stio.format.delta`), written into tensors by torch's operators.

Elements are moved as integers of their width, or of parts of it where memory is not aligned to it: no bit changes.
Positions need 8 bytes a code for a while, so they are decoded some codes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch

_CODES_AT_ONCE = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def positions_of(codes: torch.Tensor, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
    """Yield the positions of changed elements, int64, ascending, some of them at a time.

    Args:
        codes: U8 or U16, on the CPU; they were checked.
        device: Where they are decoded, on the current stream.
    """
    largest = (1 << 8 * codes.itemsize) - 1
    first = torch.zeros(1, dtype=torch.int64, device=device)
    for begin in range(0, len(codes), _CODES_AT_ONCE):
        part = codes[begin : begin + _CODES_AT_ONCE].to(device)
        gaps = part.to(torch.int64) if codes.itemsize == 1 else part.view(torch.int16).to(torch.int64) & largest
        is_element = gaps < largest
        ends = gaps.add_(is_element).cumsum(0).add_(first)
        first = ends[-1:]
        yield ends[is_element].sub_(1)


def write_changes(
    memory: torch.Tensor,
    codes: torch.Tensor,
    values: torch.Tensor,
    item_bytes: int,
    pieces: Sequence[tuple[int, int, int]],
) -> None:
    """Write changed elements into memory that holds parts of a tensor, on the current stream.

    Args:
        memory: uint8; a view of bytes of the device.
        codes: See `positions_of`.
        values: The elements, uint8 `[count * item_bytes]`, on any device, with a storage of their own.
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
    places = (places - start) // item_bytes
    done = 0
    for positions in positions_of(codes, memory.device):
        part = new[done : done + len(positions)].to(memory.device)
        done += len(positions)
        piece = torch.searchsorted(firsts, positions, right=True).sub_(1).clamp_(min=0)
        within = positions - firsts[piece]
        is_here = (within >= 0) & (within < numbers[piece])
        rows.index_copy_(0, (within + places[piece])[is_here], part[is_here])
