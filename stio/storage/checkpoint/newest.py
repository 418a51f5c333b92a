"""Finds the newest complete checkpoint of a training, in a directory with one checkpoint for each step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from typing import Any, TypeAlias, TypeVar, overload

from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    MismatchError,
    StioError,
    listed,
)
from stio.format.files import FILE_SUFFIXES, INDEX_SUFFIX, FileName, NamedCheckpoint
from stio.storage.checkpoint.open import open_checkpoint
from stio.storage.checkpoint.shards import OpenOptions
from stio.storage.checks import CHECKPOINT_SUFFIXES, local_directory, refused, steps_in
from stio.text import log

_DATED = "its name has a date, whose numbers are no step; load it by its path, or name it such as step-100"
_UNFINISHED = "its name is one that programs give to a checkpoint until it is complete; if it is, rename it"
_DEEPEST = 3
"""Most directories inside each other in the one of a step: `step-3/model/`."""
_NUM_BEFORE = 2
"""Number of complete steps before that a step is compared with: a part that both have is one that the run saves."""
_NO_DEFAULT: Any = object()

T = TypeVar("T")
_Examined: TypeAlias = tuple[dict[str, str], list[str], list[str]]
"""Of a step: for each entry that is complete, the path to return; why the others are left out; all its checkpoints."""


@overload
def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False) -> str: ...


@overload
def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False, default: T) -> str | T: ...


def latest(directory: str | os.PathLike[str], *, follow_symlinks: bool = False, default: T = _NO_DEFAULT) -> str | T:
    """Return the path of the newest complete checkpoint in a directory of a training's steps; blocks for a moment.

    The newest one has the highest step: the number in the name of its file or directory, as for `keep_last=` of a
    `stio.Saver`; a date is none. A checkpoint is complete if its index and all headers are right and fit the sizes of
    the files; no tensors are read. What is not complete, such as shards of which one is missing, a delta whose base is
    missing, a link to nothing, files of torch.save, or a name such as `step-3.tmp`, is left out, and a warning names
    it. So is a step with fewer checkpoints than each of the two complete steps before it. Names that begin with a dot,
    and what holds no checkpoint, are left out too.

        if (path := stio.latest("checkpoints", default=None)) is not None:  # None at the first start
            state = await stio.load_state(path)

    Args:
        directory: Holds `step-100`, `step-200` or files such as `step-100.safetensors`. The directory of a step may
            hold several checkpoints; then its path is returned if all of them are complete. If the only one lies
            deeper, as in `step-100/actor/huggingface`, the path of that one is returned.
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
    try:
        newest, left_out = newest_in(path, follow_symlinks=follow_symlinks)
    except CheckpointNotFoundError:  # and not for a mount that is gone: a run would begin anew
        if default is _NO_DEFAULT or os.path.islink(path):
            raise
        return default
    if newest is None and default is _NO_DEFAULT:
        raise _none(path, left_out, follow_symlinks)
    for text in left_out[:1]:
        if newest is None:
            log(logging.WARNING, "%s has no complete checkpoint of a step; left out: %s", path, text)
        else:
            log(logging.WARNING, "%s is the newest complete checkpoint; left out: %s", newest, text)
    return default if newest is None else newest


def newest_in(path: str, *, follow_symlinks: bool = False) -> tuple[str | None, list[str]]:
    """Return the path of the newest complete checkpoint, None if there is none, and what is left out; see `latest`.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        StioError: See `latest`.
    """
    by_step = _listed(path, steps_in)
    dated = [f"{entry}: {_DATED}" for entry in by_step.pop(None, [])]
    steps = sorted((step for step in by_step if step is not None), reverse=True)
    examined = cache(lambda step: _examine(by_step[step], follow_symlinks))
    left_out: list[str] = []
    for position, step in enumerate(steps):
        complete, incomplete, checkpoints = examined(step)
        left_out += incomplete
        before = _usable(steps[position + 1 :], examined) if complete else {}
        if reason := _why_parts_are_missing(checkpoints, before, path):
            left_out += [f"{entry}: {reason}" for entry in complete]
            continue
        if len(complete) > 1:
            message = f"several checkpoints are of the newest step, {step}: pass one, or save each step by one call"
            names = listed(map(os.path.basename, complete))
            raise AmbiguousCheckpointError(message, path=path, expected="one", found=names)
        for newest in complete.values():
            return newest, [*left_out, *dated]
    return None, [*left_out, *dated]


def _listed(path: str, look: Callable[[str], T]) -> T:
    try:
        return look(path)
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such directory", path=path) from None
    except OSError as error:
        raise refused("looking for the newest checkpoint", path, error) from error


def _usable(steps: Sequence[int], examined: Callable[[int], _Examined]) -> dict[int, list[str]]:
    """Return the checkpoints of the first steps that are complete, with which a later one is compared."""
    usable: dict[int, list[str]] = {}
    for step in steps:
        with suppress(StioError):  # such as a link that leads out
            complete, incomplete, checkpoints = examined(step)
            if complete and not incomplete:
                usable[step] = checkpoints
        if len(usable) == _NUM_BEFORE:
            break
    return usable


