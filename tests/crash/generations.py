"""Checkpoints that carry one number in every value, and a look at what a crash left of them.

The look is not stio's: the index is read by hand and the shards by the official reader, so that a fault in stio's
reading cannot hide one in its saving.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch

from stio import sync
from stio.errors import CheckpointNotFoundError, StioError

INDEX = "model.safetensors.index.json"
NUM_TENSORS = 6
COUNT = 5000
"""Numbers in the first tensor: some whole pages, which are written past the page cache, and a tail, which is not."""

MANY: Mapping[str, Any] = {"max_shard_size": 45_000}
"""Keywords that give three shards."""
ONE: Mapping[str, Any] = {"max_shard_size": "5GB"}


class Torn(AssertionError):
    """What stands at a destination is neither the old nor the new checkpoint."""


def tensors_of(generation: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a generation, from 1 on: a hole reads as 0."""
    assert generation > 0
    return {f"layer.{k}": torch.full((COUNT + k,), generation, dtype=torch.int32) for k in range(NUM_TENSORS)}


def save(where: Path, generation: int, keywords: Mapping[str, Any]) -> None:
    """Save a generation."""
    if where.suffix == ".safetensors":
        keywords = {key: value for key, value in keywords.items() if key != "max_shard_size"}
    sync.save(tensors_of(generation), where, **keywords)


# Looking.


def look(where: Path) -> int | None:
    """Return the generation that stands at a destination, None if nothing does.

    Args:
        where: A file or a directory.

    Raises:
        Torn: It is no whole generation.
    """
    shards = shards_of(where)
    if shards is None:
        return None
    found: dict[str, int] = {}
    for path, names in shards.items():
        found |= read_shard(path, names)
    return only_generation(found, where)


def look_by_stio(where: Path, *, verify: bool = False) -> int | None:
    """Return the generation that stio's own reader sees, None if it finds nothing.

    Args:
        where: A file or a directory.
        verify: Whether the manifest has to be there, and right.

    Raises:
        Torn: It is no whole generation, or refused.
    """
    try:
        tensors = sync.load(where, memory="copy", verify=verify)
    except CheckpointNotFoundError as error:
        if shards_of(where) is None:
            return None
        raise Torn(f"stio finds nothing: {error}") from error
    except StioError as error:
        raise Torn(f"stio refuses: {type(error).__name__}: {error}; there are {listing(where)}") from error
    return only_generation({name: number_of(name, tensor) for name, tensor in tensors.items()}, where)


def shards_of(where: Path) -> dict[Path, set[str] | None] | None:
    """Return what readers open, as transformers does it: the shards that the index names, with their tensors, or the
    one file of the name that a checkpoint of one file has."""
    if where.suffix == ".safetensors":
        return {where: None} if where.exists() else None
    try:
        index = json.loads((where / INDEX).read_bytes())
    except FileNotFoundError:
        single = where / "model.safetensors"
        return {single: None} if single.exists() else None
    except ValueError as error:
        raise Torn(f"the index: {error}") from error
    shards: dict[Path, set[str] | None] = {}
    for name, shard in index["weight_map"].items():
        names = shards.setdefault(where / shard, set())
        assert names is not None
        names.add(name)
    return shards


def read_shard(path: Path, names: set[str] | None) -> dict[str, int]:
    """Return the number that each tensor of a file holds.

    Raises:
        FileNotFoundError: It is not there.
        Torn: A tensor holds several, or is missing.
    """
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except safetensors.SafetensorError as error:
        raise Torn(f"{path.name}: {error}") from error
    except RuntimeError as error:  # it opens the path a second time, through torch
        if "No such file" in str(error):
            raise FileNotFoundError(str(error)) from error
        raise Torn(f"{path.name}: {error}") from error
    if names is not None and set(tensors) != names:
        raise Torn(f"{path.name} holds {sorted(tensors)}, the index names {sorted(names)}")
    return {name: number_of(f"{path.name}: {name}", tensor) for name, tensor in tensors.items()}


