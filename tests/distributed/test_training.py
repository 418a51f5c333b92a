"""Trainings of FSDP2 that are killed, and go on from the newest checkpoint, on as many ranks or on others."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stio import sync

NUM_STEPS = 20
BATCH_ROWS = 24
"""Rows of the batch of all ranks together: 1, 2, 3 and 4 ranks have equal shares."""
KILLED_FROM = 8
"""First step whose checkpoint lets the ranks be killed."""


class Training:
    """A tiny model on the ranks below a number. Each step has the same batch on any number of ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.group = dist.new_group(list(range(num_ranks)))
        self.num_ranks = num_ranks
        self.is_member = dist.get_rank() < num_ranks
        self.step = 0
        mesh = DeviceMesh("cpu", torch.arange(num_ranks))  # all ranks have to make it
        if not self.is_member:
            return
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.LayerNorm(29), nn.Linear(29, 31), nn.Linear(31, 3))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def take_step(self) -> None:
        self.step += 1
        rows = torch.randn(BATCH_ROWS, 13, generator=torch.Generator().manual_seed(self.step))
        own = rows.chunk(self.num_ranks)[dist.get_rank()]
        loss = (self.model(own) - own[:, :3].sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"step": self.step, "model": model, "optimizer": optimizer}

    def save_and_train(self, folder: str, until: int) -> None:
        """Train, and save every second step while the training goes on."""
        with sync.distributed.Saver(keep_last=2, process_group=self.group) as saver:
            while self.step < until:
                self.take_step()
                if self.step % 2 == 0:
                    saver.save_state(self.state(), f"{folder}/step-{self.step}")

    def resume(self, folder: str) -> int:
        """Go on from the newest checkpoint; return its step."""
        state = self.state()
        sync.distributed.load_into(state, newest(folder), process_group=self.group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]
        return self.step

    def weights(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, weight in self.model.state_dict().items():
            assert isinstance(weight, DTensor)
            found[name] = weight.full_tensor()
        return found


def newest(folder: str) -> str:
    steps = [int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-")]
    return f"{folder}/step-{max(steps)}"


# Run by each rank.


def train_until_killed(folder: str, num_ranks: int, moment: float) -> None:
    """Train on all ranks but the last, which kills them at a moment after a checkpoint of theirs is durable."""
    training = Training(num_ranks)
    if training.is_member:
        Path(folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        training.save_and_train(f"{folder}/run", NUM_STEPS)
        signal.pause()
    while not os.path.exists(f"{folder}/run/step-{KILLED_FROM}"):
        time.sleep(0.001)
    time.sleep(moment)
    for rank in range(num_ranks):
        os.kill(int(Path(folder, f"{rank}.pid").read_text()), signal.SIGKILL)


def go_on(folder: str, num_ranks: int, others: Sequence[int]) -> dict[str, Any]:
    """Return the weights of a whole training, and of those that go on from the killed one."""
    whole = Training(num_ranks)
    if whole.is_member:
        while whole.step < NUM_STEPS:
            whole.take_step()
    found: dict[str, Any] = {"whole": whole.weights() if whole.is_member else None}
    for k in (num_ranks, *others):
        dist.barrier()
        training = Training(k)
        if training.is_member:
            if dist.get_rank() == 0:
                shutil.copytree(f"{folder}/run", f"{folder}/run-{k}")  # with what the killed save has left
            dist.barrier(training.group)
            begun = training.resume(f"{folder}/run-{k}")
            assert KILLED_FROM <= begun <= NUM_STEPS
            training.save_and_train(f"{folder}/run-{k}", NUM_STEPS)
            found[f"on {k}"] = training.weights()
    return found


# Tests.


def kill_and_go_on(folder: Path, num_ranks: int, others: Sequence[int], moment: float = 0.0) -> None:
    run_ranks(train_until_killed, num_ranks + 1, folder, str(folder), num_ranks, moment, killed=range(num_ranks))
    results = run_ranks(go_on, max(num_ranks, *others), folder, str(folder), num_ranks, others)
    found = results[0]
    for name, expected in found["whole"].items():
        assert torch.equal(found[f"on {num_ranks}"][name], expected), name
        for k in others:
            difference = (found[f"on {k}"][name] - expected).norm() / expected.norm()
            assert difference <= 1e-5, (k, name, difference)
    for k in (num_ranks, *others):
        names = os.listdir(folder / f"run-{k}")
        assert f"step-{NUM_STEPS}" in names
        assert not [name for name in names if not name.startswith("step-")]  # nothing of the killed save


@pytest.mark.slow
def test_killed_on_two_ranks(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, 2, [3])


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.01, 0.03, 0.1, 0.3])
def test_killed_on_four_ranks(tmp_path: Path, moment: float) -> None:
    kill_and_go_on(tmp_path, 4, [2, 1], moment)
