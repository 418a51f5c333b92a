"""Kill a process that overwrites a checkpoint again and again, at random times, under the eyes of readers.

torch and stio are imported once; each child is forked, saves numbered generations, and tells by a pipe which it began
and which it was told are saved. Run by hand: `python -m crash.kills DIRECTORY --rounds 10000`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from crash.generations import (
    HASHED,
    HUB,
    MANY,
    ONE,
    Torn,
    leftovers,
    look,
    look_by_stio,
    only_generation,
    read_shard,
    save,
    shards_of,
    tensors_of,
)

from stio.storage.commit.recovery import collect_garbage

_SPAN_SECONDS = 0.025
"""A child lives at most so long from its first save's begin: some saves."""
_PATIENCE_SECONDS = 30.0
_MAX_KEPT = 5
"""Directories of one case that are kept."""
_MESSAGE = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Case:
    """What is saved over and over."""

    name: str
    """What it is called in reports."""
    keywords: tuple[Mapping[str, Any], ...]
    """Of the saves, in turn."""
    destination: str = "model"
    """Name of the destination."""
    mixes: bool = False
    """Whether both generations may be seen until somebody recovers."""
    naive: bool = False
    """Whether files are written in place, a negative control: that must be found out."""

    @property
    def hashed(self) -> bool:
        """Whether there is a manifest."""
        return "hash" in self.keywords[0]


CASES = (
    Case("sharded", (MANY,)),
    Case("file", (ONE,), destination="model.safetensors"),
    Case("ever other shards", (MANY, ONE, {"max_shard_size": 21_000})),
    Case("hashed", (HASHED,)),
    Case("hashed file", ({"hash": "sha256"},), destination="model.safetensors"),
    Case("not durable", ({**MANY, "durability": "none"},)),
    Case("hub names, file by file", (HUB,), mixes=True),
)

CONTROL = Case("written in place", ({},), destination="model.safetensors", naive=True)
"""What most programs do."""


class Killing:
    """One case's directory, its readers, and what was found.

    Args:
        case: What is saved.
        directory: Where; must be there and empty.
        keep: Where the directory is copied when anything is found.
    """

    def __init__(self, case: Case, directory: Path, keep: Path | None = None) -> None:
        self.case, self._keep = case, keep
        self.where = directory / case.destination
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.standing = 1
        self._save(1)
        self._readers = [] if case.mixes else [start_reader(self.where, way) for way in (by_path, by_stio)]

    def round(self, random_number: float, *, by_save: bool) -> None:
        """Kill one child, look, clean up.

        Args:
            random_number: Below 1: when.
            by_save: Whether the next save cleans up, and not `collect_garbage`.
        """
        begun, acknowledged = self._kill(random_number * _SPAN_SECONDS)
        self.counts["kills"] += 1
        try:
            if self.case.mixes:
                collect_garbage(self.where)
            found = look(self.where)
            if found is None or found < max(acknowledged, self.standing):
                raise Torn(f"lost: {found} stands, {acknowledged} was acknowledged, {self.standing} stood before")
            if found > begun:
                raise Torn(f"{found} stands, and only {begun} was begun")
            if look_by_stio(self.where, verify=self.case.hashed) != found:
                raise Torn(f"stio does not see generation {found}")
            self.counts["old" if found < begun else "new"] += 1
            self.counts["died with work left"] += bool(leftovers(self.where))
            self.standing = found
            self._clean(by_save)
        except (Torn, FileNotFoundError) as error:
            self.problems.append(f"{self.case.name}, round {self.counts['kills']}: {error}")
            if self._keep is not None and len(self.problems) <= _MAX_KEPT:
                kept = self._keep / f"{self.case.name}, round {self.counts['kills']}".replace(" ", "-")
                shutil.copytree(self.where.parent, kept, dirs_exist_ok=True)
            self.standing = max(self.standing, begun)

    def _clean(self, by_save: bool) -> None:
        if by_save:
            self.standing += 1
            self._save(self.standing)
        else:
            collect_garbage(self.where)
        if look(self.where) != self.standing:
            raise Torn(f"{look(self.where)} stands after cleaning, {self.standing} stood before")
        # A staging directory whose owner died before its lock is left alone for a minute.
        left = [name for name in leftovers(self.where) if not is_lockless(self.where.parent / name)]
        if left:
            raise Torn(f"left after {'the next save' if by_save else 'recovery'}: {left}")

    def _save(self, generation: int) -> None:
        if self.case.naive:
            self.where.write_bytes(safetensors.torch.save(tensors_of(generation)))
        else:
            save(self.where, generation, self.case.keywords[generation % len(self.case.keywords)])

    def _kill(self, seconds: float) -> tuple[int, int]:
        """Fork a child that saves, kill it; return what it began and what it was told is saved."""
        source, target = os.pipe()
        child = os.fork()
        if not child:
            in_child(lambda: self._save_for_ever(target))
        os.close(target)
        try:
            heard = os.read(source, _MESSAGE.size)  # it has begun
            deadline = time.perf_counter() + seconds
            while (left := deadline - time.perf_counter()) > 0:
                if select.select([source], [], [], left)[0]:
                    heard += os.read(source, 65536)
            os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGKILL, f"the child ended by itself: {status}"
            while more := os.read(source, 65536):
                heard += more
        finally:
            os.close(source)
        told = [number for (number,) in _MESSAGE.iter_unpack(heard)]
        return max(-number for number in told), max((number for number in told if number > 0), default=0)

    def _save_for_ever(self, target: int) -> NoReturn:
        generation = self.standing
        while True:
            generation += 1
            os.write(target, _MESSAGE.pack(-generation))
            self._save(generation)
            os.write(target, _MESSAGE.pack(generation))

    def finish(self) -> None:
        """End the readers, and hear what they saw."""
        for reader in self._readers:
            counts, problems = reader()
            self.counts.update(counts)
            self.problems += [f"{self.case.name}, {problem}" for problem in problems]


