"""The bounds that loads to a device have to keep, each with the figure that is held against it."""

from __future__ import annotations

from statistics import median

from benchmarks.stats import Measured, NoFigure, Runs, ratio
from benchmarks.verdicts import Bound, cost, faster, seconds

_PEERS = ("safetensors", "runai", "fastsafetensors", "instanttensor")


def _of_the_slower_limit(runs: Runs) -> Measured:
    """Give stio's rate through the smaller of what bus and page cache allow."""
    limits = {name: median(runs.values("gpu-warm", name, "seconds").values()) for name in ("raw-bus", "raw-page-cache")}
    return ratio(runs, "gpu-warm", "stio", max(limits, key=limits.__getitem__))


def _forward_through_load(runs: Runs) -> Measured:
    """Give the seconds to the end of the first forward through those that a load of the same module takes."""
    ours = runs.values("gpu-forward", "stio-warm", "seconds")
    theirs = runs.values("gpu-forward", "stio-then", "load_seconds")
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise NoFigure("stio-warm and stio-then share no round")
    each = [ours[number] / theirs[number] for number in shared]
    mine, other = median(ours[number] for number in shared), median(theirs[number] for number in shared)
    return Measured(mine / other, min(each), max(each), len(each), mine, other, "the load alone")


BOUNDS: tuple[Bound, ...] = (
    Bound("gpu-warm", "stio / the slower of bus and page cache", _of_the_slower_limit, at_least=0.9),
    faster("gpu-warm", "stio / the fastest peer", "stio", _PEERS, 1.0),
    faster("gpu-warm", "stio / safetensors", "stio", "safetensors"),
    faster("gpu-swap", "stio from a HostCache / bus", "stio-cache", "raw-bus", 0.95),
    faster("gpu-swap", "stio, a second load / bus", "stio", "raw-bus"),
    faster("gpu-busy", "stio busy / alone, both with switch_interval", "stio-switch busy", "stio-switch", 0.8),
    faster("gpu-busy", "stio busy / alone with switch_interval", "stio busy", "stio-switch"),
    faster("gpu-busy", "stio / safetensors, both busy", "stio busy", "safetensors busy"),
    faster("gpu-cold", "stio / disk", "stio", "raw-disk", 0.95),
    faster("gpu-cold", "stio / the fastest peer", "stio", _PEERS),
    Bound("gpu-forward", "first forward of a warm start through the load alone", _forward_through_load, at_most=1.1),
    cost(
        "gpu-forward", "first forward of a warm start through load, then forward", "stio-warm", "stio-then", "seconds"
    ),
    cost("gpu-forward", "the same through safetensors, then forward", "stio-warm", "safetensors-then", "seconds"),
    cost("gpu-save", "blocked, later saves, through the bus", "stio-saver", "raw-d2h", "seconds", 1.1),
    cost("gpu-save", "blocked, later saves, through DCP's", "stio-saver", "dcp", "seconds", 0.5),
    seconds("gpu-save", "blocked, the first save", "stio-saver", "first_seconds", None),
)
