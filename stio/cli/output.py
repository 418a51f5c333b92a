"""What the commands share: how names, sizes and errors are shown, the bar, and the exit status.

Status 0: done, and the answer is yes. 1: looked, and the answer is no (damage, a difference). 2: an error, said in one
sentence with what to do. 130: interrupted; 141: who read our output has left. Names, metadata and messages come out of
files that nobody vouches for: control characters are escaped before they reach a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from stio.errors import (
    AmbiguousCheckpointError,
    ChangedDuringReadError,
    CheckpointNotFoundError,
    CommitUncertainError,
    ConcurrentSaveError,
    DeviceError,
    DeviceMemoryError,
    FormatError,
    IndexFormatError,
    IntegrityError,
    NoSpaceError,
    SharedTensorsError,
    StioError,
    StorageError,
    TensorNotFoundError,
    UnsafePathError,
    UnsupportedDtypeError,
    printable,
)
from stio.runtime.progress import ProgressEvent
from stio.runtime.spans import show_bytes

__all__ = [
    "BROKEN_PIPE",
    "ERROR",
    "INTERRUPTED",
    "NO",
    "PATH",
    "Bar",
    "CommandError",
    "aligned",
    "console",
    "counted",
    "explained",
    "matcher",
    "one_line",
    "rate_text",
    "require_writable",
]

NO, ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

_ADVICE: tuple[tuple[type[StioError], str], ...] = (
    (CheckpointNotFoundError, "check the path"),
    (AmbiguousCheckpointError, "give the path of the one you mean"),
    (IndexFormatError, "fetch index and shards again, from one save"),
    (UnsafePathError, "do not use it unless you know who made it"),
    (IntegrityError, "fetch it again"),
    (FormatError, "it is damaged or of another kind: fetch it again, or make one by `stio convert`"),
    (TensorNotFoundError, "`stio inspect` lists the names"),
    (UnsupportedDtypeError, "a newer torch may have it"),
    (SharedTensorsError, "save one of them"),
    (ConcurrentSaveError, "run it again when the other save is done"),
    (ChangedDuringReadError, "run it again when nobody writes to it"),
    (NoSpaceError, "make room, or choose another destination"),
    (CommitUncertainError, "run it again"),
    (StorageError, "look at permissions, the disk and the system's log"),
    (DeviceMemoryError, "free memory there, or take --device cpu"),
    (DeviceError, "name a device that is here, as in --device cpu"),
)
"""What to do, where the message does not say it itself; the first class that fits counts."""


_SPELLED = (
    ("pass follow_symlinks=True if you trust it", "copy the file there if you trust it"),
    ("trust_pickle=True", "--trust-pickle"),
)
"""Advice that names a keyword, and what it is on the command line."""


class CommandError(click.ClickException):
    """What keeps a command from its work: one sentence, and what to do."""

    exit_code = ERROR


def explained(error: StioError) -> str:
    """Return an error as one line: what is wrong, and what to do about it."""
    text = one_line(str(error))
    for keyword, spelled in _SPELLED:
        text = text.replace(keyword, spelled)
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), None)
    # After a semicolon messages of stio say what to do.
    return text if advice is None or ";" in error.message else f"{text}; {advice}"


class _CheckpointPath(click.Path):
    """A path, completed by shells; an empty one, as an unset variable leaves it, is refused at once."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the path is empty; give a file or a directory", param, ctx)
        return super().convert(value, param, ctx)


PATH = _CheckpointPath(readable=False)
"""Type of arguments that are paths. Whether there is something is found out by who opens it."""


def matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return whether a name is meant by `--filter`: a glob over the whole name, or `/a regular expression/` in it.

    Raises:
        CommandError: The expression is malformed.
    """
    if pattern is None:
        return lambda name: True
    if len(pattern) < 2 or not (pattern.startswith("/") and pattern.endswith("/")):
        return lambda name: fnmatchcase(name, pattern)
    try:
        found = re.compile(pattern[1:-1]).search
    except re.error as error:
        text = f"{pattern!r} is no regular expression: {error}; without the slashes it is a glob"
        raise CommandError(text) from error
    return lambda name: found(name) is not None


def one_line(text: str) -> str:
    """Return text on one line, what a terminal would obey escaped."""
    return text if text.isprintable() else "".join(map(printable, text))


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, `1 file` or `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate_text(nbytes: int, seconds: float) -> str:
    """Return a rate."""
    return f"{show_bytes(nbytes / max(seconds, 1e-9))}/s"


def require_writable(path: str, kind: str, suffixes: Iterable[str]) -> None:
    """Refuse, before the work is done, a file that could not be written after it.

    Args:
        path: The file.
        kind: What it is called.
        suffixes: What its name may end in, in small letters.

    Raises:
        CommandError: Its name ends otherwise, or its directory cannot be written to.
    """
    *others, last = sorted(suffixes)
    if os.path.splitext(path)[1].lower() not in (*others, last):
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise CommandError(f"{one_line(path)}: no such kind of {kind}; its name ends in {wanted}")
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{one_line(folder)}: no directory that can be written to; choose another place")


def aligned(rows: Iterable[Sequence[str]], *, right: frozenset[int] | set[int]) -> Iterator[str]:
    """Yield rows as lines of plain columns, nothing cut.

    Args:
        rows: Cells, as many in each row.
        right: Columns that are flush right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in cells).rstrip()


def console(*, to_stderr: bool = False) -> Console:
    """Return a terminal to draw on, as it and the environment want it."""
    # rich drops colours for NO_COLOR and keeps bold; whoever sets it wants neither.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=to_stderr, color_system=colours, highlight=False, emoji=False, markup=False)


class Bar:
    """A bar on standard error if that is a terminal, or nothing; gone when the work is done. Thread-safe.

    Args:
        label: What is being done.
        is_wanted: False draws nothing anywhere.
    """

    def __init__(self, label: str, *, is_wanted: bool = True) -> None:
        screen = console(to_stderr=True)
        is_drawn = is_wanted and sys.stderr is not None and sys.stderr.isatty() and screen.is_interactive
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
            disable=not is_drawn,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: ProgressEvent) -> None:
        """Show how far a load or a save is."""
        self._progress.update(self._task, completed=event.done_bytes, total=event.total_bytes)

    def advance(self, nbytes: int, total_bytes: int) -> None:
        """Show that so much more is done."""
        self._progress.update(self._task, advance=nbytes, total=total_bytes)
