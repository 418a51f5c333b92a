"""Random tensors on random meshes, from a seed: the same ones in each process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]

MESHES = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1, 2, 3], [3, 1, 2], [0, 2], [[1, 2]], [[[0], [1]]]]
"""Ranks of each mesh. Not all of them have all four ranks."""


@dataclass(frozen=True)
class Case:
    """A tensor, and its placements."""

    name: str
    mesh: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[int | str | None, ...]
    """Of each mesh dimension: the tensor's dimension, `"strided"` for dimension 0 from right to left, or None."""

    def placements(self, mesh: DeviceMesh) -> list[Placement]:
        """Return the placements in torch's form."""
        found: list[Placement] = []
        for k, cut in enumerate(self.cuts):
            if cut == "strided":
                parts = [mesh.shape[j] for j in range(k + 1, mesh.ndim) if self.cuts[j] == 0]
                found.append(_StridedShard(0, split_factor=parts[0]))
            else:
                found.append(Replicate() if cut is None else Shard(int(cut)))
        return found

    def whole(self) -> torch.Tensor:
        """Return the values of the tensor."""
        generator = torch.Generator().manual_seed(int(self.name.split(".")[1]))
        return torch.randint(0, 100, self.shape, generator=generator).to(self.dtype)

    def expected(self, mesh: DeviceMesh) -> torch.Tensor:
        """Return what torch puts on this rank; for strided parts, which it does not distribute, by two cuts in a row."""
        whole = self.whole()
        if "strided" not in self.cuts:
            return distribute_tensor(whole, mesh, self.placements(mesh), src_data_rank=None).to_local()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for k in reversed(range(mesh.ndim)):
            cut = self.cuts[k]
            if cut is not None:
                dim = 0 if cut == "strided" else int(cut)
                step = -(-whole.shape[dim] // mesh.shape[k])
                first = min(coordinate[k] * step, whole.shape[dim])
                whole = whole.narrow(dim, first, min(step, whole.shape[dim] - first))
        return whole


def random_cases(seed: int, num: int) -> list[Case]:
    """Return cases of all meshes, with even, uneven and empty parts."""
    chosen = random.Random(seed)
    return [_random_case(chosen, f"case.{seed * 1_000_000 + k}") for k in range(num)]


def _random_case(chosen: random.Random, name: str) -> Case:
    mesh = chosen.randrange(len(MESHES))
    num_dims = torch.tensor(MESHES[mesh]).ndim
    shape = tuple(chosen.choice([0, 1, 2, 3, 4, 5, 7, 8, 13, 27]) for _ in range(chosen.choice([0, 1, 1, 2, 2, 2, 3])))
    dims = [None, *range(len(shape))] if shape else [None]
    cuts: list[int | str | None] = [chosen.choice(dims) for _ in range(num_dims)]
    if shape and num_dims == 2 and chosen.random() < 0.2:
        cuts = ["strided", 0]
    return Case(name, mesh, shape, chosen.choice(DTYPES), tuple(cuts))


def meshes() -> list[DeviceMesh]:
    """Return all meshes; each rank makes all of them, also those that it is not in."""
    return [DeviceMesh("cpu", ranks) for ranks in MESHES]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one dtype, one shape, and equal bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(_as_bytes(tensor) for tensor in (one, other)))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def tensors_of(cases: Sequence[Case]) -> dict[str, torch.Tensor]:
    """Return the whole tensors by name."""
    return {case.name: case.whole() for case in cases}
