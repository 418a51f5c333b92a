"""What is measured of saving: the cases, and who takes part in each."""

from __future__ import annotations

from benchmarks.cases import MEBI, SMALL_BUDGET_BYTES, Case, Entry
from benchmarks.files import Layout

BUDGET_BYTES = 512 * MEBI
SLACK_BYTES = 64_000_000
"""What a save may hold above its budget: the engine's thread, workers, headers."""

_PEERS = ("safetensors", "hub", "torch")
_WATCHED = ("safetensors-fsync", "dcp", "dcp-async", "dcp-hf", *_PEERS)


def _budgeted(contestant: str, budget_bytes: int) -> Entry:
    def limit_bytes(layout: Layout) -> int:
        return budget_bytes + SLACK_BYTES

    return Entry(
        contestant,
        f"{contestant} {budget_bytes // MEBI} MiB",
        options={"budget_bytes": budget_bytes},
        limit_bytes=limit_bytes,
    )


CASES: tuple[Case, ...] = (
    Case(
        "durable",
        "one save, from the call until it is durable",
        (
            *(Entry(name) for name in ("stio", "raw", "safetensors-fsync", "dcp")),
            Entry("stio-saver", task="again", rounds=5),
            *(Entry(name, rounds=3) for name in _PEERS),
            Entry("dcp-hf", rounds=2),
        ),
        rounds=15,
        not_quick=frozenset({*_PEERS, "dcp-hf"}),
    ),
    Case(
        "staged",
        "three saves by one saver: until the tensors may change",
        (
            *(Entry(name, task="again") for name in ("stio-saver", "memcpy", "dcp-async")),
            Entry("dcp-caller", task="again", rounds=2),
        ),
        rounds=5,
    ),
    Case(
        "training",
        "one save, the caller's loop blocked by 200 ms steps",
        (
            Entry("stio"),
            Entry("stio", "stio beside steps", task="steps"),
            Entry("stio", "stio beside sleeps", task="sleeps"),
        ),
        rounds=5,
    ),
    Case(
        "memory",
        "memory held by one save, the tensors aside, by control group",
        (
            *(_budgeted(name, size) for name in ("stio", "stio-saver") for size in (BUDGET_BYTES, SMALL_BUDGET_BYTES)),
            *(Entry(name) for name in ("stio-saver", *_WATCHED)),
        ),
        rounds=1,
        watch_memory=True,
        not_quick=frozenset({"stio-saver", *_WATCHED}),
    ),
    Case(
        "loop",
        "event loop's lag during saves",
        (
            Entry("stio", "stio alone", task="heartbeat"),
            Entry("stio", "stio busy", task="heartbeat", busy=True),
            Entry("stio-switch", "stio-switch busy", task="heartbeat", busy=True),
            Entry("stio-saver", "stio-saver alone", task="heartbeat"),
            Entry("safetensors-fsync", "safetensors-fsync alone", task="heartbeat", rounds=1),
            Entry("dcp-async", "dcp-async alone", task="heartbeat", rounds=1),
        ),
        rounds=3,
        not_quick=frozenset({"stio-saver alone", "safetensors-fsync alone", "dcp-async alone"}),
    ),
)
