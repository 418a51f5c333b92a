"""The bounds that a server has to keep while it loads by stio, each with the figure that is held against it."""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks.stats import Measured, NoFigure, Runs
from benchmarks.verdicts import Bound, cost, seconds

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
        entry, who = f"{ours} {busy}", f"{text}, {busy}"
        found += [
            Bound(
                state,
                f"health p99 while loading through without a load: {who}",
                partial(_through_idle, case=state, entry=entry),
                at_most=2.0,
            ),
            cost(
                state,
                f"health p99 through safetensors in a thread: {who}",
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
