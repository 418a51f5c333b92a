"""Compare loads of two ranks with torch's reader of the hub's layout: `python -m benchmarks.distributed`.

`load_into` fills a module, `dcp` is `dcp.load` with `StioStorageReader`, `hf` is `dcp.load` with torch's own
`HuggingFaceStorageReader`. Each run has fresh processes, one for each rank (gloo). Memory of the tensors is allocated
and touched before the clock starts, which is at a barrier. A run takes as long as its slowest rank. All kinds of
parts are interleaved in one case, so that they can be compared with each other.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import files, meters, pagecache, runner
from benchmarks.child import Spec
from benchmarks.report import cost, count_cell, median_cell, plain, seconds
from benchmarks.runs import Bound, Record, Runs
from benchmarks.suite import Case, Columns, Entry, Measure, Settings, Suite

NUM_RANKS = 2
SIDE = 2048
"""Rows and columns of each tensor."""
PLACEMENTS = ("rows", "columns", "replicated")
_MODEL = "model.safetensors"


def _entries(*pairs: tuple[str, str]) -> tuple[Entry, ...]:
    return tuple(Entry(name, f"{name} {kind}", options={"placement": kind}) for name, kind in pairs)


CASES: tuple[Case, ...] = (
    Case(
        "warm",
        f"{NUM_RANKS} ranks, warm",
        _entries(*((name, kind) for kind in PLACEMENTS for name in ("load_into", "dcp", "hf"))),
        rounds=5,
        state="warm",
    ),
    Case(
        "cold",
        f"{NUM_RANKS} ranks, cold",
        _entries(*((name, kind) for kind in ("rows", "columns") for name in ("load_into", "dcp", "hf"))),
        rounds=5,
        state="cold",
    ),
)

BOUNDS: tuple[Bound, ...] = (
    cost("warm", "rows: load_into / torch's reader", "load_into rows", "hf rows", "seconds", 1.1),
    cost("warm", "rows: dcp.load by stio / torch's reader", "dcp rows", "hf rows", "seconds", 1.2),
    cost("warm", "columns: load_into / its rows", "load_into columns", "load_into rows", "seconds", 1.5),
    cost("warm", "columns: dcp.load by stio / torch's reader", "dcp columns", "hf columns", "seconds", 1.3),
    cost("warm", "replicated: dcp.load by stio / torch's reader", "dcp replicated", "hf replicated", "seconds", 1.0),
    cost("warm", "columns: load_into / torch's reader", "load_into columns", "hf columns", "seconds"),
    cost("warm", "replicated: load_into / torch's reader", "load_into replicated", "hf replicated", "seconds"),
    cost("cold", "rows: load_into / torch's reader", "load_into rows", "hf rows", "seconds"),
    cost("cold", "columns: load_into / torch's reader", "load_into columns", "hf columns", "seconds"),
    *(
        seconds("cold", f"rows, {name}: bytes that a rank reads / its share", f"{name} rows", "rank_share", 1.02, "")
        for name in ("load_into", "dcp")
    ),
    *(
        seconds(
            "cold", f"{kind}, {name}: bytes of all ranks from the disk / the file", f"{name} {kind}", "share", 1.02, ""
        )
        for kind in ("rows", "columns")
        for name in ("load_into", "dcp")
    ),
)

LABELS = {
    "load_into": "stio.distributed.load_into",
    "dcp": "dcp.load, StioStorageReader",
    "hf": "dcp.load, HuggingFaceStorageReader",
}


def layout_of(size_bytes: int) -> files.Layout:
    """Give square matrices of about so many bytes."""
    count = max(1, math.floor(size_bytes / (SIDE * SIDE * files.ITEM_BYTES)))
    return files.Layout("square", tuple(files.TensorShape(f"t{k:03}", (SIDE, SIDE)) for k in range(count)))


# One run: a process for each rank.


def run(spec: Spec) -> Record:
    """Start the ranks, and give what they measured: see `_measured`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = context.SimpleQueue()
        ranks = [
            context.Process(target=_run_rank, args=(rank, spec.encode(), f"file://{folder}/meeting", answers))
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return {"error": f"exit status of the ranks: {[process.exitcode for process in ranks]}"}
        record: Record = answers.get()
        return record


def _run_rank(rank: int, encoded: str, meeting: str, answers: Any) -> None:
    import json

    import torch
    import torch.distributed as dist

    spec = Spec(**json.loads(encoded))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, _measured(spec, dist.barrier))
    if rank == 0:
        record = {key: max(each[key] for each in found) for key in found[0] if key != "disk_bytes"}
        share = sum(each["disk_bytes"] for each in found) / os.path.getsize(spec.path)
        answers.put(record | {"share": share, "rank_seconds": [each["seconds"] for each in found]})
    dist.barrier()
    dist.destroy_process_group()


