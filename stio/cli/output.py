"""Common parts of the commands: texts of names, sizes and errors, lines and tables, options, the progress bar.

Exit status 0: done, and the answer is yes. 1: the answer is no (damage, a difference). 2: an error, one sentence with
an advice. 3: nothing matches `--filter`. 130: interrupted. 141: the reader of the output has closed the pipe. Names,
metadata and messages may come from hostile files, so control characters are escaped (`one_line`) before a terminal gets
them. Only a terminal has a width: there long lines and long names go on in the next line. A pipe gets whole lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from math import isnan
from textwrap import wrap
from typing import Any, Self

import click
from tqdm import tqdm
from tqdm.utils import disp_len

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
    printable,
)
from stio.process import contextmanager
from stio.runtime.reports import ProgressEvent
from stio.text import show_bytes

NO, ERROR, NO_MATCH, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

_ADVICE: tuple[tuple[type[StioError], str], ...] = (
    (CheckpointNotFoundError, "check the path"),
    (AmbiguousCheckpointError, "give the path of the one you mean"),
    (IndexFormatError, "fetch index and shards again, from one save"),
    (UnsafePathError, "do not use it unless you trust its author"),
    (IntegrityError, "fetch it again"),
    (FormatError, "it is damaged or of another kind: fetch it again"),
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
    (", or cast with dtype=", " with --filter"),
    ("dtype= takes a torch.dtype or the name of one", "--dtype takes the name of a dtype"),
    ("dtype= takes a torch.dtype, or the name of one in", "--dtype takes the name of a dtype in"),
    ("pass limits=stio.Limits(", "in Python, pass limits=stio.Limits("),
    (" (lock_timeout=)", ""),
    (" with a slash missing (a pathlib.Path removes one): pass the URL as text", ", with a slash missing"),
    (" (stio.convert)", ""),
    ("a save makes one with hash='sha256'", "`stio convert` makes one with --hash sha256"),
    ("names= of stio.load", "--filter of `stio load`"),
    ("names=", "--filter"),
)
"""Advice that names a keyword without an option of its name, and its form on the command line."""

_KEYWORD = re.compile(
    r"\b(?:(device|memory|dtype|key|hash|max_shard_size|trust_pickle)=(?:True\b|'([^']*)')?|max_shard_size\b)"
)
"""A keyword with an option of its name, and its value if that is given."""


class CommandError(click.ClickException):
    """A reason why a command cannot work: one sentence, with an advice."""

    exit_code = ERROR


class NoMatchError(CommandError):
    """Nothing matches `--filter`. A status of its own: scripts can tell it from an error and from a difference."""

    exit_code = NO_MATCH


def explained(error: StioError) -> str:
    """Return an error as one line: what is wrong, and an advice."""
    text = one_line(str(error).replace(error.message, spelled(error.message), 1))  # paths and names are not changed
    advice = next((advice for kind, advice in _ADVICE if isinstance(error, kind)), None)
    # A message with a semicolon has its advice after it.
    return text if advice is None or ";" in error.message else f"{text}; {advice}"


def spelled(text: str) -> str:
    """Return a message with options of the command line in the place of keywords of a call."""
    for keyword, option in _SPELLED:
        text = text.replace(keyword, option)
    return _KEYWORD.sub(_option, text)


def _option(keyword: re.Match[str]) -> str:
    option = f"--{(keyword[1] or 'max_shard_size').replace('_', '-')}"
    return option if keyword[2] is None else f"{option} {shlex.quote(keyword[2])}"


class _CheckpointPath(click.Path):
    """A path that shells complete. An empty one, the value of an unset variable, is an error at once."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the path is empty; give a file or a directory", param, ctx)
        return super().convert(value, param, ctx)


class _Number(click.FloatRange):
    """A number in a range. NaN, which is in every range of click's, is an error."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if isnan(number):
            self.fail("it takes a number, and not NaN", param, ctx)
        return number


PATH = _CheckpointPath(readable=False)
"""Type of arguments that are paths. Only opening the path shows whether it exists."""

ZERO_OR_MORE = _Number(min=0)
"""Type of options that are numbers."""

FILTER_OPTION = click.option(
    "--filter",
    "pattern",
    metavar="PATTERN",
    help="Only names that match a glob such as 'layers.*', or '/a regular expression/'.",
)


def _flag(name: str, text: str) -> Callable[[Any], Any]:
    """Return an option that `is_given` reads; the function of the command does not get it."""

    def remember(context: click.Context, option: click.Parameter, value: bool) -> None:
        context.meta[name] = value

    return click.option(name, is_flag=True, expose_value=False, callback=remember, help=text)


JSON_OPTION = _flag("--json", "Write JSON.")
NO_PROGRESS_OPTION = _flag("--no-progress", "Show no progress bar. Only a terminal shows one.")


def is_given(name: str) -> bool:
    """Return whether the current command has a flag: `--json` or `--no-progress`."""
    return bool(click.get_current_context().meta.get(name))


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Turn errors of a call about its arguments, or about a missing package, into the error of a command."""
    try:
        yield
    except StioError:
        raise  # the group of commands explains it
    except (TypeError, ValueError) as error:
        raise CommandError(spelled(one_line(str(error)))) from error


