"""Files of trainings of Lightning with stio and without: `python -m integrations.lightning_files --count 20 --seed 0`.

Each training runs twice, with random arguments of `ModelCheckpoint`: with Lightning's own plugin, and with stio's, whose
saves take so long that several steps pass. Both must leave the same names, links, and contents.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from integrations.lightning_case import Validated, loader, make_trainer
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from stio.conversion.torch_files import kind_of_file
from stio.format.files.other_kinds import _TORCH_SAVE
from stio.integrations.lightning import StioCheckpointIO
from stio.storage.commit import syscalls as calls

ROOT_NAME = "DIRECTORY"
"""Stands for the directory of a training in the paths of its checkpoints."""


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a training."""

    callbacks: list[dict[str, Any]]
    """The keywords of each `ModelCheckpoint`; `dirpath` is relative."""
    trainer: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Whether a second training of the same callbacks goes on from the last file."""


class Exact(Validated):
    """Without dropout: stio restores the random generators, and Lightning does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].p = 0.0


def random_case(seed: int) -> Case:
    numbers = random.Random(seed)
    callbacks = [_random_keywords(numbers) for _ in range(numbers.choice([1, 2, 2, 3]))]
    keys = set()
    for keywords in callbacks:  # Lightning requires that their states have different keys
        key = [keywords.get(name) for name in ("monitor", "mode", "every_n_train_steps", "every_n_epochs")]
        while str(key) in keys:
            keywords["every_n_epochs"] = key[3] = (key[3] or 0) + 1
            keywords.pop("every_n_train_steps", None)
            key[2] = None
        keys.add(str(key))
    trainer = numbers.choice([{}, {}, {"val_check_interval": 0.5}, {"check_val_every_n_epoch": 2}])
    weights_only = any(keywords["save_weights_only"] for keywords in callbacks)  # no training goes on from these
    return Case(callbacks, trainer, resumes=not weights_only and numbers.random() < 0.5)


def _random_keywords(numbers: random.Random) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "dirpath": numbers.choice([None, "c", "c", "d"]),
        "save_last": numbers.choice([None, False, True, True, "link"]),
        "filename": numbers.choice([None, None, "best", "{epoch}", "{val:.1f}", "{epoch}-{loss:.0f}", "a/{step}"]),
        "save_on_train_epoch_end": numbers.choice([None, None, True, False]),
        "save_weights_only": numbers.random() < 0.2,
        "enable_version_counter": numbers.random() < 0.9,
    }
    if numbers.random() < 0.6:
        keywords |= {"monitor": numbers.choice(["val", "loss"]), "mode": numbers.choice(["min", "max"])}
        keywords["save_top_k"] = numbers.choice([1, 1, 2, 3, -1])
    else:
        keywords["save_top_k"] = numbers.choice([0, 1, 1, -1])
    if numbers.random() < 0.5:
        keywords["every_n_train_steps"] = numbers.choice([1, 2, 3])
    else:
        keywords["every_n_epochs"] = numbers.choice([1, 1, 2])
    return keywords


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Let each file become durable only after a time, on threads of saves; saves that training waits for too."""
    plain = calls.fsync

    def fsync(fd: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        plain(fd)

    calls.fsync = fsync
    try:
        yield
    finally:
        calls.fsync = plain


def train(directory: Path, plugin: Any, case: Case, epochs: int = 4) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(2 if case.resumes else 1):
            seed_everything(3, verbose=False)
            callbacks = []
            for keywords in case.callbacks:
                place = keywords.get("dirpath")
                callbacks.append(ModelCheckpoint(**keywords | {"dirpath": place and directory / place}))
            last = max(directory.rglob("last*.ckpt"), key=lambda path: path.name, default=None) if number else None
            trainer = make_trainer(directory, plugin, *callbacks, epochs=epochs + 2 * number, **case.trainer)
            trainer.fit(Exact(), loader(), loader(), ckpt_path=last)


def found(directory: Path) -> dict[str, Any]:
    """Return all links and checkpoints below a directory, by path."""
    result: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            result[name] = os.readlink(path)
        elif path.is_file():
            result[name] = _content(path, directory)
    return result


def _content(path: Path, directory: Path) -> Any:
    if kind_of_file(str(path)) == _TORCH_SAVE:
        state = torch.load(path, weights_only=False)
    else:  # pickle would read text of the header as a size, and allocate 10 GB
        state = StioCheckpointIO().load_checkpoint(path)
        state.pop("stio.random", None)
    return _comparable(state, str(directory))


def _comparable(value: Any, directory: str) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {_comparable(key, directory): _comparable(item, directory) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item, directory) for item in value]
    return value.replace(directory, ROOT_NAME) if isinstance(value, str) else value


def difference(case: Case, directory: Path, seconds: float = 0.03) -> str | None:
    """Return what differs between both trainings, None if nothing does."""
    train(directory / "own", TorchCheckpointIO(), case)
    with slow_disk(seconds):
        train(directory / "stio", StioCheckpointIO(), case)
    own, other = found(directory / "own"), found(directory / "stio")
    if own.keys() != other.keys():
        return f"Lightning leaves {sorted(own)}, stio {sorted(other)}"
    different = [name for name in own if own[name] != other[name]]
    return f"other contents: {different}" if different else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_files = num_different = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        with tempfile.TemporaryDirectory() as directory:
            try:
                differs = difference(random_case(seed), Path(directory))
            except Exception as error:
                differs = f"{type(error).__name__}: {error}"
            num_files += len(found(Path(directory) / "stio"))
        if differs:
            num_different += 1
            print(f"seed {seed}: {random_case(seed)}\n  {differs}")
    print(f"{arguments.count} trainings left {num_files} files, {num_different} differ from Lightning's own")
    return 1 if num_different or not num_files else 0


if __name__ == "__main__":
    sys.exit(main())
