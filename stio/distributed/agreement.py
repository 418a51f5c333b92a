"""What the ranks of a save must agree on: names, dtypes, shapes and options; and which rank writes which bytes.

Each rank describes the whole state from its own part of it. Equal descriptions give equal plans, so each rank can
compute where its bytes are in files that other ranks write too. A rank cannot always detect tied tensors: where its
part of a tensor is empty there is no memory to compare.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import msgspec
import torch

from stio.distributed.placements import byte_ranges
from stio.distributed.plan_parts import ByteRange, WrittenPart, data_places
from stio.distributed.ranks import Ranks
from stio.errors import MismatchError, RankError, printable
from stio.format import TensorSource, is_encodable, tensor_nbytes
from stio.format.state import POINTER, STATE_KEY, TREE_TENSOR, sorted_tree, tree_entries
from stio.runtime import run_blocking
from stio.runtime.memory import Region
from stio.saving import WritePlan

_SHOWN_CHARACTERS = 30
_VALUES_OF = "the values of tensor "

TREE = "what is no tensor"
"""Describes the tree of a nested state."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of a tensor: a part, of which other ranks may have copies."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, in torch."""
    index: tuple[slice, ...]
    """Which part it is; a slice for each dimension."""
    mesh: str
    """Identifies the mesh, that is its ranks."""
    replica: int
    """Number of this copy in the mesh."""
    num_replicas: int
    """Number of copies of each part in the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of a save as one rank sees it."""

    sources: Sequence[TensorSource]
    """What the rank holds of each tensor, in the caller's order."""
    shares: Mapping[str, Share]
    """Which part that is; a tensor that has none here is whole, and all ranks have it."""
    metadata: Mapping[str, str] | None
    """Of the files."""
    tree: bytes
    """The tree of a nested state, see `tree_of`."""
    settings: Mapping[str, str]
    """What else must be equal on all ranks: texts by what they describe."""
    values: Mapping[str, str]
    """Digests of the tensors whose values are compared."""
    rank: int
    """This rank."""
    num_ranks: int
    """Number of ranks."""

    def described(self) -> Mapping[str, str]:
        """Return what must be equal on all ranks: a text for each tensor and option, in order."""
        described, meshes = dict(self.settings), self.meshes()
        if self.tree:
            described[TREE] = hashlib.sha256(self.tree).hexdigest()
        for source in self.sources:
            share, text = self.shares.get(source.name), f"{source.dtype} {list(self._whole_shape(source))}"
            if share is not None:
                text += f" on mesh {meshes.index(share.mesh)} with {share.num_replicas} copies"
            described[f"tensor {printable(source.name)!r}"] = text
            if source.name in self.values:
                described[f"{_VALUES_OF}{printable(source.name)!r}"] = self.values[source.name]
        return described

    def in_order_of_names(self) -> RankState:
        """Return the same state with the tensors in the order of their names, and the tree in that of its keys."""
        sources = sorted(self.sources, key=lambda source: source.name)
        shares = {source.name: self.shares[source.name] for source in sources if source.name in self.shares}
        state = replace(self, sources=sources, shares=shares)
        if not self.tree:
            return state
        tree, metadata = sorted_tree(self.tree), self.metadata or {}
        if metadata[STATE_KEY] != POINTER:
            return replace(state, tree=tree, metadata={**metadata, STATE_KEY: tree.decode()})
        data, nbytes = torch.frombuffer(bytearray(tree), dtype=torch.uint8), len(tree)
        sources = [
            replace(one, data=data, shape=(nbytes,), nbytes=nbytes, span=(0, nbytes), storage_key=None)
            if one.name == TREE_TENSOR
            else one
            for one in sources
        ]
        return replace(state, tree=tree, sources=sources)

    def meshes(self) -> list[str]:
        """Return the meshes of the tensors, in the order of their first tensors.

        Other ranks may have other ones in the same places: with tensor parallelism over part of a model, parameters
        that it leaves alone are sharded over as many meshes as it has ranks. Each mesh then has a copy.
        """
        return list(dict.fromkeys(share.mesh for share in self.shares.values()))

    def digest(self) -> str:
        """Return a digest of `described`; the order of the tensors counts."""
        return hashlib.sha256(json.dumps(list(self.described().items())).encode()).hexdigest()

    def ties(self) -> list[list[str]]:
        """Return groups of names that are one tensor, as far as this rank can detect it; none that no file can hold."""
        found: defaultdict[Hashable, list[str]] = defaultdict(list)
        for source in self.sources:
            if source.storage_key is not None and source.nbytes:
                found[self._identity(source)].append(source.name)
        return [names for names in found.values() if len(names) > 1 and all(map(is_encodable, names))]

    def is_tied(self, names: Collection[str]) -> bool:
        """Return whether these are one tensor, or may be: only other ranks can compare those that are empty here."""
        held = [source for source in self.sources if source.name in names and source.nbytes]
        return len({self._identity(source) for source in held}) <= 1

    def whole(self, ties: Iterable[Collection[str]]) -> list[TensorSource]:
        """Return the whole tensors, for the plan of the files. They have no data.

        Args:
            ties: Groups of names that are one tensor.
        """
        keys = {name: f"tie {k}" for k, names in enumerate(ties) for name in names}
        whole = []
        for source in self.sources:
            key, shape = keys.get(source.name), self._whole_shape(source)
            nbytes = tensor_nbytes(source.dtype, shape)
            whole.append(
                replace(source, shape=shape, nbytes=nbytes, storage_key=key, span=(0, nbytes), layout=None, data=None)
            )
        return whole

    def parts(self, saved: Sequence[TensorSource], meshes: Sequence[Sequence[str]]) -> dict[str, WrittenPart]:
        """Return what this rank writes of the tensors that are saved.

        Copies of one part are equal, and one rank writes it: the one that has least to write so far, the largest
        tensors first. A tensor is never written by copies in turn, which may differ by rounding.

        Args:
            saved: The whole tensors.
            meshes: The `meshes` of each rank.
        """
        copies = {own: sorted(set(found)) for own, *found in zip(self.meshes(), *meshes, strict=True)}
        held = {source.name: source for source in self.sources}
        written: defaultdict[int, list[int]] = defaultdict(list)  # by number of copies: bytes of each copy
        parts = {}
        for whole in sorted(saved, key=lambda source: (-source.nbytes, source.name)):
            replica, num_replicas = self._replica_of(whole.name, copies)
            loads = written[num_replicas] or [0] * num_replicas
            writer = loads.index(min(loads))
            loads[writer] += whole.nbytes
            written[num_replicas] = loads
            source = held[whole.name]
            if replica == writer and source.nbytes:
                parts[whole.name] = WrittenPart(source, self._ranges(source))
        return parts

    def _replica_of(self, name: str, copies: Mapping[str, Sequence[str]]) -> tuple[int, int]:
        """Return which copy of its part a tensor is on this rank, and how many there are."""
        share = self.shares.get(name)
        if share is None:
            return self.rank, self.num_ranks
        meshes, num_replicas = copies[share.mesh], share.num_replicas
        return meshes.index(share.mesh) * num_replicas + share.replica, len(meshes) * num_replicas

    def _whole_shape(self, source: TensorSource) -> tuple[int, ...]:
        share = self.shares.get(source.name)
        if share is None:
            return source.shape
        if source.dtype == "F4":  # two elements of the format are one of torch
            return (*share.shape[:-1], share.shape[-1] * 2)
        return share.shape

    def _ranges(self, source: TensorSource) -> list[ByteRange]:
        share = self.shares.get(source.name)
        if share is None:
            return [ByteRange(0, source.nbytes)]
        return byte_ranges(share.shape, share.index, source.data.dtype.itemsize)

    def _identity(self, source: TensorSource) -> Hashable:
        share = self.shares.get(source.name)
        where = None if share is None else (share.shape, tuple((one.start, one.stop) for one in share.index))
        return source.storage_key, source.span, source.dtype, source.shape, source.layout, where


