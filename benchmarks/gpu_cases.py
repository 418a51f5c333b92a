"""What is measured on the device: the cases, and who takes part in each."""

from __future__ import annotations

from benchmarks.cases import Case, Entry
from benchmarks.gpu_child import FORWARD_LABELS
from benchmarks.gpu_contestants import CONTESTANTS, RINGS, ring_name
from benchmarks.gpu_saves import SAVER_LABELS

SAVE_BYTES = 4_000_000_000
"""Most bytes of a save: what is measured is over long before they are on the disk."""

TRACED = "stio traced"
"""The entry whose timeline is drawn."""

LABELS: dict[str, str] = {name: contestant.label for name, contestant in CONTESTANTS.items()}
LABELS |= FORWARD_LABELS | SAVER_LABELS

_PEERS = ("safetensors", "runai", "fastsafetensors", "instanttensor")
_SLOW_ROUNDS = 2


def _rings(suffix: str = "") -> tuple[Entry, ...]:
    return tuple(Entry(ring_name(*ring) + suffix, rounds=_SLOW_ROUNDS) for ring in RINGS)


CASES: tuple[Case, ...] = (
    Case(
        "gpu-warm",
        "out of the page cache to the device",
        (
            *(Entry(name) for name in ("stio", "stio-switch", *_PEERS, "raw-bus", "raw-page-cache")),
            *_rings(),
            Entry("raw-registered", rounds=_SLOW_ROUNDS),
            Entry("stio", TRACED, rounds=1),
        ),
        rounds=5,
        state="warm",
        not_quick=frozenset({"stio-switch", *(ring_name(*ring) for ring in RINGS)}),
    ),
    Case(
        "gpu-swap",
        "the second load of a process, the first one's tensors dropped before it",
        (
            Entry("stio", task="again"),
            Entry("stio-cache", task="again"),
            Entry("safetensors", task="again"),
            Entry("raw-bus", task="again"),
        ),
        rounds=5,
        state="warm",
    ),
    Case(
        "gpu-busy",
        "out of the page cache, beside a busy pure-Python thread",
        (
            *(Entry(name, f"{name} busy", busy=True) for name in ("stio", "stio-switch", "safetensors", "runai")),
            Entry("stio-switch"),
        ),
        rounds=3,
        state="warm",
    ),
    Case(
        "gpu-cold",
        "from the disk to the device",
        (*(Entry(name) for name in ("stio", "stio-gds", *_PEERS, "raw-disk")), *_rings("-direct")),
        rounds=3,
        state="cold",
        not_quick=frozenset(ring_name(*ring) + "-direct" for ring in RINGS),
    ),
    Case(
        "gpu-forward",
        "from the call to the end of the first forward of 512 tokens",
        tuple(Entry(name, task="forward") for name in FORWARD_LABELS),
        rounds=5,
        state="warm",
    ),
    Case(
        "gpu-save",
        "saves: until a change of the tensors, made as soon as it is allowed, is done",
        tuple(Entry(name, task="save") for name in SAVER_LABELS),
        rounds=3,
        state="",
    ),
)
