"""Counts the steps that a saver has saved, and deletes the oldest ones (`keep_last`).

All that belongs to one step is kept or deleted together: a step is the number that `step_of` finds in the path of a
destination. A destination without one is never deleted. In doubt a checkpoint stays. A step that holds the base of a
delta that stays, or the base of that base, stays too, until no delta needs it. What a save wrote, and whether it
is still unchanged, `stio.storage.commit.retention` compares when it deletes.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from stio.errors import StioError, listed, printable
from stio.format.files import FileName, FilePattern, step_of
from stio.storage import CHECKPOINT_SUFFIXES, Identity, Published, steps_in
from stio.storage.checkpoint import base_of
from stio.storage.commit import EarlierSave, WrittenFiles, find_earlier_saves
from stio.text import is_url, log, without_secrets

_Place: TypeAlias = tuple[str, str | None]
"""Path of a destination and pattern of the file names in it; None: it is one file."""

_MAX_ATTEMPTS = 256
"""Most records of saves that were begun, and of which nothing is durable."""

_MAX_SHOWN = 8
"""Most steps that a warning lists."""

_made: dict[str, tuple[int, int]] = {}
"""Directories that savers of this process made and that still exist. The last saver to delete a part deletes them."""

_MAX_UNDELETED = 16
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
    is_mark: bool = False
    """Whether it stays by `keep_every`, and counts no more; `drop_higher` may delete it."""


class Retention:
    """Keeps the newest steps of one saver.

    A step is complete when as many of its saves are durable as were begun of each of the two steps before it: a single
    step may lack a part by intention, or because its save was refused.

    Args:
        keep_last: Number of complete steps to keep; None: all.
        keep_every: Steps that it divides are never deleted as old ones; None: there are none.
        drop_higher: Whether a complete step deletes those with a higher number whose paths differ by it alone.
        adopt: Directory whose steps of earlier runs count as steps of this saver; None: there is none.
    """

    def __init__(
        self,
        keep_last: int | None,
        *,
        keep_every: int | None = None,
        drop_higher: bool = False,
        adopt: str | None = None,
    ) -> None:
        self._keep_last, self._keep_every, self._drop_higher = keep_last, keep_every, drop_higher
        self._adopt = adopt
        self._known: dict[str, set[int]] = {}  # steps in each directory: those before this saver, and its own
        self._last: dict[str, int] = {}  # the one that was begun last
        self._earlier: list[tuple[int, EarlierSave]] = []  # with their steps
        self._adopted: set[int] = set()  # steps of earlier runs that were not saved again
        self._attempts: deque[_Place] = deque(maxlen=_MAX_ATTEMPTS)
        self._steps: dict[int, _Step] = {}  # by number, in the order of the saves
        self._bases: dict[_Place, str] = {}  # of each delta that is not deleted, the path of its base
        self._undeleted: deque[Published] = deque(maxlen=_MAX_UNDELETED)

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
        """Take over the steps of `adopt` before the first save of their series.

        Called by one save after the other, on their threads.

        Args:
            path: Its destination, links resolved.
            filename_pattern: Names of its files, in a directory; None: it is one file.

        Raises:
            StorageError: The operating system reported an error.
        """
        if self._adopt is not None:
            found = find_earlier_saves(self._adopt)
            self._earlier = _steps_among(found, self._adopt)
            for save in found:
                if (base := base_of(_opened_path(save))) is not None:
                    self._bases[_opened_path(save), None] = base
            self._adopt = None
        self._take_over(_series_of(path), filename_pattern)

    def _warn(self, path: str) -> None:
        """Log, after the first save of a step, which higher steps its directory held before this saver."""
        named = step_of(path)
        folder = os.path.dirname(named.path if named else path)
        if named is None or is_url(path) or self._last.get(folder) == named.number:
            return
        self._last[folder] = named.number
        known = self._known.setdefault(folder, set(_steps_present(folder)))
        dropped = self._steps_like({_series_of(path)}) if self._drop_higher else set()
        warn_of_higher_steps(folder, named.number, among=known - dropped)
        known.add(named.number)

    def _take_over(self, series: str | None, filename_pattern: str | None) -> None:
        """Let the earlier saves of a series count as those of this saver, before all of its own."""
        patterns = {filename_pattern} | ({FilePattern(filename_pattern).of_delta} if filename_pattern else set())
        own = [
            (number, save)
            for number, save in self._earlier
            if series is not None and save.filename_pattern in patterns and _series_of(save.path) == series
        ]
        if not own:
            return
        taken = {file for _, save in own for file in save.written.files}
        self._earlier = [one for one in self._earlier if taken.isdisjoint(one[1].written.files)]
        for number, save in own:
            step = self._steps.setdefault(number, _Step())
            if not step.saved:
                self._adopted.add(number)
            place = save.path, filename_pattern
            step.saves[place] = save.written
            step.saved.add(place)
            if (base := self._bases.pop((_opened_path(save), None), None)) is not None:
                self._bases[place] = base
            _made.update(save.written.directories)
        adopted: dict[int, _Step] = {}
        for number in sorted(self._adopted & self._steps.keys()):
            adopted[number] = self._steps.pop(number)
            adopted[number].attempted = {*adopted[number].saves}
        for key in [*adopted][-2:]:  # a step of this run has as many parts, also those that it saves later
            others = [save for number, save in self._earlier if number == key and save.filename_pattern is None]
            adopted[key].attempted |= {(save.path, None) for save in others}
        self._steps = adopted | self._steps

    def add(self, path: str, filename_pattern: str | None, written: Published, base: str | None = None) -> None:
        """Take a durable checkpoint into account, and delete the steps that are too old.

        Called by one save after the other, on their threads.

        Args:
            path: Its destination, links resolved, or its URL.
            filename_pattern: Names of its files, in a directory; None: it is one file.
            written: What its transaction published.
            base: Path or URL of what it is a delta of; None: it is full.
        """
        self._warn(path)
        if self._keep_last is None:
            return
        self._take_attempts()
        place = path, filename_pattern
        self._bases.pop(place, None)
        if base is not None:
            self._bases[place] = base
        named = step_of(path)
        for step in self._steps.values():
            for other, older in step.saves.items():
                if isinstance(older, WrittenFiles) and not older.files.keys().isdisjoint(written.files):
                    files = {file: identity for file, identity in older.files.items() if file not in written.files}
                    step.saves[other] = WrittenFiles(files, older.directories, older.made)
        if named is None:
            return
        key = named.number
        step = self._steps.setdefault(key, _Step())
        if place in step.saved:
            # The step is saved again: it is the newest one, and complete when all of it was.
            step.saved.clear()
            step.num_expected, step.is_mark = 1, False
            self._steps[key] = self._steps.pop(key)
            self._adopted.discard(key)
        step.saved.add(place)
        step.saves[place] = written
        if isinstance(written, WrittenFiles):
            _made.update({made: written.directories[made] for made in written.made})
        self._delete_old(self._keep_last)

    def _take_attempts(self) -> None:
        with suppress(IndexError):
            while True:
                place = self._attempts.popleft()
                named = step_of(place[0])
                if named is not None:
                    step = self._steps.setdefault(named.number, _Step())
                    if len(step.attempted) < _MAX_ATTEMPTS:
                        step.attempted.add(place)
        for key in [key for key, step in self._steps.items() if not step.saves][:-_MAX_ATTEMPTS]:
            del self._steps[key]

    def _complete_steps(self) -> list[int]:
        """Return the steps that are complete, in their order."""
        complete: list[int] = []
        earlier = previous = 0
        for key, step in self._steps.items():
            if step.is_mark:
                continue
            step.num_expected = max(step.num_expected, earlier, previous)
            if len(step.saved) >= step.num_expected:
                complete.append(key)
            earlier, previous = previous, max(len(step.attempted), len(step.saves))
        return complete

    def _delete_old(self, keep_last: int) -> None:
        complete = self._complete_steps()
        reasons: dict[int, str] = {}
        if self._drop_higher and complete:
            alike = self._steps_like({_series_of(path) for path, _ in self._steps[complete[-1]].saves})
            earlier = alike.intersection(takewhile(lambda key: key != complete[-1], self._steps))
            for key in [key for key in sorted(earlier) if key > complete[-1] and not self._is_folder_of_steps(key)]:
                reasons[key] = f"since step {complete[-1]} was saved after it"
            complete = [key for key in complete if key not in reasons]
        if len(complete) >= keep_last:
            for key in [*takewhile(lambda key: key != complete[-keep_last], self._steps)]:
                if self._steps[key].is_mark or key in reasons:
                    continue
                if self._is_folder_of_steps(key):
                    del self._steps[key]
                elif self._keep_every is not None and key % self._keep_every == 0:
                    self._steps[key].is_mark = True
                else:
                    reasons[key] = f"by keep_last={keep_last}"
        old: list[Published] = []
        depths = {key: self._depth(key) for key in reasons}
        for key in sorted(self._not_needed([*reasons]), key=lambda key: -depths[key]):  # a delta before its base
            old += self._taken_out(key, reasons[key])
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

    def _not_needed(self, keys: list[int]) -> list[int]:
        """Return those of these steps that no delta needs which stays."""
        above = {path: base for (path, _), base in self._bases.items()}
        while keys:
            gone = {place for key in keys for place in self._steps[key].saves}
            needed: set[str] = set()
            left = [base for place, base in self._bases.items() if place not in gone]
            while left:
                base = left.pop()
                if base not in needed:
                    own = {base, os.path.dirname(base)}  # it may be named by a file in its directory
                    needed |= own
                    left += [above[path] for path in own & above.keys()]
            stay = [key for key in keys if not needed.isdisjoint(path for path, _ in self._steps[key].saves)]
            if not stay:
                return keys
            keys = [key for key in keys if key not in stay]
        return keys

    def _depth(self, key: int) -> int:
        """Return the number of bases of a step's saves, one on the other."""
        above = {path: base for (path, _), base in self._bases.items()}
        depth, left = 0, {path for path, _ in self._steps[key].saves} & above.keys()
        while left:
            depth += 1
            bases = {above[path] for path in left}
            left = (bases | {os.path.dirname(base) for base in bases}) & above.keys()
        return depth

    def _steps_like(self, series: set[str | None]) -> set[int]:
        """Return the steps with a save of one of these series; in other names a number may be no step: `best-0.95`."""
        return {key for key, step in self._steps.items() if any(_series_of(path) in series for path, _ in step.saves)}

    def _is_folder_of_steps(self, key: int) -> bool:
        """Return whether a step is the name of a folder with a run in it: `step-500/best` beside `step-500/step-7`."""
        saves = self._steps[key].saves
        above = {named.path for path, _ in saves if (named := step_of(path)) is not None and named.path != path}
        others = [path for other, step in self._steps.items() if other != key for path, _ in step.saves]
        return any(_is_below_any(path, above) for path in others)

    def _taken_out(self, key: int, reason: str) -> list[Published]:
        """Take a step out, to delete it; return what was published, with the directories that the saver made."""
        step = self._steps.pop(key)
        for place in step.saves:
            self._bases.pop(place, None)
        if step.saves:
            log(logging.INFO, "step %d is deleted %s: %s", key, reason, listed(path for path, _ in step.saves))
        files: dict[str, Identity] = {}
        directories: dict[str, tuple[int, int]] = {}
        remote: list[Published] = []
        for save in step.saves.values():
            if isinstance(save, WrittenFiles):
                files |= save.files
                directories |= save.directories
            else:
                remote.append(save)
        tops = {named.path if (named := step_of(path)) else path for path, _ in step.saves}
        for directory in [*_made]:
            if not os.path.isdir(directory):
                _made.pop(directory, None)
        made = {path: _made[path] for path in [*_made] if _is_below_any(path, tops)}
        return [WrittenFiles(files, directories | made, made.keys()), *remote]


