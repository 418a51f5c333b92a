"""Which rank uploads each file, and the order of the windows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from stio.distributed.sharded_write import cut_windows, owners_of


def test_owners() -> None:
    assert owners_of([5], 4) == [0]
    assert owners_of([1, 9, 5, 4], 2) == [0, 0, 1, 1]
    assert owners_of([3, 3, 3], 5) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_windows_make_up_the_files(seed: int) -> None:
    """In ascending order in each file, and one of each owner in turn as long as it has one."""
    chance = random.Random(seed)
    num_ranks = chance.randint(1, 5)
    sizes = [chance.randint(8, 100) for _ in range(chance.randint(1, 8))]
    owners = owners_of(sizes, num_ranks)
    owned = Counter(dict.fromkeys(range(num_ranks), 0))
    for size, owner in zip(sizes, owners, strict=True):
        owned[owner] += size
    assert max(owned.values()) - min(owned.values()) <= max(sizes)
    windows = cut_windows(sizes, owners, 16)
    for file, size in enumerate(sizes):
        own = [window for window in windows if window.file == file]
        assert own[0].begin == 0 and own[-1].end == size
        assert all(one.end == after.begin for one, after in pairwise(own))
        assert all(window.end - window.begin <= 16 for window in own)
    sent: Counter[int] = Counter()
    left = Counter(owners[window.file] for window in windows)
    for window in windows:
        owner = owners[window.file]
        assert all(sent[owner] <= sent[other] for other in left if sent[other] < left[other])
        sent[owner] += 1
