"""Trainings that are killed by SIGKILL, at given steps and any moment, and go on until they are done.

    python -m integrations.kills integrations.plain_case DIRECTORY --steps 1 2 3 --trainings 4 --kills 6

What a training needs is imported once; each of its lives is forked, and prints `step N` after each step. In the end
its files must be, byte for byte, those of an undisturbed training. A life may fork processes that train with it: then
all of them are killed, or only the first one, and the others must end by themselves.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import NoReturn, Protocol, cast

import torch
import torch._dynamo  # an optimizer's first step imports it, for seconds

from stio.storage.commit.recovery import collect_garbage

LONGEST_SECONDS = 0.012
"""After the step's line: enough for the save that follows to begin, be written, or be published."""

_PATIENCE_SECONDS = 60


class Case(Protocol):
    """A module with a training."""

    NUM_STEPS: int

    def train(self, directory: Path) -> None:
        """Train, from what a former life left in the directory, to the end."""

    def result(self, directory: Path) -> dict[str, bytes]:
        """Return what must not differ."""


class Killed:
    """Trainings of one case in directories below another.

    Args:
        case: The training.
        directory: For all of them.
        numbers: Chooses which processes are killed.
    """

    def __init__(self, case: Case, directory: Path, numbers: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._case, self._directory, self._numbers = case, directory, numbers
        self._expected = self._finish(directory / "undisturbed")

    def training(self, name: str, kills: list[tuple[int, float]]) -> None:
        """Kill one training at these steps, so many seconds after them, then let it end."""
        where = self._directory / name
        for step, seconds in kills:
            self._live(where, step, seconds)
        found = self._finish(where)
        different = [key for key in self._expected.keys() | found.keys() if self._expected.get(key) != found.get(key)]
        self.counts["trainings"] += 1
        if different:
            self.problems.append(f"{name}, killed at {kills}: {', '.join(sorted(different))} differ")
        # A training that was killed in its last save has no later one that cleans up. A directory whose owner died before
        # it had locked it is left alone for a minute.
        for directory in {path.parent for path in _leftovers(where)}:
            collect_garbage(directory)
        if left := [path for path in _leftovers(where) if (path / "lock").exists()]:
            self.problems.append(f"{name}, killed at {kills}: left {left}")

    def _finish(self, where: Path) -> dict[str, bytes]:
        status = self._live(where, None, 0)
        if status:
            raise SystemExit(f"{where.name}: the training ended with {status}")
        return self._case.result(where)

    def _live(self, where: Path, until: int | None, seconds: float) -> int:
        """Fork a life; kill it at a step, or let it end. Return how it ended."""
        source, target = os.pipe()
        child = os.fork()
        if not child:
            os.close(source)
            os.setpgid(0, 0)
            _live_and_die(self._case, where, target)
        os.close(target)
        try:
            if not _reach(source, until):
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            deadline = time.perf_counter() + seconds
            while (left := deadline - time.perf_counter()) > 0:
                select.select([], [], [], left)
            if self._numbers.random() < 0.5:
                os.killpg(child, signal.SIGKILL)
            else:
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            _reach(source, None)  # the end of all that hold the other end
        finally:
            os.close(source)
        self.counts["kills"] += status == -signal.SIGKILL
        self.counts["kills in a save"] += bool(_leftovers(where))
        return status


def _reach(source: int, until: int | None) -> bool:
    """Read what a life prints; tell whether it came to a step, and did not end before."""
    text = b""
    while select.select([source], [], [], _PATIENCE_SECONDS)[0]:
        more = os.read(source, 4096)
        if not more:
            return False
        text += more
        *lines, text = text.split(b"\n")
        for line in lines:
            if until is not None and line.startswith(b"step ") and int(line.split()[1].rstrip(b":")) >= until:
                return True
    raise TimeoutError(f"the training printed nothing for {_PATIENCE_SECONDS} s")


def _live_and_die(case: Case, where: Path, target: int) -> NoReturn:
    code = 1
    try:
        os.dup2(target, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        case.train(where)
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _leftovers(where: Path) -> list[Path]:
    return sorted(where.rglob(".stio-*")) if where.is_dir() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="a module")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="a training for each, killed there once")
    parser.add_argument("--trainings", type=int, default=0, help="so many more")
    parser.add_argument("--kills", type=int, default=5, help="in each of these, at random steps")
    parser.add_argument("--at-least", type=int, default=0, help="so many kills in all; more trainings if needed")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    case = cast(Case, import_module(arguments.case))
    gc.collect()
    gc.freeze()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}", flush=True)
    numbers = random.Random(seed)
    killed = Killed(case, arguments.directory, numbers)
    for step in arguments.steps:
        killed.training(f"at-{step}", [(step, numbers.uniform(0, LONGEST_SECONDS))])
    k = 0
    while k < arguments.trainings or killed.counts["kills"] < arguments.at_least:
        steps = sorted(numbers.choices(range(1, case.NUM_STEPS + 1), k=arguments.kills))
        killed.training(f"random-{k}", [(step, numbers.uniform(0, LONGEST_SECONDS)) for step in steps])
        k += 1
    print(dict(killed.counts), *killed.problems, sep="\n")
    return 1 if killed.problems else 0


if __name__ == "__main__":
    sys.exit(main())
