"""Train a small model. Kill it at any time and start it again: it ends with the same weights, bit for bit.

    python examples/train.py out/

Every few steps the whole state of the training is saved to one file: the weights, the optimizer, the scheduler, the
random generator, and the number of the step, which determines the position in the data. The file appears when it is
complete. It is written while training continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stio.sync

SEED = 20


def main(directory: Path, *, num_steps: int, save_every: int) -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    done = 0  # steps

    directory.mkdir(parents=True, exist_ok=True)
    checkpoints = sorted(directory.glob("step-*.safetensors"))
    if checkpoints:
        state = stio.sync.load_state(checkpoints[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])  # dropout uses it
        done = state["done"]
        print(f"resumed after step {done}", flush=True)
    for old in checkpoints[:-1]:
        old.unlink()  # the saver deletes its own checkpoints only; these are from a process that was killed

    with stio.sync.Saver(keep_last=2) as saver:  # the end of the block waits until the last save is durable
        for inputs, targets in batches(first=done, last=num_steps):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            done += 1
            print(f"step {done}: loss {loss.item():.6f}", flush=True)
            if done % save_every == 0 or done == num_steps:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "random": torch.get_rng_state(),
                    "done": done,
                }
                saver.save_state(state, directory / f"step-{done:08}.safetensors")  # returns with the snapshot

    stio.sync.save(model, directory / "model.safetensors")


def batches(*, first: int, last: int) -> Iterator[list[torch.Tensor]]:
    """Yield the batches of some steps, counted over all epochs. The number of the epoch determines their order."""
    numbers = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(500, 16, generator=numbers)
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    order = torch.Generator()
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=order)
    step = first
    while step < last:
        epoch, skipped = divmod(step, len(loader))
        order.manual_seed(SEED + epoch)
        for batch in islice(loader, skipped, skipped + last - step):
            yield batch
            step += 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="for checkpoints, and at the end for model.safetensors")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    main(options.directory, num_steps=options.steps, save_every=options.save_every)
