"""Common parts of the commands: texts of names, sizes and errors, lines and tables, options, the progress bar.

Exit status 0: done, and the answer is yes. 1: the answer is no (damage, a difference). 2: an error, one sentence with
an advice. 3: nothing matches `--filter`. 130: interrupted. 141: the reader of the output has closed the pipe. Names,
metadata and messages may come from hostile files, so control characters are escaped (`one_line`) before a terminal gets
them. Only a terminal has a width: there lines are broken between words, and names in tables are shortened. A pipe gets
whole lines and whole names.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from math import isnan
from textwrap import wrap
from typing import Any, Literal, Self

import click
from rich.cells import cell_len
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
from stio.runtime.text import counted, show_bytes

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


class WholeNumber(click.IntRange):
    """A whole number in a range."""

    name = "whole number"


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
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
NO_PROGRESS_OPTION = click.option(
    "--no-progress", is_flag=True, help="Show no progress bar. Only a terminal shows one."
)


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Turn errors of a call about its arguments, or about a missing package, into the error of a command."""
    try:
        yield
    except StioError:
        raise  # the group of commands explains it
    except (ImportError, TypeError, ValueError) as error:
        raise CommandError(spelled(one_line(str(error)))) from error


def print_result(found: dict[str, Any], text: Iterable[str], *, as_json: bool) -> None:
    """Print the result of a command as JSON, or as lines."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        say("\n".join(text))


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
    except (re.error, OverflowError, RecursionError) as error:  # a huge count, and groups in a thousand groups
        text = f"{pattern!r} is no regular expression: {error}; without the slashes it is a glob"
        raise CommandError(text) from error
    return lambda name: found(name) is not None


def no_match(path: str, pattern: str, names: Collection[str]) -> NoMatchError:
    """Return the error for a `--filter` that matches none of these names."""
    tensors = counted(len(names), "tensor")
    text = f"{one_line(path)}: nothing matches --filter {one_line(repr(pattern))} among {tensors}"
    num_parts = 0 if pattern.startswith("/") else sum(pattern in name for name in names)
    if not num_parts:
        return NoMatchError(f"{text}; `stio inspect` lists the names")
    wider = one_line(repr(f"*{pattern}*"))
    return NoMatchError(f"{text}; a glob is for the whole name: {wider} matches {num_parts:,} of them")


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
        CommandError: Its name has another end, or it or its directory is not writable.
    """
    *others, last = sorted(suffixes)
    if os.path.splitext(path)[1].lower() not in (*others, last):
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise CommandError(f"{one_line(path)}: this is no {kind} file; its name must end in {allowed}")
    directory = os.path.dirname(path) or "."
    if not os.access(directory, os.W_OK):
        raise CommandError(f"{one_line(directory)}: this is no writable directory; choose another place")
    if os.path.isdir(path) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise CommandError(f"{one_line(path)}: this is no writable file; choose another name")


# Lines and tables.


def is_encodable(text: str) -> bool:
    """Return whether the encoding of standard output has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def width_of(stream: Any) -> int | None:
    """Return the columns of the terminal behind a stream; None: it is no terminal, and lines have any length."""
    with suppress(AttributeError, OSError, ValueError):  # there is no such stream, or it is closed
        if stream.isatty():
            own = os.get_terminal_size(stream.fileno())  # shutil looks at standard output, which may be a pipe
            return shutil.get_terminal_size((own.columns or 80, own.lines or 24)).columns
    return None


_TOGETHER = re.compile(r"\[[\d, ]*\]|[\d.,]+ [kMGT]?B(?:/s)?\b|[\d.,]+ (?:s|ms|µs)\b")
"""What a line is not broken in: a shape, and a number with its unit."""


def say(text: str, *, to_stderr: bool = False, style: Literal["bold", "dim"] | None = None) -> None:
    """Print lines; on a terminal, a long one continues on the next, indented. Words and numbers stay whole.

    Args:
        text: The lines.
        to_stderr: Print them on standard error.
        style: Style of the text, if standard output gets colours.
    """
    width = width_of(sys.stderr if to_stderr else sys.stdout)
    if width is not None:
        text = "\n".join(broken(line, width) for line in text.split("\n"))
    if style is not None and has_colours():
        text = "\n".join(click.style(line, **{style: True}) for line in text.split("\n"))
        write(text, to_stderr=to_stderr, has_style=True)
    else:
        write(text, to_stderr=to_stderr)


def write(text: str, *, to_stderr: bool = False, has_style: bool = False) -> None:
    """Print text in the encoding of the stream. Without the argument `file`, click writes UTF-8 in the place of ASCII.

    Args:
        text: The text; a character that the encoding does not have is escaped.
        to_stderr: Print it on standard error.
        has_style: It has colours, and standard output gets colours.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    if stream is not None:
        click.echo(text, file=stream, color=has_style or None)


def has_colours() -> bool:
    """Return whether standard output gets colours: it is a terminal, or the environment says so."""
    return console().color_system is not None


