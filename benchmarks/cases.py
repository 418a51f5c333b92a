"""What is measured: the cases, and who takes part in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.files import Layout, llama_layout, many_layout, sparse_layout

MEBI = 1 << 20
CAP_BYTES_PER_SECOND = 800_000_000
LOOP_READ_AHEAD_KB = 128
BUDGET_BYTES = 256 * MEBI
SMALL_BUDGET_BYTES = 64 * MEBI
MEMORY_SLACK_BYTES = 64 * MEBI
LAZY_BYTES = 100_000_000_000
MANY_TENSOR_BYTES = 4096
MANY_MORE_TENSOR_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant's part in a case."""

    contestant: str
    """A key of `contestants.CONTESTANTS`."""

    key: str = ""
    """How the figures name it; the contestant itself where empty."""

    task: str = "load"
    """See `child.RunSpec.task`."""

    busy: bool = False
    """Beside a busy pure-Python thread."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keywords for the contestant."""

    rounds: int | None = None
    """At most so many rounds."""

    limit_bytes: Callable[[Layout], int] | None = None
    """Memory that the run may hold, enforced by the kernel."""

    @property
    def name(self) -> str:
        """Its name inside the case."""
        return self.key or self.contestant


@dataclass(frozen=True, slots=True)
class Case:
    """One situation, its contestants interleaved round by round."""

    name: str
    """For `--cases`."""

    title: str
    """For the table."""

    entries: tuple[Entry, ...]
    """Who takes part."""

    rounds: int
    """Rounds of a full run; a quick one has one."""

    layout: str = "model"
    """model, many-10000, many-100000 or sparse."""

    state: str = "cold"
    """cold, warm (filled by reads, large folios) or faults (filled by page faults, small folios)."""

    place: str = "disk"
    """disk or loop."""

    cap_bytes_per_second: int | None = None
    """Cap on the reads from the disk."""

    watch_memory: bool = False
    """Measure the memory of each run by a control group."""

    touch: str = "page"
    """See `meters.touch_all`."""

    not_quick: frozenset[str] = frozenset()
    """Names of the entries that a quick run, of one round, leaves out: none that a bound needs."""


def make_layout(name: str, size_bytes: int) -> Layout:
    """Give the layout that a case names."""
    if name == "model":
        return llama_layout(size_bytes)
    if name == "sparse":
        return sparse_layout(LAZY_BYTES)
    count = int(name.removeprefix("many-"))
    return many_layout(count, MANY_TENSOR_BYTES if count <= 10_000 else MANY_MORE_TENSOR_BYTES)


def _entries(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(name) for name in names)


def _busy(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(name, f"{name} busy", busy=True) for name in names)


def _beats(task: str, *names: str) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            name,
            f"{name} {'busy' if busy else 'alone'}",
            task=task,
            busy=busy,
            rounds=None if name.startswith("stio") else 1,
        )
        for name in names
        for busy in ((True,) if name == "stio-switch" else (False, True))
    )


def _whole_result(layout: Layout) -> int:
    return layout.data_bytes + BUDGET_BYTES + MEMORY_SLACK_BYTES


def _one_tensor(layout: Layout) -> int:
    return layout.largest_bytes + BUDGET_BYTES + MEMORY_SLACK_BYTES


def _one_tensor_small_budget(layout: Layout) -> int:
    return layout.largest_bytes + SMALL_BUDGET_BYTES + MEMORY_SLACK_BYTES


_BUDGET = {"budget_bytes": BUDGET_BYTES}
_SMALL_BUDGET = {"budget_bytes": SMALL_BUDGET_BYTES}

