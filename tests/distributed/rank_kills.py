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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed.ranks import PRELOADED
from support import hook_writes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import stio
from stio import sync
from stio.device.copy_out import Readiness
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


class Workers:
    """Processes that are the ranks of one round after the other; one that was killed is replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._all: dict[int, tuple[Any, Connection]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self._all):
            self._end(rank)

    def play(self, this: Round) -> Ended:
        """Run one round."""
        path = self._folder / str(this.seed) / "model"
        sync.save({name: whole(name, 0) for name in SHAPES}, path, max_shard_size=SHARD_BYTES, durability="none")
        ended = Ended(this, path)
        pipes = [self._start(rank) for rank in range(this.num_ranks)]
        try:
            for rank, pipe in enumerate(pipes):
                pipe.send((this, rank, str(path)))
            self._drive(ended, pipes)
        except Exception as error:
            ended.wrong.append(f"{type(error).__name__}: {error}")
        if not this.raises:
            self._end(this.victim)
        if ended.wrong:
            for rank in list(self._all):
                self._end(rank)
        return ended

    def _start(self, rank: int) -> Connection:
        if rank not in self._all:
            own, other = self._context.Pipe()
            stacks = self._stacks(rank)
            process = self._context.Process(target=_work, args=(other, str(stacks)))
            process.start()
            other.close()
            self._all[rank] = process, own
        return self._all[rank][1]

    def _end(self, rank: int) -> None:
        process, pipe = self._all.pop(rank)
        process.kill()
        process.join()
        pipe.close()

    def _drive(self, ended: Ended, pipes: list[Connection]) -> None:
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
            os.kill(self._all[this.victim][0].pid, signal.SIGKILL)
            ended.fault_time = time.monotonic()
        running = {pipe: rank for rank, pipe in enumerate(pipes)}
        end = time.monotonic() + this.rank_timeout + 10
        while running:
            ready = wait(list(running), max(0, end - time.monotonic()))
            if not ready:
                ended.wrong += [self._stack(rank) for rank in running.values()]
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    if _note(ended, running[pipe], *pipe.recv()):
                        del running[pipe]
                except (EOFError, ConnectionError):
                    del running[pipe]

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def _stack(self, rank: int) -> str:
        process, _ = self._all[rank]
        os.kill(process.pid, signal.SIGABRT)
        process.join(5)
        return f"rank {rank} hangs:\n{self._stacks(rank).read_text()}"


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(60), "a rank does not begin"
    value = pipe.recv()
    assert isinstance(value, int | float), f"a rank ended before its turn: {value}"
    return value


def _note(ended: Ended, rank: int, what: str, value: Any) -> bool:
    """Note what a rank told; return whether it is the last of this round."""
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
    return what == "raised"


# In the ranks.


class Fault:
    """Makes one call of this process fail, at the time at which the driver wants it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._is_due = False
        self._once = threading.Lock()
        for owner, name in [
            (calls, "fsync"),
            (calls, "reserve"),
            (calls, "open_file"),
            (calls, "rename"),
            (Readiness, "copy_pieces"),
            (local.LocalFile, "read_into"),
        ]:
            setattr(owner, name, self._faulty(getattr(owner, name)))
        hook_writes(self._faulty(lambda: None))

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Wait for the driver's word on a thread, inside the block."""
        thread = threading.Thread(target=self._wait)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            self._is_due = False
            self.renew()

    def renew(self) -> None:
        """Let another call fail, if the one before did no harm."""
        if self._once.locked():
            self._once.release()

    def _wait(self) -> None:
        assert self._pipe.recv() == "raise"
        self._is_due = True

    def _faulty(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._is_due and self._once.acquire(blocking=False):
                self._pipe.send(("fault", time.monotonic()))
                raise OSError(errno.EIO, "a disk that fails")
            return function(*arguments, **keywords)

        return call


def _work(pipe: Connection, stacks: str) -> None:
    faulthandler.enable(open(stacks, "w"))  # noqa: SIM115
    torch.set_num_threads(1)
    fault = Fault(pipe)
    while True:
        this, rank, path = pipe.recv()
        if dist.is_initialized():  # only now: the others of the last round may need the store
            with suppress(RuntimeError):  # a rank was killed
                dist.destroy_process_group()
        is_first = rank == 0
        port = 0 if is_first else pipe.recv()
        store = dist.TCPStore("127.0.0.1", port, this.num_ranks, is_first, wait_for_workers=False)
        if is_first:
            pipe.send(store.port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=this.num_ranks)
        try:
            asyncio.run(_again_and_again(this, rank, path, pipe, fault))
        except BaseException as error:
            kind = type(error).__name__
            pipe.send(("raised", (kind, type(error.__cause__).__name__, str(error), time.monotonic())))


async def _again_and_again(this: Round, rank: int, path: str, pipe: Connection, fault: Fault) -> None:
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
        with fault.armed() if this.raises and rank == this.victim else nullcontext():
            for generation in itertools.count(2):
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
