"""`stio load PATH`: loads a checkpoint to a device, and says how fast that was and, if asked, what happened when.

torch is imported when it runs, off the clock. The device's queue is waited for before the clock stops.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import click

import stio
from stio.cli.interrupts import starting
from stio.cli.output import PATH, Bar, CommandError, counted, matcher, one_line, rate_text, require_writable
from stio.runtime.spans import show_bytes
from stio.runtime.trace import Trace

__all__ = ["load"]

_TIMELINES = {".html": "save_html", ".json": "save_chrome", ".svg": "save_svg"}
"""Suffix of the file, and the method of a trace that writes it."""


@click.command()
@click.argument("path", type=PATH)
@click.option("--device", default="auto", show_default=True, help="As torch names it; 'auto' is its accelerator.")
@click.option(
    "--memory",
    type=click.Choice(["auto", "map", "lazy", "copy", "gds"]),
    default="auto",
    show_default=True,
    help="How tensors on the CPU get their memory; gds: past the host's, to a GPU. See stio.load's documentation.",
)
@click.option("--filter", "pattern", metavar="PATTERN", help="Only names that match 'a.*.glob' or '/an expression/'.")
@click.option("--verify", is_flag=True, help="Compare the files with their manifest before.")
@click.option("--timeline", metavar="FILE", type=PATH, help="What happened when: .svg, .html, or .json for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.option("--no-progress", is_flag=True, help="Draw no bar. Pipes get none anyway.")
def load(
    path: str,
    device: str,
    memory: Literal["auto", "map", "lazy", "copy", "gds"],
    pattern: str | None,
    verify: bool,
    timeline: str | None,
    as_json: bool,
    no_progress: bool,
) -> None:
    """Load a checkpoint to a device.

    And say how fast that was. PATH is a .safetensors file, a directory that holds a checkpoint, or its index. What the
    page cache holds comes from there: `stio bench` measures the disk.
    """
    names = None if pattern is None else matcher(pattern)
    trace = None if timeline is None else Trace()
    if timeline is not None:
        require_writable(timeline, "timeline", _TIMELINES)
    with starting():
        carry_out, torch = stio.sync.load, import_module("torch")
        if device != "cpu" and torch.accelerator.is_available():
            torch.zeros(1, device=torch.accelerator.current_accelerator())  # starts its runtime, off the clock
    with Bar("loading", is_wanted=not no_progress) as bar:
        began = perf_counter()
        try:
            tensors = carry_out(
                path, names=names, device=device, memory=memory, verify=verify, trace=trace, progress=bar
            )
        except ImportError as error:  # the package that made the hashes, or that reads
            raise CommandError(one_line(str(error))) from error
        where = sorted({str(tensor.device) for tensor in tensors.values()})
        for name in where:
            if name != "cpu":
                torch.accelerator.synchronize(name)
        seconds = perf_counter() - began
    if trace is not None and timeline is not None:
        getattr(trace, _TIMELINES[Path(timeline).suffix.lower()])(timeline)
    total_bytes = sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())  # an alias is no copy
    _tell(
        {
            "path": path,
            "device": where,
            "memory": memory,
            "num_tensors": len(tensors),
            "total_bytes": total_bytes,
            "seconds": seconds,
            "bytes_per_second": None if memory == "lazy" else total_bytes / max(seconds, 1e-9),
            "timeline": timeline,
        },
        as_json,
    )


def _tell(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    tensors, nbytes = counted(result["num_tensors"], "tensor"), result["total_bytes"]
    device = ", ".join(result["device"]) or "no device"
    rate = rate_text(nbytes, result["seconds"]) if result["memory"] != "lazy" else "read when they are used"
    click.echo(
        f"{one_line(result['path'])}: {tensors}, {show_bytes(nbytes)} on {device} in {result['seconds']:.3f} s, {rate}"
    )
    if result["timeline"] is not None:
        click.echo(f"timeline: {one_line(result['timeline'])}")
