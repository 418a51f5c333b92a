"""Counts the steps that a saver has saved, and deletes the oldest ones (`keep_last`).

All that belongs to one step is kept or deleted together: a step is the number that `step_of` finds in the path of a
destination. In doubt a checkpoint stays. What a save wrote, and whether it is still unchanged,
`stio.storage.commit.retention` compares when it deletes.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from stio.errors import StioError
from stio.runtime.log import log
from stio.runtime.urls import is_url, without_secrets
from stio.storage.base import Identity, Published
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.target import DirectoryIdentity

_Place: TypeAlias = tuple[str, str | None]
"""Path of a destination and pattern of the file names in it; None: it is one file."""

_MOST_ATTEMPTS = 256
"""Most records of saves that were begun, and of which nothing is durable."""

_MOST_UNDELETED = 16
"""Most checkpoints whose deletion is tried again."""

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
    name = os.path.basename(path)
    if found := _AFTER_WORD.findall(name):
        return int(found[-1]), path
    for folder in folders:
        if _STEP_FOLDER.fullmatch(os.path.basename(folder)):
            return int(_AFTER_WORD.findall(os.path.basename(folder))[-1]), folder
    if folders and (alone := _NUMBER.fullmatch(os.path.basename(folders[0]))):
        return int(alone[1]), folders[0]
    if found := _NUMBER.findall(_RANK.sub("", name)):
        return int(found[-1]), path
    for folder in folders:
        if found := _AFTER_WORD.findall(os.path.basename(folder)):
            return int(found[-1]), folder
    return None


def _folders_above(path: str) -> list[str]:
    """Return the folders above a path, the nearest first, without the root."""
    folders = []
    while (path := os.path.dirname(path)).strip(os.sep):
        folders.append(path)
    return folders


@dataclass(slots=True)
class _Step:
    """What was saved of one step."""

    saves: dict[_Place, Published] = field(default_factory=dict)
    """What is durable; a save replaces the one before it to the same place."""
    attempted: set[_Place] = field(default_factory=set)
    """Where saves were begun to, also those that failed."""
    saved: set[_Place] = field(default_factory=set)
    """Where saves became durable since the step is the newest one."""
    num_expected: int = 1
    """Number of saves with which the step is complete."""


class Retention:
    """Keeps the newest steps of one saver.

    A step is complete when as many of its saves are durable as were begun of each of the two steps before it: a single
    step may lack a part by intention, or because its save was refused.

    Args:
        keep_last: Number of complete steps to keep; None: all.
    """

    def __init__(self, keep_last: int | None) -> None:
        self._keep_last = keep_last
        self._attempts: deque[_Place] = deque(maxlen=_MOST_ATTEMPTS)
        self._steps: dict[int | _Place, _Step] = {}  # by number; without one by place. The newest is the last one
        self._made: dict[str, DirectoryIdentity] = {}  # directories that the saver made, of all steps
        self._undeleted: deque[Published] = deque(maxlen=_MOST_UNDELETED)

    def attempt(self, destination: object, filename_pattern: str) -> None:
        """Take into account that a save begins. Called on the caller's thread, while `add` may run on another one.

        Args:
            destination: As it was given; what is no path is left out.
            filename_pattern: Names of the files in a directory.
        """
        if self._keep_last is not None and isinstance(destination, str | os.PathLike):
            path = os.fsdecode(destination)
            with suppress(OSError):  # no working directory: the save itself raises
                place = without_secrets(path).rstrip("/") if is_url(path) else os.path.abspath(path)
                self._attempts.append((place, filename_pattern))

    def add(self, path: str, filename_pattern: str | None, written: Published) -> None:
        """Take a durable checkpoint into account, and delete the steps that are too old.

        Called by one save after the other, on their threads.

        Args:
            path: Its destination, links resolved, or its URL.
            filename_pattern: Names of its files, in a directory; None: it is one file.
            written: What its transaction published.
        """
        if self._keep_last is None:
            return
        self._take_attempts()
        place = path, filename_pattern
        named = step_of(path)
        key = place if named is None else named[0]
        for step in self._steps.values():
            for other, older in step.saves.items():
                if isinstance(older, WrittenFiles) and not older.files.keys().isdisjoint(written.files):
                    files = {file: identity for file, identity in older.files.items() if file not in written.files}
                    step.saves[other] = WrittenFiles(files, older.directories, older.made)
        step = self._steps.setdefault(key, _Step())
        if place in step.saved:
            # The step is saved again: it is the newest one, and complete when all of it was.
            step.saved.clear()
            step.num_expected = 1
            self._steps[key] = self._steps.pop(key)
        step.saved.add(place)
        step.saves[place] = written
        if isinstance(written, WrittenFiles):
            self._made |= {made: written.directories[made] for made in written.made}
        self._delete_old(self._keep_last)

    def _take_attempts(self) -> None:
        with suppress(IndexError):
            while True:
                place = self._attempts.popleft()
                named = step_of(place[0])
                if named is not None:
                    step = self._steps.setdefault(named[0], _Step())
                    if len(step.attempted) < _MOST_ATTEMPTS:
                        step.attempted.add(place)
        for key in [key for key, step in self._steps.items() if not step.saves][:-_MOST_ATTEMPTS]:
            del self._steps[key]

    def _complete_steps(self) -> list[int | _Place]:
        """Return the steps that are complete, in their order."""
        complete: list[int | _Place] = []
        earlier = previous = 0
        for key, step in self._steps.items():
            step.num_expected = max(step.num_expected, earlier, previous)
            if len(step.saved) >= step.num_expected:
                complete.append(key)
            earlier, previous = previous, max(len(step.attempted), len(step.saves))
        return complete

    def _delete_old(self, keep_last: int) -> None:
        complete = self._complete_steps()
        old: list[Published] = []
        if len(complete) >= keep_last:
            for key in [*takewhile(lambda key: key != complete[-keep_last], self._steps)]:
                old += self._all_of(self._steps.pop(key))
        spare = {file for step in self._steps.values() for save in step.saves.values() for file in save.files}
        again = [*self._undeleted]
        self._undeleted.clear()
        for position, written in enumerate([*again, *old]):
            try:
                written.remove(spare=spare)
            except StioError as error:
                self._undeleted.append(written)
                if position >= len(again):
                    log(
                        logging.WARNING,
                        "an old checkpoint could not be deleted; the next save tries it again: %s",
                        error,
                    )

    def _all_of(self, step: _Step) -> list[Published]:
        """Return all that was published of a step; files of this machine with the directories that the saver made."""
        files: dict[str, Identity] = {}
        directories: dict[str, DirectoryIdentity] = {}
        remote: list[Published] = []
        for save in step.saves.values():
            if isinstance(save, WrittenFiles):
                files |= save.files
                directories |= save.directories
            else:
                remote.append(save)
        tops = {named[1] if (named := step_of(path)) else path for path, _ in step.saves}
        made = {
            directory: self._made.pop(directory)
            for directory in [*self._made]
            if any(_is_below(directory, top) for top in tops)
        }
        return [WrittenFiles(files, directories | made, made.keys()), *remote]


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(os.path.join(directory, ""))
