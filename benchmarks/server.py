"""Compare a server's latency while it loads by stio and by safetensors in a thread: `python -m benchmarks.server`.

The server is a process of its own, a run is its client. Probes of /health are sent at a fixed pace, whether or not the
one before was answered, so a stall is seen by all that fall into it. First without a load, then while models are
swapped; polls of /ready go on in both. Last, swaps beside predictions, and a shutdown during a load.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import files, meters, pagecache, runner
from benchmarks.child import Spec
from benchmarks.files import ITEM_BYTES, Layout, TensorShape
from benchmarks.report import cost, count_cell, median_cell, plain, seconds
from benchmarks.runs import Bound, Measured, NoFigure, Record, Runs
from benchmarks.suite import Case, Columns, Entry, Measure, Settings, Suite

NAMES = ("a.safetensors", "b.safetensors")
"""The two files that are swapped."""

_NUM_PROBES = 300
_PACE_SECONDS = {False: 0.01, True: 0.04}
"""Between two probes, and between two polls; beside a busy thread one request takes 10 to 20 ms."""

_MIN_SWAPS = 3
_MAX_LOADING_SECONDS = 60.0
_PATIENCE_SECONDS = 60.0
_SETTLE_SECONDS = 0.05
_MIXED_SWAPS = 2


# Cases and bounds.

LABELS: dict[str, str] = {
    "stio-switch": "examples/server.py: stio, switch_interval 0.5 ms",
    "stio": "the same without switch_interval",
    "safetensors": "safetensors in a thread: load_file, load_state_dict",
    "safetensors-map": "safetensors in a thread: load_file, assigned, every page touched",
}
"""Contestants: one server, four ways to load."""

_VOCABULARY = 32_000


def server_layout(size_bytes: int) -> Layout:
    """Give the tensors of the example's model, with as many blocks as come to at least `size_bytes`."""
    hidden = 2048 if size_bytes >= 1_000_000_000 else 1024
    wide = 4 * hidden
    ends_bytes, block_bytes = 2 * _VOCABULARY * hidden * ITEM_BYTES, 2 * hidden * wide * ITEM_BYTES
    num_blocks = max(1, math.ceil((size_bytes - ends_bytes) / block_bytes))
    shapes = {"embed.weight": (_VOCABULARY, hidden), "head.weight": (_VOCABULARY, hidden)}
    for number in range(num_blocks):
        shapes |= {f"blocks.{number}.0.weight": (wide, hidden), f"blocks.{number}.2.weight": (hidden, wide)}
    return Layout("server", tuple(TensorShape(name, shapes[name]) for name in sorted(shapes)))


def _case(state: str) -> Case:
    entries = tuple(
        Entry(name, f"{name} {'busy' if busy else 'alone'}", busy=busy, rounds=1 if name == "safetensors-map" else None)
        for name in LABELS
        for busy in (False, True)
    )
    return Case(
        state,
        f"latency of /health while models of 1.7 GB are swapped, {state}",
        entries,
        rounds=3,
        layout="server",
        state=state,
        not_quick=frozenset({"safetensors-map alone", "safetensors-map busy"}),
    )


CASES: tuple[Case, ...] = (_case("cold"), _case("warm"))

_STATES = ("cold", "warm")
_OURS = (("stio-switch", "the example"), ("stio", "the same without switch_interval"))


def _through_idle(runs: Runs, case: str, entry: str) -> Measured:
    """Give the p99 while loading through the p99 without a load, of the same runs."""
    loading = runs.values(case, entry, "loading.p99")
    idle = runs.values(case, entry, "idle.p99")
    each = [loading[number] / idle[number] for number in loading]
    return Measured(
        median(each), min(each), max(each), len(each), median(loading.values()), median(idle.values()), "no load"
    )


def _failed(runs: Runs, case: str) -> Measured:
    """Give the most requests that failed in a run of stio's, a run that came to no result being one."""
    counts = []
    for entry in runs.names(case):
        if entry.startswith("stio"):
            if errors := runs.failures(case, entry):
                raise NoFigure(f"{entry} failed: {errors[0]}")
            counts += runs.values(case, entry, "num_failed").values()
    if not counts:
        raise NoFigure("stio did not run")
    return Measured(max(counts), min(counts), max(counts), len(counts), max(counts))


