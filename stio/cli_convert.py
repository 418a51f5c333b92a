"""`stio convert SOURCE DESTINATION`: a checkpoint of another kind, cut or dtype becomes safetensors.

Imports no torch until it runs. Errors are one sentence, as of the other commands; Ctrl-C rolls back before it ends.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

import stio
from stio.errors import StioError, printable
from stio.events import ProgressEvent
from stio.manifest import HashName

__all__ = ["convert"]


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--max-shard-size", metavar="SIZE", help="Most bytes of tensors in one file, as in '5GB' (directories).")
@click.option("--dtype", metavar="DTYPE", help="Cast floating tensors, as in 'bfloat16'.")
@click.option("--key", metavar="KEY", help="Where a .pt file holds the tensors, as in 'state_dict'.")
@click.option("--trust-pickle", is_flag=True, help="Unpickle anything: runs what the file's author put there.")
@click.option("--hash", "hash_name", type=click.Choice(["sha256", "xxh3"]), help="Write a manifest of hashes.")
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
@click.option("--no-progress", is_flag=True, help="Draw no bar. Pipes get none anyway.")
def convert(
    source: str,
    destination: str,
    max_shard_size: str | None,
    dtype: str | None,
    key: str | None,
    trust_pickle: bool,
    hash_name: HashName | None,
    as_json: bool,
    no_progress: bool,
) -> None:
    """Convert a checkpoint to safetensors, or to other shards or another dtype.

    SOURCE is a .safetensors file, an index, a directory, or a file of torch.save (.pt, .pth, .bin). DESTINATION is one
    file if it ends in .safetensors, else a directory. What stands there is replaced in one step, or not at all.
    """
    bar = _Bar(sys.stderr.isatty() and not no_progress)
    try:
        with bar:
            result = stio.sync.convert(
                source,
                destination,
                max_shard_size=max_shard_size,
                dtype=dtype,
                key=key,
                trust_pickle=trust_pickle,
                hash=hash_name,
                progress=bar,
            )
    except StioError:
        raise  # the group shows it
    except ImportError as error:  # the package that makes the hashes
        raise click.ClickException(str(error)) from error
    except (TypeError, ValueError) as error:
        raise _WrongCallError(_line(str(error))) from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    count = f"{len(result.files):,} file{'' if len(result.files) == 1 else 's'}"
    click.echo(f"{_line(result.path)}: {count}, {result.total_bytes:,} bytes in {result.committed_seconds:.1f} s")


class _WrongCallError(click.ClickException):
    """Arguments that cannot be: one sentence, without the usage, and exit status 2."""

    exit_code = 2


class _Bar:
    """A bar on the terminal, or nothing.

    Args:
        is_drawn: Whether to draw.
    """

    def __init__(self, is_drawn: bool) -> None:
        self._progress = Progress(
            TextColumn("converting"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not is_drawn,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: ProgressEvent) -> None:
        self._progress.update(self._task, completed=event.done_bytes, total=event.total_bytes)


def _line(text: str) -> str:
    """Return text on one line, what a terminal would obey escaped."""
    return text if text.isprintable() else "".join(map(printable, text))
