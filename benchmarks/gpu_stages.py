"""What is measured on a GPU: the stages in their order, their cases and bounds, and how the report shows them.

First what a first GPU has to answer, then the comparisons. Nothing here imports torch: the command lists and reports
without it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gpu_child import Bench, Stage
from benchmarks.report import (
    Bound,
    Measured,
    NoFigure,
    Runs,
    cost,
    count_cell,
    faster,
    median_cell,
    plain,
    ratio,
    seconds,
    show,
)
from benchmarks.suite import Case, Columns, Entry, Panel, Suite

WORK = "benchmarks.gpu_tasks"
"""Does the turns."""

PRIME_BYTES = 4_000_000_000
"""Host memory that is touched and freed before each turn, at most."""

RINGS = ((4, 32), (8, 16), (8, 32), (16, 8), (16, 16))
"""Shapes of the bare ring: threads, and MiB of a slot."""

TRACED = "stio traced"
"""The entry whose timeline is drawn."""

_ROOT = Path(__file__).resolve().parent.parent
_THIRD_PARTIES = ("runai", "fastsafetensors", "instanttensor", "kvikio")
PEERS = frozenset({"safetensors", "safetensors-then", "safetensors-copy", "dcp", "dcp-copy", *_THIRD_PARTIES})
"""A failure of one of these does not fail the stage."""


def ring_name(num_threads: int, mebibytes: int) -> str:
    """Name a shape of the bare ring."""
    return f"raw-ring-{num_threads}x{mebibytes}"


LABELS: dict[str, str] = {
    "stio": "stio",
    "stio-switch": "stio, switch_interval 0.5 ms",
    "stio-gds": "stio, memory='gds'",
    "stio-cache": "stio, from a HostCache",
    "safetensors": "safetensors, load_file of each shard",
    "runai": "Run:ai streamer, .to(device)",
    "fastsafetensors": "fastsafetensors, no GDS",
    "instanttensor": "InstantTensor, its default (direct I/O)",
    "kvikio": "kvikio, each file whole, tensors are views",
    "raw-bus": "limit: pinned memory to device, 64 MiB a copy",
    "raw-page-cache": "limit: page cache, every processor reading",
    "raw-registered": "limit: a registered mapping of the files, copied from there",
    "raw-disk": "limit: O_DIRECT x 16, plain memory, reused",
    "raw-disk-pinned": "limit: O_DIRECT x 16 into slots that torch pinned",
    "raw-disk-registered": "limit: O_DIRECT x 16 into registered huge pages",
    "pin-none": "nothing is pinned: other threads as they are",
    "pin-touch": "plain memory on huge pages, touched",
    "pin-torch": "torch's pinned memory",
    "pin-registered": "touched huge pages, then cudaHostRegister",
    "stio-saver": "stio.Saver",
    "stio-saver-budget": "stio.Saver, budget_bytes=512 MiB",
    "dcp": "DCP async_save, DefaultStager, pinned memory",
    "raw-d2h": "limit: device to pinned memory, 64 MiB a copy",
    "kernels": "launches of seven kernels beside a busy stream, CUDA_MODULE_LOADING",
    "stio-cast": "stio.load with a cast beside a busy stream",
    "wake-query": "event.query() in a loop",
    "wake-spin": "event.synchronize()",
    "wake-sleep": "event.synchronize(), blocking=True",
    "stio-refresh": "stio.load_into a module that is there",
    "safetensors-copy": "safetensors, load_state_dict",
    "dcp-copy": "DCP, HuggingFaceStorageReader into the state dict",
    "stio-warm": "stio.warm_start, forward at once",
    "stio-then": "stio.load_into(assign=True), then forward",
    "safetensors-then": "safetensors, load_state_dict(assign=True), then forward",
    "decoder": "the decoder, its weights put there by plain copies",
    **{
        ring_name(threads, size) + suffix: f"limit: a bare ring, {threads} threads, two slots of {size} MiB each" + text
        for threads, size in RINGS
        for suffix, text in (("", ""), ("-direct", ", O_DIRECT"))
    },
}


_RESERVED = "stio reserved"
_SPIN_BUSY, _SLEEP_BUSY = "wake-spin busy", "wake-sleep busy"


def _case(
    name: str, title: str, *entries: Entry | str, task: str = "load", state: str = "warm", rounds: int = 3
) -> Case:
    """Make a case; a quick run leaves out all shapes of the ring but one."""
    made = tuple(entry if isinstance(entry, Entry) else Entry(entry, task=task) for entry in entries)
    shapes = {entry.name for entry in made if re.fullmatch(r"raw-ring-(?!8x16).*", entry.name)}
    return Case(name, title, made, rounds, state=state, not_quick=frozenset(shapes))


def _reserved(task: str) -> Entry:
    return Entry("stio", _RESERVED, task, options={"reserve": True})


def _kernels(loading: str) -> Entry:
    environment = {"CUDA_MODULE_LOADING": loading}
    return Entry("kernels", f"kernels {loading.lower()}", "kernels", options={"environment": environment})


def _run_tests(bench: Bench) -> None:
    """Run the tests that need a device, as they come; where all were skipped nothing has been shown.

    Settings of plugins that are not there are let pass, and what other versions of packages announce for the future.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-v", "--color=no", "--tb=short"),
        *(["tests/gpu/test_saves.py"] if bench.is_rehearsal else ["tests/gpu", "tests/device"]),
        *("-o", "addopts=--import-mode=importlib --strict-markers -r fE", "-o", "minversion=7.4"),
        *("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"),
        *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
    ]
    counts: dict[str, int] = {}
    environment = os.environ | ({"STIO_TEST_DEVICE": "sim"} if bench.is_rehearsal else {})
    tests = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    timer = threading.Timer(max(1.0, bench.seconds_left), tests.kill)
    timer.start()
    try:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if found := re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", line):
                counts[found[2]] = counts.get(found[2], 0) + 1
                if found[2] in ("FAILED", "ERROR"):
                    bench.emit({"kind": "note", "text": f"{found[2]}: {found[1]}"})
        status = tests.wait()
    finally:
        timer.cancel()
        tests.kill()
    bench.emit({"kind": "note", "text": ", ".join(f"{number} {name.lower()}" for name, number in counts.items())})
    if status < 0:
        raise SystemExit("the tests were killed when the stage's time was over")
    if status or not counts.get("PASSED"):
        raise SystemExit(f"pytest ended with status {status}, {counts.get('PASSED', 0)} tests passed")


