"""Runs a function in the processes of a group."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST_SECONDS = 120


def run_ranks(function: Callable[..., Any], num_ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """Call a function in processes of their own, which can send to each other; return what it returned in each.

    Raises:
        AssertionError: It raised in one of them; the text has all tracebacks.
    """
    results = folder / f"results-{function.__name__}"
    results.mkdir()
    context = mp.get_context("spawn")
    meeting = f"file://{results}/meeting"
    processes = [
        context.Process(target=_run, args=(function, rank, num_ranks, meeting, str(results), arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(MOST_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
    failed = [path.read_text() for path in sorted(results.glob("*.failed"))]
    assert not failed, "\n".join(failed)
    assert [process.exitcode for process in processes] == [0] * num_ranks
    return [torch.load(results / f"{rank}.result", weights_only=False) for rank in range(num_ranks)]


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
    dist.destroy_process_group()