CASES: tuple[Case, ...] = (
    Case(
        "cold-cap",
        "cold, reads capped at 800 MB/s",
        _entries("stio", "safetensors-mmap", "safetensors-pread", "runai", "raw"),
        rounds=3,
        cap_bytes_per_second=CAP_BYTES_PER_SECOND,
        not_quick=frozenset({"safetensors-mmap", "safetensors-pread", "runai"}),
    ),
    Case(
        "cold-loop",
        "cold, loop mount, read-ahead 128 KiB",
        (
            # The disk behind it has slow minutes: many rounds of the two that the bound is about.
            *_entries("stio", "raw", "runai"),
            *(Entry(name, rounds=5) for name in ("safetensors-mmap", "safetensors-pread", "raw-whole")),
        ),
        rounds=15,
        place="loop",
        not_quick=frozenset({"raw-whole", "safetensors-pread"}),
    ),
    Case(
        "cold",
        "cold, the disk as it is",
        (
            *_entries("stio", "safetensors-mmap", "safetensors-pread", "runai"),
            Entry("raw", rounds=8),
            Entry("raw-whole", rounds=3),
            Entry("fastsafetensors", rounds=3),
        ),
        rounds=15,
        not_quick=frozenset({"raw-whole", "fastsafetensors", "safetensors-pread"}),
    ),
    Case(
        "warm",
        "warm, large folios",
        _entries("stio", "safetensors-mmap", "safetensors-pread", "runai", "stio-copy", "safetensors-clone"),
        rounds=5,
        state="warm",
        not_quick=frozenset({"safetensors-pread"}),
    ),
    Case("faults", "warm, small folios", _entries("stio", "safetensors-mmap"), rounds=5, state="faults"),
    Case(
        "busy-cold",
        "cold, beside a busy Python thread",
        (Entry("stio"), *_busy("stio", "stio-switch", "safetensors-clone", "safetensors-pread", "runai")),
        rounds=3,
        not_quick=frozenset({"safetensors-clone busy", "runai busy"}),
    ),
    Case(
        "busy-warm",
        "warm, beside a busy Python thread",
        (Entry("stio"), *_busy("stio", "stio-switch", "safetensors-clone", "safetensors-pread", "runai")),
        rounds=3,
        state="warm",
        not_quick=frozenset({"safetensors-clone busy", "runai busy"}),
    ),
    Case(
        "many-busy",
        "10,000 tensors, warm, beside a busy Python thread",
        _busy("stio", "stio-switch", "safetensors-mmap", "runai"),
        rounds=3,
        layout="many-10000",
        state="warm",
        not_quick=frozenset({"runai busy", "safetensors-mmap busy"}),
    ),
    Case(
        "many",
        "100,000 tensors, warm",
        tuple(
            Entry(name, f"{name} {task}", task=task)
            for task in ("open", "load")
            for name in ("stio", "safetensors-mmap")
        ),
        rounds=5,
        layout="many-100000",
        state="warm",
    ),
    Case(
        "loop-cold",
        "event loop's lag during cold loads",
        _beats("heartbeat-load", "stio", "stio-switch"),
        rounds=3,
    ),
    Case(
        "loop-warm",
        "event loop's lag during warm loads",
        _beats("heartbeat-load", "stio", "stio-switch", "safetensors-pread"),
        rounds=3,
        state="warm",
        not_quick=frozenset({"safetensors-pread alone", "safetensors-pread busy"}),
    ),
    Case(
        "loop-open",
        "event loop's lag during openings of 100,000 tensors",
        _beats("heartbeat-open", "stio", "stio-switch", "safetensors-mmap"),
        rounds=3,
        layout="many-100000",
        state="warm",
        not_quick=frozenset({"safetensors-mmap alone", "safetensors-mmap busy"}),
    ),
    Case(
        "blocked",
        "cold, the caller's loop blocked by 200 ms steps",
        (Entry("stio"), Entry("stio", "stio blocked", task="blocked")),
        rounds=3,
    ),
    Case(
        "memory",
        "memory held by a cold load, by control group",
        (
            Entry("stio-copy", options=_BUDGET, limit_bytes=_whole_result),
            Entry("stio-fake", options=_BUDGET, limit_bytes=_whole_result),
            Entry("stio", "stio stream", task="stream", options=_BUDGET, limit_bytes=_one_tensor),
            Entry(
                "stio",
                "stio stream 64 MiB",
                task="stream",
                options=_SMALL_BUDGET,
                limit_bytes=_one_tensor_small_budget,
            ),
            *_entries("safetensors-mmap", "safetensors-pread", "runai", "fastsafetensors"),
        ),
        rounds=1,
        watch_memory=True,
        not_quick=frozenset({"safetensors-mmap", "safetensors-pread", "runai", "fastsafetensors"}),
    ),
    Case(
        "lazy",
        "a sparse file of 100 GB, mapped lazily",
        (Entry("stio-lazy"),),
        rounds=3,
        layout="sparse",
        touch="ends",
    ),
)