def _stage(
    name: str,
    seconds: float,
    title: str,
    *entries: Entry | str,
    task: str = "load",
    state: str = "warm",
    rounds: int = 3,
    is_fresh: bool = False,
) -> Stage:
    """Make a stage of one case, named as the stage is."""
    case = _case(name, title, *entries, task=task, state=state, rounds=rounds)
    return Stage(name, title, seconds, (case,), is_fresh)


STAGES: tuple[Stage, ...] = (
    Stage("tests", "the tests that need a device", 400, run=_run_tests),
    _stage(
        *("bus", 90, "out of the page cache; reserved: the total was allocated at once and released before"),
        *("stio", _reserved("load"), "raw-bus", "raw-page-cache"),
        rounds=5,
    ),
    _stage(
        *("pinning", 60, "pinning host memory, and by how much other threads come late meanwhile"),
        *("pin-none", "pin-touch", "pin-torch", "pin-registered"),
        task="pin",
        state="",
    ),
    _stage(
        *("direct", 120, "O_DIRECT reads into pinned memory, the bits of one slot compared on the device"),
        *("raw-disk", "raw-disk-pinned", "raw-disk-registered", "raw-ring-8x16-direct"),
        state="cold",
    ),
    _stage(
        *("first-save", 150, "three saves of a fresh process; by how much other threads come late during the first"),
        *("stio-saver", "stio-saver-budget", "dcp"),
        task="save",
        state="",
        is_fresh=True,
    ),
    _stage(
        *(
            "kernels",
            120,
            "first uses of kernels in a fresh process, beside a busy stream; the seconds are a second use's",
        ),
        *(_kernels("LAZY"), _kernels("EAGER"), Entry("stio-cast", task="cast")),
        state="",
        is_fresh=True,
    ),
    _stage(
        *(
            "wakeup",
            60,
            "from the queueing of a copy of 4 MiB to the return of the call that waits for it, medians of 200",
        ),
        *("wake-query", "wake-spin", "wake-sleep"),
        *(Entry("wake-spin", _SPIN_BUSY, "wakeup", busy=True), Entry("wake-sleep", _SLEEP_BUSY, "wakeup", busy=True)),
        task="wakeup",
        state="",
    ),
    _stage(
        *("fragmentation", 120, "two models in turns, each dropped before the next; the seconds are the fourth load's"),
        *("stio", _reserved("turns"), "safetensors"),
        task="turns",
    ),
    _stage(
        *("refresh", 120, "new weights for a module on the device whose parameters keep their addresses"),
        *("stio-refresh", "safetensors-copy", "dcp-copy", Entry("raw-bus")),
        task="refresh",
    ),
    _stage(
        *("first-load", 120, "out of the page cache, the first load of a fresh process", "stio", "safetensors"),
        is_fresh=True,
    ),
    _stage(
        *("warm", 120, "out of the page cache to the device"),
        *("stio", "stio-switch", "safetensors", "raw-bus", "raw-page-cache"),
        Entry("stio", TRACED, rounds=1, options={"trace": True}),
        rounds=5,
    ),
    _stage("cold", 150, "from the disk to the device", "stio", "safetensors", "raw-disk", state="cold"),
    _stage(
        *("busy", 150, "out of the page cache, beside a busy pure-Python thread"),
        *(Entry(name, f"{name} busy", busy=True) for name in ("stio", "stio-switch", "safetensors", "runai")),
        "stio-switch",
    ),
    _stage(
        *("swap", 120, "the second of two loads, the first one's tensors dropped before it"),
        *("stio", "stio-cache", "safetensors", "raw-bus"),
        task="again",
        rounds=5,
    ),
    _stage(
        *("forward", 150, "from the call to the end of the first forward of 512 tokens"),
        *("stio-warm", "stio-then", "safetensors-then"),
        task="forward",
        rounds=5,
    ),
    _stage(
        *("save", 150, "until a change of the tensors, made as soon as it is allowed, is done: medians of later saves"),
        *("stio-saver", "dcp", "raw-d2h"),
        task="save",
        state="",
    ),
    _stage(
        *("decoder", 60, "forwards of 512 tokens with all weights there: the first, and the median of later ones"),
        "decoder",
        task="forward",
    ),
    Stage(
        *("limits", "which shape of ring is the fastest, and is a registered mapping faster", 240),
        cases=(
            _case(
                *("limits", "out of the page cache, bare", "stio", *(ring_name(*ring) for ring in RINGS)),
                *("raw-registered", "raw-bus", "raw-page-cache"),
            ),
            _case(
                *("limits-cold", "from the disk, bare", "stio", *(ring_name(*ring) + "-direct" for ring in RINGS)),
                "raw-disk",
                state="cold",
            ),
        ),
    ),
    _stage("gds", 120, "from the disk to the device", "stio", "stio-gds", "kvikio", "raw-disk", state="cold"),
    Stage(
        *("peers", "other loaders", 300),
        cases=(
            _case("peers", "out of the page cache to the device", "stio", "safetensors", *_THIRD_PARTIES),
            _case("peers-cold", "from the disk to the device", "stio", "safetensors", *_THIRD_PARTIES, state="cold"),
        ),
    ),
)