def tree_of(metadata: Mapping[str, str] | None, sources: Sequence[TensorSource]) -> bytes:
    """Return the tree of a nested state, from the metadata or from its tensor; empty if there is none."""
    text = (metadata or {}).get(STATE_KEY, "")
    if text != POINTER:
        return text.encode()
    data = next((source.data for source in sources if source.name == TREE_TENSOR), None)
    return b"" if data is None else bytes(Region(data.data_ptr(), data.nbytes, data).view())


class _Compared(msgspec.Struct, array_like=True):
    """What a rank says of its state."""

    digest: str
    meshes: list[str]
    ties: list[list[str]]


class Agreed(NamedTuple):
    """What all ranks save."""

    state: RankState
    """The state, in the order of all ranks."""
    meshes: Sequence[Sequence[str]]
    """The meshes of each rank."""
    ties: Sequence[Sequence[str]]
    """Groups of names that are one tensor on all of them."""


def agree(state: RankState, ranks: Ranks, *, with_ties: bool, path: str) -> Agreed:
    """Compare the states of all ranks.

    Where only their orders differ, for example by the seed of Python's hashes, all ranks take that of the names.

    Args:
        state: The state of this rank.
        ranks: The ranks.
        with_ties: Whether tied tensors are looked for.
        path: The destination, for messages.

    Raises:
        MismatchError: The states differ.
        RankError: On another rank.
    """
    found = _compare("state", state, ranks, with_ties)
    if _ranks_that_differ(found):
        state = state.in_order_of_names()
        found = _compare("state by names", state, ranks, with_ties)
        if others := _ranks_that_differ(found):
            _raise_difference(state, ranks, others[0], path)
    meshes = [one.meshes for one in found]
    if any(len(one) != len(state.meshes()) for one in meshes):
        raise RankError("a rank has sent another number of meshes than its state has")
    groups = merged(group for one in found for group in one.ties)
    if not groups:
        return Agreed(state, meshes, [])
    mine = [k for k, group in enumerate(groups) if state.is_tied(group)]
    tied = set(mine).intersection(*run_blocking(ranks.arrive("ties", mine, kind=list[int])))
    return Agreed(state, meshes, [groups[k] for k in sorted(tied)])


