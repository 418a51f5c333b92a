"""The bounds that stio's loads have to keep, each with the figure that is held against it."""

from __future__ import annotations

from benchmarks.cases import CAP_BYTES_PER_SECOND
from benchmarks.child import BLOCKING_STEP_SECONDS
from benchmarks.stats import Measured, Runs, difference, plain
from benchmarks.verdicts import Bound, cost, faster, held, lag, seconds

SAFETENSORS = ("safetensors-mmap", "safetensors-pread")
_BUSY_SAFETENSORS = ("safetensors-clone busy", "safetensors-pread busy")


def _share_of_cap(runs: Runs) -> Measured:
    """Give stio's rate through the cap, touching included."""
    found = plain(runs, "cold-cap", "stio", "seconds")
    data_bytes = runs.of("cold-cap", "stio")[0]["data_bytes"]
    share = [data_bytes / seconds / CAP_BYTES_PER_SECOND for seconds in (found.value, found.high, found.low)]
    return Measured(share[0], share[1], share[2], found.num_rounds, found.ours)


def _blocked(runs: Runs) -> Measured:
    return difference(runs, "blocked", "stio blocked", "load_seconds", "load_seconds", lower_entry="stio")


BOUNDS: tuple[Bound, ...] = (
    Bound("cold-cap", "share of the cap", _share_of_cap, at_least=0.95),
    faster("cold-cap", "stio / safetensors' better backend", "stio", SAFETENSORS),
    faster("cold-cap", "stio / Run:ai", "stio", "runai"),
    faster("cold-loop", "stio / raw O_DIRECT limit", "stio", "raw", 0.9),
    faster("cold-loop", "stio / the same limit filling a fresh result", "stio", "raw-whole"),
    faster("cold-loop", "stio / safetensors' better backend", "stio", SAFETENSORS),
    faster("cold-loop", "stio / Run:ai", "stio", "runai"),
    faster("cold", "stio / safetensors' better backend (expected 1.8)", "stio", SAFETENSORS),
    faster("cold", "stio / Run:ai (expected not behind)", "stio", "runai"),
    faster("cold", "stio / fastsafetensors", "stio", "fastsafetensors"),
    faster("cold", "stio / raw O_DIRECT limit", "stio", "raw"),
    faster("warm", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 0.95),
    faster("warm", "stio / Run:ai, every page touched", "stio", "runai", 6.0),
    faster("warm", 'stio memory="copy" / load_file + clone', "stio-copy", "safetensors-clone", 1.0),
    faster("faults", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 1.4),
    *(
        bound
        for case in ("busy-cold", "busy-warm")
        for bound in (
            faster(case, "stio busy / stio idle", "stio busy", "stio", 0.7),
            faster(case, "stio / safetensors, better of clone and pread", "stio busy", _BUSY_SAFETENSORS, 3.0),
            faster(case, "stio with switch_interval busy / stio idle", "stio-switch busy", "stio"),
            faster(case, "stio / Run:ai", "stio busy", "runai busy"),
        )
    ),
    seconds("many-busy", "stio loads 10,000 tensors", "stio busy", "load_seconds", 0.150, "ms"),
    seconds("many-busy", "the same with switch_interval", "stio-switch busy", "load_seconds", None, "ms"),
    seconds("many-busy", "safetensors loads them", "safetensors-mmap busy", "load_seconds", None, "ms"),
    seconds("many-busy", "Run:ai loads them", "runai busy", "load_seconds", None, "ms"),
    cost("many", "open and list: stio through safetensors", "stio open", "safetensors-mmap open", "seconds", 1.0),
    cost("many", "load: stio through load_file", "stio load", "safetensors-mmap load", "load_seconds", 0.6),
    *(
        bound
        for case in ("loop-cold", "loop-warm")
        for bound in (
            lag(case, "p99 lag above the baseline, alone", "stio alone", 0.005),
            lag(case, "p99 lag above the baseline, busy", "stio busy", 0.025),
            lag(case, "p99 lag above the baseline, busy, switch_interval 0.5 ms", "stio-switch busy", 0.005),
        )
    ),
    seconds("loop-open", "p99 lag, alone", "stio alone", "lag.p99", 0.015, "ms"),
    seconds("loop-open", "p99 lag, busy", "stio busy", "lag.p99", 0.030, "ms"),
    seconds("loop-open", "p99 lag, busy, switch_interval 0.5 ms", "stio-switch busy", "lag.p99", None, "ms"),
    Bound(
        "blocked",
        "seconds above an idle loop's load (three steps allowed)",
        _blocked,
        at_most=3 * BLOCKING_STEP_SECONDS,
        unit="s",
    ),
    held("stio-copy", 'memory="copy" through result + budget + 64 MiB'),
    held("stio-fake", "fake device through result + budget + 64 MiB"),
    held("stio stream", "stream through largest tensor + budget + 64 MiB"),
    held("stio stream 64 MiB", "stream, budget 64 MiB, through largest tensor + 128 MiB"),
    seconds("lazy", 'memory="lazy" loads 100 GB', "stio-lazy", "load_seconds", 1.0),
)
