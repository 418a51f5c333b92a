"""Finds the newest complete checkpoint of a training, in a directory with one checkpoint for each step."""

from __future__ import annotations

import logging
import os
from collections import defaultdict

from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    listed,
)
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX
from stio.format.step_names import step_named
from stio.loading.open import open_checkpoint
from stio.runtime.log import log
from stio.runtime.urls import is_url, without_secrets
from stio.storage.checks import refused

_FILES = (FILE_SUFFIX, ".sft", ".ckpt")
"""Ends of the names of files that are checkpoints: those of safetensors, and of Lightning by stio."""

_DEEPEST = 3
"""Most directories inside each other in the one of a step: `step-3/model/`."""


def latest(directory: str | os.PathLike[str]) -> str:
    """Return the path of the newest complete checkpoint in a directory of a training's steps; blocks for a moment.

    The newest one has the highest step: the number in the name of its file or directory, as for `keep_last=` of a
    `stio.Saver`. A checkpoint is complete if its index and all headers are right and fit the sizes of the files; no
    tensors are read. What is not complete is left out, and a warning names it. Names that begin with a dot, and what
    holds no checkpoint, are left out too.

        state = await stio.load_state(stio.latest("checkpoints"))

    Args:
        directory: Holds `step-100`, `step-200` or files such as `step-100.safetensors`. The directory of a step may
            hold several checkpoints; then its path is returned if all of them are complete.

    Raises:
        CheckpointNotFoundError: There is no such directory, or no complete checkpoint of a step in it.
        AmbiguousCheckpointError: Several files or directories are checkpoints of the newest step.
        StorageError: The operating system reported an error.
        TypeError: It is no path.
        ValueError: It is a URL.
    """
    path = os.fsdecode(directory)
    if is_url(path):
        raise ValueError(f"stio.latest looks into a directory of this machine, not into {without_secrets(path)}")
    by_step: dict[int, list[str]] = defaultdict(list)
    for name in _names_in(path):
        step = step_named(name)
        if step is not None and _may_be_checkpoint(os.path.join(path, name)):
            by_step[step].append(os.path.join(path, name))
    incomplete: list[str] = []
    for step in sorted(by_step, reverse=True):
        reasons = {entry: _why_incomplete(entry, _DEEPEST) for entry in by_step[step]}
        incomplete += [f"{entry}: {reason}" for entry, reason in reasons.items() if reason]
        complete = [entry for entry, reason in reasons.items() if reason is None]
        if len(complete) > 1:
            message = (
                f"several checkpoints are of the newest step, {step}: pass one of them, or save each step by one call"
            )
            names = listed(os.path.basename(entry) for entry in complete)
            raise AmbiguousCheckpointError(message, path=path, expected="one", found=names)
        if complete:
            if incomplete:
                log(logging.WARNING, "%s is the newest complete checkpoint; left out: %s", complete[0], incomplete[0])
            return complete[0]
    raise _none(path, incomplete)


def _names_in(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such directory", path=path) from None
    except OSError as error:
        raise refused("looking for the newest checkpoint", path, error) from error


def _may_be_checkpoint(path: str) -> bool:
    return os.path.isdir(path) or (path.endswith(_FILES) and os.path.isfile(path))


def _why_incomplete(path: str, depth: int) -> str | None:
    """Return why there is no complete checkpoint at a path: empty text if there is none at all; None if there is."""
    try:
        open_checkpoint(path, warn=lambda _: None).close()
        return None
    except (FormatError, IndexFormatError) as error:
        return str(error)
    except AmbiguousCheckpointError:
        pass  # several checkpoints
    except CheckpointNotFoundError as error:
        if not os.path.isdir(path):
            return ""  # removed meanwhile
        if any(name.endswith(INDEX_SUFFIX) for name in _names_in(path)):
            return str(error)
    entries = [os.path.join(path, name) for name in _names_in(path)]
    parts = [one for one in entries if one.endswith((*_FILES, INDEX_SUFFIX)) or (depth and os.path.isdir(one))]
    reasons = [_why_incomplete(part, depth - 1) for part in parts]
    found = [reason for reason in reasons if reason != ""]
    return next((reason for reason in found if reason is not None), None) if found else ""


def _none(path: str, incomplete: list[str]) -> CheckpointNotFoundError:
    message = "there is no complete checkpoint of a step in this directory"
    if incomplete:
        return CheckpointNotFoundError(message, path=path, found=f"an incomplete one, {incomplete[0]}")
    if _why_incomplete(path, 0) is None:
        return CheckpointNotFoundError(f"{message}: it is a checkpoint itself; load it by its path", path=path)
    return CheckpointNotFoundError(message, path=path, expected="names with a number, such as step-100")
