"""Lightning with FSDP2 on the CPU, in processes that are forked: `python -m integrations.lightning_sharded DIRECTORY`.

A training that is stopped and resumed ends with the weights of an undisturbed one: bit for bit in as many processes,
within 1e-5 in others.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from integrations.failing_ranks import fork_ranks, no_disk
from integrations.lightning_case import loader
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import stio
from stio.integrations import lightning
from stio.integrations.lightning import StioModelParallelStrategy
from stio.storage.commit import syscalls as calls

NUM_EPOCHS = 4
ROWS = 8
"""Rows of all processes together in a step; the data has two steps."""


class Sharded(LightningModule):
    """Two layers on the mesh of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 1))

    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            for module in [*self.layers, self.layers]:
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)]


class AtEpoch(Callback):
    """Calls a function at the end of an epoch."""

    def __init__(self, act: Callable[[int], object]) -> None:
        self._act = act

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._act(trainer.current_epoch)


def quiet(directory: Path, strategy: StioModelParallelStrategy, **arguments: Any) -> Trainer:
    arguments = {"devices": 2, "enable_checkpointing": "callbacks" in arguments} | arguments
    return Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def train(
    directory: Path, num_ranks: int, epochs: int, begun: Path | None = None, act: Callable[[int], object] = abs
) -> dict[str, torch.Tensor]:
    module = Sharded()
    data: DataLoader[Any] = DataLoader(loader().dataset, batch_size=ROWS // num_ranks)
    trainer = quiet(
        directory,
        StioModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1),
        devices=num_ranks,
        max_epochs=epochs,
        callbacks=[
            AtEpoch(act),
            ModelCheckpoint(directory, "{epoch}", every_n_epochs=1, save_top_k=2, monitor="epoch", mode="max"),
        ],
    )
    trainer.fit(module, data, ckpt_path=begun)
    found = {}
    for name, weight in module.state_dict().items():
        assert isinstance(weight, DTensor)
        found[name] = weight.full_tensor()
    return found


def in_two(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole = train(directory / "whole", 2, NUM_EPOCHS)
    names = [f"epoch={number}.ckpt" for number in (NUM_EPOCHS - 2, NUM_EPOCHS - 1)]
    assert sorted(os.listdir(directory / "whole")) == names
    state = stio.sync.load_state(directory / "whole" / names[-1])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in state["state_dict"].items())
    assert len(state["stio.random"]) == 2
    train(directory / "parts", 2, 2)
    resumed = train(directory / "parts", 2, NUM_EPOCHS, directory / "parts" / "epoch=1.ckpt")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())
    assert sorted(os.listdir(directory / "parts")) == ["epoch=1.ckpt", *names]  # Lightning keeps where it has begun
    if rank == 0:
        torch.save(whole, directory / "whole.pt")

    # The disk of one process fails: both raise it, and the checkpoint before it stays.
    plain = calls.fsync

    def fail(epoch: int) -> None:
        if epoch == 2 and rank == 1:
            calls.fsync = no_disk

    try:
        train(directory / "failed", 2, NUM_EPOCHS, act=fail)
        raise AssertionError("no error")
    except stio.StioError as error:
        assert "Input/output error" in str(error), error
    calls.fsync = plain
    torch.distributed.barrier()
    assert sorted(os.listdir(directory / "failed")) == ["epoch=0.ckpt", "epoch=1.ckpt"]


def strange(directory: Path, rank: int) -> None:
    """What one process cannot send, cannot read, or cannot delete, is an error on both; the caller's dict is its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    strategy = StioModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    trainer = quiet(directory / "strange", strategy, max_epochs=1)
    trainer.fit(Sharded(), DataLoader(loader().dataset, batch_size=4))
    sharded, path = strategy.lightning_module_state_dict(), str(directory / "strange.ckpt")
    checkpoint = {"state_dict": sharded, "hyper_parameters": {"f": print if rank == 0 else None}}
    error = raised(lambda: strategy.save_checkpoint(checkpoint, path), TypeError)
    assert "state['hyper_parameters']['f'] is a builtin_function_or_method" in str(error), error
    checkpoint["hyper_parameters"] = {"f": rank}
    strategy.save_checkpoint(checkpoint, path)
    assert checkpoint["state_dict"] is sharded
    strategy.checkpoint_io.collect()
    saved = stio.sync.load_state(path)
    assert saved["hyper_parameters"] == {"f": 0}
    assert all(torch.equal(saved["state_dict"][name], tensor.full_tensor()) for name, tensor in sharded.items())

    plain = lightning._remove
    lightning._remove = no_disk
    with strategy.checkpoint_io.beside_training(path + "-next"):
        strategy.save_checkpoint(checkpoint, path + "-next")
    with strategy.checkpoint_io.beside_training(path):
        if rank == 0:
            strategy.remove_checkpoint(path)
    raised(lambda: strategy.save_checkpoint(checkpoint, path + "-last"), OSError)
    lightning._remove = plain
    strategy.save_checkpoint(checkpoint, path + "-last")
    strategy.checkpoint_io.collect()

    if rank == 1:
        lightning.load_state = no_disk
    raised(lambda: strategy.load_checkpoint(path + "-last"), OSError)
    strategy.teardown()


def raised(act: Callable[[], object], kind: type[Exception]) -> Exception:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError("no error")


def goes_on(directory: Path, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = train(directory / f"on-{num_ranks}", num_ranks, NUM_EPOCHS, directory / "begun.ckpt")
    for name, expected in torch.load(directory / "whole.pt").items():
        assert (found[name] - expected).norm() <= 1e-5 * expected.norm(), name


def main(directory: Path) -> int:
    failed = fork_ranks(partial(in_two, directory), 2) or fork_ranks(partial(strange, directory), 2)
    if not failed:
        os.link(directory / "failed" / "epoch=1.ckpt", directory / "begun.ckpt")
        failed = fork_ranks(partial(goes_on, directory, 4), 4)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
