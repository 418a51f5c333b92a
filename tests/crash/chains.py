"""Kills of a process that saves chains of deltas, and deletes old ones: what stands then loads, and is what was saved.

    python -m crash.chains DIRECTORY --rounds 500 --seed 1 [--control]

Each round forks a saver that goes on with the run in the directory, and kills it at a random moment. With `--control`
the saver deletes the oldest step by hand, whether or not a delta needs it: that must be found.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import select
import shutil
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NoReturn

import torch
from crash.generations import Torn, grow_old, listing
from crash.kills import in_child

from stio import sync
from stio.errors import CheckpointNotFoundError, StioError
from stio.storage.checkpoint import open_checkpoint, read_tensor
from stio.storage.commit.recovery import collect_garbage

_MESSAGE = struct.Struct("<q")
_SPAN_SECONDS = 0.06
COUNT = 6000


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step: a few numbers are other ones than at the step before, and one tensor is whole."""
    numbers = torch.zeros(COUNT, dtype=torch.int32)
    for k in range(max(0, step - 200), step + 1):
        numbers[k * 37 % COUNT] = k
    return {"few": numbers, "none": torch.ones(500), "all": torch.full((40,), step, dtype=torch.int64)}


def step_at(path: Path) -> int:
    """Return the step that a checkpoint holds, its bases read too.

    Raises:
        Torn: It cannot be read, or is no step's.
    """
    try:
        opened = open_checkpoint(path)
    except StioError as error:
        beside = {one.name: listing(one) for one in path.parent.iterdir()}
        raise Torn(f"{path.name}: {type(error).__name__}: {error}; there are {beside}") from error
    try:
        found = {name: read_tensor(opened, opened.info(name)).tobytes() for name in ("few", "none", "all")}
    finally:
        opened.close()
    step = int.from_bytes(found["all"][:8], "little")
    if found != {name: tensor.numpy().tobytes() for name, tensor in tensors_at(step).items()}:
        raise Torn(f"{path.name} holds a mixture that begins like step {step}")
    return step


def standing(directory: Path) -> list[int]:
    """Return the steps in a directory, each of which must be whole under its name."""
    steps = []
    for path in directory.glob("step-*"):
        step = step_at(path)
        if path.name != f"step-{step}":
            raise Torn(f"{path.name} holds step {step}")
        steps.append(step)
    return sorted(steps)


def save_on(directory: Path, first: int, target: int, *, harmful: bool = False) -> NoReturn:
    """Save steps for ever; tell which are durable."""
    with sync.Saver(full_every=4, keep_last=2, adopt=directory) as saver:
        step = first
        while True:
            saver.save(tensors_at(step), directory / f"step-{step}").result()
            os.write(target, _MESSAGE.pack(step))
            if harmful and step % 3 == 0:
                oldest = min(directory.glob("step-*"), key=lambda path: int(path.name[5:]))
                shutil.rmtree(oldest, ignore_errors=True)
            step += 1


def kill_once(directory: Path, first: int, seconds: float, *, harmful: bool) -> int:
    """Fork a saver, kill it; return the last step that it was told is durable, 0 if there is none."""
    source, target = os.pipe()
    child = os.fork()
    if not child:
        in_child(lambda: save_on(directory, first, target, harmful=harmful))
    os.close(target)
    heard = b""
    try:
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
    return max((step for (step,) in _MESSAGE.iter_unpack(heard)), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--control", action="store_true", help="delete bases: must be found out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    gc.freeze()
    print(f"seed {arguments.seed}", flush=True)
    numbers, counts = random.Random(arguments.seed), Counter[str]()
    run = arguments.directory / "run"
    run.mkdir(parents=True)
    newest, problems = 0, []
    for _ in range(arguments.rounds):
        told = kill_once(run, newest + 1, numbers.random() ** 2 * 10 * _SPAN_SECONDS, harmful=arguments.control)
        counts["steps"] += max(0, told - newest)
        try:
            steps = standing(run)
            least = max(told, newest)
            if max(steps, default=0) < least:
                raise Torn(f"{steps} stand, and step {least} was durable")
            counts["deltas"] += sum((run / f"step-{step}" / "delta.safetensors").exists() for step in steps)
            grow_old(run / "x")
            collect_garbage(run)
            if standing(run) != steps:
                raise Torn(f"{steps} stood before the garbage was collected, then {standing(run)}")
        except (Torn, CheckpointNotFoundError) as error:
            problems.append(str(error)[:500])
            shutil.rmtree(run)
            run.mkdir()
            newest = 0
            continue
        newest = max(steps, default=0)
    shutil.rmtree(run)
    print(*problems[:5], sep="\n")
    print(f"{arguments.rounds} kills, {dict(counts)}, {len(problems)} problems")
    return 1 if problems or counts["deltas"] < min(5, arguments.rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
