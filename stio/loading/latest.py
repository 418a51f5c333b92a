"""Finds the newest complete checkpoint of a training, in a directory with one checkpoint for each step."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    listed,
)
from stio.format.directory import require_complete, without_index
from stio.format.naming import (
    FILE_SUFFIX,
    FILE_SUFFIXES,
    INDEX_SUFFIX,
    is_dated,
    is_unfinished,
    shard_number,
    step_named,
)
from stio.format.other_sources import is_pickle_of_weights
from stio.loading.open import open_checkpoint
from stio.runtime.log import log
from stio.storage.checks import local_directory, refused

_FILES = (FILE_SUFFIX, ".sft", ".ckpt")
"""Ends of the names of files that are checkpoints: those of safetensors, and of Lightning by stio."""

_DATED = "its name has a date, whose numbers are no step; load it by its path, or name it such as step-100"
_UNFINISHED = "its name is one that programs give to a checkpoint until it is complete; if it is, rename it"
_DEEPEST = 3
"""Most directories inside each other in the one of a step: `step-3/model/`."""
_NO_DEFAULT: Any = object()

T = TypeVar("T")


@overload
def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False) -> str: ...


@overload
def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False, default: T) -> str | T: ...


def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False, default: T = _NO_DEFAULT) -> str | T:
    """Return the path of the newest complete checkpoint in a directory of a training's steps; blocks for a moment.

    The newest one has the highest step: the number in the name of its file or directory, as for `keep_last=` of a
    `stio.Saver`; a date is none. A checkpoint is complete if its index and all headers are right and fit the sizes of
    the files; no tensors are read. What is not complete, such as shards of which one is missing, a link to nothing,
    files of torch.save, or a name such as `step-3.tmp`, is left out, and a warning names it. Names that begin with a
    dot, and what holds no checkpoint, are left out too.

        if (path := stio.latest("checkpoints", default=None)) is not None:  # None at the first start
            state = await stio.load_state(path)

    Args:
        directory: Holds `step-100`, `step-200` or files such as `step-100.safetensors`. The directory of a step may
            hold several checkpoints; then its path is returned if all of them are complete.
        follow_symlinks: See `stio.load`, which needs it then too.
        default: Returned if there is no such directory, or no complete checkpoint of a step in it; a warning names what
            is left out. Without it that is an error.

    Raises:
        CheckpointNotFoundError: There is no such directory, or no complete checkpoint of a step in it, and no
            `default`.
        AmbiguousCheckpointError: Several files or directories are checkpoints of the newest step.
        UnsafePathError: A file of a newer step is a link that leads out of its directory.
        StorageError: The operating system reported an error.
        TypeError: It is no path.
        ValueError: It is empty or a URL, or begins with `~`.
    """
    local_directory(directory, "stio.latest")
    path = os.fsdecode(directory)
    if default is not _NO_DEFAULT and not os.path.lexists(path):
        return default
    by_step: dict[int, list[str]] = defaultdict(list)
    dated: list[str] = []
    for name in _names_in(path):
        step, entry = step_named(name), os.path.join(path, name)
        if (step is not None or is_dated(name)) and _may_be_checkpoint(entry):
            by_step[step].append(entry) if step is not None else dated.append(f"{entry}: {_DATED}")
    left_out: list[str] = []
    for step in sorted(by_step, reverse=True):
        reasons = {
            entry: _UNFINISHED if is_unfinished(os.path.basename(entry)) else _why_incomplete(entry, follow_symlinks)
            for entry in by_step[step]
        }
        left_out += [f"{entry}: {reason}" for entry, reason in reasons.items() if reason]
        complete = [entry for entry, reason in reasons.items() if reason is None]
        if len(complete) > 1:
            message = (
                f"several checkpoints are of the newest step, {step}: pass one of them, or save each step by one call"
            )
            names = listed(os.path.basename(entry) for entry in complete)
            raise AmbiguousCheckpointError(message, path=path, expected="one", found=names)
        if complete:
            for reason in [*left_out, *dated][:1]:
                log(logging.WARNING, "%s is the newest complete checkpoint; left out: %s", complete[0], reason)
            return complete[0]
    if default is _NO_DEFAULT:
        raise _none(path, [*left_out, *dated], follow_symlinks)
    for reason in [*left_out, *dated][:1]:
        log(logging.WARNING, "%s has no complete checkpoint of a step; left out: %s", path, reason)
    return default


def _names_in(path: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if not name.startswith("."))
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such directory", path=path) from None
    except OSError as error:
        raise refused("looking for the newest checkpoint", path, error) from error


def _may_be_checkpoint(path: str) -> bool:
    if os.path.islink(path) and not os.path.exists(path):
        return path.endswith(_FILES) or not os.path.splitext(path)[1]
    return os.path.isdir(path) or (path.endswith(_FILES) and os.path.isfile(path))


def _why_incomplete(path: str, follow_symlinks: bool, depth: int = _DEEPEST) -> str | None:
    """Return why there is no complete checkpoint at a path: empty text if there is none at all; None if there is."""
    pickled = ""
    try:
        open_checkpoint(path, follow_symlinks=follow_symlinks, warn=lambda _: None).close()
        return None
    except (FormatError, IndexFormatError) as error:
        return str(error)
    except AmbiguousCheckpointError:
        names = _names_in(path)  # of several checkpoints
        if reason := _why_shards_are_missing(path, names):
            return reason
    except CheckpointNotFoundError as error:
        if not os.path.isdir(path):
            return str(error) if os.path.islink(path) else ""  # removed meanwhile
        names = _names_in(path)
        if any(name.endswith(INDEX_SUFFIX) or (name.endswith(FILE_SUFFIXES) and shard_number(name)) for name in names):
            return str(error)
        pickled = str(error) if any(map(is_pickle_of_weights, names)) else ""
    entries = [os.path.join(path, name) for name in names]
    parts = [one for one in entries if one.endswith((*_FILES, INDEX_SUFFIX)) or (depth and os.path.isdir(one))]
    reasons = [_why_incomplete(part, follow_symlinks, depth - 1) for part in parts]
    found = [reason for reason in reasons if reason != ""]
    return next((reason for reason in found if reason is not None), None) if found else pickled


def _why_shards_are_missing(path: str, names: Sequence[str]) -> str:
    """Return why a set of shards without an index is not complete; empty text if there is none, or an index."""
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return ""  # it decides
    for one in without_index(names):
        try:
            require_complete(one.files, path=path)
        except CheckpointNotFoundError as error:
            return str(error)
    return ""


def _none(path: str, left_out: list[str], follow_symlinks: bool) -> CheckpointNotFoundError:
    message = "there is no complete checkpoint of a step in this directory"
    if left_out:
        return CheckpointNotFoundError(f"{message}; left out: {left_out[0]}", path=path)
    if _why_incomplete(path, follow_symlinks, 0) is None:
        message += ": it is a checkpoint itself; load it by its path"
    return CheckpointNotFoundError(message, path=path, expected="names with a number, such as step-100")
