"""`examples/train.py` as a case for `integrations.kills`."""

from __future__ import annotations

import sys
from pathlib import Path

from checkout import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "examples"))

import train as example  # from there

NUM_STEPS = 40
SAVE_EVERY = 3


def train(directory: Path) -> None:
    example.main(directory, num_steps=NUM_STEPS, save_every=SAVE_EVERY)


def result(directory: Path) -> dict[str, bytes]:
    # The last checkpoint holds the optimizer and the generator too.
    names = ["model.safetensors", f"step-{NUM_STEPS:08}.safetensors"]
    return {name: (directory / name).read_bytes() for name in names}
