"""Two ranks of Lightning on the CPU, each with a dropout of its own: `python -m integrations.lightning_ranks DIRECTORY`.

A resumed training must end with the weights of an undisturbed one.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from integrations.lightning_case import Small, loader
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from stio import sync
from stio.integrations.lightning import StioCheckpointIO


class OwnSeeds(Callback):
    """Gives each rank generators of its own, at the beginning of a training that is not resumed."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.ckpt_path:
            torch.manual_seed(100 + trainer.global_rank)


def train(directory: Path, epochs: int) -> None:
    seed_everything(0, verbose=False)
    found = sorted(directory.glob("*.ckpt"))
    Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        max_epochs=epochs,
        plugins=[StioCheckpointIO()],
        callbacks=[ModelCheckpoint(directory, save_top_k=-1), OwnSeeds()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Small(), loader(shuffle=True), ckpt_path=found[-1] if found else None)


def result(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = sync.load_state(max(directory.glob("*.ckpt")))
    return state


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train(directory / "whole", 4)
    train(directory / "parts", 2)
    train(directory / "parts", 4)
    whole, parts = result(directory / "whole"), result(directory / "parts")
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(tensor, parts["state_dict"][name]), name
    ranks = whole["stio.random"]
    assert not torch.equal(ranks[0]["torch"], ranks[1]["torch"])
    assert all(
        torch.equal(one["torch"], other["torch"]) for one, other in zip(ranks, parts["stio.random"], strict=True)
    )
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
