"""`stio convert SOURCE DESTINATION`: converts a checkpoint to safetensors, to other shards, or to another dtype.

Imports torch only when it runs. After Ctrl-C it rolls back before it ends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import stio
from stio.cli.interrupts import starting
from stio.cli.output import JSON_OPTION, NO_PROGRESS_OPTION, PATH, Bar, print_result, wrong_arguments
from stio.errors import one_line
from stio.text import counted, show_bytes, without_secrets


@click.command()
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--max-shard-size", metavar="SIZE", help="Most bytes of tensors in one file of a directory, such as '5GB'."
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Cast floating tensors to it: a name of torch or of the format, such as 'bfloat16' or 'BF16'.",
)
@click.option(
    "--key", metavar="KEY", help="Key of the tensors in a .pt file, or keys joined by dots, such as 'model.state_dict'."
)
@click.option(
    "--trust-pickle", is_flag=True, help="Unpickle any object: executes code that the author of the file chose."
)
@click.option("--hash", type=click.Choice(["sha256", "xxh3"]), help="Write a manifest with hashes.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def convert(source: str, destination: str, **options: Any) -> None:
    """Convert a checkpoint to safetensors.

    It converts files of torch.save, and changes shards or dtype. SOURCE is a .safetensors file, an index, a directory,
    or a file of torch.save (.pt, .pth, .bin). DESTINATION is one file if it ends in .safetensors, otherwise a
    directory. A checkpoint at DESTINATION is replaced in one step, or not at all.
    """
    with starting():
        run = stio.sync.convert
    with wrong_arguments(), Bar("converting") as bar:
        result = run(source, destination, **options, progress=bar)
    size = f"{counted(len(result.files), 'file')}, {show_bytes(result.total_bytes)}"
    text = f"{one_line(without_secrets(destination))}: {size} in {result.committed_seconds:.3f} s"
    if result.out_of_range:
        number = counted(sum(result.out_of_range.values()), "value")
        text += f"; {number} out of the range of {one_line(str(options['dtype']))}"
    print_result(dataclasses.asdict(result), lambda: [text])
