"""What is measured of a server: the cases, who takes part, and the model that is served."""

from __future__ import annotations

import math

from benchmarks.cases import Case, Entry
from benchmarks.files import ITEM_BYTES, Layout, TensorShape

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
