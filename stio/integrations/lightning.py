"""Checkpoints of Lightning without pickle, written while the training goes on.

    trainer = Trainer(plugins=[StioCheckpointIO()], callbacks=[ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(module, data)
    trainer.fit(module, data, ckpt_path="last")

The dict that Lightning makes becomes a nested state: one file for each checkpoint, with the name that Lightning chose
(`.ckpt`). Lightning removes an old checkpoint as soon as it has started to save a new one. Here the removal waits until
the new one is durable, so a process that is killed at any time leaves a complete checkpoint.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from lightning.pytorch.plugins import CheckpointIO

from stio.errors import FormatError, StioError
from stio.format.state_tree import STATE_KEY
from stio.integrations._tagged import from_plain, to_plain
from stio.saving.pending import PendingSave
from stio.storage.commit.retention import WrittenFiles, describe_file, remove_checkpoint
from stio.storage.commit.target import OneFile
from stio.sync import Saver, load_state, save_state
from stio.sync import open as open_checkpoint

__all__ = ["StioCheckpointIO"]

logger = logging.getLogger("stio")


class StioCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning is not followed by mypy
    """Saves and loads the checkpoints of Lightning: `Trainer(plugins=[StioCheckpointIO()])`.

    `stio.load_state` reads such a checkpoint too. Paths, sets, namespaces, default dicts, numpy arrays and scalars are
    stored as tagged dicts. Loading restores them and executes nothing. A value of another type, for example an enum or
    an object among the hyperparameters, raises an error that names its path, before anything is written.

    An asynchronous save returns when its snapshot is complete. If it fails later, the next call raises the error, at
    the latest the end of `fit`, which waits for saves under way. A link to the last checkpoint (`save_last="link"`)
    points to a missing file until that checkpoint is durable; with `save_last=True` this does not occur.

    It supports strategies that write one file from one process: a single device, DDP. Paths are local. It does not read
    files of `torch.save`. `load_from_checkpoint` does not use this class, and cannot read these checkpoints: load the
    weights by `module.load_state_dict(stio.sync.load_state(path)["state_dict"])`.

    Args:
        asynchronous: Whether training goes on while a checkpoint is written.
        budget_bytes: See `stio.Saver`.
        **keywords: The other keywords of `stio.save`.

    Raises:
        TypeError: `stio.save` does not have a keyword, or its value has the wrong type.
        ValueError: The value of a keyword is out of range.
    """

    def __init__(self, *, asynchronous: bool = True, budget_bytes: int | None = None, **keywords: Any) -> None:
        super().__init__()
        self._asynchronous = asynchronous
        self._budget_bytes = budget_bytes
        self._keywords = keywords
        self._saver: Saver | None = None
        self._new_saver().close()  # raises for wrong keywords
        self._under_way: list[tuple[PendingSave, str, list[str]]] = []
        """Saves under way, oldest first, each with its file, and with the files to remove when it is durable."""
        self._written: dict[str, WrittenFiles] = {}
        """What was saved and not removed, by path."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: The dict of Lightning.
            path: The file; missing directories are created.
            storage_options: Not supported.

        Raises:
            TypeError: A value cannot be stored in a nested state (the message names it), or `storage_options` is given.
            ValueError: The path is a URL.
            StioError: This save failed, or an earlier one whose error was not raised yet.
        """
        if storage_options is not None:
            raise TypeError("StioCheckpointIO takes no storage_options; give keywords of stio.save to the class")
        file = _local(path)
        self._collect()
        for _, _, unwanted in self._under_way:
            if file in unwanted:
                unwanted.remove(file)  # this save replaces it in one step
        try:
            state = to_plain(checkpoint)
            if not self._asynchronous:
                save_state(state, OneFile(file), budget_bytes=self._budget_bytes, **self._keywords)
                self._written[file] = describe_file(file)
                return
            if self._saver is None:
                self._saver = self._new_saver()
            self._under_way.append((self._saver.save_state(state, OneFile(file)), file, []))
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
        """Load a checkpoint; waits for saves under way.

        Args:
            path: A file that this class saved.
            map_location: Device to load to, the CPU by default; other forms are not supported.
            weights_only: Has no effect: nothing is ever executed.
            state: Has no effect; Lightning applies the returned dict.

        Raises:
            TypeError: `map_location` is not a device.
            CheckpointNotFoundError: There is no such file; it is a `FileNotFoundError`.
            StioError: See `stio.load_state`; or an earlier save failed, and its error was not raised yet.
        """
        if not (map_location is None or isinstance(map_location, str | torch.device) or callable(map_location)):
            raise TypeError(f"map_location must be a device, not {type(map_location).__name__}")
        self._collect(wait=True)
        device = "cpu" if map_location is None or callable(map_location) else map_location
        try:
            loaded: dict[str, Any] = from_plain(load_state(_local(path), device=device))
        except FormatError as error:
            error.add_note("StioCheckpointIO loads its own checkpoints only, not those of torch.save")
            raise
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when all saves under way are durable. A missing file is no error.

        Only a checkpoint of this class is removed. A file that another program has replaced since stays, and a warning
        names it.

        Raises:
            StioError: The operating system reported an error, or an earlier save failed and did not raise it yet.
        """
        file = _local(path)
        self._collect()
        if self._under_way:
            self._under_way[-1][2].append(file)
        else:
            self._remove(file)

    def teardown(self) -> None:
        """Wait for saves under way, and release the staging memory.

        Raises:
            StioError: A save failed, and its error was not raised yet.
        """
        try:
            self._collect(wait=True)
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:
                saver.close()

    def _new_saver(self) -> Saver:
        return Saver(budget_bytes=self._budget_bytes, **self._keywords)

    def _collect(self, *, wait: bool = False) -> None:
        """Collect saves that have ended: remove the files that they replace, raise the first error."""
        failed: StioError | None = None
        while self._under_way and (wait or self._under_way[0][0].done()):
            pending, path, unwanted = self._under_way.pop(0)
            try:
                pending.result()
                if pending.written is not None:
                    self._written[path] = pending.written
                for file in unwanted:
                    self._remove(file)
            except StioError as error:
                failed = failed or error  # the files that it should replace stay
        if failed is not None:
            raise failed

    def _remove(self, file: str) -> None:
        """Delete a checkpoint of this object, or of an earlier process."""
        written = self._written.pop(file, None)
        if written is None:
            written = describe_file(file)
            if written.files and not _is_checkpoint(file):
                logger.warning("%s stays: it is no checkpoint that StioCheckpointIO saved", file)
                return
        remove_checkpoint(written)


def _is_checkpoint(file: str) -> bool:
    """Return whether a file holds a nested state of stio."""
    try:
        with open_checkpoint(file) as checkpoint:
            return STATE_KEY in checkpoint.metadata
    except StioError:
        return False


def _local(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if "://" in text:
        raise ValueError(f"StioCheckpointIO saves to local paths, not to {text}")
    return os.path.abspath(text)
