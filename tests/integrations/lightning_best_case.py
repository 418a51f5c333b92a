"""A training of Lightning that keeps its two best checkpoints, as a case for `integrations.kills`."""

from __future__ import annotations

import warnings
from pathlib import Path

from integrations.lightning_case import STEPS_PER_EPOCH, Telling, Validated, loader, make_trainer
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from stio import sync
from stio.integrations.lightning import StioCheckpointIO

NUM_EPOCHS = 6
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
NUM_KEPT = 2


def train(directory: Path) -> None:
    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    found = sorted(directory.glob("epoch=*.ckpt"))  # of one digit
    saving = ModelCheckpoint(directory, "{epoch}-{val:.6f}", monitor="val", save_top_k=NUM_KEPT)
    trainer = make_trainer(directory, StioCheckpointIO(), Telling(), saving, epochs=NUM_EPOCHS)
    trainer.fit(Validated(), loader(shuffle=True), loader(), ckpt_path=found[-1] if found else None)


def result(directory: Path) -> dict[str, bytes]:
    """Return the weights of the best checkpoints, and read the others, if a kill came before a removal, to the end."""
    by_value = sorted(directory.glob("epoch=*.ckpt"), key=lambda path: float(path.stem.partition("val=")[2]))
    states = {path.name: sync.load_state(path) for path in by_value}
    return {
        f"{name}/{key}": tensor.numpy().tobytes()
        for name in list(states)[:NUM_KEPT]
        for key, tensor in states[name]["state_dict"].items()
    }
