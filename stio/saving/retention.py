"""Counts the steps that a saver has saved, and deletes the oldest ones (`keep_last`).

All that belongs to one step is kept or deleted together: a step is the number that `step_of` finds in the path of a
destination. In doubt a checkpoint stays. What a save wrote, and whether it is still unchanged,
`stio.storage.commit.retention` compares when it deletes.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from stio.errors import StioError, printable
from stio.format.naming import FILE_SUFFIX, series_of, step_named, step_of
from stio.runtime.log import log
from stio.runtime.urls import is_url, without_secrets
from stio.storage.base import Identity, Published
from stio.storage.commit.destination import DirectoryIdentity
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.written_list import EarlierSave, find_earlier_saves

_Place: TypeAlias = tuple[str, str | None]
"""Path of a destination and pattern of the file names in it; None: it is one file."""

_MOST_ATTEMPTS = 256
"""Most records of saves that were begun, and of which nothing is durable."""

_FILES = (FILE_SUFFIX, ".ckpt")
_MOST_SHOWN = 8
"""Most steps that a warning lists."""

_MOST_UNDELETED = 16
"""Most checkpoints whose deletion is tried again."""


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
        adopt: Directory whose steps of earlier runs count as steps of this saver; None: there is none.
    """

    def __init__(self, keep_last: int | None, adopt: str | None = None) -> None:
        self._keep_last = keep_last
        self._adopt = adopt
        self._begun: set[str] = set()  # directories of steps that were examined
        self._earlier: list[tuple[int, EarlierSave]] = []  # with their steps
        self._adopted: set[int] = set()  # steps of earlier runs that were not saved again
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

    def begin(self, path: str, filename_pattern: str | None) -> None:
        """Examine the directory of the steps before the first save there: take over its steps, warn about higher ones.

        Called by one save after the other, on their threads.

        Args:
            path: Its destination, links resolved.
            filename_pattern: Names of its files, in a directory; None: it is one file.

        Raises:
            StorageError: The operating system reported an error.
        """
        if self._adopt is not None:
            self._earlier = _earlier_saves(self._adopt)
            self._adopt = None
        self._take_over(series_of(path), filename_pattern)
        named = step_of(path)
        folder = os.path.dirname(named[1] if named else path)
        if named is None or is_url(path) or folder in self._begun:
            return
        self._begun.add(folder)
        warn_of_higher_steps(folder, named[0])

    def _take_over(self, series: str | None, filename_pattern: str | None) -> None:
        """Let the earlier saves of a series count as those of this saver, before all of its own."""
        own = [
            (number, save)
            for number, save in self._earlier
            if series is not None and save.filename_pattern == filename_pattern and series_of(save.path) == series
        ]
        if not own:
            return
        taken = {file for _, save in own for file in save.written.files}
        self._earlier = [one for one in self._earlier if taken.isdisjoint(one[1].written.files)]
        for number, save in own:
            step = self._steps.setdefault(number, _Step())
            if not step.saved:
                self._adopted.add(number)
            place = save.path, save.filename_pattern
            step.saves[place] = save.written
            step.saved.add(place)
            self._made |= save.written.directories
        adopted: dict[int | _Place, _Step] = {}
        for number in sorted(self._adopted & self._steps.keys()):
            adopted[number] = self._steps.pop(number)
            adopted[number].attempted = {*adopted[number].saves}
        for key in [*adopted][-2:]:  # a step of this run has as many parts, also those that it saves later
            others = [save for number, save in self._earlier if number == key and save.filename_pattern is None]
            adopted[key].attempted |= {(save.path, None) for save in others}
        self._steps = adopted | self._steps

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
            self._adopted -= {named[0]} if named else set()
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


def _earlier_saves(directory: str) -> list[tuple[int, EarlierSave]]:
    """Return the checkpoints of steps in a directory, each with its step."""
    root = os.path.realpath(directory)
    found = [(step_of(save.path), save) for save in find_earlier_saves(directory)]
    # A number in the path of the directory itself is not that of a step in it.
    return [(named[0], save) for named, save in found if named is not None and len(named[1]) > len(root)]


def warn_of_higher_steps(directory: str, step: int) -> None:
    """Log a warning if a directory holds steps above the one at which a run begins there.

    What resumes from the highest step, and what deletes by the number, would take those.
    """
    steps: set[int] = set()
    with suppress(OSError), os.scandir(directory) as entries:  # without it the save itself raises, or makes it
        for entry in entries:
            found = step_named(entry.name)
            if found is not None and found > step and (entry.name.endswith(_FILES) or entry.is_dir()):
                steps.add(found)
    if steps:
        higher = sorted(steps)
        shown = map(str, higher if len(higher) <= _MOST_SHOWN else [*higher[:2], "...", *higher[-2:]])
        log(
            logging.WARNING,
            "%s: this run begins at step %d, and there are higher steps already: %s. What resumes from the highest "
            "step takes one of those; save to a new directory, or remove them",
            printable(directory),
            step,
            ", ".join(shown),
        )
