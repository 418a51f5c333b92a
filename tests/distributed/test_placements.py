"""Parts of a tensor on a mesh: they tile the tensor, for random meshes, placements and shapes."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest
from counts import count

from stio.distributed.placements import Cut, byte_ranges, local_part


def random_case(chance: random.Random) -> tuple[list[int], list[int], list[Cut | None]]:
    shape = [chance.choice([0, 1, 2, 3, 5, 7, 8, 13, 27]) for _ in range(chance.randint(1, 3))]
    mesh = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    cuts: list[Cut | None] = [
        None if chance.random() < 0.25 else Cut(chance.randrange(-len(shape), len(shape))) for _ in mesh
    ]
    for k, cut in enumerate(cuts):  # some as FSDP makes them over tensor parallelism
        if cut is not None and chance.random() < 0.4:
            right = [j for j in range(k + 1, len(cuts)) if cuts[j] is not None and same_dim(cuts[j], cut, len(shape))]
            if right:
                cuts[k] = Cut(cut.dim, prod(mesh[j] for j in right))
    return shape, mesh, cuts


def same_dim(one: Cut | None, other: Cut, num_dims: int) -> bool:
    return one is not None and one.dim % num_dims == other.dim % num_dims


@pytest.mark.parametrize("seed", range(count(40, 300)))
def test_parts_tile_the_tensor(seed: int) -> None:
    """Each element is on as many ranks as the mesh dimensions that do not cut have places."""
    shape, mesh, cuts = random_case(random.Random(seed))
    counts = np.zeros(shape, np.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        part = local_part(shape, mesh, coordinate, cuts)
        assert all(0 <= one.start <= one.stop <= size for one, size in zip(part, shape, strict=True))
        counts[part] += 1
    copies = prod(size for size, cut in zip(mesh, cuts, strict=True) if cut is None)
    assert (counts == copies).all()


@pytest.mark.parametrize(
    ("size", "mesh", "expected"),
    [
        (13, (3, 2), [(0, 3), (7, 9), (3, 6), (9, 11), (6, 7), (11, 13)]),
        (27, (3, 4), [(0, 3), (7, 10), (14, 17), (21, 23), (3, 6), (10, 13), (17, 20), (23, 25), (6, 7), (13, 14), (20, 21), (25, 27)]),
    ],
)  # fmt: skip
def test_uneven_fsdp_over_tensor_parallelism(size: int, mesh: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    """Cases that torch's own helper gets wrong: the right mesh dimension cuts first."""
    cuts = [Cut(0, mesh[1]), Cut(0)]
    found = [local_part([size], mesh, place, cuts)[0] for place in itertools.product(*map(range, mesh))]
    assert [(one.start, one.stop) for one in found] == expected


@pytest.mark.parametrize(
    ("mesh", "place", "cuts", "words"),
    [
        ((2,), (2,), [Cut(0)], "no place 2"),
        ((2,), (0, 0), [Cut(0)], "2 coordinates"),
        ((2,), (0,), [Cut(2)], "2 dimensions"),
        ((2, 2), (0, 0), [Cut(0, 4), Cut(0)], "split_factor=4"),
        ((2, 2), (0, 0), [Cut(0, 2), Cut(1)], "split_factor=2"),
    ],
)
def test_refused(mesh: tuple[int, ...], place: tuple[int, ...], cuts: list[Cut], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        local_part((4, 4), mesh, place, cuts)


@pytest.mark.parametrize("seed", range(count(40, 300)))
def test_byte_ranges_are_the_elements_of_the_part(seed: int) -> None:
    """In row-major order of the part; neighbours are one range, and ranges at even distances are described together."""
    chance = random.Random(seed)
    shape = [chance.choice([1, 2, 3, 5, 8]) for _ in range(chance.randint(0, 4))]
    part = []
    for size in shape:
        start = chance.choice([0, chance.randint(0, size)])
        part.append(slice(start, chance.choice([size, chance.randint(start, size)])))
    whole = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    data, found = whole.tobytes(), []
    ranges = byte_ranges(shape, part, 4)
    for one in ranges:
        assert one.num_ranges == 1 or one.stride > one.nbytes
        for k in range(one.num_ranges):
            begin = one.start + k * one.stride
            found.append((begin, begin + one.nbytes))
    assert b"".join(data[begin:end] for begin, end in found) == whole[tuple(part)].tobytes()
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found)), "neighbours are one range"
    cut = [one for one, size in zip(part, shape, strict=True) if one.stop - one.start != size]
    if len(cut) <= 1:
        assert len(ranges) <= 1, "one cut makes ranges at even distances"
