"""A tiny model under transformers' Trainer, with dropout, shuffling, a schedule and evaluation; a case for kills too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from stio.integrations.transformers import StioCallback

logging.set_verbosity_error()
logging.disable_progress_bar()

STEPS_PER_EPOCH = 5
NUM_STEPS = 2 * STEPS_PER_EPOCH
WEIGHTS = "model.safetensors"


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Twenty rows of numbers."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 32, (20, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model(**config: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # Its output is tied to its input; dropout is on.
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, **config))


def make_trainer(
    directory: Path, callbacks: list[TrainerCallback], model: torch.nn.Module | None = None, **arguments: Any
) -> Trainer:
    """Make a trainer of two epochs of five steps."""
    defaults = {"save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "seed": 7}
    arguments = defaults | {"per_device_train_batch_size": 4} | arguments
    settings = TrainingArguments(
        str(directory),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    data = Sentences()
    return Trainer(
        make_model() if model is None else model, settings, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )


class AtStep(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        self._act(state.global_step)


def train(directory: Path) -> None:
    callback = StioCallback(keep_last=2)
    trainer = make_trainer(directory, [callback, AtStep(lambda step: print(f"step {step}"))])
    callback.resume(trainer)


def result(directory: Path) -> dict[str, bytes]:
    last = directory / f"checkpoint-{NUM_STEPS}"
    names = [WEIGHTS, "training_state/state.safetensors", "config.json"]
    return {name: (last / name).read_bytes() for name in names}
