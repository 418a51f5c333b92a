"""Checkpoints of a training as directories, one for each step that was saved: found, published, rotated.

A `PublishedSave` is made up of several saves and of small files. A thread of stio's own waits for the saves and
publishes the directory whole, so the training goes on meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
from types import TracebackType
from typing import Self

from stio.errors import StioError
from stio.runtime.operation import Operation
from stio.saving.pending import EXIT_PATIENCE_SECONDS, PendingSave
from stio.storage.commit.retention import remove_checkpoint
from stio.storage.commit.staged_directory import StagedDirectory

__all__ = ["STATE_NAME", "TRAINER_STATE", "PublishedSave", "latest_checkpoint"]

logger = logging.getLogger("stio")

STATE_NAME = "training_state"
"""Directory in a checkpoint with everything but the model, for `stio.load_state`."""

TRAINER_STATE = "trainer_state.json"
_THEIR_OPTIMIZER = "optimizer.pt"
_THEIR_ARGUMENTS = "training_args.bin"  # Trainer writes it in each of its own

_NAME = re.compile(r"checkpoint-(\d+)")
_MODEL_PATTERN = "model{suffix}.safetensors"


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint from which a training can go on, None if there is none.

    Args:
        directory: `output_dir`. Trainer's own checkpoints count too; those without an optimizer do not.
    """
    found = [path for path, names in _checkpoints(directory) if not names.isdisjoint((STATE_NAME, _THEIR_OPTIMIZER))]
    return found[-1] if found else None


def _checkpoints(directory: str | os.PathLike[str], *, until: int | None = None) -> list[tuple[str, set[str]]]:
    """Return the whole checkpoints, oldest first, and the names in each."""
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        match, path = _NAME.fullmatch(name), os.path.join(directory, name)
        if match is not None and (until is None or int(match[1]) <= until) and os.path.isdir(path):
            found.append((int(match[1]), path, set(os.listdir(path))))
    # Trainer writes its state last: only then one of its own is whole.
    return [(path, names) for _, path, names in sorted(found, key=lambda one: one[0]) if TRAINER_STATE in names]


class PublishedSave:
    """A checkpoint that is made up under `with`, and published once its saves are durable.

    Leaving the block by an exception rolls everything back.

    Args:
        home: Directory of all checkpoints.
        step: Step of the training.
        durable: Whether to sync what is published.

    Raises:
        StorageError: The operating system refused.
    """

    def __init__(self, home: str, step: int, *, durable: bool) -> None:
        self._home, self._step = home, step
        self._staged = StagedDirectory(home, durable=durable)
        self._saves: list[PendingSave] = []
        self._operation: Operation[None] | None = None

    @property
    def path(self) -> str:
        """Where the files are to be put."""
        return self._staged.path

    def add(self, save: PendingSave) -> None:
        """Have the publishing wait for a save to `path` or below."""
        self._saves.append(save)

    def start(self, *, keep_last: int | None) -> None:
        """Let it be published.

        Args:
            keep_last: Delete older ones once so many are durable.
        """
        operation = Operation(
            lambda operation: self._publish(operation, keep_last), name="publish", exit_patience=EXIT_PATIENCE_SECONDS
        )
        self._operation = operation.start()

    def result(self) -> None:
        """Wait until it is published and durable; a KeyboardInterrupt rolls it back.

        Raises:
            StioError: It failed, and is rolled back.
        """
        if self._operation is not None:
            self._operation.result()

    def _publish(self, operation: Operation[None], keep_last: int | None) -> None:
        for save in self._saves:
            operation.on_cancel(save.cancel)
        try:
            for save in self._saves:
                save.result()
            operation.settle()
            self._staged.publish(f"checkpoint-{self._step}")
        except BaseException as error:
            if not operation.cancelled:  # the training may have ended without anybody who waits
                logger.error("saving the checkpoint of step %d failed: %s", self._step, error)
            self._roll_back()
            raise
        if keep_last:
            self._rotate(keep_last)

    def _roll_back(self) -> None:
        for save in self._saves:
            save.cancel()
        for save in self._saves:
            save.close()
        self._staged.remove()

    def _rotate(self, keep_last: int) -> None:
        """Delete what is older than the newest `keep_last` up to this one, Trainer's own not among it."""
        found = _checkpoints(self._home, until=self._step)
        ours = [path for path, names in found if _THEIR_ARGUMENTS not in names]
        for path in ours[:-keep_last]:
            try:
                remove_checkpoint(path, filename_pattern=_MODEL_PATTERN, whole=True)
            except StioError as error:
                logger.warning("an old checkpoint could not be deleted: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._roll_back()
