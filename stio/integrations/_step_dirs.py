"""Checkpoints of a training as directories, one for each saved step: finds them, commits them, deletes old ones.

A `PublishedSave` consists of several saves and of small files. A thread of stio waits for the saves, and commits the
directory as a whole in one step, while the training goes on. Where the saves are those of many ranks, the first rank
publishes the directory, and the others have a `JoinedSave`.

`HubPushes` pushes durable checkpoints to the hub. A push reads the files of a durable checkpoint, so what it uploads is
one whole checkpoint. The checkpoint must not be deleted before its push has ended: `under_way` names it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Self

from huggingface_hub import HfApi

from stio.errors import StioError, printable
from stio.runtime import Operation, run_blocking
from stio.saving import PendingSave, SaveOptions
from stio.storage.commit import WrittenFiles, begin_directory
from stio.text import log

STATE_NAME = "training_state"
"""Directory in a checkpoint that holds everything but the model; read by `stio.load_state`."""

TRAINER_STATE = "trainer_state.json"
_TRAINER_OPTIMIZER = "optimizer.pt"

_NAME = re.compile(r"checkpoint-(\d+)")


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest checkpoint from which a training can resume, None if there is none.

    Args:
        directory: `output_dir`. Checkpoints of Trainer itself count too; those without an optimizer do not.
    """
    found = resumable_checkpoints(directory)
    return found[-1] if found else None


