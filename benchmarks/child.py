"""One run of one contestant in a process of its own: `python -m benchmarks.child SPEC`, SPEC being JSON.

Imports are done, memory is primed and control groups are joined before the clock starts; it starts at the call.
The last line of the output is the run's record as JSON, with `error` where the contestant failed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import files, meters, pagecache
from benchmarks.contestants import CONTESTANTS, AsyncLoader, Contestant, WholeFile, import_stio

BLOCKING_STEP_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What one process has to do."""

    contestant: str
    """A key of `CONTESTANTS`."""

    path: str
    """The file."""

    task: str = "load"
    """load, open, heartbeat-load, heartbeat-open, blocked or stream."""

    busy: bool = False
    """Beside a busy pure-Python thread."""

    state: str = ""
    """cold, warm (filled by reads, large folios), faults (filled by faults, small folios), or left as it is."""

    touch: str = "page"
    """page or ends, see `meters.touch_all`."""

    verify: bool = False
    """Read every byte after the clock has stopped."""

    prime_bytes: int = 0
    """Memory to touch and free before."""

    join: tuple[str, ...] = ()
    """`cgroup.procs` files to join before the clock starts."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords for the contestant."""

    def encode(self) -> str:
        """Give the spec as the argument of this module."""
        return json.dumps(asdict(self))


Record = dict[str, Any]


def run(spec: RunSpec) -> Record:
    """Do one run; see the fields of the tasks below."""
    contestant = CONTESTANTS[spec.contestant]
    record: Record = {}
    task = _TASKS[spec.task]
    job = task(spec, contestant, record)
    gc.collect()
    record["prime_seconds"] = meters.prime_memory(min(spec.prime_bytes, meters.available_bytes() // 2))
    _set_state(spec)
    if spec.state in ("warm", "faults"):
        record["large_folios"] = pagecache.large_folio_fraction(Path(spec.path))
    for procs in spec.join:
        Path(procs).write_text(str(os.getpid()))
    meters.reset_peak_rss()
    before = meters.rss_bytes()["rss_bytes"]
    asyncio.run(job())
    after = meters.rss_bytes()
    record["peak_rss_bytes"] = after["peak_rss_bytes"]
    record["peak_rss_added_bytes"] = after["peak_rss_bytes"] - before
    return record


def _set_state(spec: RunSpec) -> None:
    """Evict or fill the file, after priming: a fill would take the memory that was primed before it."""
    prepare = {"cold": pagecache.evict, "warm": pagecache.fill_by_reads, "faults": pagecache.fill_by_faults}
    if spec.state:
        prepare[spec.state](Path(spec.path))


def _load_task(spec: RunSpec, contestant: Contestant, record: Record) -> Any:
    """Load once: load_seconds to the result, touch_seconds for touching it, seconds for both, and the checksums."""
    call = _prepared(contestant, spec, "load")

    async def job() -> None:
        with meters.busy_thread(spec.busy):
            started = time.perf_counter()
            result = await call(Path(spec.path))
            loaded = time.perf_counter()
        _finish(spec, record, result, loaded - started)

    return job


def _open_task(spec: RunSpec, contestant: Contestant, record: Record) -> Any:
    """Open and list once: seconds."""
    call = _prepared(contestant, spec, "open")

    async def job() -> None:
        with meters.busy_thread(spec.busy):
            started = time.perf_counter()
            result = await call(Path(spec.path))
            record["seconds"] = time.perf_counter() - started
        names = result[1] if isinstance(result, tuple) else result
        record["num_tensors"] = len(names)

    return job


def _heartbeat_task(kind: str) -> Any:
    def task(spec: RunSpec, contestant: Contestant, record: Record) -> Any:
        """Load or open again and again until there are enough beats, see `meters.measure_lag`."""
        call = _prepared(contestant, spec, kind, own_thread=True)

        def before() -> None:
            if spec.state == "cold":
                _set_state(spec)

        async def job() -> None:
            await meters.measure_lag(record, busy=spec.busy, before=before, turn=lambda: call(Path(spec.path)))

        return job

    return task


def _blocked_task(spec: RunSpec, contestant: Contestant, record: Record) -> Any:
    """Load while the caller's loop is blocked by steps of 200 ms, with one turn of the loop between them."""
    call = _prepared(contestant, spec, "load", own_thread=True)

    async def job() -> None:
        started = time.perf_counter()
        loading = asyncio.ensure_future(call(Path(spec.path)))
        await asyncio.sleep(0)
        steps = 0
        while not loading.done():
            time.sleep(BLOCKING_STEP_SECONDS)
            steps += 1
            await asyncio.sleep(0)
        loaded = time.perf_counter()
        record["num_steps"] = steps
        _finish(spec, record, loading.result(), loaded - started)

    return job


def _stream_task(spec: RunSpec, contestant: Contestant, record: Record) -> Any:
    """Stream once, holding one tensor at a time, each touched as it comes: seconds."""
    stio = import_stio()

    async def job() -> None:
        sums = {}
        started = time.perf_counter()
        async with stio.open(Path(spec.path), **spec.options) as checkpoint:
            async for name, tensor in checkpoint.stream():
                ((_, array),) = meters.tensor_arrays({name: tensor})
                sums[name] = meters.touch(array, spec.touch)
                del tensor, array
        record["seconds"] = time.perf_counter() - started
        record["checksum"] = meters.combine(sums)

    return job


def _finish(spec: RunSpec, record: Record, result: Any, load_seconds: float) -> None:
    """Touch the result on the clock, verify it off the clock."""
    record["load_seconds"] = load_seconds
    started = time.perf_counter()
    arrays = _arrays(spec, result)
    checksum = None if arrays is None else meters.touch_all(arrays, spec.touch)
    record["touch_seconds"] = time.perf_counter() - started
    record["seconds"] = load_seconds + record["touch_seconds"]
    record["checksum"] = checksum
    record["anonymous_bytes"] = meters.rss_bytes()["anonymous_bytes"]
    if spec.verify and (again := _arrays(spec, result)) is not None:
        record["full_checksum"] = meters.checksum_all(again)


def _arrays(spec: RunSpec, result: Any) -> Any:
    if result is None:
        return None
    if isinstance(result, WholeFile):
        return meters.file_arrays(result.data, *files.read_header(Path(spec.path)))
    return meters.tensor_arrays(result)


def _prepared(contestant: Contestant, spec: RunSpec, kind: str, *, own_thread: bool = False) -> AsyncLoader:
    """Prepare the contestant's call for the event loop; a blocking one runs right there, or in a thread."""
    prepare_async, prepare = {
        "load": (contestant.load_async, contestant.load),
        "open": (contestant.open_async, contestant.open),
    }[kind]
    if prepare_async is not None:
        return prepare_async(spec.options)
    if prepare is None:
        raise NotImplementedError(f"{contestant.label} has no {kind}")
    blocking = prepare(spec.options)

    async def call(path: Path) -> Any:
        return await asyncio.to_thread(blocking, path) if own_thread else blocking(path)

    return call


_TASKS = {
    "load": _load_task,
    "open": _open_task,
    "heartbeat-load": _heartbeat_task("load"),
    "heartbeat-open": _heartbeat_task("open"),
    "blocked": _blocked_task,
    "stream": _stream_task,
}


def answer(run: Callable[[Any], Record], spec_class: type[Any]) -> None:
    """Run the spec in the arguments, print the record, and leave without the interpreter's teardown."""
    fields = json.loads(sys.argv[1])
    try:
        record = run(spec_class(**fields))
    except Exception as error:  # noqa: BLE001 - a contestant's failure is a result
        record = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(record), flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    answer(run, RunSpec)
