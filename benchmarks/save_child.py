"""One run of one contestant's saves in a process of its own: `python -m benchmarks.save_child SPEC`, SPEC being JSON.

Imports are done, tensors, stagers and buffers are made, memory is primed and control groups are joined before the
clock starts; it starts at the call. The last line of the output is the run's record, as with `benchmarks.child`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import files, meters
from benchmarks.child import BLOCKING_STEP_SECONDS, answer
from benchmarks.save_contestants import CONTESTANTS, Save, Tensors, Times, opened

REPEATS = 3
"""Saves of the task "again": the first, and those whose median counts."""

_MIN_LOOP_SAVES = 3
_STEP_SIZE = 512

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """What one process has to do."""

    contestant: str
    """A key of `save_contestants.CONTESTANTS`."""

    directory: str
    """Where the destinations are made."""

    size_bytes: int
    """Size of the model."""

    task: str = "save"
    """save, again, heartbeat, steps or sleeps."""

    busy: bool = False
    """Beside a busy pure-Python thread."""

    verify: bool = False
    """Compare what the last save left, after the clock has stopped."""

    prime_bytes: int = 0
    """Memory to touch and free before."""

    join: tuple[str, ...] = ()
    """`cgroup.procs` files to join before the clock starts."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords for the contestant."""

    def encode(self) -> str:
        """Give the spec as the argument of this module."""
        return json.dumps(asdict(self))


def run(spec: SaveSpec) -> Record:
    """Do one run; see the fields of the tasks below."""
    return asyncio.run(_run(spec))


async def _run(spec: SaveSpec) -> Record:
    contestant = CONTESTANTS[spec.contestant]
    tensors = make_tensors(spec.size_bytes)
    record: Record = {}
    async with opened(contestant, tensors, spec.options, spec.task == "heartbeat") as save:
        gc.collect()
        record["prime_seconds"] = meters.prime_memory(min(spec.prime_bytes, meters.available_bytes() // 2))
        for procs in spec.join:
            Path(procs).write_text(str(os.getpid()))
        meters.reset_peak_rss()
        before = meters.rss_bytes()["rss_bytes"]
        last = await _TASKS[spec.task](spec, save, record)
        record["peak_rss_added_bytes"] = meters.rss_bytes()["peak_rss_bytes"] - before
    if spec.verify and contestant.check is not None:
        contestant.check(last, tensors)
    return record


def make_tensors(size_bytes: int) -> Tensors:
    """Make the tensors of a language model, each in memory of its own, touched."""
    import torch

    layout = files.llama_layout(size_bytes)
    tensors = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in layout.tensors}
    files.fill_arrays(array for _, array in meters.tensor_arrays(tensors))
    return tensors


async def _once(spec: SaveSpec, save: Save, record: Record) -> Path:
    """Save once: staged_seconds, seconds and, where the contestant says it, committed_seconds."""
    path = _destination(spec, 0)
    _note(record, [await save(path)])
    return path


async def _again(spec: SaveSpec, save: Save, record: Record) -> Path:
    """Save several times to fresh destinations: the first one's figures, and the medians of the others."""
    times = []
    for number in range(REPEATS):
        path = _destination(spec, number)
        times.append(await save(path))
        if number < REPEATS - 1:
            files.discard(path)
    _note(record, times[1:])
    record |= {"first_staged_seconds": times[0].staged, "first_seconds": times[0].done}
    record["all_staged_seconds"] = [each.staged for each in times]
    return path


async def _heartbeat(spec: SaveSpec, save: Save, record: Record) -> Path:
    """Save again and again until there are enough beats, see `meters.measure_lag`."""
    path = _destination(spec, 0)
    await meters.measure_lag(
        record,
        busy=spec.busy,
        before=lambda: files.discard(path),
        turn=lambda: save(path),
        min_turns=_MIN_LOOP_SAVES,
    )
    return path


def _beside(prepare_step: Callable[[], Callable[[], None]]) -> Callable[[SaveSpec, Save, Record], Awaitable[Path]]:
    async def task(spec: SaveSpec, save: Save, record: Record) -> Path:
        """Save while the caller's loop is blocked by steps of 200 ms, with one turn of the loop between them."""
        path = _destination(spec, 0)
        step = prepare_step()
        saving = asyncio.ensure_future(save(path))
        await asyncio.sleep(0)
        steps = 0
        while not saving.done():
            step()
            steps += 1
            await asyncio.sleep(0)
        _note(record, [saving.result()])
        record["num_steps"] = steps
        return path

    return task


def _prepare_training() -> Callable[[], None]:
    """Give a step that computes on one core, in torch."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(_STEP_SIZE, _STEP_SIZE), torch.randn(_STEP_SIZE, _STEP_SIZE)
    a @ b  # the library's own set-up

    def step() -> None:
        end = time.perf_counter() + BLOCKING_STEP_SECONDS
        while time.perf_counter() < end:
            a @ b

    return step


def _prepare_sleeping() -> Callable[[], None]:
    return lambda: time.sleep(BLOCKING_STEP_SECONDS)


def _destination(spec: SaveSpec, number: int) -> Path:
    return Path(spec.directory) / f"step-{number}{CONTESTANTS[spec.contestant].suffix}"


def _note(record: Record, times: list[Times]) -> None:
    record["staged_seconds"] = median(each.staged for each in times)
    record["seconds"] = median(each.done for each in times)
    committed = [each.committed for each in times if each.committed is not None]
    if committed:
        record["committed_seconds"] = median(committed)


_TASKS: dict[str, Callable[[SaveSpec, Save, Record], Awaitable[Path]]] = {
    "save": _once,
    "again": _again,
    "heartbeat": _heartbeat,
    "steps": _beside(_prepare_training),
    "sleeps": _beside(_prepare_sleeping),
}


if __name__ == "__main__":
    answer(run, SaveSpec)
