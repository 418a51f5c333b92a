"""The numbers of a training's steps in the paths of its checkpoints: `run/step-100`, `epoch=0-step=4`, `100/model`."""

from __future__ import annotations

import posixpath
import re

_WORD = r"(?:step|epoch|iteration|iter|checkpoint|ckpt)"
_AFTER_WORD = re.compile(rf"{_WORD}[^0-9A-Za-z]{{0,2}}([0-9]+)", re.IGNORECASE)
# Further numbers may follow: `epoch=0-step=100`, `step-3-loss-0.25`.
_STEP_FOLDER = re.compile(
    rf"(?:global[-_]?)?{_AFTER_WORD.pattern}"
    rf"(?:[^0-9A-Za-z]+{_AFTER_WORD.pattern}|[^0-9A-Za-z]+[A-Za-z_]+[=-][0-9]+|\.[0-9]+)*",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"([0-9]+)(?:\.[0-9]+)*")
_RANK = re.compile(r"(?:rank|shard|part)[^0-9A-Za-z]{0,2}[0-9]+", re.IGNORECASE)
_RANK_OR_NUMBER = re.compile(rf"{_RANK.pattern}|{_NUMBER.pattern}", re.IGNORECASE)
_SHARD = re.compile(r"-[0-9]+-of-[0-9]+")
_DATE = re.compile(
    r"(?<![0-9])(?:(?:19|20)[0-9]{2}([-_.])[0-9]{1,2}\1[0-9]{1,2}"
    r"|(?:19|20)[0-9]{6}[-_.T][0-9]{2}[-_.]?[0-9]{2}(?:[-_.]?[0-9]{2})?)(?![0-9])"
)
"""A date, or without separators a date and a time."""
_UNFINISHED = re.compile(r"_?tmp[-_.].+|.+[-_.](?:tmp|temp|partial|incomplete)(?:\.[0-9]+)?|.+\.part", re.IGNORECASE)


def step_of(path: str) -> tuple[int, str] | None:
    """Return the number of the step of a training that a path names, and the path up to the name that holds the number.

    The first of these that exists:

    - the last number in the name that follows `step`, `epoch`, `iter`, `iteration`, `checkpoint` or `ckpt`;
    - that of the nearest folder whose whole name is such a word and a number: `step-100`, `epoch=0-step=100`;
    - the name of the parent folder, if it is a number: `100/model`;
    - the last number in the name, but for those of ranks, shards and parts: `model-100_rank0`;
    - the last number after such a word in the nearest folder: `step-100-ema/model`.

    Args:
        path: Path of a destination, links resolved.

    Returns:
        None if there is no such number.
    """
    folders = _folders_above(path)
    name = posixpath.basename(path)
    if found := _AFTER_WORD.findall(name):
        return int(found[-1]), path
    for folder in folders:
        if _STEP_FOLDER.fullmatch(posixpath.basename(folder)):
            return int(_AFTER_WORD.findall(posixpath.basename(folder))[-1]), folder
    if folders and (alone := _NUMBER.fullmatch(posixpath.basename(folders[0]))):
        return int(alone[1]), folders[0]
    if found := _NUMBER.findall(_RANK.sub("", name)):
        return int(found[-1]), path
    for folder in folders:
        if found := _AFTER_WORD.findall(posixpath.basename(folder)):
            return int(found[-1]), folder
    return None


def _folders_above(path: str) -> list[str]:
    """Return the folders above a path, the nearest first, without the root."""
    folders = []
    while (path := posixpath.dirname(path)).strip("/"):
        folders.append(path)
    return folders


def is_shard_name(name: str) -> bool:
    """Return whether a name is that of one of several shards, and its numbers are no step."""
    return _SHARD.search(name) is not None


def step_named(name: str) -> int | None:
    """Return the step that the name of a directory's entry has; None for hidden names, shards and dates too."""
    found = None if name.startswith(".") or is_shard_name(name) or is_dated(name) else step_of(name)
    return None if found is None else found[0]


def is_dated(name: str) -> bool:
    """Return whether a name has a date and no step: the last number of a date would be taken for one."""
    return _DATE.search(name) is not None and _AFTER_WORD.search(name) is None


def is_unfinished(name: str) -> bool:
    """Return whether a name is one that programs give to a checkpoint until it is complete: `tmp-checkpoint-5`."""
    return _UNFINISHED.fullmatch(name) is not None


def series_of(path: str) -> str | None:
    """Return a path without the numbers of its step: equal for the checkpoints that a run saves for each of its steps.

    Numbers of ranks, shards and parts stay, and those of folders that name no step.
    """
    named = step_of(path)
    if named is None:
        return None
    folders = posixpath.dirname(named[1]).split("/")
    folders = [_without_numbers(folder) if _STEP_FOLDER.fullmatch(folder) else folder for folder in folders]
    return "/".join((*folders, _without_numbers(posixpath.basename(named[1])))) + path[len(named[1]) :]


def _without_numbers(name: str) -> str:
    return _RANK_OR_NUMBER.sub(lambda found: found[0] if found[1] is None else "#", name)
