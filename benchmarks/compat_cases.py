"""What is measured of the drop-ins: the cases, and the files and states in them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import files
from benchmarks.cases import Case, Entry

ROWS = 8192
"""Rows and columns of the matrix of which one row is read."""

MATRIX = "matrix"
"""Its name."""

NUM_PARAMETERS = 20_000
"""Of the optimizer's state, each with three tensors."""

_ELEMENTS = 64
"""Of each of a parameter's moments."""

_STATE_SEED = 7
_LAYOUTS = {"small": (64, 2, 6_000), "middle": (512, 9, 30_522)}
"""Hidden size, layers and vocabulary: 1 MB and 90 MB."""


def layout_of(case: Case, size_bytes: int) -> files.Layout:
    """Give the tensors of a case of loading or saving."""
    if case.layout == "model":
        return files.llama_layout(size_bytes)
    return files.bert_layout(case.layout, *_LAYOUTS[case.layout])


def data_bytes(case: Case, size_bytes: int) -> int:
    """Give the bytes of data that one operation of a case is about."""
    if case.layout == "matrix":
        return ROWS * 4
    if case.layout == "state":
        return NUM_PARAMETERS * (2 * _ELEMENTS + 1) * 4
    return layout_of(case, size_bytes).data_bytes


def write_matrix(path: Path) -> None:
    """Write a file with one matrix of F32."""
    nbytes = ROWS * ROWS * 4
    entry = {MATRIX: {"dtype": "F32", "shape": [ROWS, ROWS], "data_offsets": [0, nbytes]}}
    text = json.dumps(entry, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(_STATE_SEED).random((ROWS, ROWS), np.float32)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(numbers.data)


def make_state() -> dict[str, Any]:
    """Make a state as AdamW's: a step and two moments a parameter, each tensor in memory of its own."""
    import torch

    torch.manual_seed(_STATE_SEED)
    return {
        "state": {
            number: {
                "step": torch.tensor(float(number)),
                "exp_avg": torch.randn(_ELEMENTS),
                "exp_avg_sq": torch.rand(_ELEMENTS),
            }
            for number in range(NUM_PARAMETERS)
        },
        "param_groups": [
            {
                "lr": 3e-4,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "weight_decay": 0.1,
                "amsgrad": False,
                "maximize": False,
                "foreach": None,
                "capturable": False,
                "differentiable": False,
                "fused": None,
                "params": list(range(NUM_PARAMETERS)),
            }
        ],
    }


_SIDES = (Entry("stio"), Entry("official"))
_SAVERS = (Entry("stio"), Entry("official-fsync"), Entry("official-atomic"), Entry("official", rounds=3))

CASES: tuple[Case, ...] = (
    *(
        Case(f"load-{size}", f"load_file of {size}", _SIDES, rounds=5, layout=layout, state="load")
        for size, layout in (("1MB", "small"), ("90MB", "middle"), ("1.7GB", "model"))
    ),
    *(
        Case(f"save-{size}", f"save_file of {size}, to a fresh path", _SAVERS, rounds=5, layout=layout, state="save")
        for size, layout in (("1MB", "small"), ("90MB", "middle"), ("1.7GB", "model"))
    ),
    Case(
        "slice",
        f"one row of a matrix [{ROWS}, {ROWS}] of F32, warm",
        (*(Entry(name) for name in ("stio", "stio-pread", "official-pread")), Entry("official", rounds=3)),
        rounds=5,
        layout="matrix",
        state="slice",
    ),
    Case(
        "state",
        f"an optimizer's state of {NUM_PARAMETERS:,} parameters, {3 * NUM_PARAMETERS:,} tensors",
        (Entry("stio-state"), Entry("torch-state")),
        rounds=5,
        layout="state",
        state="state",
    ),
)
