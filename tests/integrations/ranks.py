"""Two processes that train together by transformers' Trainer on the CPU; run in each: `python -m integrations.ranks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from integrations.trainer_case import AtStep, make_trainer
from transformers import Trainer, TrainerCallback

from stio.integrations.transformers import StioCallback


class Stop(Exception):
    """What stops all processes in the middle."""


def stop(step: int) -> None:
    if step == 3:
        raise Stop


def make(directory: Path, callbacks: list[TrainerCallback]) -> Trainer:
    trainer = make_trainer(directory, callbacks, save_steps=2, ddp_backend="gloo")
    torch.manual_seed(100 + trainer.args.process_index)  # a dropout of its own for each process
    return trainer


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    whole = make(directory / "whole", [StioCallback()])
    assert whole.args.world_size == 2
    whole.train()
    callback = StioCallback()
    try:
        callback.resume(make(directory / "stopped", [callback, AtStep(stop)]))
    except Stop:
        torch.distributed.barrier()
    resumed = make(directory / "stopped", [])
    StioCallback().resume(resumed)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    torch.distributed.barrier()
    print(f"rank {whole.args.process_index}: {resumed.state.global_step} steps", flush=True)
    os._exit(0)  # the end of gloo's threads, at a regular exit, sometimes waits for ever


if __name__ == "__main__":
    main(Path(sys.argv[1]))
