"""The same training, but what the random generator was set to is forgotten: `integrations.kills` must notice."""

from __future__ import annotations

from pathlib import Path

import torch
from integrations import plain_case
from integrations.plain_case import NUM_STEPS, result

__all__ = ["NUM_STEPS", "result", "train"]


def train(directory: Path) -> None:
    torch.set_rng_state = lambda _: None  # in a process of its own
    plain_case.train(directory)
