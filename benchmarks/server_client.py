"""One run of one server, seen by its client: `python -m benchmarks.server_client SPEC`, SPEC as JSON.

The server is a process of its own. Probes of /health are sent at a fixed pace, whether or not the one before was
answered, so a stall is seen by all that fall into it. First without a load, then while models are swapped; polls of
/ready go on in both. Last, swaps beside predictions, and a shutdown during a load.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import meters, pagecache
from benchmarks.child import answer

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

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What one process has to do."""

    contestant: str
    """A key of `server_cases.LABELS`."""

    directory: str
    """Where the files are."""

    busy: bool
    """Beside a busy pure-Python thread in the server."""

    state: str
    """cold or warm."""

    prime_bytes: int = 0
    """Memory to touch and free before."""

    def encode(self) -> str:
        """Give the spec as the argument of this module."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class _Log:
    """What the requests came to."""

    probes: list[tuple[float, float]] = field(default_factory=list)
    """When each was sent and answered."""

    num_requests: int = 0
    """All of them."""

    failures: list[str] = field(default_factory=list)
    """Those that were not answered, or not by what was expected."""

    def latencies(self, begin: float, end: float) -> list[float]:
        """Give the seconds of the probes that were under way between two times."""
        return [answered - sent for sent, answered in self.probes if sent < end and answered > begin]


class _Client:
    def __init__(self, http: httpx.AsyncClient, spec: ServerSpec) -> None:
        self.log = _Log()
        self._http, self._spec = http, spec
        self._pace = _PACE_SECONDS[spec.busy]
        self._files = itertools.cycle(reversed(NAMES))  # the server begins with the first

    async def ask(self, method: str, path: str, expected: int, **keywords: Any) -> Any:
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
        if await self.ask("GET", "/health", 200) is not None:
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
            await self.ask("GET", "/ready", 200)
            await asyncio.sleep(self._pace)
        return begin, time.perf_counter()

    async def swap(self, *, cold: bool) -> tuple[float, float]:
        """Have the other file loaded; give from when to when the server loaded."""
        name = await self._next(cold)
        await asyncio.sleep(_SETTLE_SECONDS)
        begin = time.perf_counter()
        await self.ask("POST", "/models", 202, json={"path": name})
        while time.perf_counter() < begin + _PATIENCE_SECONDS:
            found = await self.ask("GET", "/ready", 200)
            if found is not None and found["version"] == name and found["loading"] is None:
                return begin, time.perf_counter()
            if found is not None and found["error"] is not None:
                raise RuntimeError(found["error"])
            await asyncio.sleep(self._pace)
        raise TimeoutError("the server did not switch")

    async def swap_beside_predictions(self, record: Record) -> None:
        """Swap while another task asks for predictions, one after the other."""
        answers: list[Any] = []
        swapped = asyncio.Event()

        async def predict() -> None:
            while not swapped.is_set():
                answers.append(await self.ask("POST", "/predict", 200, json={"tokens": [1, 2, 3]}))

        task = asyncio.create_task(predict())
        for _ in range(_MIXED_SWAPS):
            await self.swap(cold=False)  # a prediction may still hold the model whose file would have to go
        swapped.set()
        await task
        record["num_predictions"] = len(answers)

    async def begin_load(self, *, cold: bool) -> None:
        """Begin a load, and do not wait for it."""
        await self.ask("POST", "/models", 202, json={"path": await self._next(cold)})
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _next(self, cold: bool) -> str:
        name = next(self._files)
        if cold:
            await asyncio.to_thread(pagecache.evict, Path(self._spec.directory, name))
        return name


async def _measure(spec: ServerSpec, base_url: str, record: Record) -> None:
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


def run(spec: ServerSpec) -> Record:
    """Start a server, measure it, and end it during a load."""
    record: Record = {"prime_seconds": meters.prime_memory(min(spec.prime_bytes, meters.available_bytes() // 2))}
    prepare = {"cold": pagecache.evict, "warm": pagecache.fill_by_reads}[spec.state]
    for name in NAMES:
        prepare(Path(spec.directory, name))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = {
            "contestant": spec.contestant,
            "directory": spec.directory,
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


if __name__ == "__main__":
    answer(run, ServerSpec)
