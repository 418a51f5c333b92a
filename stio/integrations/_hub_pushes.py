"""Pushes durable checkpoints of a training to the hub, while the training goes on.

A push reads the files of a durable checkpoint, so what it uploads is one whole checkpoint. The checkpoint must not be
deleted before its push has ended: `under_way` names it.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, wait
from typing import Any

from huggingface_hub import HfApi

from stio.errors import printable
from stio.integrations._step_dirs import STATE_NAME, TRAINER_STATE
from stio.text import log

_NOT_OF_THE_MODEL = [f"{STATE_NAME}/*", TRAINER_STATE]
_LAST_CHECKPOINT = "last-checkpoint"


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
                made = self._api.create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
                self._repository = made.repo_id
            moment = f"step {step}" if args.save_strategy == "steps" else f"epoch {int(epoch or 0)}"
            message = f"Training in progress, {moment}"
            self._upload(path, commit_message=message, ignore_patterns=_NOT_OF_THE_MODEL)
            if args.hub_strategy in ("checkpoint", "all_checkpoints"):
                place = _LAST_CHECKPOINT if args.hub_strategy == "checkpoint" else os.path.basename(path)
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
    error = None if job.cancelled() else job.exception()
    if error is not None:
        _warn(error)


def _warn(error: BaseException) -> None:
    log(logging.WARNING, "a checkpoint could not be pushed to the hub: %s", printable(str(error)))