def _of_state(state: str, busy: str) -> tuple[Bound, ...]:
    found: list[Bound] = []
    for ours, text in _OURS:
        entry, label = f"{ours} {busy}", f"{text}, {busy}"
        found += [
            Bound(
                state,
                f"health p99 while loading through without a load: {label}",
                partial(_through_idle, case=state, entry=entry),
                at_most=2.0,
            ),
            cost(
                state,
                f"health p99 through safetensors in a thread: {label}",
                entry,
                f"safetensors {busy}",
                "loading.p99",
                0.5,
            ),
        ]
    example = f"stio-switch {busy}"
    found += [
        cost(
            state,
            f"health p99 through safetensors mapped and touched: the example, {busy}",
            example,
            f"safetensors-map {busy}",
            "loading.p99",
        ),
        seconds(state, f"a swap: the example, {busy}", example, "seconds", None),
        seconds(state, f"a swap: safetensors in a thread, {busy}", f"safetensors {busy}", "seconds", None),
    ]
    return tuple(found)


BOUNDS: tuple[Bound, ...] = (
    *(bound for state in _STATES for busy in ("alone", "busy") for bound in _of_state(state, busy)),
    *(
        Bound(state, "most requests that failed in a run, swaps included", partial(_failed, case=state), None, 0.0, "")
        for state in _STATES
    ),
    seconds("cold", "shutdown during a load: the example, alone", "stio-switch alone", "shutdown_seconds", None),
)


# One run: the client.


@dataclass(slots=True)
class _Log:
    """What the requests came to."""

    probes: list[tuple[float, float]] = field(default_factory=list)  # when each was sent and answered
    num_requests: int = 0
    failures: list[str] = field(default_factory=list)  # no answer, or not the one expected

    def latencies(self, begin: float, end: float) -> list[float]:
        """Give the seconds of the probes that were under way between two times."""
        return [answered - sent for sent, answered in self.probes if sent < end and answered > begin]


