"""A tiny module under Lightning's Trainer; a case for kills too, with a checkpoint after each epoch."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stio import sync
from stio.integrations.lightning import StioCheckpointIO

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

STEPS_PER_EPOCH = 4
NUM_STEPS = 4 * STEPS_PER_EPOCH


class Small(LightningModule):
    """Two layers, dropout, an optimizer with a state, and a schedule."""

    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)]


class Validated(Small):
    """The same, with a validation after each epoch."""

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    inputs = torch.randn(4 * STEPS_PER_EPOCH, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=shuffle)


def make_trainer(
    directory: Path, plugin: Any, *callbacks: Callback, epochs: int = NUM_STEPS // STEPS_PER_EPOCH, **keywords: Any
) -> Trainer:
    return Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        plugins=[plugin],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **keywords,
    )


class Telling(Callback):
    """Prints steps."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        print(f"step {trainer.global_step}")


def train(directory: Path) -> None:
    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    found = sorted(directory.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2].partition("-")[0]))
    # Lightning does not restore the place in an epoch's data: a checkpoint at the end of each.
    saving = ModelCheckpoint(directory, save_top_k=1)
    trainer = make_trainer(directory, StioCheckpointIO(), Telling(), saving)
    trainer.fit(Small(), loader(shuffle=True), ckpt_path=found[-1] if found else None)


def result(directory: Path) -> dict[str, bytes]:
    last = max(directory.glob(f"*step={NUM_STEPS}*.ckpt"))
    return {name: tensor.numpy().tobytes() for name, tensor in sync.load(last).items() if "callbacks" not in name}
