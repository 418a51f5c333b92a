"""Trainings of transformers' Trainer under FSDP2 in several processes; run: `python -m integrations.fsdp_ranks DIRECTORY`.

The model has no dropout, so that trainings in other numbers of processes are comparable.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from integrations.failing_ranks import fork_ranks, no_disk
from integrations.fsdp_case import FSDP, allow_fsdp_on_cpu
from integrations.trainer_case import WEIGHTS, AtStep, make_model, make_trainer
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import GPT2LMHeadModel, Trainer

import stio
from stio.integrations._training import set_optimizer_state
from stio.integrations.transformers import StioCallback, latest_checkpoint
from stio.storage.commit import syscalls as calls

NUM_STEPS = 12
ROWS = 8
"""Rows of all processes together in a step."""


class Stop(Exception):
    """What stops a training in the middle."""


def stop(step: int) -> None:
    if step == 5:
        raise Stop


def make(
    directory: Path, num_ranks: int, act: Callable[[int], object] = lambda step: None, **arguments: Any
) -> Trainer:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    together = {"ddp_backend": "gloo", **FSDP} if num_ranks > 1 else {}
    return make_trainer(
        directory,
        [AtStep(act)],
        make_model(**dropout),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=ROWS // num_ranks,
        dataloader_drop_last=True,  # so each step has the same rows in any number of processes
        **{**together, **arguments},
    )


def whole_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in trainer.model.state_dict().items():
        assert isinstance(tensor, DTensor) == (trainer.args.world_size > 1), name
        found[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def in_two(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    allow_fsdp_on_cpu()
    whole = make(directory / "whole", 2)
    StioCallback(keep_last=2).resume(whole)
    assert whole.is_fsdp_enabled
    assert sorted(path.name for path in (directory / "whole").iterdir()) == ["checkpoint-10", f"checkpoint-{NUM_STEPS}"]
    weights, last = whole_of(whole), directory / "whole" / f"checkpoint-{NUM_STEPS}"
    # The files are those that any program reads.
    read = GPT2LMHeadModel.from_pretrained(last)
    assert type(read).__name__ in read.config.architectures
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert set(load_file(last / WEIGHTS)) < set(weights)  # a tied one is there once

    raised(partial(StioCallback().resume, make(directory / "stopped", 2, stop)), Stop)
    torch.distributed.barrier()
    resumed = make(directory / "stopped", 2)
    StioCallback(directory / "stopped").resume(resumed)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole_of(resumed).items())

    # The disk of one process fails: both raise it, and the checkpoint before it stays.
    for failing in (0, 1):
        plain = calls.fsync
        where = directory / f"failed-{failing}"

        def fail(step: int, where: Path = where, failing: int = failing) -> None:
            if step == 3 and rank == failing:
                while not (where / "checkpoint-2").exists():
                    time.sleep(0.001)
                calls.fsync = no_disk

        error = raised(partial(StioCallback().resume, make(where, 2, fail)))
        calls.fsync = plain
        assert "Input/output error" in str(error), error
        torch.distributed.barrier()
        assert latest_checkpoint(where) == str(where / "checkpoint-2")
        assert [path.name for path in where.iterdir()] == ["checkpoint-2"]

    # Activation checkpointing wraps the layers that are sharded.
    config = {"fsdp_config": {"version": 2, "activation_checkpointing": True}}
    wrapped = make(directory / "wrapped", 2, **config)
    StioCallback().resume(wrapped)
    assert any(type(module).__name__.endswith("CheckpointWrapper") for module in wrapped.model.modules())
    raised(partial(StioCallback().resume, make(directory / "wrapped-parts", 2, stop, **config)), Stop)
    torch.distributed.barrier()
    resumed = make(directory / "wrapped-parts", 2, **config)
    StioCallback().resume(resumed)
    expected = whole_of(wrapped)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_of(resumed).items())

    # The best one is loaded at the end, and no limit deletes it.
    trainer = make(
        directory / "best",
        2,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=True,
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    StioCallback().resume(trainer)
    best = stio.sync.load(directory / "best" / "checkpoint-2")
    assert trainer.state.best_model_checkpoint == str(directory / "best" / "checkpoint-2")
    assert all(torch.equal(tensor, best.get(name, tensor)) for name, tensor in whole_of(trainer).items())

    # What has not the shape of its parameter, as the factors of Adafactor, is refused.
    saved = stio.sync.load_state(last / "training_state")["optimizer"]
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].sum(1)
    error = raised(partial(set_optimizer_state, whole.optimizer, saved), stio.MismatchError)
    assert "'exp_avg' of parameter 0" in str(error)

    # Without `resume` Trainer would read files of accelerate.
    trainer = make(directory / "refused", 2)
    trainer.add_callback(StioCallback())
    assert "resume(trainer)" in str(raised(trainer.train, ValueError))


def raised(act: Callable[[], object], kind: type[Exception] = stio.StioError) -> Exception:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError("no error")


def goes_on(directory: Path, num_ranks: int, begun: Path, rank: int = 0) -> None:
    """Go on from the checkpoint of another number of processes."""
    torch.set_num_threads(1)
    allow_fsdp_on_cpu()
    steps: list[int] = []
    trainer = make(directory / f"on-{num_ranks}", num_ranks, steps.append)
    StioCallback().resume(trainer, begun)
    assert steps == list(range(1 + int(begun.name.removeprefix("checkpoint-")), NUM_STEPS + 1))
    expected = stio.sync.load(directory / "whole" / f"checkpoint-{NUM_STEPS}", memory="copy")
    for name, tensor in whole_of(trainer).items():
        if name in expected:
            for one in (tensor, expected[name]) if name.endswith("attn.c_attn.bias") else ():
                # A bias of the keys has no gradient but errors of rounding, and AdamW makes whole steps of them.
                one[one.numel() // 3 : 2 * one.numel() // 3] = 0
            difference = (tensor - expected[name]).norm() / expected[name].norm()
            assert difference <= 1e-5, (name, difference)


def main(directory: Path) -> int:
    begun = directory / "stopped" / "checkpoint-4"
    failed = fork_ranks(partial(in_two, directory), 2)
    failed = failed or fork_ranks(partial(goes_on, directory, 4, begun), 4)
    if not failed:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
        goes_on(directory, 1, begun)
        # What one process without FSDP has saved goes on under FSDP2.
        failed = fork_ranks(partial(goes_on, directory, 2, directory / "on-1" / "checkpoint-6"), 2)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