def _of_the_slower_limit(runs: Runs, case: str, entry: str) -> Measured:
    """Give stio's rate through the smaller of what bus and page cache allow."""
    limits = {name: median(runs.values(case, name, "seconds").values()) for name in ("raw-bus", "raw-page-cache")}
    return ratio(runs, case, entry, max(limits, key=limits.__getitem__))


def _forward_through_load(runs: Runs) -> Measured:
    """Give the seconds to the end of the first forward through those that a load of the same module takes."""
    ours = runs.values("forward", "stio-warm", "seconds")
    theirs = runs.values("forward", "stio-then", "load_seconds")
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise NoFigure("stio-warm and stio-then share no round")
    each = [ours[number] / theirs[number] for number in shared]
    mine, other = median(ours[number] for number in shared), median(theirs[number] for number in shared)
    return Measured(mine / other, min(each), max(each), len(each), mine, other, "the load alone")


_ALL_PEERS = ("safetensors", *_THIRD_PARTIES)
_SLOWER = "the slower of bus and page cache"

BOUNDS: tuple[Bound, ...] = (
    faster("bus", "stio / bus", "stio", "raw-bus"),
    faster("bus", "stio, the total allocated before / bus", _RESERVED, "raw-bus"),
    Bound(
        "bus",
        f"stio, the total allocated before / {_SLOWER}",
        partial(_of_the_slower_limit, case="bus", entry=_RESERVED),
    ),
    faster("bus", "stio, the total allocated before / without", _RESERVED, "stio"),
    seconds("pinning", "a GB, torch", "pin-torch", "seconds_per_gb", None),
    seconds("pinning", "a GB, registered huge pages", "pin-registered", "seconds_per_gb", None),
    seconds("pinning", "longest stall of a launch, torch", "pin-torch", "stalls.launch.max", None, "ms"),
    faster("direct", "into pinned slots / into plain memory", "raw-disk-pinned", "raw-disk"),
    seconds("first-save", "blocked, the first save", "stio-saver", "first_seconds", None),
    seconds("first-save", "blocked, the first save, with a budget", "stio-saver-budget", "first_seconds", None),
    cost("first-save", "blocked, the first save, through DCP's", "stio-saver", "dcp", "first_seconds"),
    seconds("kernels", "first launches, loaded lazily", "kernels lazy", "first_seconds", None, "ms"),
    seconds("kernels", "first launches, loaded eagerly", "kernels eager", "first_seconds", None, "ms"),
    seconds("kernels", "a load's first cast beside a busy stream", "stio-cast", "first_seconds", None),
    cost("wakeup", "a sleeping wait through a polling one", "wake-sleep", "wake-query", "seconds"),
    cost("wakeup", "the same beside a busy thread", _SLEEP_BUSY, "wake-query", "seconds"),
    faster("refresh", "stio / bus", "stio-refresh", "raw-bus"),
    faster("refresh", "stio / safetensors", "stio-refresh", "safetensors-copy"),
    faster("first-load", "stio / safetensors", "stio", "safetensors"),
    Bound("warm", f"stio / {_SLOWER}", partial(_of_the_slower_limit, case="warm", entry="stio"), at_least=0.9),
    faster("warm", "stio / safetensors", "stio", "safetensors"),
    faster("peers", "stio / the fastest peer", "stio", _ALL_PEERS, 1.0),
    faster("swap", "stio from a HostCache / bus", "stio-cache", "raw-bus", 0.95),
    faster("swap", "stio, a second load / bus", "stio", "raw-bus"),
    faster("busy", "stio busy / alone, both with switch_interval", "stio-switch busy", "stio-switch", 0.8),
    faster("busy", "stio busy / alone with switch_interval", "stio busy", "stio-switch"),
    faster("busy", "stio / safetensors, both busy", "stio busy", "safetensors busy"),
    faster("cold", "stio / disk", "stio", "raw-disk", 0.95),
    faster("peers-cold", "stio / the fastest peer", "stio", _ALL_PEERS),
    faster("gds", "GPUDirect Storage / staged", "stio-gds", "stio"),
    Bound("forward", "first forward of a warm start through the load alone", _forward_through_load, at_most=1.1),
    cost("forward", "first forward of a warm start through load, then forward", "stio-warm", "stio-then", "seconds"),
    cost("forward", "the same through safetensors, then forward", "stio-warm", "safetensors-then", "seconds"),
    cost("save", "blocked, later saves, through the bus", "stio-saver", "raw-d2h", "seconds", 1.1),
    cost("save", "blocked, later saves, through DCP's", "stio-saver", "dcp", "seconds", 0.5),
    seconds("save", "blocked, the first save", "stio-saver", "first_seconds", None),
)

