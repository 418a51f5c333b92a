"""The command line `stio`: the group of commands, and how a command ends.

A command returns its exit status (`output.py` lists them). An error of stio or of the system is printed as one sentence
on standard error. Any other exception is a bug: it keeps its traceback, and its status is that of an error.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import click

from stio import __version__, native
from stio.cli.bench import bench
from stio.cli.convert import convert
from stio.cli.diff import diff
from stio.cli.gc import gc
from stio.cli.inspect import inspect
from stio.cli.load import load
from stio.cli.output import BROKEN_PIPE, ERROR, INTERRUPTED, CommandError, explained, say, spelled
from stio.cli.pull import pull
from stio.cli.verify import verify
from stio.errors import StioError, one_line
from stio.process import contextmanager


class _Program(click.Group):
    """A group that ends each command with a status and at most one line on standard error, without a traceback."""

    def make_context(self, *arguments: Any, **keywords: Any) -> click.Context:
        with _explained_errors():  # `--help` and `--version` print here
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        with _explained_errors():
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk or a closed pipe must be noticed here
            return result

    def main(self, *arguments: Any, **keywords: Any) -> NoReturn:
        keywords |= {"prog_name": "stio", "standalone_mode": False}  # the name is for `python -m`
        try:
            status: Any = super().main(*arguments, **keywords)
        except (click.Abort, click.ClickException) as error:
            status = _explain(error)
        _discard_output()
        sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def _explained_errors() -> Iterator[None]:
    """Turn errors of stio and of the system into the error of a command, which is one sentence."""
    try:
        yield
    except StioError as error:
        raise CommandError(explained(error)) from error
    except BrokenPipeError:
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except MemoryError as error:
        raise CommandError("there is not enough memory; free some, or load a smaller part with --filter") from error
    except ImportError as error:  # the package of an extra
        raise CommandError(spelled(one_line(str(error)))) from error
    except OSError as error:
        name = error.filename  # of a call with a descriptor it is a number
        where = f"{one_line(os.fsdecode(name))}: " if isinstance(name, str | bytes) else ""
        why = one_line(error.strerror or str(error))
        raise CommandError(f"{where}{why}; look at the path, its permissions and the disk") from error


def _explain(error: click.Abort | click.ClickException) -> int:
    """Print an error; for a wrong call, name the help of the command too."""
    if isinstance(error, click.Abort):
        _print("Interrupted.")
        return INTERRUPTED
    if isinstance(error, CommandError):
        _print(f"Error: {one_line(error.format_message()).rstrip('.')}")
    elif type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 shows the help by raising an error
        error.show()
    else:
        context = error.ctx if isinstance(error, click.UsageError) else None
        text = one_line(" ".join(error.format_message().split())).rstrip(".")  # click's texts have several lines
        _print(f"Error: {text} (see `{context.command_path if context is not None else 'stio'} --help`)")
    return error.exit_code if isinstance(error, CommandError) else ERROR


def _print(text: str) -> None:
    with suppress(OSError):  # standard error is closed
        say(text, to_stderr=True)


def _discard_output() -> None:
    """Discard output that cannot be written; otherwise the interpreter would report it at its end, by status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, io.UnsupportedOperation):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _print(f"warning: {spelled(one_line(str(message)))}")


class _LogWarnings(logging.Handler):
    """Shows warnings in the log of stio as other warnings are shown. The default of `logging` would not escape them."""

    def emit(self, record: logging.LogRecord) -> None:
        _show_warning(record.getMessage())


_SETTINGS = {"help_option_names": ["-h", "--help"]}
_COMPLETION = """\b
Completion: add the line for your shell to its startup file.
  bash, ~/.bashrc:  eval "$(_STIO_COMPLETE=bash_source stio)"
  zsh, ~/.zshrc:    eval "$(_STIO_COMPLETE=zsh_source stio)"
  fish, ~/.config/fish/completions/stio.fish:
                    _STIO_COMPLETE=fish_source stio | source
"""


_HELP = """\
Inspect, check, compare, load, copy and convert safetensors checkpoints, and measure this machine.

Exit status: 0 done; 1 damage or a difference was found; 2 an error; 3 nothing matches --filter; 130 interrupted; 141
the output pipe was closed.
"""


def _show_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        click.echo(f"stio, version {__version__} ({native.name()})")
        context.exit()


@click.group("stio", cls=_Program, context_settings=_SETTINGS, help=_HELP, epilog=_COMPLETION)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
def main() -> None:
    """Set up the output of names and warnings for all commands."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal cannot show is escaped
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        # Warnings of torch about the format of a file do not help the user of a command. Those of stio are one line.
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        warnings.showwarning = _show_warning
    logger = logging.getLogger("stio")
    if not logger.hasHandlers():
        logger.addHandler(_LogWarnings(logging.WARNING))


for _command in (inspect, verify, diff, load, pull, convert, bench, gc):
    main.add_command(_command)