def number_of(what: str, tensor: torch.Tensor) -> int:
    """Return the one number in a tensor."""
    low, high = int(tensor.min()), int(tensor.max())
    if low != high:
        raise Torn(f"{what} holds {low} and {high}")
    return low


def only_generation(found: Mapping[str, int], where: Path) -> int:
    """Return the one generation of all tensors."""
    if set(found) != set(tensors_of(1)):
        raise Torn(f"{where} holds {sorted(found)}")
    if len(set(found.values())) != 1 or 0 in found.values():
        raise Torn(f"{where} holds several generations: {dict(found)}")
    return next(iter(found.values()))


def leftovers(where: Path) -> list[str]:
    """Return what no save may leave behind: staging directories, and shards that the index does not name."""
    found = [str(path.relative_to(where.parent)) for path in where.parent.rglob(".stio-*")]
    if where.is_dir():
        named = {path.name for path in shards_of(where) or {}}
        found += [path.name for path in where.glob("*.safetensors") if path.name not in named]
    return sorted(found)


def grow_old(where: Path) -> None:
    """Let staging directories seem two minutes old: one without a lock may be somebody's who is about to take it."""
    for path in where.parent.rglob(".stio-*"):
        past = path.stat().st_mtime - 120
        os.utime(path, (past, past))


def listing(where: Path) -> list[str]:
    """Return all files below a directory, for messages."""
    return sorted(str(path.relative_to(where)) for path in where.rglob("*")) if where.is_dir() else [where.name]


# What a save can meet at its destination.


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way from an old checkpoint to a new one."""

    name: str
    """What it is called in reports."""
    before: Mapping[str, Any] | None
    """Keywords of the old checkpoint's save; None: there is none."""
    after: Mapping[str, Any] = field(default_factory=lambda: MANY)
    """Keywords of the new one's save."""
    destination: str = "model"
    """Name of the destination."""
    made: bool = False
    """Whether the destination is a directory that is there and empty."""
    mixes: bool = False
    """Whether both may be seen at once until somebody recovers: the documented window of `commit="files"`."""

    distinct: bool = True
    """Whether none of the others makes all the calls that it makes."""

    @property
    def hashed(self) -> bool:
        """Whether there is a manifest."""
        return "hash" in self.after

    @property
    def old(self) -> int | None:
        """The old generation."""
        return None if self.before is None else 1

    def prepare(self, directory: Path) -> Path:
        """Save the old generation, 1, in a directory; return the destination."""
        where = directory / self.destination
        if self.made:
            where.mkdir()
        if self.before is not None:
            save(where, 1, self.before)
        return where

    def look(self, where: Path) -> int | None:
        """Look, by hand and by stio, and at the manifest where there has to be one."""
        found = look(where)
        seen = look_by_stio(where, verify=self.hashed)
        if seen != found:
            raise Torn(f"stio sees generation {seen}, others see {found}: {listing(where)}")
        return found


HUB: Mapping[str, Any] = {**MANY, "shard_names": "hub", "commit": "files"}
HASHED: Mapping[str, Any] = {**MANY, "hash": "sha256"}

SCENARIOS = (
    Scenario("fresh directory", None),
    Scenario("empty directory", None, made=True),
    Scenario("fresh file", None, destination="model.safetensors", distinct=False),
    Scenario("file over file", ONE, ONE, destination="model.safetensors", distinct=False),
    Scenario("hashed file", {"hash": "sha256"}, {"hash": "sha256"}, destination="model.safetensors"),
    Scenario("many to many", MANY, distinct=False),
    Scenario("one to many", ONE),
    Scenario("one to one", ONE, ONE, distinct=False),
    Scenario("many to one", MANY, ONE, distinct=False),
    Scenario("hashed", HASHED, HASHED),
    Scenario("hub names, file by file", HUB, HUB, mixes=True),
)


def scenario(name: str) -> Scenario:
    """Return a scenario by its name."""
    return next(one for one in SCENARIOS if one.name == name)


def fast_directory() -> str | None:
    """Return a place in memory for checkpoints that no power cut threatens, None where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