def resumable_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the checkpoints from which a training can resume, oldest first.

    Args:
        directory: See `latest_checkpoint`.
    """
    return [path for path, names in _checkpoints(directory) if not names.isdisjoint((STATE_NAME, _TRAINER_OPTIMIZER))]


def _checkpoints(directory: str | os.PathLike[str], *, until: int | None = None) -> list[tuple[str, set[str]]]:
    """Return the complete checkpoints, oldest first, and the names of the files in each."""
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        match, path = _NAME.fullmatch(name), os.path.join(directory, name)
        if match is not None and (until is None or int(match[1]) <= until) and os.path.isdir(path):
            with suppress(FileNotFoundError, PermissionError):  # removed meanwhile, or another user's
                found.append((int(match[1]), path, set(os.listdir(path))))
    # Trainer writes its state last: a checkpoint without it is incomplete.
    return [(path, names) for _, path, names in sorted(found, key=lambda one: one[0]) if TRAINER_STATE in names]


class JoinedSave:
    """What one process adds to a checkpoint that another one publishes; filled under `with`.

    An exception under `with` rolls the saves back.

    Args:
        path: Directory for the files of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        """Directory for the files of the checkpoint."""
        self._saves: list[PendingSave] = []

    def add(self, save: PendingSave) -> None:
        """Let the commit wait for a save to `path` or below."""
        self._saves.append(save)

    def result(self) -> None:
        """Wait until the saves are durable.

        Raises:
            StioError: One failed; all were rolled back.
        """
        try:
            for save in self._saves:
                save.result()
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        for save in self._saves:
            save.cancel()
        for save in self._saves:
            run_blocking(save.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._roll_back()


class PublishedSave(JoinedSave):
    """A checkpoint that is filled under `with`, and committed once its saves are durable.

    An exception under `with` rolls everything back.

    Args:
        directory: Directory of all checkpoints.
        step: Step of the training.
        durable: Whether to sync files and directory.

    Raises:
        StorageError: The operating system reported an error.
    """

    def __init__(self, directory: str, step: int, *, durable: bool) -> None:
        self._all, self._step = directory, step
        self._transaction = begin_directory(os.path.join(directory, f"checkpoint-{step}"), durable=durable)
        super().__init__(self._transaction.files_path)
        self._operation: Operation[None] | None = None

    def start(
        self,
        *,
        keep_last: int | None,
        when_durable: Callable[[str], None] = lambda path: None,
        protected: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Start to wait for the saves and to commit, on a thread. If no thread starts, everything is rolled back.

        Args:
            keep_last: Number of durable checkpoints to keep; older ones are deleted. None keeps all.
            when_durable: Called on that thread with the path of the durable checkpoint, before old ones are deleted. It
                must not raise.
            protected: Called on that thread; returns the checkpoints that are not deleted. They count among those to
                keep.
        """

        def publish(operation: Operation[None]) -> None:
            self._publish(operation)
            when_durable(os.path.join(self._all, f"checkpoint-{self._step}"))
            if keep_last is not None:
                try:
                    self._delete_old(keep_last, protected())
                except OSError as error:  # the new checkpoint is durable
                    log(logging.WARNING, "old checkpoints could not be deleted: %s", error)

        about = os.path.join(self._all, f"checkpoint-{self._step}")
        operation = Operation(publish, name="publish", about=about, exit_patience=SaveOptions.EXIT_PATIENCE_SECONDS)
        try:
            self._operation = operation.start()
        except BaseException:  # no thread publishes it
            self._roll_back()
            raise

    def result(self) -> None:
        """Wait until the checkpoint is durable; a KeyboardInterrupt rolls it back.

        Raises:
            StioError: The save failed, and was rolled back.
        """
        if self._operation is not None:
            self._operation.result()

    def _publish(self, operation: Operation[None]) -> None:
        for save in self._saves:
            operation.on_cancel(save.cancel)
        try:
            for save in self._saves:
                save.result()
            WrittenFiles.store_list(self._transaction.files_path, STATE_NAME)
            self._transaction.prepare_commit(operation.check)
            operation.refuse_cancel()
            self._transaction.commit(index=None)
        except BaseException as error:
            if not operation.cancelled:  # the training may have ended without a call of `result`
                log(logging.ERROR, "saving the checkpoint of step %d failed: %s", self._step, error)
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        super()._roll_back()
        self._transaction.roll_back()

    def _delete_old(self, keep_last: int, protected: Collection[str]) -> None:
        """Delete the oldest checkpoints up to this one, until `keep_last` are left.

        Only those of this class count, also of earlier processes: each has a list of its files. What is not in the
        list, or was replaced since, stays. So do the newest one and the protected ones.
        """
        own = [(path, WrittenFiles.listed_in(path)) for path, _ in _checkpoints(self._all, until=self._step)]
        found = [(path, written) for path, written in own if written is not None]
        stay = {os.path.realpath(path) for path in protected} | {os.path.realpath(path) for path, _ in found[-1:]}
        others = [(path, written) for path, written in found if os.path.realpath(path) not in stay]
        for path, written in others[: max(0, len(found) - keep_last)]:
            log(logging.INFO, "%s is deleted by keep_last=%d", path, keep_last)
            try:
                written.remove()
            except StioError as error:
                log(logging.WARNING, "an old checkpoint could not be deleted: %s", error)


_NOT_OF_THE_MODEL = [f"{STATE_NAME}/*", TRAINER_STATE]


class HubPushes:
    """The pushes of one training.

    Args:
        args: `TrainingArguments` of the training; this module does not import transformers.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self._api = HfApi()
        self._repository = ""
        self._jobs: list[tuple[str, Future[Any]]] = []

    def push(self, path: str, *, step: int, epoch: float | None) -> None:
        """Start to push a checkpoint; an error is logged.

        Nothing is pushed while an earlier push is under way, except with `hub_always_push`.

        Args:
            path: Directory of the checkpoint.
            step: Its step.
            epoch: Its epoch.
        """
        args = self._args
        if self.under_way() and not args.hub_always_push:
            log(logging.INFO, "the checkpoint of step %d is not pushed: an earlier push is under way", step)
            return
        try:
            if not self._repository:
                name = args.hub_model_id or os.path.basename(os.path.abspath(args.output_dir))
                self._repository = self._api.create_repo(
                    name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True
                ).repo_id
            moment = f"step {step}" if args.save_strategy == "steps" else f"epoch {int(epoch or 0)}"
            message = f"Training in progress, {moment}"
            self._upload(path, commit_message=message, ignore_patterns=_NOT_OF_THE_MODEL)
            if args.hub_strategy in ("checkpoint", "all_checkpoints"):
                place = "last-checkpoint" if args.hub_strategy == "checkpoint" else os.path.basename(path)
                self._upload(path, commit_message=f"{message}, checkpoint", path_in_repo=place)
        except Exception as error:  # of the network, or of the hub
            _warn(error)

    def _upload(self, path: str, **keywords: Any) -> None:
        job = self._api.upload_folder(
            repo_id=self._repository,
            folder_path=path,
            token=self._args.hub_token,
            revision=self._args.hub_revision,
            run_as_future=True,
            **keywords,
        )
        job.add_done_callback(_report)
        self._jobs.append((path, job))

    def under_way(self) -> list[str]:
        """Return the checkpoints whose push has not ended."""
        self._jobs = [one for one in self._jobs if not one[1].done()]
        return [path for path, _ in self._jobs]

    def wait(self) -> None:
        """Wait until all pushes have ended."""
        wait([job for _, job in self._jobs])


def _report(job: Future[Any]) -> None:
    if not job.cancelled():
        _warn(job.exception())


def _warn(error: BaseException | None) -> None:
    if error is not None:
        log(logging.WARNING, "a checkpoint could not be pushed to the hub: %s", printable(str(error)))