_PEAK = ("device memory added, peak, GB", "added_peak_bytes", 1e-9, 2)
_STALLS = (
    ("a Python thread late, longest, ms", "stalls.python.max", 1e3, 1),
    ("a launch and its wait, median, ms", "stalls.launch.p50", 1e3, 2),
    ("longest, ms", "stalls.launch.max", 1e3, 1),
)
_FIRST, _DONE = ("first, s", "first_seconds", 1, 3), ("done, s", "done_seconds", 1, 3)
_COLUMNS: dict[str, tuple[tuple[str, str, float, int], ...]] = {
    "pinning": (("seconds a GB", "seconds_per_gb", 1, 3), *_STALLS),
    "first-save": (_FIRST, _DONE, *_STALLS),
    "save": (_FIRST, _DONE, _PEAK),
    "kernels": (_FIRST, ("the busy stream's work, s", "busy_seconds", 1, 3)),
    "wakeup": (("p99, ms", "p99", 1e3, 3), ("longest, ms", "max", 1e3, 3)),
    "fragmentation": (
        ("first, s", "first_seconds", 1, 3),
        ("kept by torch, GB", "reserved_bytes", 1e-9, 2),
        ("held by tensors, GB", "used_bytes", 1e-9, 2),
    ),
    "swap": (_FIRST, _PEAK),
    "forward": (("all loaded, s", "load_seconds", 1, 3), _PEAK),
    "decoder": (_FIRST,),
}
"""What a case's table shows before the seconds and the rate: title, figure, factor, digits."""


def _row(case: str, entry: str, runs: Runs) -> list[str]:
    found = plain(runs, case, entry, "seconds")
    return [
        *(median_cell(runs, case, entry, *figure) for _, *figure in _COLUMNS.get(case, (_PEAK,))),
        show(found.value, "s"),
        f"{show(found.low, 's')} to {show(found.high, 's')}",
        median_cell(runs, case, entry, "rate", 1e-9, 2),
        count_cell(runs, case, entry),
    ]


def _columns(case: Case) -> Columns:
    titles = (title for title, *_ in _COLUMNS.get(case.name, (_PEAK,)))
    return Columns((*titles, "seconds", "min to max", "GB/s", "runs"), _row)


SUITE = Suite(
    name="gpu",
    cases=tuple(case for stage in STAGES for case in stage.cases),
    bounds=BOUNDS,
    labels=LABELS,
    prepared=None,
    columns=_columns,
    panels=(
        Panel("warm", "seconds", "until all is on the device"),
        Panel("cold", "seconds", "until all is on the device"),
        Panel("swap", "seconds", "the second load"),
        Panel("save", "seconds", "the time in which tensors may not change"),
        Panel("peers", "seconds", "until all is on the device"),
        Panel("refresh", "seconds", "into a module that is there"),
    ),
    picture="Rates of loads to a GPU",
)