def is_lockless(path: Path) -> bool:
    return path.is_dir() and path.name.startswith(".stio-") and not (path / "lock").exists()


def in_child(body: Callable[[], object]) -> NoReturn:
    """Run a forked child's body, and nothing else of the program."""
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# Readers.


def by_path(where: Path) -> int | None:
    """Read as a program does that knows nothing of stio: the index, then shard after shard by its path.

    Raises:
        FileNotFoundError: A commit came in between.
    """
    shards = shards_of(where)
    assert shards is not None
    found: dict[str, int] = {}
    for path, names in shards.items():
        found |= read_shard(path, names)
    return only_generation(found, where)


def by_stio(where: Path) -> int | None:
    """Read by `stio.sync.load`, which must always succeed."""
    try:
        return look_by_stio(where)
    except FileNotFoundError as error:
        raise Torn(str(error)) from error


def start_reader(where: Path, way: Callable[[Path], int | None]) -> Callable[[], tuple[dict[str, int], list[str]]]:
    """Fork a reader that goes on until the returned function is called, which tells what it counted and met."""
    stop = where.parent / "stop"
    parent = os.getpid()
    source, target = os.pipe()
    child = os.fork()
    if not child:
        in_child(
            lambda: os.write(
                target, json.dumps(read_on(where, way, lambda: stop.exists() or os.getppid() != parent)).encode()
            )
        )
    os.close(target)

    def finish() -> tuple[dict[str, int], list[str]]:
        stop.touch()
        with open(source, "rb") as file:
            text = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status or not text:
            return {}, [f"the reader {way.__name__} ended with {status}"]
        counts, problems = json.loads(text)
        return counts, problems

    return finish


def read_on(
    where: Path, way: Callable[[Path], int | None], is_over: Callable[[], bool]
) -> tuple[dict[str, int], list[str]]:
    """Read until it is over."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    last = 0
    while not is_over():
        time.sleep(0.002)  # not all of a core for it
        counts[f"reads {way.__name__}"] += 1
        try:
            found = way(where)
            if found is None or found < last:
                raise Torn(f"{found} was read after {last}")
            last = found
        except FileNotFoundError:
            counts["missing file"] += 1
        except Torn as error:
            problems.append(f"reader {way.__name__}: {error}")
    counts["generations seen"] = last
    return counts, problems[:20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=200, help="kills, over all cases")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", action="append", help="name of a case; all of them if there is none")
    parser.add_argument("--control", action="store_true", help="write in place: must be found out")
    parser.add_argument("--keep", type=Path, help="where the directory goes as it is when anything is found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    gc.freeze()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}", flush=True)
    numbers = random.Random(seed)
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    if arguments.control:
        cases = [CONTROL]
    problems: list[str] = []
    num_kills = num_reads = 0
    for k, case in enumerate(cases):
        directory = arguments.directory / str(k)
        directory.mkdir(parents=True)
        killing = Killing(case, directory, arguments.keep)
        for n in range(arguments.rounds // len(cases) + (k < arguments.rounds % len(cases))):
            killing.round(numbers.random(), by_save=bool(n % 2))
        killing.finish()
        problems += killing.problems
        num_kills += killing.counts["kills"]
        num_reads += sum(number for name, number in killing.counts.items() if name.startswith("reads"))
        print(f"{case.name}: {dict(killing.counts)}, {len(killing.problems)} problems", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
    print(*(problem[:500] for problem in problems), sep="\n")
    print(f"{num_kills:,} kills, {num_reads:,} reads beside them, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
