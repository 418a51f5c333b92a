"""Four processes that save to one directory and four that read it, for a while: whole checkpoints only, none outdated.

    python -m nightly.shared_directory DIRECTORY --seconds 60 --seed 1 --keep DIRECTORY

Each save has its own number, which stands in every value. A reader must see one number in all tensors. It must not see
a checkpoint that a later save had replaced before the reader began: a save that began after another one had returned is
the later one. At the end the same holds for what stands, and nothing else may be left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import sys
import time
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from crash.generations import HASHED, MANY, ONE, Torn, leftovers, look, look_by_stio, save, tensors_of
from crash.kills import by_path, by_stio, in_child

from stio import sync
from stio.errors import ConcurrentSaveError
from stio.storage.commit.recovery import collect_garbage

NUM_SAVERS = NUM_READERS = 4
WAYS = (MANY, ONE, {"max_shard_size": 21_000}, HASHED, {**MANY, "durability": "none"})
"""Keywords of saves, chosen at random."""

Save = tuple[float, float | None, int]
"""When a save began, when it returned (None: it failed), its number."""


def save_for(where: Path, member: int, until: float, seed: str) -> dict[str, Any]:
    """Save again and again; return all saves, and what was met."""
    numbers = random.Random(seed)
    counts: Counter[str] = Counter()
    saves: list[Save] = []
    problems: list[str] = []
    number = member + 1
    with sync.Saver() as saver:
        while time.monotonic() < until:
            number += NUM_SAVERS
            keywords = numbers.choice(WAYS)
            begun = time.monotonic()
            try:
                if numbers.random() < 0.5:
                    save(where, number, keywords)
                else:
                    saver.save(tensors_of(number), where, **keywords).result()
                saves.append((begun, time.monotonic(), number))
                counts["saves"] += 1
            except ConcurrentSaveError:
                saves.append((begun, None, number))
                counts["saves refused"] += 1
            except Exception as error:  # noqa: BLE001 - all else is a finding
                saves.append((begun, None, number))
                problems.append(f"saver {member}: {type(error).__name__}: {error}")
    return {"saves": saves, "reads": [], "counts": counts, "problems": problems[:20]}


def read_for(where: Path, member: int, until: float, seed: str) -> dict[str, Any]:
    """Read again and again; return when each read began and what it found."""
    way: Callable[[Path], int | None] = by_path if member % 2 else by_stio
    counts: Counter[str] = Counter()
    reads: list[tuple[float, int]] = []
    problems: list[str] = []
    while time.monotonic() < until:
        begun = time.monotonic()
        counts[f"reads {way.__name__}"] += 1
        try:
            found = way(where)
            if found is None:
                raise Torn("nothing stands")
            reads.append((begun, found))
        except FileNotFoundError:
            counts["reads by_path that missed a file"] += 1
        except Exception as error:  # noqa: BLE001
            problems.append(f"reader {member} {way.__name__}: {type(error).__name__}: {error}")
    return {"saves": [], "reads": reads, "counts": counts, "problems": problems[:20]}


def outdated(saves: list[Save], reads: list[tuple[float, int]]) -> list[str]:
    """Return the reads that found a checkpoint which had been replaced before they began."""
    returned = sorted((end, begun) for begun, end, _ in saves if end is not None)
    ends = [end for end, _ in returned]
    last_begun = list(accumulate((begun for _, begun in returned), max))
    end_of = {number: end for _, end, number in saves}
    problems = []
    for begun, found in reads:
        if found not in end_of:
            problems.append(f"{found} was read, and nobody saved it")
            continue
        end, k = end_of[found], bisect_left(ends, begun) - 1
        if end is not None and k >= 0 and last_begun[k] > end:
            problems.append(
                f"{found} was read at {begun:.4f}, and replaced by a save of {last_begun[k]:.4f} to {ends[k]:.4f}"
            )
    return problems


def start(body: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Run a body in a process; return a function that waits for its result."""
    source, target = os.pipe()
    child = os.fork()
    if not child:

        def run() -> None:
            os.close(source)
            with open(target, "w") as file:
                json.dump(body(), file)

        in_child(run)
    os.close(target)

    def finish() -> dict[str, Any]:
        with open(source) as file:
            text = file.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status or not text:
            return {"saves": [], "reads": [], "counts": {}, "problems": [f"a process ended with {status}"]}
        found: dict[str, Any] = json.loads(text)
        return found

    return finish


def run(where: Path, seconds: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Let all processes work; return what was counted and what was found."""
    save(where, 1, MANY)
    until = time.monotonic() + seconds
    members = [(save_for, k) for k in range(NUM_SAVERS)] + [(read_for, k) for k in range(NUM_READERS)]
    finishes = [
        start(lambda body=body, k=k: body(where, k, until, f"{seed}/{body.__name__}/{k}")) for body, k in members
    ]
    results = [finish() for finish in finishes]
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    problems = [problem for result in results for problem in result["problems"]]
    saves = [(0.0, 0.0, 1), *(tuple(one) for result in results for one in result["saves"])]
    reads = [tuple(one) for result in results for one in result["reads"]]
    try:
        found = look(where)
        if look_by_stio(where) != found:
            raise Torn(f"stio does not see {found}")
        reads.append((time.monotonic(), found or 0))
        collect_garbage(where)
        if left := leftovers(where):
            raise Torn(f"left at the end: {left}")
    except (Torn, OSError) as error:
        problems.append(f"at the end: {error}")
    counts["checkpoints read"] = len({found for _, found in reads})
    return counts, problems + outdated(saves, reads)[:20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where the directory is copied if anything is found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    gc.freeze()
    where = options.directory / "model"
    counts, problems = run(where, options.seconds, options.seed)
    if problems and options.keep:
        shutil.copytree(options.directory, options.keep / "directory", dirs_exist_ok=True)
    print(*(problem[:500] for problem in problems), sep="\n")
    print(f"{', '.join(f'{number:,} {name}' for name, number in sorted(counts.items()))}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
