"""Two processes that train together under transformers' Trainer (DDP, gloo), as a case for `integrations.kills`."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path
from typing import Any

import torch
from integrations.trainer_case import WEIGHTS, AtStep, make_trainer

from stio.integrations.transformers import StioCallback

NUM_STEPS = 6
"""Twenty rows are three steps of two processes with four rows each."""


def train(directory: Path) -> None:
    train_in_two(directory)


def train_in_two(directory: Path, **arguments: Any) -> None:
    """Fork the second process; raise an error if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = os.fork()
    if not child:
        code = 1
        try:
            _train(directory, 1, arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _train(directory, 0, arguments)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"the second process ended with {os.waitstatus_to_exitcode(status)}")


def _train(directory: Path, rank: int, arguments: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    callback = StioCallback(keep_last=2)
    show = AtStep(lambda step: print(f"step {step}", flush=True) if rank == 0 else None)
    trainer = make_trainer(directory, [callback, show], save_steps=1, ddp_backend="gloo", **arguments)
    torch.manual_seed(100 + rank)  # a dropout of its own for each process
    callback.resume(trainer)
    # The process group is not destroyed: the end of gloo's threads sometimes waits for ever.


def result(directory: Path) -> dict[str, bytes]:
    last = directory / f"checkpoint-{NUM_STEPS}"
    names = [WEIGHTS, "training_state/state.safetensors", "config.json"]
    return {name: (last / name).read_bytes() for name in names}