def _measured(spec: Spec, barrier: Callable[[], object]) -> Record:
    """Load on this rank: seconds, and disk_bytes that this process caused to be read.

    Of cold loads by stio, which are traced: rank_share, the bytes that it reads through those that it holds. What the
    kernel reads ahead for one rank is often what another one needs, so disk_bytes of a rank say nothing.
    """
    import torch.distributed as dist

    tensors = make_tensors(spec)
    trace = import_module("stio").Trace() if spec.state == "cold" and spec.contestant != "hf" else None
    load = _LOADS[spec.contestant](spec.path, tensors, trace)
    path = Path(spec.path)
    if dist.get_rank() == 0:
        if spec.state == "warm":
            pagecache.fill_by_reads(path)
        else:
            pagecache.evict(path)
    barrier()
    before = _disk_bytes()
    started = time.perf_counter()
    load()
    taken = time.perf_counter() - started
    disk_bytes = _disk_bytes() - before
    barrier()
    if spec.verify:
        _check(path, tensors, spec.options["placement"])
    record: Record = {"seconds": taken, "disk_bytes": disk_bytes}
    if trace is not None:
        held = sum(tensor.to_local().nbytes for tensor in tensors.values())
        record["rank_share"] = sum(span.num_bytes for span in trace.spans if span.name in ("read", "populate")) / held
    return record


def make_tensors(spec: Spec) -> dict[str, Any]:
    """Make the tensors of a rank, of which every page was touched."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    placement: Any = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[spec.options["placement"]]
    made = {}
    for tensor in layout_of(spec.size_bytes).tensors:
        shape = list(tensor.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= NUM_RANKS
        local = torch.empty(shape, dtype=torch.bfloat16).fill_(-1)
        made[tensor.name] = DTensor.from_local(
            local, mesh, [placement], shape=torch.Size(tensor.shape), stride=(SIDE, 1), run_check=False
        )
    return made


def _into_module(path: str, tensors: dict[str, Any], trace: Any) -> Callable[[], object]:
    from torch import nn

    sync = import_module("stio.sync")
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    load_into = sync.distributed.load_into
    return lambda: load_into(module, path, trace=trace)


def _by_dcp(path: str, tensors: dict[str, Any], trace: Any) -> Callable[[], object]:
    dcp = import_module("torch.distributed.checkpoint")
    reader = import_module("stio.distributed").StioStorageReader
    return lambda: dcp.load(dict(tensors), storage_reader=reader(path, trace=trace))


def _by_torch(path: str, tensors: dict[str, Any], trace: Any) -> Callable[[], object]:
    dcp = import_module("torch.distributed.checkpoint")
    import_module("safetensors.torch")
    reader = dcp.HuggingFaceStorageReader
    folder = str(Path(path).parent)
    return lambda: dcp.load(dict(tensors), storage_reader=reader(folder))


_LOADS: dict[str, Callable[[str, dict[str, Any], Any], Callable[[], object]]] = {
    "load_into": _into_module,
    "dcp": _by_dcp,
    "hf": _by_torch,
}


def _disk_bytes() -> int:
    """Give the bytes that this process caused to be read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _check(path: Path, tensors: dict[str, Any], placement: str) -> None:
    """Compare what this rank holds with the file.

    Raises:
        ValueError: They differ.
    """
    import numpy as np
    import torch.distributed as dist

    data, (start, spans) = np.memmap(path, np.uint8, mode="r"), files.read_header(path)
    half = slice(dist.get_rank() * SIDE // NUM_RANKS, (dist.get_rank() + 1) * SIDE // NUM_RANKS)
    for (name, found), tensor in zip(
        meters.tensor_arrays({name: tensor.to_local() for name, tensor in tensors.items()}),
        tensors.values(),
        strict=True,
    ):
        whole = data[start + spans[name][0] : start + spans[name][1]].view(np.uint16).reshape(SIDE, SIDE)
        part = {"rows": whole[half], "columns": whole[:, half], "replicated": whole}[placement]
        if not np.array_equal(found.view(np.uint16).reshape(tensor.to_local().shape), part):
            raise ValueError(f"wrong bytes were loaded: {name}")


# The runs of a case.


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Make the file that all entries read; give the function that runs an entry."""
    directory = settings.directory / case.name
    if directory.exists():  # of a run that was killed, in a directory that stays
        files.discard(directory)
    directory.mkdir()
    layout = layout_of(settings.size_bytes)

    def measure(entry: Entry, number: int, verify: bool) -> Record:
        spec = Spec(
            contestant=entry.contestant,
            path=str(directory / _MODEL),
            size_bytes=settings.size_bytes,
            case=case.name,
            state=case.state,
            verify=verify,
            options=entry.options,
        )
        record = runner.run_child("benchmarks.distributed", spec, settings.timeout_seconds)
        return {"data_bytes": layout.data_bytes} | record

    try:
        files.write_file(directory / _MODEL, layout)
        yield measure
    finally:
        files.discard(directory)


def _columns(case: Case) -> Columns:
    def row(name: str, entry: str, runs: Runs) -> list[str]:
        found = plain(runs, name, entry, "seconds")
        cells = [f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}"]
        if case.state == "cold":
            cells += [median_cell(runs, name, entry, key, 1.0, 3) for key in ("share", "rank_share")]
        return [*cells, count_cell(runs, name, entry)]

    disk = ("from the disk / file", "a rank reads / its share") if case.state == "cold" else ()
    return Columns(("s", "min to max", *disk, "runs"), row)


SUITE = Suite(
    name="distributed",
    cases=CASES,
    bounds=BOUNDS,
    labels=LABELS,
    prepared=prepared,
    columns=_columns,
    size_bytes=60 * SIDE * SIDE * files.ITEM_BYTES,
    quick_size_bytes=8 * SIDE * SIDE * files.ITEM_BYTES,
)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
