"""Runs a function in the processes of a group."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST_SECONDS = 120

PRELOADED = [
    "stio.distributed",
    "stio.sync",
    "torch._dynamo",  # the first use of a `DTensor` imports it
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
"""Modules that the server imports once, before it forks ranks: an import of torch in each would take seconds."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    *arguments: Any,
    killed: Collection[int] = (),
    over_tcp: bool = False,
) -> list[Any]:
    """Call a function in processes of their own, which can send to each other; return what it returned in each.

    Ranks in `killed` end by SIGKILL, at the latest when all others have ended; their result is None. The store is a
    file, or with `killed` and `over_tcp` on the first rank.

    Raises:
        AssertionError: It raised in one of them; the text has all tracebacks.
    """
    results = folder / f"results-{function.__name__}"
    results.mkdir()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    meeting = f"tcp://127.0.0.1:{free_port()}" if killed or over_tcp else f"file://{results}/meeting"
    processes = [
        context.Process(target=_run, args=(function, rank, num_ranks, meeting, str(results), arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + MOST_SECONDS
    while alive := [p.sentinel for rank, p in enumerate(processes) if p.is_alive() and rank not in killed]:
        if time.monotonic() > end:
            break
        wait(alive, timeout=1)
        if any(results.glob("*.failed")):
            end = min(end, time.monotonic() + 5)  # the others may wait for that rank
    for process in processes:
        process.kill()
        process.join()
    failed = [path.read_text() for path in sorted(results.glob("*.failed"))]
    assert not failed, "\n".join(failed)
    assert [process.exitcode for process in processes] == [-9 if rank in killed else 0 for rank in range(num_ranks)]
    found = [results / f"{rank}.result" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _run(
    function: Callable[..., Any], rank: int, num_ranks: int, meeting: str, results: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    try:
        torch.save(function(*arguments), f"{results}/{rank}.result")
    except BaseException:
        Path(f"{results}/{rank}.failed").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # the others may wait for this one
    try:
        dist.destroy_process_group()
    except Exception:
        os._exit(0)  # the rank that has the store was killed