class _Client:
    def __init__(self, http: httpx.AsyncClient, spec: Spec) -> None:
        self.log = _Log()
        self._http, self._spec = http, spec
        self._pace = _PACE_SECONDS[spec.busy]
        self._files = itertools.cycle(reversed(NAMES))  # the server begins with the first

    async def request(self, method: str, path: str, expected: int, **keywords: Any) -> Any:
        """Send a request; give what was answered, None where it failed."""
        self.log.num_requests += 1
        try:
            response = await self._http.request(method, path, **keywords)
        except httpx.HTTPError as error:
            self.log.failures.append(f"{path}: {type(error).__name__}: {error}")
            return None
        if response.status_code != expected:
            self.log.failures.append(f"{path}: {response.status_code}: {response.text[:100]}")
            return None
        return response.json()

    async def probe_forever(self) -> None:
        """Send probes at the pace; a cancel waits for those under way."""
        under_way: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        try:
            while True:
                task = asyncio.create_task(self._probe())
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                due += self._pace
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            await asyncio.gather(*under_way)

    async def _probe(self) -> None:
        sent = time.perf_counter()
        if await self.request("GET", "/health", 200) is not None:
            self.log.probes.append((sent, time.perf_counter()))

    async def first_load(self) -> None:
        """Wait until the server has its first model."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with suppress(httpx.HTTPError):
                if (await self._http.get("/ready")).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError("the server has no model")
            await asyncio.sleep(0.05)

    async def idle(self) -> tuple[float, float]:
        """Poll as long as it takes for enough probes; give when."""
        begin = time.perf_counter()
        while len(self.log.latencies(begin, time.perf_counter())) < _NUM_PROBES:
            await self.request("GET", "/ready", 200)
            await asyncio.sleep(self._pace)
        return begin, time.perf_counter()

    async def swap(self, *, cold: bool) -> tuple[float, float]:
        """Have the other file loaded; give from when to when the server loaded."""
        name = await self._next(cold)
        await asyncio.sleep(_SETTLE_SECONDS)
        begin = time.perf_counter()
        await self.request("POST", "/models", 202, json={"path": name})
        while time.perf_counter() < begin + _PATIENCE_SECONDS:
            found = await self.request("GET", "/ready", 200)
            if found is not None and found["version"] == name and found["loading"] is None:
                return begin, time.perf_counter()
            if found is not None and found["error"] is not None:
                raise RuntimeError(found["error"])
            await asyncio.sleep(self._pace)
        raise TimeoutError("the server did not switch")

    async def swap_beside_predictions(self, record: Record) -> None:
        """Swap while another task requests predictions, one after the other."""
        answers: list[Any] = []
        swapped = asyncio.Event()

        async def predict() -> None:
            while not swapped.is_set():
                answers.append(await self.request("POST", "/predict", 200, json={"tokens": [1, 2, 3]}))

        task = asyncio.create_task(predict())
        for _ in range(_MIXED_SWAPS):
            await self.swap(cold=False)  # a prediction may still hold the model whose file would have to go
        swapped.set()
        await task
        record["num_predictions"] = len(answers)

    async def begin_load(self, *, cold: bool) -> None:
        """Begin a load, and do not wait for it."""
        await self.request("POST", "/models", 202, json={"path": await self._next(cold)})
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _next(self, cold: bool) -> str:
        name = next(self._files)
        if cold:
            await asyncio.to_thread(pagecache.evict, Path(self._spec.path, name))
        return name


async def _measure(spec: Spec, base_url: str, record: Record) -> None:
    # A connection that the server is about to close (uvicorn does so after 5 s) must not be taken for a failure.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=2.0)
    async with httpx.AsyncClient(base_url=base_url, timeout=_PATIENCE_SECONDS, limits=limits) as http:
        client = _Client(http, spec)
        log = client.log
        await client.first_load()
        gc.collect()
        gc.freeze()
        gc.disable()  # a pause of the client's would be taken for the server's
        probing = asyncio.create_task(client.probe_forever())
        await asyncio.sleep(_SETTLE_SECONDS)
        idle = await client.idle()
        windows: list[tuple[float, float]] = []
        count, deadline = 0, time.monotonic() + _MAX_LOADING_SECONDS
        while (count < _NUM_PROBES or len(windows) < _MIN_SWAPS) and time.monotonic() < deadline:
            windows.append(await client.swap(cold=spec.state == "cold"))
            count += len(log.latencies(*windows[-1]))
        await client.swap_beside_predictions(record)
        probing.cancel()
        await asyncio.wait([probing])  # the last ones are answered: from here on the log has them all
        loading = [latency for window in windows for latency in log.latencies(*window)]
        record["idle"] = meters.percentiles(log.latencies(*idle))
        record["loading"] = meters.percentiles(loading)
        record["num_turns"] = len(windows)
        record["seconds"] = median(end - begin for begin, end in windows)
        await client.begin_load(cold=spec.state == "cold")
    record |= {"num_requests": log.num_requests, "num_failed": len(log.failures), "failures": log.failures[:5]}
    if len(loading) < _NUM_PROBES:
        record["error"] = f"only {len(loading)} probes"


def run(spec: Spec) -> Record:
    """Start a server, measure it, and end it during a load."""
    record: Record = {"prime_seconds": spec.prime()}
    prepare = {"cold": pagecache.evict, "warm": pagecache.fill_by_reads}[spec.state]
    for name in NAMES:
        prepare(Path(spec.path, name))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = {
            "contestant": spec.contestant,
            "directory": spec.path,
            "first": NAMES[0],
            "busy": spec.busy,
            "descriptor": listening.fileno(),
        }
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server_app", json.dumps(arguments)],
            pass_fds=[listening.fileno()],
            stdout=subprocess.DEVNULL,
        )
        port = listening.getsockname()[1]
    try:
        asyncio.run(_measure(spec, f"http://127.0.0.1:{port}", record))
        started = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.wait(_PATIENCE_SECONDS)
        record["shutdown_seconds"] = time.perf_counter() - started
    finally:
        server.kill()
        server.wait()
    return record


# The runs of a case.


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Make two files of one model; give the function that runs an entry."""
    layout = server_layout(settings.size_bytes)
    for name in NAMES:
        path = settings.directory / name
        if path.exists() and path.stat().st_size == len(files.encode_header(layout)) + layout.data_bytes:
            continue  # of the case before, or of an earlier run in a directory that stays
        runner.require_space(settings.directory, layout.data_bytes)
        files.write_file(path, layout)
        pagecache.evict(path)

    def measure(entry: Entry, number: int, verify: bool) -> Record:
        spec = Spec(
            contestant=entry.contestant,
            path=str(settings.directory),
            busy=entry.busy,
            state=case.state,
            prime_bytes=settings.prime_bytes,
        )
        record = runner.run_child("benchmarks.server", spec, settings.timeout_seconds)
        return {"data_bytes": layout.data_bytes} | record

    yield measure


# Tables.


_HEAD = (
    "no load: p50 / p99 / max, ms",
    "loading: p50 / p99 / max, ms",
    "loads, s",
    "shutdown, s",
    "probes",
    "failed",
    "runs",
)


def _row(case: str, entry: str, runs: Runs) -> list[str]:
    stretches = [
        " / ".join(median_cell(runs, case, entry, f"{stretch}.{key}", 1e3, 1) for key in ("p50", "p99", "max"))
        for stretch in ("idle", "loading")
    ]
    return [
        *stretches,
        median_cell(runs, case, entry, "seconds", 1, 3),
        median_cell(runs, case, entry, "shutdown_seconds", 1, 2),
        f"{plain(runs, case, entry, 'loading.num_beats').low:.0f} or more",
        f"{plain(runs, case, entry, 'num_failed').high:.0f}",
        count_cell(runs, case, entry),
    ]


def _columns(case: Case) -> Columns:
    return Columns(_HEAD, _row)


SUITE = Suite(name="server", cases=CASES, bounds=BOUNDS, labels=LABELS, prepared=prepared, columns=_columns)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
