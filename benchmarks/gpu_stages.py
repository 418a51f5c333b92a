"""What is measured on a GPU: the stages in their order, their cases and bounds, and how the report shows them.

The plan has what a reader asks first: do all bits arrive; how fast is the first load of a process, how fast are later
ones, and those beside a busy thread; loads out of a cache, new weights for a module, saves; other loaders. The other
stages answer single questions of the design. Nothing here imports torch: the command lists and reports without it.

A budget has its processes with 5.5 s each until their clocks start, of which imports are 4 s, and their loads as they
were measured on an H200 with 16 processors: 6 GB in 0.1 to 0.9 s, three times, and 1 s to compare all bits once.
"""

from __future__ import annotations

import re
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu_child import Stage
from benchmarks.report import cost, count_cell, faster, median_cell, plain, seconds
from benchmarks.runs import Bound, Measured, NoFigure, Runs, show
from benchmarks.suite import Case, Columns, Entry, Panel, Suite

WORK = "benchmarks.gpu_tasks"
"""Does the turns."""

PRIME_BYTES = 4_000_000_000
"""Host memory that is touched and freed before each turn, at most."""

RINGS = ((4, 32), (8, 16), (8, 32), (16, 8), (16, 16))
"""Shapes of the bare ring: threads, and MiB of a slot."""

TRACED = "stio traced"
"""The entry whose timeline is drawn."""

_PREFETCH, _BUFFERED = "safetensors-prefetch", "instanttensor-buffered"
_LOADERS = ("safetensors", _PREFETCH, _BUFFERED, "instanttensor", "fastsafetensors", "runai", "kvikio")
PEERS = frozenset({*_LOADERS, "prefetch-copy", "dcp-copy", "safetensors-then", "dcp"})
"""A failure of one of these does not fail the stage."""


def ring_name(num_threads: int, mebibytes: int) -> str:
    """Name a shape of the bare ring."""
    return f"raw-ring-{num_threads}x{mebibytes}"


