"""Ranks that save or load again and again, until one of them is killed or raises, at a random moment.

Each round has ranks, a directory with a checkpoint, and a store of its own, which the first rank holds. A checkpoint is
one *generation*: all values of its tensors follow from one number.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import PRELOADED
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import stio
from stio import sync
from stio.saving import scheduler
from stio.storage import local
from stio.storage.commit import syscalls as calls

KINDS = ["save", "broadcast", "saver", "load"]
SHARD_BYTES = 1 << 20
FIRST_TIMEOUT = 60.0
"""Of the first save or load, which imports what it needs, and for which all ranks wait."""

SHAPES: dict[str, tuple[tuple[int, int], list[Placement] | None]] = {
    "rows": ((301, 1024), [Shard(0)]),
    "more_rows": ((256, 1024), [Shard(0)]),
    "few_rows": ((3, 1024), [Shard(0)]),
    "columns": ((96, 1031), [Shard(1)]),
    "plain": ((600, 1024), None),
}
"""Shapes and placements. `plain` is the same on all ranks."""


def whole(name: str, generation: int) -> torch.Tensor:
    """Return the values of a tensor."""
    (rows, columns), _ = SHAPES[name]
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) + generation


@dataclass(frozen=True)
class Round:
    """What happens in one round."""

    seed: int
    kind: str
    """What the ranks do; see `KINDS`."""
    raises: bool
    """Whether the victim raises instead of being killed."""
    num_ranks: int
    victim: int
    moment: float
    """When, from the time at which all ranks are about to do it again, as a multiple of the time that it takes."""
    rank_timeout: float

    @property
    def saves(self) -> bool:
        return self.kind in ("save", "saver")

    @classmethod
    def from_seed(cls, seed: int, rank_timeout: float) -> Round:
        """Return the round of a seed. Of eight in a row, each kind has a kill and a failure."""
        chance = random.Random(seed)
        num_ranks = chance.choice([2, 3, 4])
        return cls(
            seed=seed,
            kind=KINDS[seed % 4],
            raises=seed % 8 in (1, 2, 4, 7),
            num_ranks=num_ranks,
            victim=chance.randrange(num_ranks),
            moment=chance.uniform(0, 2),
            rank_timeout=rank_timeout,
        )


@dataclass
class Ended:
    """What the ranks of one round told."""

    of: Round
    path: Path
    began: int = 0
    """The last generation that a rank began to save."""
    acknowledged: int = 0
    """The last generation whose save returned on a rank."""
    fault_time: float | None = None
    """When the victim was killed, or when its first call failed."""
    errors: dict[int, tuple[str, str, str, float]] = field(default_factory=dict)
    """Of each rank that raised: the classes of the error and of its cause, the text, and when."""
    wrong: list[str] = field(default_factory=list)

    @property
    def delays(self) -> dict[int, float]:
        """Seconds from the fault to the error, of each rank but the victim."""
        assert self.fault_time is not None, "nothing went wrong"
        return {rank: error[3] - self.fault_time for rank, error in self.errors.items() if rank != self.of.victim}


# In the driver.


def play(this: Round, folder: Path) -> Ended:
    """Run one round; `folder` is its own. Callable on several threads at once."""
    path = folder / "place" / "model"
    sync.save({name: whole(name, 0) for name in SHAPES}, path, max_shard_size=SHARD_BYTES)
    ended = Ended(this, path)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    try:
        for rank in range(this.num_ranks):
            own, other = context.Pipe()
            process = context.Process(target=_rank, args=(this, rank, str(path), other, str(folder)))
            process.start()
            other.close()
            pipes.append(own)
            processes.append(process)
        _drive(ended, pipes, processes, folder)
    except Exception as error:
        ended.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    return ended


def _drive(ended: Ended, pipes: list[Connection], processes: list[Any], folder: Path) -> None:
    this = ended.of
    port = _receive(pipes[0])
    for pipe in pipes[1:]:
        pipe.send(port)
    seconds = max(_receive(pipe) for pipe in pipes)
    if this.saves:
        ended.began = ended.acknowledged = 1
    for pipe in pipes:
        pipe.send("go")
    time.sleep(seconds * this.moment)
    if this.raises:
        pipes[this.victim].send("raise")
    else:
        os.kill(processes[this.victim].pid, signal.SIGKILL)
        ended.fault_time = time.monotonic()
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + this.rank_timeout + 10
    while ranks:
        ready = wait(list(ranks), max(0, end - time.monotonic()))
        if not ready:
            ended.wrong += [_stack(processes[rank], folder, rank) for rank in ranks.values()]
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                _note(ended, ranks[pipe], *pipe.recv())
            except (EOFError, ConnectionError):
                del ranks[pipe]


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(60), "a rank does not begin"
    value = pipe.recv()
    assert isinstance(value, int | float), f"a rank ended before its turn: {value}"
    return value


def _note(ended: Ended, rank: int, what: str, value: Any) -> None:
    if what == "begin" and ended.of.saves:
        ended.began = max(ended.began, value)
    elif what == "done" and ended.of.saves:
        ended.acknowledged = max(ended.acknowledged, value)
    elif what == "fault":
        ended.fault_time = value
    elif what == "raised":
        ended.errors[rank] = value
    elif what == "wrong":
        ended.wrong.append(f"rank {rank}: {value}")


def _stack(process: Any, folder: Path, rank: int) -> str:
    os.kill(process.pid, signal.SIGABRT)
    process.join(5)
    return f"rank {rank} hangs:\n{(folder / f'stacks-{rank}').read_text()}"


# In the ranks.


class Fault:
    """Makes one call of this process fail, at the time at which the driver wants it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_due = threading.Event()
        self._once = threading.Lock()
        for owner, name in [
            (calls, "write"),
            (calls, "fsync"),
            (calls, "reserve"),
            (calls, "open_file"),
            (calls, "rename"),
            (scheduler, "copy_out"),
            (local.LocalFile, "read_into"),
        ]:
            setattr(owner, name, self._faulty(getattr(owner, name)))
        threading.Thread(target=self._wait, daemon=True).start()

    def renew(self) -> None:
        """Let another call fail, if the one before did no harm."""
        if self._once.locked():
            self._once.release()

    def _wait(self) -> None:
        assert self._pipe.recv() == "raise"
        self._is_due.set()

    def _faulty(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._is_due.is_set() and self._once.acquire(blocking=False):
                self._pipe.send(("fault", time.monotonic()))
                raise OSError(errno.EIO, "a disk that fails")
            return function(*arguments, **keywords)

        return call


def _rank(this: Round, rank: int, path: str, pipe: Connection, folder: str) -> None:
    stacks = open(f"{folder}/stacks-{rank}", "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    torch.set_num_threads(1)
    is_first = rank == 0
    port = 0 if is_first else pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, this.num_ranks, is_first, wait_for_workers=False)
    if is_first:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=this.num_ranks)
    try:
        asyncio.run(_again_and_again(this, rank, path, pipe))
    except BaseException as error:
        kind = type(error).__name__
        pipe.send(("raised", (kind, type(error.__cause__).__name__, str(error), time.monotonic())))
    os._exit(0)  # the group cannot be left in order: a rank has ended


