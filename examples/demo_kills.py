"""Part two of the demo: a process that saves over its old checkpoint again and again is killed at random moments.

A checkpoint has one number in all its tensors, its generation. So the files that are left show whether they are the old
checkpoint, the new one, or neither. safetensors reads them, for all contestants.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
from demo_machine import child, receive
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import stio.sync

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = [f"layer.{k}" for k in range(16)]
NUM_SHARDS = 4

Tensors = dict[str, torch.Tensor]


# The contestants. All of them save over what is there.


def safetensors_file(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / FILE)


def stio_file(tensors: Tensors, folder: Path) -> None:
    stio.sync.save(tensors, folder / FILE)


def hub_shards(tensors: Tensors, folder: Path) -> None:
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes(tensors))


def stio_shards(tensors: Tensors, folder: Path) -> None:
    stio.sync.save(tensors, folder, max_shard_size=shard_bytes(tensors))


def shard_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values()) // NUM_SHARDS


SAVES: dict[str, Callable[[Tensors, Path], None]] = {
    "safetensors: save_file, one file": safetensors_file,
    "stio: save, one file": stio_file,
    f"huggingface_hub: {NUM_SHARDS} shards": hub_shards,
    f"stio: save, {NUM_SHARDS} shards": stio_shards,
}


# The process that saves.


def tensors_of(generation: int, size_bytes: int) -> Tensors:
    count = size_bytes // len(NAMES) // torch.int32.itemsize
    return {name: torch.full((count,), generation, dtype=torch.int32) for name in NAMES}


def save_forever(connection: Connection, contestant: str, folder: Path, generation: int, size_bytes: int) -> None:
    """Save one generation after the other. A message before each save says when it began."""
    tensors = tensors_of(generation, size_bytes)
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        for tensor in tensors.values():
            tensor.fill_(generation)
        connection.send((generation, perf_counter()))
        SAVES[contestant](tensors, folder)
        generation += 1


# The process that kills it.


@dataclass(frozen=True, slots=True)
class Kill:
    seconds: float
    """Time from the begin of the killed save."""
    left: str
    """What was left: "old", "new", "mixed", "unreadable", or "lost": older than the last save that had returned."""


@dataclass(slots=True)
class Killed:
    """All kills of a contestant."""

    kills: list[Kill] = field(default_factory=list)
    generation: int = 0
    """The last one whose save has begun."""
    left_over: dict[Path, int] = field(default_factory=dict)
    """Files that are no part of the checkpoint, and their sizes, after a last save that was not killed."""

    def counts(self) -> Counter[str]:
        return Counter(kill.left for kill in self.kills)

    @property
    def left_over_bytes(self) -> int:
        return sum(self.left_over.values())

    @property
    def num_broken(self) -> int:
        return sum(kill.left not in ("old", "new") for kill in self.kills)


def kill_all(home: Path, size_bytes: int, seconds: float, most: int) -> dict[str, Killed]:
    """Kill each contestant in turn, until the time is over or each was killed `most` times."""
    killed = {contestant: Killed() for contestant in SAVES}
    folders = {contestant: home / str(number) for number, contestant in enumerate(SAVES)}
    for folder in folders.values():
        folder.mkdir(parents=True)
    end = perf_counter() + seconds
    for number in range(most):
        if number and perf_counter() > end:
            break
        for contestant, folder in folders.items():
            killed[contestant].kills.append(kill_once(contestant, folder, killed[contestant], size_bytes))
    for contestant, folder in folders.items():
        SAVES[contestant](tensors_of(killed[contestant].generation + 1, size_bytes), folder)
        named = {folder / INDEX, *files_of(folder)}
        others = (path for path in folder.rglob("*") if path.is_file() and path not in named)
        killed[contestant].left_over = {path: path.stat().st_size for path in others}
    return killed


def kill_once(contestant: str, folder: Path, killed: Killed, size_bytes: int) -> Kill:
    """Let a process make one save, kill it at a random moment of a later one, and look at what is left."""
    with child(save_forever, contestant, folder, killed.generation + 1, size_bytes) as (process, connection):
        _, began_first = receive(connection)
        generation, began = receive(connection)
        time.sleep(random.uniform(0, 1.2 * (began - began_first)))
        process.kill()
        now = perf_counter()
        process.join()
        with suppress(EOFError):
            while True:
                generation, began = connection.recv()
    killed.generation = generation
    return Kill(now - began, look(folder, generation))


def look(folder: Path, generation: int) -> str:
    """Compare what is left in a directory with the generation whose save was killed, and the one before."""
    found: set[int] = set()
    names: set[str] = set()
    try:
        for path in files_of(folder):
            tensors = load_file(path)
            names |= tensors.keys()
            found |= {int(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError):
        return "unreadable"
    if names != set(NAMES):
        return "unreadable"
    if len(found) > 1:
        return "mixed"
    return {generation: "new", generation - 1: "old"}.get(found.pop(), "lost")


def files_of(folder: Path) -> set[Path]:
    """Return the files that a reader of the hub's layout opens: those in the index, or the only one."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        return {folder / FILE}
    return {folder / name for name in index["weight_map"].values()}