def require_all_parts(plan: WritePlan, parts: Mapping[str, WrittenPart], ranks: Ranks, *, path: str) -> None:
    """Require that the parts of all ranks make up the tensors.

    Args:
        plan: The plan of the files.
        parts: What this rank writes.
        ranks: The ranks.
        path: The destination, for messages.

    Raises:
        MismatchError: They do not.
    """
    places, own_bytes = data_places(plan), [0] * len(plan.shards)
    for name, part in parts.items():
        own_bytes[places[name][0]] += part.source.nbytes
    all_bytes = run_blocking(ranks.arrive("parts", own_bytes, kind=list[int]))
    for number, shard in enumerate(plan.shards):
        of_ranks = [found[number] for found in all_bytes if len(found) == len(own_bytes)]
        if sum(of_ranks) != shard.data_bytes:
            raise MismatchError(
                "the parts of all ranks do not make up the tensors; are these all the ranks that have a part of them "
                "(process_group=)?",
                path=path,
                expected=f"{shard.data_bytes:,} bytes of one file",
                found=f"{sum(of_ranks):,}",
            )


def _compare(name: str, state: RankState, ranks: Ranks, with_ties: bool) -> list[_Compared]:
    mine = _Compared(state.digest(), state.meshes(), state.ties() if with_ties else [])
    found: list[_Compared] = run_blocking(ranks.arrive(name, mine, kind=_Compared))
    return found


def _ranks_that_differ(found: Sequence[_Compared]) -> list[int]:
    return [rank for rank, one in enumerate(found) if one.digest != found[0].digest]


def _raise_difference(state: RankState, ranks: Ranks, other: int, path: str) -> NoReturn:
    """Raise how the state of a rank differs from that of the first one, on that rank; on the others its error."""
    described = {**state.settings, **(tree_entries(state.tree) if state.tree else {}), **state.described()}
    described.pop(TREE, None)
    mine = {what: text.encode(errors="backslashreplace").decode() for what, text in described.items()}
    if ranks.rank == 0:
        ranks.share("described", mine)
    if ranks.rank != other:
        run_blocking(ranks.fetch("difference", of=other))  # raises what that rank raises
    theirs = run_blocking(ranks.fetch("described", kind=dict[str, str]))
    raise MismatchError(f"the ranks do not save the same: {difference(mine, theirs, ranks.rank)}", path=path)


def merged(groups: Iterable[Collection[str]]) -> list[list[str]]:
    """Return groups of names, joined where they have a name in common; sorted."""
    group_of: dict[str, set[str]] = {}
    for names in groups:
        joined = set(names).union(*(group_of[name] for name in names if name in group_of))
        group_of.update(dict.fromkeys(joined, joined))
    return sorted(sorted(names) for names in {id(names): names for names in group_of.values()}.values())


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> str:
    """Return the first difference between the states of two ranks, in a sentence, and what to do about it.

    Args:
        mine: What this rank describes.
        theirs: What the first rank describes.
        rank: This rank.
    """
    text = f"names, shapes, options or metadata of rank {rank} differ from those of rank 0"
    what = next((what for what in [*theirs, *mine] if mine.get(what) != theirs.get(what)), "")
    if what not in mine and what in theirs:
        text = f"rank 0 has {what}, and rank {rank} has not"
    elif what not in theirs and what in mine:
        text = f"rank {rank} has {what}, and rank 0 has not"
    elif what.startswith(_VALUES_OF):
        text = f"{what} differ between rank 0 and rank {rank}"
    elif what:
        here, there = _around_difference(mine[what], theirs[what])
        text = f"{what} differs: {there} on rank 0, {here} on rank {rank}"
    is_option = what.startswith(("the option", "the destination", "the metadata"))
    return text if is_option else f"{text}; {GATHER_FIRST}"


GATHER_FIRST = (
    "all ranks save all names, with equal values: gather what differs by rank first, by "
    "torch.distributed.all_gather_object, and save the list on all ranks"
)


def _around_difference(*texts: str) -> Iterator[str]:
    differs = (k for k, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    begin = max(0, next(differs, min(map(len, texts))) - _SHOWN_CHARACTERS)
    return (f"...{printable(text[begin:])}" if begin else printable(text) for text in texts)