async def _again_and_again(this: Round, rank: int, path: str, pipe: Connection) -> None:
    """Save or load once, tell the driver how long it took, and go on until an error when it says so."""
    model = Model(DeviceMesh("cpu", torch.arange(this.num_ranks)))
    async with stio.distributed.Saver(max_shard_size=SHARD_BYTES, rank_timeout=this.rank_timeout) as saver:

        async def once(rank_timeout: float = this.rank_timeout) -> None:
            if this.kind == "saver" and rank_timeout == this.rank_timeout:
                await (await saver.save(model, path))
            elif this.saves:
                await stio.distributed.save(model, path, max_shard_size=SHARD_BYTES, rank_timeout=rank_timeout)
            else:
                model.fill(-1)
                shares = this.kind == "broadcast"
                await stio.distributed.load_into(model, path, broadcast=shares, rank_timeout=rank_timeout)
                if not model.holds(0):
                    pipe.send(("wrong", "the values are not those of the checkpoint"))

        model.fill(1)
        await asyncio.to_thread(dist.barrier)
        begin = time.monotonic()
        await once(FIRST_TIMEOUT)
        pipe.send(time.monotonic() - begin)
        assert pipe.recv() == "go"
        fault = Fault(pipe) if this.raises and rank == this.victim else None
        for generation in itertools.count(2):
            if fault is not None:
                fault.renew()
            model.fill(generation)
            pipe.send(("begin", generation))
            await once()
            pipe.send(("done", generation))


class Model(nn.Module):
    """What one rank holds of the tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name, (_, rule) in SHAPES.items():
            tensor = whole(name, 0)
            held = tensor if rule is None else distribute_tensor(tensor, mesh, rule, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(held, requires_grad=False))
        self._start = {name: _local(held).clone() for name, held in self.named_parameters()}

    def fill(self, generation: int) -> None:
        """Set all values to those of a generation."""
        for name, held in self.named_parameters():
            torch.add(self._start[name], generation, out=_local(held))

    def holds(self, generation: int) -> bool:
        """Return whether all values are those of a generation."""
        return all(torch.equal(_local(held), self._start[name] + generation) for name, held in self.named_parameters())


def _local(held: torch.Tensor) -> torch.Tensor:
    return held.to_local() if isinstance(held, DTensor) else held.data