LABELS: dict[str, str] = {
    "stio": "stio",
    "stio-gds": "stio, memory='gds'",
    "stio-cache": "stio, from a HostCache",
    "safetensors": "safetensors, load_file of each shard",
    _PREFETCH: "safetensors 0.9, prefetch of all shards",
    "runai": "Run:ai streamer, .to(device)",
    "fastsafetensors": "fastsafetensors, no GDS",
    "instanttensor": "InstantTensor, its default (direct I/O; on tmpfs a mapping)",
    _BUFFERED: "InstantTensor, buffered backend",
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
    "pin-stio": "stio's pinned memory: mapped, touched by several threads, registered",
    "stio-saver": "stio.Saver",
    "dcp": "DCP async_save, DefaultStager kept, pinned memory",
    "raw-d2h": "limit: device to pinned memory, 64 MiB a copy",
    "kernels": "launches of seven kernels beside a busy stream, CUDA_MODULE_LOADING",
    "stio-cast": "stio.load with a cast beside a busy stream",
    "wake-query": "event.query() in a loop",
    "wake-spin": "event.synchronize()",
    "wake-sleep": "event.synchronize(), blocking=True",
    "stio-refresh": "stio.load_into a module that is there",
    "prefetch-copy": "safetensors 0.9, prefetch, load_state_dict",
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


_BUSY = {name: f"{name} busy" for name in ("stio", _PREFETCH, "safetensors", "runai", "wake-spin", "wake-sleep")}


def _case(
    name: str, title: str, *entries: Entry | str, task: str = "load", state: str = "warm", place: str = "disk"
) -> Case:
    """Make a case of three rounds; a quick run leaves out all shapes of the ring but one."""
    made = tuple(entry if isinstance(entry, Entry) else Entry(entry, task=task) for entry in entries)
    shapes = {entry.name for entry in made if re.fullmatch(r"raw-ring-(?!8x16).*", entry.name)}
    return Case(name, title, made, rounds=3, state=state, place=place, not_quick=frozenset(shapes))


def _stage(name: str, budget_seconds: float, title: str, *entries: Entry | str, **options: Any) -> Stage:
    """Make a stage of one case, named as the stage is."""
    return Stage(name, title, budget_seconds, (_case(name, title, *entries, **options),))


def _loads(contestant: str, num_loads: int, *, busy: bool = False, **options: Any) -> Entry:
    """Make an entry that loads so many times in its process."""
    key = _BUSY[contestant] if busy else contestant
    return Entry(contestant, key, busy=busy, options={"loads": num_loads}, **options)


def _behind(first: str, *names: str, task: str = "load") -> tuple[Entry, ...]:
    """Make entries that run in the process of another one, after it."""
    return tuple(Entry(name, task=task, behind=first) for name in names)


def _kernels(loading: str) -> Entry:
    environment = {"CUDA_MODULE_LOADING": loading}
    return Entry("kernels", f"kernels {loading.lower()}", "kernels", options={"environment": environment})


PLAN: tuple[Stage, ...] = (
    Stage("bits", "do all bits arrive, on each path and in each dtype", 60, tests=("tests/gpu/test_bits.py",)),
    _stage(
        *("loads", 89, "out of the page cache, the first load of a process, and the median of later ones"),
        *(_loads(name, 3) for name in ("stio", "safetensors", _PREFETCH, _BUFFERED)),
        *_behind("stio", "raw-bus", "raw-page-cache"),
        Entry("stio", TRACED, behind="stio", rounds=1, options={"trace": True}),
    ),
    _stage(
        *("busy", 90, "out of the page cache, later loads beside a busy pure-Python thread"),
        *(_loads("stio", 2), _loads("stio", 2, busy=True, behind="stio"), _loads(_PREFETCH, 2, busy=True)),
        _loads("safetensors", 1, busy=True, rounds=1, limit_seconds=25),
        _loads("runai", 1, busy=True, rounds=1, limit_seconds=12),
    ),
    _stage(
        *("cache", 29, "out of a cache in pinned memory: the first load with the filling of the cache, and later ones"),
        *(_loads("stio-cache", 3), *_behind("stio-cache", "raw-bus")),
    ),
    _stage(
        *("refresh", 53, "new weights for a module on the device whose parameters keep their addresses"),
        *("stio-refresh", "prefetch-copy", Entry("dcp-copy", task="refresh", rounds=1)),
        *_behind("stio-refresh", "raw-bus"),
        task="refresh",
    ),
    _stage(
        *("saves", 56, "until a change of the tensors, made as soon as it is allowed, is done: first and later saves"),
        *("stio-saver", "dcp", *_behind("stio-saver", "raw-d2h", task="save")),
        task="save",
        state="",
    ),
    _stage(
        *("peers", 82, "out of tmpfs, the first load of a process, and the median of later ones"),
        *(_loads(name, 3) for name in ("stio", _PREFETCH, "instanttensor")),
        *(_loads(name, 4, rounds=1) for name in ("fastsafetensors", "runai")),
        place="tmpfs",
    ),
)
"""What runs by default: at most 480 s with the preparation, see `benchmarks.gpu.planned_seconds`."""

STAGES: tuple[Stage, ...] = (
    *PLAN,
    Stage("tests", "all tests that need a device", 400, tests=("tests/gpu", "tests/device")),
    _stage(
        *("pinning", 60, "pinning host memory, and by how much other threads come late meanwhile"),
        *("pin-none", *_behind("pin-none", "pin-touch", "pin-torch", "pin-registered", "pin-stio", task="pin")),
        task="pin",
        state="",
    ),
    _stage(
        *("direct", 90, "O_DIRECT reads into pinned memory, the bits of one slot compared on the device"),
        *("raw-disk", *_behind("raw-disk", "raw-disk-pinned", "raw-disk-registered", "raw-ring-8x16-direct")),
        state="cold",
    ),
    _stage(
        *(
            "kernels",
            90,
            "first uses of kernels in a fresh process, beside a busy stream; the seconds are a second use's",
        ),
        *(_kernels("LAZY"), _kernels("EAGER"), Entry("stio-cast", task="cast")),
        state="",
    ),
    _stage(
        *(
            "wakeup",
            40,
            "from the queueing of a copy of 4 MiB to the return of the call that waits for it, medians of 200",
        ),
        *("wake-query", *_behind("wake-query", "wake-spin", "wake-sleep", task="wakeup")),
        *(Entry(name, _BUSY[name], "wakeup", busy=True, behind="wake-query") for name in ("wake-spin", "wake-sleep")),
        task="wakeup",
        state="",
    ),
    _stage(
        *("fragmentation", 90, "two models in turns, each dropped before the next; the seconds are the fourth load's"),
        *("stio", "safetensors"),
        task="turns",
    ),
    _stage(
        *("cold", 240, "from the disk to the device, two loads of a process"),
        *(_loads(name, 2) for name in ("stio", *_LOADERS[:2], *_LOADERS[3:-1])),
        *_behind("stio", "raw-disk"),
        state="cold",
    ),
    _stage(
        *("forward", 90, "from the call to the end of the first forward of 512 tokens"),
        *("stio-warm", "stio-then", "safetensors-then"),
        task="forward",
    ),
    _stage(
        *("decoder", 40, "forwards of 512 tokens with all weights there: the first, and the median of later ones"),
        "decoder",
        task="forward",
    ),
    Stage(
        *("limits", "which shape of ring is the fastest, and is a registered mapping faster", 200),
        cases=(
            _case(
                *("limits", "out of the page cache, bare", "stio"),
                *_behind("stio", *(ring_name(*ring) for ring in RINGS)),
                *_behind("stio", "raw-registered", "raw-bus", "raw-page-cache"),
            ),
            _case(
                *("limits-cold", "from the disk, bare", "stio"),
                *_behind("stio", *(ring_name(*ring) + "-direct" for ring in RINGS), "raw-disk"),
                state="cold",
            ),
        ),
    ),
    _stage(
        *("gds", 120, "from the disk to the device", "stio", "stio-gds", "kvikio", *_behind("stio", "raw-disk")),
        state="cold",
    ),
)


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


_first = partial(faster, key="first_seconds")
_IN_PAGE_CACHE = ("safetensors", _PREFETCH, _BUFFERED)
_IN_TMPFS = (_PREFETCH, "instanttensor", "fastsafetensors", "runai")
_BUSY_PEERS = (_BUSY[_PREFETCH], _BUSY["safetensors"], _BUSY["runai"])

BOUNDS: tuple[Bound, ...] = (
    _first("loads", "the first load: stio / bus", "stio", "raw-bus", 0.65),
    _first("loads", "the first load: stio / the fastest peer", "stio", _IN_PAGE_CACHE, 1.0),
    faster("loads", "later loads: stio / bus", "stio", "raw-bus", 0.9),
    faster("loads", "later loads: stio / the fastest peer", "stio", _IN_PAGE_CACHE, 1.0),
    faster("busy", "stio busy / idle", _BUSY["stio"], "stio", 0.8),
    faster("busy", "stio / the fastest peer, both busy", _BUSY["stio"], _BUSY_PEERS, 1.0),
    faster("cache", "stio from a HostCache / bus", "stio-cache", "raw-bus", 0.9),
    faster("refresh", "stio / bus", "stio-refresh", "raw-bus", 0.8),
    faster("refresh", "stio / the fastest peer", "stio-refresh", ("prefetch-copy", "dcp-copy"), 1.0),
    cost("saves", "blocked, later saves, through the bus", "stio-saver", "raw-d2h", "seconds", 1.1),
    cost("saves", "blocked, later saves, through DCP's", "stio-saver", "dcp", "seconds", 1.0),
    cost("saves", "blocked, the first save, through DCP's", "stio-saver", "dcp", "first_seconds", 1.0),
    _first("peers", "the first load: stio / the fastest peer", "stio", _IN_TMPFS, 1.0),
    faster("peers", "later loads: stio / the fastest peer", "stio", _IN_TMPFS, 1.0),
    seconds("pinning", "a GB, torch", "pin-torch", "seconds_per_gb", None),
    seconds("pinning", "a GB, registered huge pages", "pin-registered", "seconds_per_gb", None),
    seconds("pinning", "a GB, stio", "pin-stio", "seconds_per_gb", None),
    seconds("pinning", "longest stall of a launch, torch", "pin-torch", "stalls.launch.max", None, "ms"),
    faster("direct", "into pinned slots / into plain memory", "raw-disk-pinned", "raw-disk"),
    seconds("kernels", "first launches, loaded lazily", "kernels lazy", "first_seconds", None, "ms"),
    seconds("kernels", "first launches, loaded eagerly", "kernels eager", "first_seconds", None, "ms"),
    seconds("kernels", "a load's first cast beside a busy stream", "stio-cast", "first_seconds", None),
    cost("wakeup", "a sleeping wait through a polling one", "wake-sleep", "wake-query", "seconds"),
    cost("wakeup", "the same beside a busy thread", _BUSY["wake-sleep"], "wake-query", "seconds"),
    faster("fragmentation", "stio / safetensors", "stio", "safetensors"),
    faster("cold", "stio / disk", "stio", "raw-disk", 0.95),
    faster("cold", "stio / the fastest peer", "stio", _IN_TMPFS),
    Bound("forward", "first forward of a warm start through the load alone", _forward_through_load, at_most=1.1),
    cost("forward", "first forward of a warm start through load, then forward", "stio-warm", "stio-then", "seconds"),
    cost("forward", "the same through safetensors, then forward", "stio-warm", "safetensors-then", "seconds"),
    faster("gds", "GPUDirect Storage / staged", "stio-gds", "stio"),
)

_PEAK = ("device memory added, peak, GB", "added_peak_bytes", 1e-9, 2)
_STALLS = (
    ("a Python thread late, longest, ms", "stalls.python.max", 1e3, 1),
    ("a launch and its wait, median, ms", "stalls.launch.p50", 1e3, 2),
    ("longest, ms", "stalls.launch.max", 1e3, 1),
)
_FIRST, _DONE = ("first, s", "first_seconds", 1, 3), ("done, s", "done_seconds", 1, 3)
_FIRST_RATE = ("GB/s", "first_rate", 1e-9, 2)
_COLUMNS: dict[str, tuple[tuple[str, str, float, int], ...]] = {
    **dict.fromkeys(("loads", "busy", "cache", "refresh", "peers", "cold"), (_PEAK, _FIRST, _FIRST_RATE)),
    "saves": (_PEAK, _FIRST, _DONE),
    "pinning": (("seconds a GB", "seconds_per_gb", 1, 3), *_STALLS),
    "kernels": (_FIRST, ("the busy stream's work, s", "busy_seconds", 1, 3)),
    "wakeup": (("p99, ms", "p99", 1e3, 3), ("longest, ms", "max", 1e3, 3)),
    "fragmentation": (
        ("first, s", "first_seconds", 1, 3),
        ("kept by torch, GB", "reserved_bytes", 1e-9, 2),
        ("held by tensors, GB", "used_bytes", 1e-9, 2),
    ),
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
    columns = _COLUMNS.get(case.name, (_PEAK,))
    title = "later, s" if _FIRST in columns else "seconds"
    return Columns((*(title for title, *_ in columns), title, "min to max", "GB/s", "runs"), _row)


SUITE = Suite(
    name="gpu",
    cases=tuple(case for stage in STAGES for case in stage.cases),
    bounds=BOUNDS,
    labels=LABELS,
    prepared=None,
    columns=_columns,
    panels=(
        Panel("loads", "first_seconds", "the first load of a process"),
        Panel("loads", "seconds", "later loads"),
        Panel("busy", "seconds", "beside a busy thread"),
        Panel("cache", "seconds", "later loads, out of the cache"),
        Panel("refresh", "seconds", "into a module that is there"),
        Panel("saves", "seconds", "the time in which tensors may not change, later saves"),
        Panel("peers", "first_seconds", "the first load of a process, out of tmpfs"),
        Panel("peers", "seconds", "later loads, out of tmpfs"),
    ),
    picture="Rates of loads to a GPU",
)
