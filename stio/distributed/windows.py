"""Which rank uploads each file of a save to a store, and in which pieces the other ranks send it the bytes. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import zip_longest

from stio.saving.plan_parts import Window


def owners_of(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank that uploads each file: the largest files first, each to the rank with the fewest bytes so far.

    One file alone is the first rank's, which commits it.

    Args:
        sizes: Bytes of each file.
        num_ranks: Number of ranks.
    """
    owned = [0] * num_ranks
    owners = [0] * len(sizes)
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        owner = owned.index(min(owned))
        owners[file] = owner
        owned[owner] += sizes[file]
    return owners


def cut_windows(sizes: Sequence[int], owners: Sequence[int], window_bytes: int) -> list[Window]:
    """Return the windows of all files, in the order in which they are sent: one of each owner in turn.

    An owner's files follow each other, so that few are under way at one time.

    Args:
        sizes: Bytes of each file.
        owners: The rank that uploads each.
        window_bytes: Size of a window; a multiple of `PAGE_BYTES`.
    """
    of_owner: dict[int, list[Window]] = {owner: [] for owner in sorted(set(owners))}
    for file, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        of_owner[owner] += _cut(Window(file, 0, size), window_bytes)
    return [window for turn in zip_longest(*of_owner.values()) for window in turn if window is not None]


def cut_again(windows: Sequence[Window], numbers: Container[int], window_bytes: int) -> list[Window]:
    """Return the windows with some of them cut into smaller ones, which take their places.

    Args:
        windows: All of them.
        numbers: Which ones are cut.
        window_bytes: Size of a smaller one; a multiple of `PAGE_BYTES`.
    """
    found: list[Window] = []
    for number, window in enumerate(windows):
        found += _cut(window, window_bytes) if number in numbers else [window]
    return found


def _cut(window: Window, window_bytes: int) -> list[Window]:
    file, begin, end = window
    return [Window(file, at, min(at + window_bytes, end)) for at in range(begin, end, window_bytes)]
