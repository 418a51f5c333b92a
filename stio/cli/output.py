"""Common parts of the commands: texts of names, sizes and errors, options, the progress bar, the exit status.

Exit status 0: done, and the answer is yes. 1: the answer is no (damage, a difference). 2: an error, one sentence with
an advice. 130: interrupted. 141: the reader of the output has closed the pipe. Names, metadata and messages may come
from hostile files, so control characters are escaped (`one_line`) before a terminal gets them.
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
    HostMemoryError,
    IndexFormatError,
    IntegrityError,
    NoSpaceError,
    SharedTensorsError,
    StioError,
    StorageError,
    TensorNotFoundError,
    UnsafePathError,
    UnsupportedDtypeError,
    one_line,
)
from stio.runtime.progress import ProgressEvent
from stio.runtime.units import show_bytes

NO, ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

_ADVICE: tuple[tuple[type[StioError], str], ...] = (
    (CheckpointNotFoundError, "check the path"),
    (AmbiguousCheckpointError, "give the path of the one you mean"),
    (IndexFormatError, "fetch index and shards again, from one save"),
    (UnsafePathError, "do not use it unless you trust its author"),
    (IntegrityError, "fetch it again"),
    (FormatError, "it is damaged or of another kind: fetch it again, or make one by `stio convert`"),
    (TensorNotFoundError, "`stio inspect` lists the names"),
    (UnsupportedDtypeError, "a newer torch may have it"),
    (SharedTensorsError, "save one of them"),
    (ConcurrentSaveError, "run it again when the other save is done"),
    (ChangedDuringReadError, "run it again when nothing writes to it"),
    (NoSpaceError, "free some space, or choose another destination"),
    (CommitUncertainError, "run it again"),
    (StorageError, "look at permissions, the disk and the system's log"),
    (HostMemoryError, "free some memory, or load a smaller part with --filter"),
    (DeviceMemoryError, "free memory of the device, or use --device cpu"),
    (DeviceError, "give a device of this machine, for example --device cpu"),
)
"""Advice for errors whose message has none. The first class that matches counts."""


_SPELLED = (
    ("pass follow_symlinks=True if you trust it", "copy the file there if you trust it"),
    ("trust_pickle=True", "--trust-pickle"),
)
"""Advice that names a keyword, and its form on the command line."""


class CommandError(click.ClickException):
    """A reason why a command cannot work: one sentence, with an advice."""

    exit_code = ERROR


def explained(error: StioError) -> str:
    """Return an error as one line: what is wrong, and an advice."""
    text = one_line(str(error))
    for keyword, spelled in _SPELLED:
        text = text.replace(keyword, spelled)
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), None)
    # A message with a semicolon has its advice after it.
    return text if advice is None or ";" in error.message else f"{text}; {advice}"


class _CheckpointPath(click.Path):
    """A path that shells complete. An empty one, the value of an unset variable, is an error at once."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the path is empty; give a file or a directory", param, ctx)
        return super().convert(value, param, ctx)


PATH = _CheckpointPath(readable=False)
"""Type of arguments that are paths. Only opening the path shows whether it exists."""

FILTER_OPTION = click.option(
    "--filter",
    "pattern",
    metavar="PATTERN",
    help="Only names that match a glob such as 'layers.*', or '/a regular expression/'.",
)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
NO_PROGRESS_OPTION = click.option(
    "--no-progress", is_flag=True, help="Show no progress bar. Only a terminal shows one."
)


def matcher(pattern: str | None) -> Callable[[str], bool]:
    """Return a function for `--filter`: a glob for the whole name, or `/a regular expression/` for a part of it.

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


def rate_text(nbytes: int, seconds: float) -> str:
    """Return a rate as text: `1.5 GB/s`."""
    return f"{show_bytes(nbytes / max(seconds, 1e-9))}/s"


def require_writable(path: str, kind: str, suffixes: Iterable[str]) -> None:
    """Check, before the work, that the file for its result can be written.

    Args:
        path: The file.
        kind: Kind of the file, for messages.
        suffixes: Allowed ends of its name, in lower case.

    Raises:
        CommandError: Its name has another end, or its directory is not writable.
    """
    *others, last = sorted(suffixes)
    if os.path.splitext(path)[1].lower() not in (*others, last):
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise CommandError(f"{one_line(path)}: this is no {kind} file; its name must end in {allowed}")
    directory = os.path.dirname(path) or "."
    if not os.access(directory, os.W_OK):
        raise CommandError(f"{one_line(directory)}: this is no writable directory; choose another place")


def aligned(rows: Iterable[Sequence[str]], *, right: frozenset[int] | set[int]) -> Iterator[str]:
    """Yield rows as lines of aligned columns, with no cell cut.

    Args:
        rows: Cells of each row; all rows have the same number.
        right: Columns that are aligned right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(cell.rjust(width) if k in right else cell.ljust(width) for k, (cell, width) in cells).rstrip()


def console(*, to_stderr: bool = False) -> Console:
    """Return a console of rich, with the settings of the terminal and of the environment."""
    # With NO_COLOR set, rich removes colours but not bold; here both are removed.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=to_stderr, color_system=colours, highlight=False, emoji=False, markup=False)


class Bar:
    """A progress bar on standard error if that is a terminal. It disappears after the work. Thread-safe.

    Args:
        label: Name of the work.
        is_wanted: False shows no bar.
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
        """Show the progress of a load or a save."""
        self._progress.update(self._task, completed=event.done_bytes, total=event.total_bytes)

    def advance(self, nbytes: int, total_bytes: int) -> None:
        """Show that `nbytes` more are done."""
        self._progress.update(self._task, advance=nbytes, total=total_bytes)
