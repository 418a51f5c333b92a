"""`stio load PATH`: loads a checkpoint to a device, prints the rate, and draws a timeline on request.

torch is imported when the command runs, before the time is measured. The measured time includes all work of the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import stio
from stio.cli.interrupts import starting
from stio.cli.output import (
    FILTER_OPTION,
    JSON_OPTION,
    NO_PROGRESS_OPTION,
    PATH,
    Bar,
    CommandError,
    matcher,
    no_match,
    print_result,
    rate_text,
    wrong_arguments,
)
from stio.errors import one_line
from stio.runtime.reports import Trace
from stio.text import counted, show_bytes, without_secrets

_TIMELINES = {".json": "save_chrome", ".svg": "save_svg"}
"""Suffix of a timeline, and the method of a trace that writes it."""


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--device", default="auto", show_default=True, help="Device as torch names it; 'auto' is the accelerator."
)
@click.option(
    "--memory",
    type=click.Choice(["auto", "map", "lazy", "copy", "gds"]),
    default="auto",
    show_default=True,
    help="How tensors on the CPU get their memory; gds: from the disk to a GPU. See the documentation of stio.load.",
)
@FILTER_OPTION
@click.option("--verify", is_flag=True, help="Compare the files with the manifest first.")
@click.option("--timeline", metavar="FILE", type=PATH, help="Draw what happened when: .svg, or .json for Perfetto.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def load(path: str, pattern: str | None, timeline: str | None, **options: Any) -> None:
    """Load a checkpoint to a device.

    It prints the rate. PATH is a .safetensors file, a directory with a checkpoint, its index, or a URL of one of these.
    Files in the page cache are not read from the disk; `stio bench` measures the disk. Exit status 3: nothing matches
    --filter.
    """
    names = None if pattern is None else matcher(pattern)
    trace = Trace()
    if timeline is not None:
        if Path(timeline).suffix.lower() not in _TIMELINES:
            raise CommandError(f"{one_line(timeline)}: this is no timeline file; its name must end in .json or .svg")
        if not os.access(os.path.dirname(timeline) or ".", os.W_OK):  # checked before the work
            raise CommandError(f"{one_line(timeline)}: its directory is not writable; choose another place")
    with starting():
        run, torch = stio.sync.load, import_module("torch")
        if options["device"] != "cpu" and torch.accelerator.is_available():
            with suppress(RuntimeError):  # a device that is full or broken: the load says so in a sentence
                torch.zeros(1, device=torch.accelerator.current_accelerator())  # starts its runtime before the load
    with Bar("loading") as bar:
        began = perf_counter()
        with wrong_arguments():
            tensors = run(path, names=names, trace=trace, progress=bar, **options)
        if pattern is not None and not tensors:
            raise no_match(without_secrets(path), pattern)
        devices = sorted({str(tensor.device) for tensor in tensors.values()})
        for name in devices:
            if name != "cpu":
                torch.accelerator.synchronize(name)
        seconds = perf_counter() - began
    if timeline is not None:
        getattr(trace, _TIMELINES[Path(timeline).suffix.lower()])(timeline)
    reads = {span.name for span in trace.spans} & {"map", "populate", "read"}
    total_bytes = sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())  # an alias counts once
    result = {
        "path": without_secrets(path),
        "device": devices,
        "memory": options["memory"],
        "mapped": bool(reads) and "read" not in reads,  # the tensors are mapped files, and not copies
        "num_tensors": len(tensors),
        "total_bytes": total_bytes,
        "seconds": seconds,
        "bytes_per_second": None if options["memory"] == "lazy" else total_bytes / max(seconds, 1e-9),
        "timeline": timeline,
    }
    print_result(result, lambda: _lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    tensors, nbytes = counted(result["num_tensors"], "tensor"), result["total_bytes"]
    rate = rate_text(nbytes, result["seconds"]) if result["memory"] != "lazy" else "read when they are used"
    where = f"{'mapped ' if result['mapped'] else ''}on {', '.join(result['device']) or 'no device'}"
    yield f"{one_line(result['path'])}: {tensors}, {show_bytes(nbytes)} {where} in {result['seconds']:.3f} s, {rate}"
    if result["timeline"] is not None:
        yield f"timeline: {one_line(result['timeline'])}"