def print_result(result: dict[str, Any], show: Callable[[], Iterable[str]]) -> None:
    """Print the result of a command as JSON, or the lines that `show` returns."""
    if is_given("--json"):
        click.echo(json.dumps(result, indent=2))
    elif lines := list(show()):
        say("\n".join(lines))


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
        search = re.compile(pattern[1:-1]).search
    except (re.error, OverflowError, RecursionError) as error:  # a huge count, and groups in a thousand groups
        text = f"{pattern!r} is no regular expression: {error}; without the slashes it is a glob"
        raise CommandError(text) from error
    return lambda name: search(name) is not None


def no_match(path: str, pattern: str) -> CommandError:
    """Return the error for a `--filter` that matches no name."""
    text = f"{one_line(path)}: nothing matches --filter {one_line(repr(pattern))}"
    return NoMatchError(f"{text}; a glob is for the whole name, and `stio inspect` lists the names")


def rate_text(nbytes: int, seconds: float) -> str:
    """Return a rate as text: `1.5 GB/s`."""
    return f"{show_bytes(nbytes / max(seconds, 1e-9))}/s"


# Lines and tables.


def width_of(stream: Any) -> int | None:
    """Return the columns of the terminal behind a stream; None: it is no terminal, and lines have any length."""
    with suppress(AttributeError, OSError, ValueError):  # there is no such stream, or it is closed
        if stream.isatty():
            own = os.get_terminal_size(stream.fileno())  # shutil looks at standard output, which may be a pipe
            return shutil.get_terminal_size((own.columns or 80, own.lines or 24)).columns
    return None


def say(text: str, *, to_stderr: bool = False, **style: Any) -> None:
    """Print lines; on a terminal, a long one continues on the next, indented.

    Args:
        text: The lines.
        to_stderr: Print them on standard error.
        **style: Style of the text, as for `click.style`.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    width = width_of(stream)
    if width is not None:
        text = "\n".join(_broken(line, width) for line in text.split("\n"))
    if stream is not None:
        # Without the argument `file`, click writes UTF-8 in the place of ASCII.
        click.echo(styled(text, **style), file=stream)


def styled(text: str, **style: Any) -> str:
    """Return text in a style, unless the environment wants none. click removes the style where there is no terminal."""
    return click.style(text, **style) if style and not os.environ.get("NO_COLOR") else text


def _broken(line: str, width: int) -> str:
    if cells(line) <= width:
        return line
    if not line.isascii():  # textwrap counts characters, of which some have two columns
        return "\n  ".join(_pieces(line, width - 2))
    options: dict[str, Any] = {"expand_tabs": False, "replace_whitespace": False, "break_on_hyphens": False}
    return "\n".join(wrap(line, max(width, 20), subsequent_indent="  ", **options))


def cells(text: str) -> int:
    """Return the columns that a terminal needs for some text."""
    return len(text) if text.isascii() else disp_len(text)


def _pieces(text: str, width: int) -> list[str]:
    """Return text in pieces of at most `width` columns."""
    pieces, room = [""], width
    for character in text:
        needed = cells(character)
        if needed > room:
            pieces.append("")
            room = width
        pieces[-1] += character
        room -= needed
    return pieces


_GAP = "  "
_MAX_PADDED, _MAX_PADDED_NAME = 32, 100
"""Cells, and names in a pipe, are padded to this width at most; a longer one moves the rest of its own row only."""

_SHORTEST_NAME = 12


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), names: int = 0, width: int | None = None
) -> Iterator[list[str]]:
    """Yield the lines of a table, as cells that are padded to aligned columns.

    Args:
        rows: Cells of each row, escaped; all rows have the same number.
        right: Columns that are aligned right.
        names: The column of names. On a terminal a name that has no room goes on in the next line.
        width: Columns of the terminal; None: there is none.
    """
    if width is not None:
        rows = [[printable(cell) if k == names else cell for k, cell in enumerate(row)] for row in rows]
    widest = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    widths = [*(min(wide, _MAX_PADDED) for wide in widest[:-1]), widest[-1]]
    others = sum(widths) - widths[names] + len(_GAP) * (len(widths) - 1)
    widths[names] = min(widest[names], _MAX_PADDED_NAME if width is None else max(_SHORTEST_NAME, width - others))
    for row in rows:
        pieces = [row[names]] if width is None else _pieces(row[names], widths[names])
        for number, piece in enumerate(pieces):
            line = [piece if k == names else cell if number == 0 else "" for k, cell in enumerate(row)]
            spaces = [" " * (wide - cells(text)) for text, wide in zip(line, widths, strict=True)]
            yield [spaces[k] + text if k in right else text + spaces[k] for k, text in enumerate(line)]


def joined(line: Sequence[str]) -> str:
    """Return the cells of a line of a table as text."""
    return _GAP.join(line).rstrip()


class Bar:
    """A progress bar on standard error if that is a terminal. It disappears after the work."""

    def __init__(self, label: str) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        is_drawn = is_terminal and not is_given("--no-progress")
        self._bar = tqdm(desc=label, unit="B", unit_scale=True, leave=False, disable=not is_drawn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, event: ProgressEvent) -> None:
        """Show the progress of a load or a save."""
        self.advance(event.done_bytes - int(self._bar.n), event.total_bytes)

    def advance(self, nbytes: int, total_bytes: int) -> None:
        """Show that `nbytes` more are done."""
        self._bar.total = total_bytes
        self._bar.update(nbytes)
