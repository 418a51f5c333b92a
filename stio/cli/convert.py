"""`stio convert SOURCE DESTINATION`: a checkpoint of another kind, cut or dtype becomes safetensors.

Imports no torch until it runs. Ctrl-C rolls back before it ends.
"""

from __future__ import annotations

import dataclasses
import json

import click

import stio
from stio.cli.interrupts import starting
from stio.cli.output import PATH, Bar, CommandError, counted, one_line
from stio.errors import StioError
from stio.runtime.hashing import HashName
from stio.runtime.spans import show_bytes

__all__ = ["convert"]


@click.command()
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
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
    """Convert a checkpoint to safetensors.

    Or to other shards, or to another dtype. SOURCE is a .safetensors file, an index, a directory, or a file of
    torch.save (.pt, .pth, .bin). DESTINATION is one file if it ends in .safetensors, else a directory. What stands
    there is replaced in one step, or not at all.
    """
    with starting():
        carry_out = stio.sync.convert
    try:
        with Bar("converting", is_wanted=not no_progress) as bar:
            result = carry_out(
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
        raise  # the group explains it
    except (ImportError, TypeError, ValueError) as error:  # the package that makes hashes; arguments that cannot be
        raise CommandError(one_line(str(error))) from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
        return
    size = f"{counted(len(result.files), 'file')}, {show_bytes(result.total_bytes)}"
    click.echo(f"{one_line(destination)}: {size} in {result.committed_seconds:.3f} s")
