"""Runs a function in the processes of a group."""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

MAX_SECONDS = 120
SHARED_RANKS = 4
"""Processes of a `RankSet`."""

PRELOADED = [
    *("stio.distributed", "stio.sync", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch._dynamo", "torch.distributed.checkpoint.state_dict"),  # what the first `fully_shard` imports
    *("pytest", "safetensors.torch", "trio"),  # what the tests import
    "tests.distributed.preloaded",  # the last one
]
"""Modules that the server imports once, before it forks ranks: in each rank they would take seconds."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    folder: Path,
    *arguments: Any,
    killed: Collection[int] = (),
    over_tcp: bool = False,
) -> list[Any]:
    """Call a function in processes that can send to each other; return what it returned in each.

    The processes are those of the calls before (`RankSet`), unless ranks are `killed`: then each has its own. Ranks in
    `killed` end by SIGKILL, at the latest when all others have ended; their result is None. The store is a file, or
    with `killed` and `over_tcp` on the first rank.

    Raises:
        AssertionError: It raised in one of them; the text has all tracebacks.
    """
    results = folder / f"results-{function.__name__}"
    results.mkdir()
    meeting = f"tcp://127.0.0.1:{free_port()}" if killed or over_tcp else f"file://{results}/meeting"
    if killed or num_ranks > SHARED_RANKS:
        run_some(server(), range(num_ranks), function, num_ranks, meeting, results, arguments, killed)
    else:
        RankSet.shared().run(function, num_ranks, meeting, results, arguments)
    return results_of(num_ranks, results)


def server() -> Any:
    """Return the context of processes that are forked from one that has imported what ranks need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankSet:
    """Processes that are the ranks of one call after the other. If one fails, all end, and the next call has new ones."""

    _shared: ClassVar[RankSet | None] = None

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []
        for _ in range(SHARED_RANKS):
            own, other = mp.Pipe()
            process = server().Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            self._ranks.append((process, own))

    @classmethod
    def shared(cls) -> RankSet:
        """Return those of this run of pytest."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        meeting: str,
        results: Path,
        arguments: tuple[Any, ...],
    ) -> None:
        """Call a function in the first `num_ranks` of them; what it returns is in `results`."""
        running = [pipe for _, pipe in self._ranks[:num_ranks]]
        for rank, pipe in enumerate(running):
            pipe.send((function, rank, num_ranks, meeting, str(results), arguments))
        end, ended_early = time.monotonic() + MAX_SECONDS, False
        while running and time.monotonic() < end:
            for pipe in wait(running, timeout=1):
                assert isinstance(pipe, Connection)
                running.remove(pipe)
                try:
                    pipe.recv()
                except EOFError:
                    ended_early = True
            if ended_early:
                end = min(end, time.monotonic() + 5)  # the others may wait for that rank
        if running or ended_early:
            self.close()
        failed = [path.read_text() for path in sorted(results.glob("*.failed"))]
        assert not failed, "\n".join(failed)
        assert not running, f"{len(running)} of {num_ranks} ranks did not end"
        assert not ended_early, "a rank ended"

    def close(self) -> None:
        """End the processes."""
        RankSet._shared = None
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()


def run_some(
    context: Any,
    own: Sequence[int],
    function: Callable[..., Any],
    num_ranks: int,
    meeting: str,
    results: Path,
    arguments: tuple[Any, ...],
    killed: Collection[int],
) -> None:
    """Run some of the ranks of `run_ranks`, by processes of their own on this host; what they return is in `results`."""
    processes = {
        rank: context.Process(target=_run, args=(function, rank, num_ranks, meeting, str(results), arguments))
        for rank in own
    }
    for process in processes.values():
        process.start()
    end = time.monotonic() + MAX_SECONDS
    awaited = [process for rank, process in processes.items() if rank not in killed] or list(processes.values())
    while alive := [process.sentinel for process in awaited if process.is_alive()]:
        if time.monotonic() > end:
            break
        wait(alive, timeout=1)
        if any(results.glob("*.failed")):
            end = min(end, time.monotonic() + 5)  # the others may wait for that rank
    for process in processes.values():
        process.kill()
        process.join()
    failed = [path.read_text() for path in sorted(results.glob("*.failed"))]
    assert not failed, "\n".join(failed)
    assert {rank: process.exitcode for rank, process in processes.items()} == {
        rank: -9 if rank in killed else 0 for rank in own
    }


def results_of(num_ranks: int, results: Path) -> list[Any]:
    """Return what each rank has returned; None if it was killed."""
    found = [results / f"{rank}.result" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _serve(pipe: Connection) -> None:
    """Be a rank, again and again."""
    environment = dict(os.environ)
    with suppress(EOFError):  # pytest has ended
        while True:
            _run(*pipe.recv())
            os.environ.clear()
            os.environ |= environment
            _clear_sharding_prop_cache()  # its meshes are those of groups that are no more
            gc.collect()
            pipe.send("done")


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
