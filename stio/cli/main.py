"""The command line `stio`, also `python -m stio`: the group, and how its commands end.

Each command stands in a file of its own, `cli_*.py`; none imports torch before it needs it, so an answer is there at
once. A command returns its exit status (`cli_common.py` says what they mean). Errors are one sentence on standard
error; what is no error of stio's or the system's is a bug, and comes with its traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from stio import __version__
from stio.cli.bench import bench
from stio.cli.convert import convert
from stio.cli.diff import diff
from stio.cli.gc import gc
from stio.cli.inspect import inspect
from stio.cli.load import load
from stio.cli.output import BROKEN_PIPE, ERROR, INTERRUPTED, CommandError, explained, one_line
from stio.cli.verify import verify
from stio.errors import StioError

__all__ = ["main"]


class _Program(click.Group):
    """A group whose every end is clean: a status, at most one line on standard error, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told of
            return result
        except StioError as error:
            raise CommandError(explained(error)) from error
        except BrokenPipeError:
            _forget_pipes()
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except MemoryError as error:
            raise CommandError("there is not enough memory; free some, or take a smaller part by --filter") from error
        except OSError as error:
            where = f"{one_line(os.fsdecode(error.filename))}: " if error.filename is not None else ""
            why = one_line(error.strerror or str(error))
            raise CommandError(f"{where}{why}; look at the path, its permissions and the disk") from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        prog_name = prog_name or "stio"  # under `python -m` too: help and completion name it
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            if not standalone_mode:
                return status
        except click.Abort:
            if not standalone_mode:
                raise
            status = _tell("Interrupted.", INTERRUPTED)
        except click.ClickException as error:
            if not standalone_mode:
                raise
            status = _explain(error)
        sys.exit(status if isinstance(status, int) else 0)


def _explain(error: click.ClickException) -> int:
    """Say what is wrong; of a wrong call, where to read how it is done."""
    if not isinstance(error, click.UsageError):
        return _tell(f"Error: {_sentence(error)}", ERROR)
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 shows the help by an error
        error.show()
        return ERROR
    program = error.ctx.command_path if error.ctx is not None else "stio"
    return _tell(f"Error: {_sentence(error)} (see `{program} --help`)", ERROR)


def _sentence(error: click.ClickException) -> str:
    return one_line(" ".join(error.format_message().split())).rstrip(".")


def _tell(text: str, status: int) -> int:
    with suppress(OSError):  # nobody listens
        click.echo(text, err=True)
    return status


def _forget_pipes() -> None:
    """Let what is still to be written go nowhere: the interpreter would complain of it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, io.UnsupportedOperation):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _tell(f"warning: {one_line(str(message))}", 0)


_SETTINGS = {"help_option_names": ["-h", "--help"]}
_COMPLETION = """\b
Completion: put the line of your shell into its start file.
  bash, ~/.bashrc:  eval "$(_STIO_COMPLETE=bash_source stio)"
  zsh, ~/.zshrc:    eval "$(_STIO_COMPLETE=zsh_source stio)"
  fish, ~/.config/fish/completions/stio.fish:
                    _STIO_COMPLETE=fish_source stio | source
"""


_HELP = """\
Look at safetensors checkpoints, load, compare, convert and measure them.

Exit status: 0 done; 1 damage or a difference was found; 2 an error; 130 interrupted; 141 the reader of our output left.
"""


@click.group("stio", cls=_Program, context_settings=_SETTINGS, help=_HELP, epilog=_COMPLETION)
@click.version_option(__version__, prog_name="stio")
def main() -> None:
    """Set up what all commands share: how names and warnings are shown."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal's encoding lacks is shown escaped
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        # What torch says of a file's age or kind is no use to who converts it; what stio warns of is one line.
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        warnings.showwarning = _show_warning


for _command in (inspect, verify, diff, load, convert, bench, gc):
    main.add_command(_command)