def _is_below_any(path: str, directories: Collection[str]) -> bool:
    return any(path == directory or path.startswith(f"{directory}/") for directory in directories)


def _steps_among(saves: Sequence[EarlierSave], directory: str) -> list[tuple[int, EarlierSave]]:
    """Return those of the checkpoints in a directory that are steps, each with its number."""
    root = os.path.realpath(directory)
    found = [(step_of(save.path), save) for save in saves]
    # A number in the path of the directory itself is not that of a step in it.
    return [(named.number, save) for named, save in found if named is not None and len(named.path) > len(root)]


def _opened_path(save: EarlierSave) -> str:
    """Return the path by which an earlier save is opened."""
    if save.filename_pattern is None:
        return save.path
    names = FilePattern(save.filename_pattern)
    index = os.path.join(save.path, names.index)
    return index if index in save.written.files else os.path.join(save.path, names.whole)


def _series_of(path: str) -> str | None:
    named = step_of(path)
    return None if named is None else named.series


def warn_of_higher_steps(directory: str, step: int, *, among: Collection[int] | None = None) -> None:
    """Log a warning if a directory holds checkpoints of higher steps than the one at which a run is.

    What resumes from the highest step, and what deletes by the number, would take those.

    Args:
        directory: The directory of the steps.
        step: The step.
        among: The steps that count; None: all.
    """
    present = _steps_present(directory)
    numbers = [number for number in sorted(present) if number > step and (among is None or number in among)]
    higher = [number for number in numbers if any(map(_holds_checkpoint, present[number]))]
    if higher:
        shown = map(str, higher if len(higher) <= _MAX_SHOWN else [*higher[:2], "...", *higher[-2:]])
        log(
            logging.WARNING,
            "%s: this run is at step %d, and there are higher steps already: %s. What resumes from the highest step, "
            "such as by stio.latest, takes one of those; save to a new directory, or remove them (stio.Saver has "
            "drop_higher=)",
            printable(directory),
            step,
            ", ".join(shown),
        )


def _steps_present(directory: str) -> dict[int, list[str]]:
    """Return the paths in a directory by their steps; none if it cannot be listed: the save makes it, or raises."""
    with suppress(OSError):
        return {number: paths for number, paths in steps_in(directory).items() if number is not None}
    return {}


def _holds_checkpoint(path: str) -> bool:
    if not os.path.isdir(path):
        return True
    names = (name for _, _, names in os.walk(path) for name in map(FileName, names) if not name.is_hidden)
    return any(name.endswith(CHECKPOINT_SUFFIXES) or name.is_index for name in names)
