"""Lightning's checkpoints without pickle, written while the training goes on.

    trainer = Trainer(plugins=[StioCheckpointIO()], callbacks=[ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(module, data)
    trainer.fit(module, data, ckpt_path="last")

The dict that Lightning makes becomes nested state, one file for each checkpoint, under the name that Lightning gives it
(`.ckpt`). Lightning removes old checkpoints as soon as it has asked for a new one; here that waits until the new one
is durable, so a process that is killed at any moment leaves a whole checkpoint behind.
"""

from __future__ import annotations

import os
from typing import Any, Unpack

import torch
from lightning.pytorch.plugins import CheckpointIO

from stio.errors import FormatError, StioError
from stio.integrations._tagged import from_plain, to_plain
from stio.saving.options import SaveKeywords
from stio.saving.pending import PendingSave
from stio.storage.commit.retention import remove_checkpoint
from stio.storage.commit.target import OneFile
from stio.sync import Saver, load_state, save_state

__all__ = ["StioCheckpointIO"]


class StioCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and loads Lightning's checkpoints; give it to the Trainer, `plugins=[StioCheckpointIO()]`.

    A checkpoint is what `stio.load_state` loads, with paths, sets, namespaces, default dicts and numpy's arrays and
    scalars as tagged dicts. Loading restores those and executes nothing. What is of another type, an enum or an
    object among the hyperparameters say, is refused by its path before anything is written.

    Asynchronous, a save returns when its snapshot is complete. One that failed is raised by the next call, the end of
    `fit` at the latest, which waits for what is under way. A link to the last checkpoint (`save_last="link"`) leads
    nowhere until that is durable; `save_last=True` has no such moment.

    For strategies that write one file, from one process: a single device, DDP. Paths are local. Checkpoints of
    `torch.save` are not read, and `load_from_checkpoint`, which goes past this class, does not read these: load the
    weights by `module.load_state_dict(stio.sync.load_state(path)["state_dict"])`.

    Args:
        asynchronous: Whether training goes on while a checkpoint is written.
        budget_bytes: See `stio.Saver`.
        **keywords: See `SaveKeywords`.

    Raises:
        TypeError: A keyword of `stio.save` that is wrong.
        ValueError: A keyword's value that is wrong.
    """

    def __init__(
        self, *, asynchronous: bool = True, budget_bytes: int | None = None, **keywords: Unpack[SaveKeywords]
    ) -> None:
        super().__init__()
        self._asynchronous = asynchronous
        self._budget_bytes = budget_bytes
        self._keywords = keywords
        self._saver: Saver | None = None
        self._new_saver().close()  # raises for what is wrong
        self._under_way: list[tuple[PendingSave, list[str]]] = []
        """Saves, and what is to be removed when they are durable; oldest first."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: What Lightning made.
            path: Where to; missing directories are made.
            storage_options: Not supported.

        Raises:
            TypeError: It holds what nested state does not; the message names the path. Or there are storage options.
            ValueError: The path is a URL.
            StioError: This save failed, or an earlier one and nobody was told.
        """
        if storage_options is not None:
            raise TypeError("StioCheckpointIO takes no storage_options; give keywords of stio.save to the class")
        file = _local(path)
        self._settle()
        for _, unwanted in self._under_way:
            if file in unwanted:
                unwanted.remove(file)  # it is replaced, and that in one step
        try:
            state = to_plain(checkpoint)
            if not self._asynchronous:
                save_state(state, OneFile(file), budget_bytes=self._budget_bytes, **self._keywords)
                return
            if self._saver is None:
                self._saver = self._new_saver()
            self._under_way.append((self._saver.save_state(state, OneFile(file)), []))
        except TypeError as error:
            if "hyper_parameters" in str(error):
                error.add_note("save_hyperparameters(ignore=[...]) leaves it out of the checkpoint")
            raise

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,
        state: Any | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; waits for what is being saved.

        Args:
            path: A file that this class has saved.
            map_location: Device to load to, the CPU by default; other forms are not supported.
            weights_only: Without effect: nothing is executed, whatever it is.
            state: Without effect; Lightning applies what is returned.

        Raises:
            TypeError: `map_location` is no device.
            CheckpointNotFoundError: There is none; it is a `FileNotFoundError`.
            StioError: See `stio.load_state`; or a save failed and nobody was told.
        """
        if not (map_location is None or isinstance(map_location, str | torch.device) or callable(map_location)):
            raise TypeError(f"map_location must be a device, not {type(map_location).__name__}")
        self._settle(wait=True)
        device = "cpu" if map_location is None or callable(map_location) else map_location
        try:
            loaded: dict[str, Any] = from_plain(load_state(_local(path), device=device))
        except FormatError as error:
            error.add_note("StioCheckpointIO loads its own checkpoints, none of torch.save")
            raise
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, once all that are being saved now are durable. One that is not there is no error.

        Raises:
            StioError: The operating system refused; or a save failed and nobody was told.
        """
        file = _local(path)
        self._settle()
        if self._under_way:
            self._under_way[-1][1].append(file)
        else:
            remove_checkpoint(file, filename_pattern=None, whole=False)

    def teardown(self) -> None:
        """Wait for what is being saved, and give the staging memory back.

        Raises:
            StioError: A save failed and nobody was told.
        """
        try:
            self._settle(wait=True)
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:
                saver.close()

    def _new_saver(self) -> Saver:
        return Saver(budget_bytes=self._budget_bytes, **self._keywords)

    def _settle(self, *, wait: bool = False) -> None:
        """Look at what was saved: remove what has been replaced by it, raise what failed."""
        failed: StioError | None = None
        while self._under_way and (wait or self._under_way[0][0].done()):
            pending, unwanted = self._under_way.pop(0)
            try:
                pending.result()
                for file in unwanted:
                    remove_checkpoint(file, filename_pattern=None, whole=False)
            except StioError as error:
                failed = failed or error  # what was to be removed stays
        if failed is not None:
            raise failed


def _local(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(f"StioCheckpointIO saves to local paths, not to {text}")
    return os.path.abspath(text)