def broken(line: str, width: int) -> str:
    """Return a line as lines of at most `width` columns, broken between words; all but the first are indented."""
    if len(line) <= width:
        return line
    joined = _TOGETHER.sub(lambda match: match[0].replace(" ", "\xa0"), line)
    indent = len(line) - len(line.lstrip(" "))
    lines = wrap(
        joined,
        max(width, 20),
        subsequent_indent=" " * (indent + 2),
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\xa0", " ")


def shortened(name: str, width: int, *, telling: Collection[int] = ()) -> str:
    """Return a name in at most `width` columns: parts between its dots are left out, and numbers as the last ones.

    A name whose last part is too long keeps its end. No number is cut, unless it fills the width.

    Args:
        name: The name, with any number of dots.
        width: Most columns.
        telling: Positions of parts that tell it from others; they are left out after all parts but the numbers.
    """
    length = cells(name)
    if length <= width and len(name) <= max(width, _MAX_SEARCHED):  # some characters take no column, in any number
        return name
    dots = "…" if is_encodable("…") else "..."
    parts = name.split(".") if len(name) <= _MAX_SEARCHED else [name]
    before_last = range(1, len(parts) - 1)
    order = sorted((k for k in before_last if not parts[k].isdecimal()), key=lambda k: k in telling)
    order += [0, *(k for k in before_last if parts[k].isdecimal())] if len(parts) > 1 else []
    left_out: set[int] = set()
    for k in order:
        num_joined = (k - 1 in left_out) + (k + 1 in left_out)  # gaps side by side become one
        length += len(dots) - cells(parts[k]) - num_joined * (len(dots) + 1)
        left_out.add(k)
        if length <= width:
            joined = {one for one in left_out if one - 1 in left_out}
            return ".".join(dots if one in left_out else parts[one] for one in range(len(parts)) if one not in joined)
    start = len(name) - max(0, width - len(dots))
    while cells(name[start:]) + len(dots) > width and start < len(name):
        start += 1
    whole = start
    while whole < len(name) and name[whole - 1 : whole + 1].isdecimal():
        whole += 1
    return dots + (name[whole:] or name[start:])


_MAX_SEARCHED = 400
"""Characters of the longest name whose parts are looked at; one in a hostile file has any number of them."""


def cells(text: str) -> int:
    """Return the columns that a terminal needs for some text."""
    return len(text) if text.isascii() else cell_len(text)


_MAX_PADDED, _MAX_PADDED_IF_NARROW = 32, 20
"""Cells that are not names are padded to this width at most; a longer one moves the rest of its own row only."""

READABLE_NAME = 40
"""Columns that most names of tensors need: `model.layers.10.self_attn.q_proj.weight` has 39."""


def columns_of(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int], width: int | None = None
) -> Iterator[list[str]]:
    """Yield rows with their cells padded to aligned columns; with a width, names in the first column are shortened.

    Args:
        rows: Cells of each row; all rows have the same number.
        right: Columns that are aligned right.
        width: Columns of the terminal; None: no cell is shortened.
    """
    widest = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    widths = _padded(widest, _MAX_PADDED)
    names = [row[0] for row in rows]
    if width is not None:
        if _room(widths, width) < min(widest[0], READABLE_NAME):
            widths = _padded(widest, _MAX_PADDED_IF_NARROW)
        widths[0] = min(widths[0], max(_SHORTEST_NAME, _room(widths, width)))
        names = _shortened_apart(names, widths[0])
    for name, row in zip(names, rows, strict=True):
        texts = [name, *row[1:]]
        for k, most in enumerate(widths):
            spaces = " " * (most - cells(texts[k]))
            texts[k] = spaces + texts[k] if k in right else texts[k] + spaces
        yield texts


_GAP = "  "
_SHORTEST_NAME = 12


def _padded(widest: Sequence[int], most: int) -> list[int]:
    """Return the widths of columns: all of the first and of the last one, and at most `most` of the others."""
    return [widest[0], *(min(one, most) for one in widest[1:-1]), *widest[1:][-1:]]


def _room(widths: Sequence[int], width: int) -> int:
    """Return the columns that a table of a terminal leaves for the names."""
    return width - sum(len(_GAP) + one for one in widths[1:])


def room_for_names(rows: Sequence[Sequence[str]], width: int) -> int:
    """Return the columns that a table of these rows leaves for the names, which are the first cells."""
    return _room(_padded([max(map(cells, column)) for column in zip(*rows, strict=True)], _MAX_PADDED), width)


def _shortened_apart(names: Sequence[str], width: int) -> list[str]:
    """Return names in at most `width` columns; two that would look alike keep the parts in which they differ."""
    texts = [shortened(name, width) for name in names]
    alike: dict[str, set[str]] = {}
    for name, text in zip(names, texts, strict=True):
        alike.setdefault(text, set()).add(name)
    for k, (name, text) in enumerate(zip(names, texts, strict=True)):
        if len(alike[text]) > 1 and len(name) <= _MAX_SEARCHED:
            others = [one.split(".") for one in list(alike[text])[:_MAX_COMPARED]]
            telling = {j for j, part in enumerate(name.split(".")) if any(part not in one[j : j + 1] for one in others)}
            texts[k] = shortened(name, width, telling=telling)
    return texts


_MAX_COMPARED = 8
"""Names with which one that looks like them is compared; a hostile file has any number of them."""


def aligned(
    rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int], width: int | None = None
) -> Iterator[str]:
    """Yield rows as lines of aligned columns; see `columns_of`."""
    yield from (_GAP.join(texts).rstrip() for texts in columns_of(rows, right=right, width=width))


# The terminal.


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