def _examine(entries: Sequence[str], follow_symlinks: bool) -> _Examined:
    """Examine the files and directories that name one step.

    Returns:
        See `_Examined`.
    """
    complete: dict[str, str] = {}
    incomplete: list[str] = []
    all_of: list[str] = []
    for entry in entries:
        if FileName(os.path.basename(entry)).is_unfinished:
            incomplete.append(f"{entry}: {_UNFINISHED}")
            continue
        found = _checkpoints_in(entry, follow_symlinks)
        all_of += found
        reasons = [reason for reason in found.values() if reason is not None]
        if reasons:
            incomplete.append(f"{entry}: {reasons[0]}")
        elif found:
            complete[entry] = entry if len(found) > 1 else all_of[-1]
    return complete, incomplete, all_of


def _checkpoints_in(path: str, follow_symlinks: bool, depth: int = _DEEPEST) -> dict[str, str | None]:
    """Return the checkpoints at a path and below it, each with the reason why it is not complete; None: it is.

    Args:
        path: A file, or a directory.
        follow_symlinks: See `latest`.
        depth: Most directories inside each other that are searched.
    """
    if not os.path.isdir(path):
        return {path: _why_incomplete([path], follow_symlinks)} if os.path.lexists(path) else {}
    names = [name for name in map(FileName, _listed(path, os.listdir)) if not name.is_hidden]
    folders = {name for name in names if os.path.isdir(os.path.join(path, name))}
    used: set[str | None] = set()
    checkpoints: dict[str, str | None] = {}
    pickled = ""
    try:
        with closing(open_checkpoint(path, _quiet(follow_symlinks))) as opened:
            used = {opened.index, *(header.shard for header in opened.headers)} - {None}
        checkpoints[path] = None
    except (FormatError, IndexFormatError, MismatchError) as error:
        return {path: str(error)}
    except AmbiguousCheckpointError:
        pass
    except CheckpointNotFoundError as error:
        if any(name.endswith(INDEX_SUFFIX) or (name.endswith(FILE_SUFFIXES) and name.shard) for name in names):
            return {path: str(error)}
        pickled = str(error) if any(name.is_pickle for name in names) else ""
    named = NamedCheckpoint.without_index((name for name in names if name not in folders), CHECKPOINT_SUFFIXES)
    # Behind the files: their set of shards is that of the index.
    named += [NamedCheckpoint.of_index(name) for name in names if name.is_index and name.is_checkpoint]
    others: dict[str, str | None] = {}
    for one in {one.stem: one for one in named}.values():
        files = [os.path.join(path, name) for name in one.files or [one.index or ""]]
        if used.isdisjoint([one.index, *one.files]):
            others[files[0]] = _why_incomplete(files, follow_symlinks, one)
    for name in sorted(folders if depth else ()):
        others |= _checkpoints_in(os.path.join(path, name), follow_symlinks, depth - 1)
    if checkpoints:  # beside it, what is not complete does not count
        others = {place: reason for place, reason in others.items() if reason is None}
    return checkpoints | others or ({path: pickled} if pickled else {})


def _quiet(follow_symlinks: bool) -> OpenOptions:
    return OpenOptions(follow_symlinks=follow_symlinks, warn=lambda _: None)


def _why_incomplete(paths: Sequence[str], follow_symlinks: bool, named: NamedCheckpoint | None = None) -> str | None:
    """Return why a checkpoint is not complete, of these files or with this index; None: it is complete."""
    try:
        if named is not None:
            named.require_complete(path=os.path.dirname(paths[0]))
        for path in paths:
            open_checkpoint(path, _quiet(follow_symlinks)).close()
    except (FormatError, IndexFormatError, CheckpointNotFoundError, MismatchError) as error:
        return str(error)
    return None


def _why_parts_are_missing(own: Sequence[str], before: Mapping[int, Sequence[str]], path: str) -> str:
    """Return why a step lacks a part: all steps before have more checkpoints; else ""."""
    step, others = min(before.items(), key=lambda one: len(one[1]), default=(0, ()))
    if len(others) <= len(own):
        return ""
    names = listed(os.path.relpath(other, path) for other in others)
    return f"it holds {len(own)} of the {len(others)} checkpoints that step {step} holds ({names})"


def _none(path: str, left_out: list[str], follow_symlinks: bool) -> CheckpointNotFoundError:
    message = "there is no complete checkpoint of a step in this directory"
    if left_out:
        return CheckpointNotFoundError(f"{message}; left out: {left_out[0]}", path=path)
    if _checkpoints_in(path, follow_symlinks, 0).get(path, "") is None:
        message += ": it is a checkpoint itself; load it by its path"
    return CheckpointNotFoundError(message, path=path, expected="names with a number, such as step-100")
