"""`stio pull URL DIR`: copies a checkpoint from a store to a new directory. Imports no torch.

What was fetched stays after an interruption, and the next call continues.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING

import click

from stio.cli.output import (
    JSON_OPTION,
    NO_PROGRESS_OPTION,
    PATH,
    Bar,
    print_result,
    rate_text,
    wrong_arguments,
)
from stio.errors import one_line
from stio.runtime import Operation
from stio.text import counted, show_bytes, without_secrets

if TYPE_CHECKING:
    from stio.remote import PullResult


@click.command()
@click.argument("url", type=PATH)
@click.argument("directory", metavar="DIR", type=PATH)
@click.option(
    "--also",
    metavar="NAME",
    multiple=True,
    help="Copy this file beside the checkpoint too, such as 'config.json'; repeatable. Needed for http only: such "
    "servers list no files.",
)
@JSON_OPTION
@NO_PROGRESS_OPTION
def pull(url: str, directory: str, also: tuple[str, ...]) -> None:
    """Copy a checkpoint from a URL to a directory.

    URL is one of a .safetensors file, of an index, or of a directory; of a directory in s3, gs, az or hf, the files
    beside the weights are copied too. DIR appears when all files are there and were verified. A call that was
    interrupted is continued by the next one. If DIR is complete already, nothing is fetched. What a delta is based on
    is copied too, to directories beside DIR.
    """
    copy = import_module("stio.remote").pull
    began = perf_counter()
    with wrong_arguments(), Bar("pulling") as bar:
        operation: Operation[PullResult] = Operation(
            lambda _: copy(url, directory, also=also, progress=bar.advance), name="pull", about=without_secrets(url)
        )
        result = operation.result()
    seconds = perf_counter() - began
    size = f"{counted(len(result.files), 'file')}, {show_bytes(result.total_bytes)}"
    checked = "headers checked" if result.verified == "headers" else f"verified by {result.verified}"
    fetched = "nothing fetched, it was complete"
    if result.fetched_bytes:
        rate = rate_text(result.fetched_bytes, seconds)
        fetched = f"{show_bytes(result.fetched_bytes)} fetched in {seconds:.3f} s, {rate}"
    facts = asdict(result) | {"total_bytes": result.total_bytes, "seconds": seconds}
    print_result(facts, lambda: [f"{one_line(result.path)}: {size}, {checked}; {fetched}"])
