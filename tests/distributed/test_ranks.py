"""Ranks that do one thing together: values that are exchanged, and one failure that all raise."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clocks import replaced_clock
from distributed.ranks import run_ranks
from support import eventually
from torch import nn
from torch.distributed.fsdp import fully_shard

import stio
from stio import sync
from stio.distributed.ranks import Ranks
from stio.errors import CheckpointNotFoundError, ClosedError, MismatchError, RankError
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Operation


def test_one_process_is_one_rank():
    async def alone() -> list[bytes]:
        async with Ranks(about="load") as ranks:
            ranks.share("x", b"1")
            assert (ranks.rank, ranks.num_ranks) == (0, 1)
            return await ranks.arrive("end", b"2")

    assert run_blocking(alone()) == [b"2"]
    assert asyncio.run(alone()) == [b"2"]


@pytest.mark.parametrize(("size", "num_lines"), [("4", 1), ("1", 0), (None, 0)])
def test_a_process_of_torchrun_without_a_process_group_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: str | None, num_lines: int
):
    """Each process would save alone, one over the other."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    if size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", size)
    Ranks(about="save")
    found = [record.getMessage() for record in caplog.records if "there is no process group" in record.getMessage()]
    assert len(found) == num_lines
    assert all("the save is of this process alone: torchrun has started 4" in line for line in found)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_timeouts_that_are_refused(timeout: float):
    with pytest.raises(ValueError, match="rank_timeout= takes a positive number"):
        Ranks(about="load", timeout=timeout)
    with pytest.raises(TypeError, match="rank_timeout= takes a number of seconds, not '5'"):
        Ranks(about="load", timeout="5")  # type: ignore[arg-type]


class OwnError(Exception):
    def __init__(self, first: str, second: str) -> None:  # cannot be unpickled
        super().__init__(first + second)


def outcome(body: Any) -> tuple[str, str, str, tuple[int, ...], float]:
    """Return how a call ended: class and text of its error, class of the cause, ranks, and the time of its end."""
    try:
        run_blocking(body)
    except BaseException as error:
        ranks = getattr(error, "ranks", ())
        return type(error).__name__, str(error), type(error.__cause__).__name__, ranks, time.monotonic()
    return "", "", "", (), time.monotonic()


def exchange() -> Any:
    async def body() -> tuple[list[bytes], bytes]:
        async with Ranks(about="load") as ranks:
            ranks.share("rank", str(ranks.rank).encode())
            return await ranks.arrive("all", bytes([ranks.rank]) * 3), await ranks.fetch("rank", of=1)

    # Often: keys of an object must not be those of the one before.
    assert {asyncio.run(body())[1] for _ in range(12)} == {b"1"}
    return run_blocking(body())


async def failing(rank: int, error: BaseException) -> None:
    """All ranks wait for each other, and one raises instead."""
    async with Ranks(about="load") as ranks:
        if ranks.rank == rank:
            raise error
        await ranks.arrive("end")


async def hostile(key: str) -> None:
    """Rank 1 sets what no rank of stio sends."""
    async with Ranks(about="load") as ranks:
        if ranks.rank == 1:
            ranks._posts.append(partial(ranks._set, key=key, value=pickle.dumps(OSError("x"))))
        await ranks.arrive("hostile" if ranks.rank != 1 else "nothing", b"x")


async def cancelled(rank: int) -> None:
    async with Ranks(about="load") as ranks:
        if ranks.rank == rank:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_later(0.05, task.cancel)
        await ranks.fetch("never", of=rank)


def on_failure(ranks: Ranks, call: Callable[[], object]) -> None:
    """Call a function when another rank has failed."""
    operation: Operation[None] = Operation(lambda _: None, name="test")
    operation.on_cancel(call)
    ranks.bind(operation)


async def ended_by_failure(rank: int) -> None:
    """What a rank does is ended when another one fails; `ClosedError` becomes the failure."""
    async with Ranks(about="load") as ranks:
        if ranks.rank == rank:
            raise CheckpointNotFoundError("nothing here", path="/x")
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        on_failure(ranks, lambda: loop.call_soon_threadsafe(ended.set))
        await asyncio.wait_for(ended.wait(), 10)
        raise ClosedError("it was ended")


def new_module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(module)
    return module


def scenarios(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"exchange": exchange()}
    found["raises"] = outcome(failing(1, CheckpointNotFoundError("nothing here", path="/x")))
    found["first rank"] = outcome(failing(0, OSError(5, "a disk")))
    found["own class"] = outcome(failing(1, OwnError("a", "b")))
    found["interrupted"] = outcome(failing(1, KeyboardInterrupt()))
    for key in ("failed", "hostile/1"):
        found[key] = outcome(hostile(key))
    for name, body in {"cancelled": cancelled, "ended": ended_by_failure}.items():
        begin = time.monotonic()
        try:
            asyncio.run(body(2))
        except BaseException as error:
            found[name] = type(error).__name__, str(error), type(error.__cause__).__name__, time.monotonic() - begin

    # A load: one rank finds no checkpoint, one has another module, one has a wrong option; then all is well.
    module = new_module()
    good, bad = f"{folder}/model", f"{folder}/nothing"
    load = stio.distributed.load_into
    found["load"] = outcome(load(module, bad if rank == 1 else good))
    other = nn.Linear(3, 3) if rank == 2 else module
    found["module"] = outcome(load(other, good))
    found["option"] = outcome(load(module, good, budget_bytes=-1 if rank == 0 else None))
    found["late"] = outcome(late(load, module, good))
    Path(f"{good}-late-{rank}").touch()
    found["well"] = outcome(load(module, good))
    found["group"] = outcome(in_a_group(module, good))
    found["new group"] = outcome(in_new_groups(folder))
    return found


def late(load: Any, module: nn.Module, path: str) -> Any:
    if dist.get_rank() == 1:  # the others have given it up
        assert eventually(lambda: all(Path(f"{path}-late-{other}").exists() for other in (0, 2)), 20)
    return load(module, path, rank_timeout=1.0)


async def in_a_group(module: nn.Module, path: str) -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        await stio.distributed.load_into(nn.Linear(64, 64), path + "-one", process_group=group)
    else:
        with pytest.raises(ValueError, match="not a member"):
            await stio.distributed.load_into(module, path, process_group=group)


async def in_new_groups(folder: str) -> None:
    """All groups are made anew, with one name for other ranks. Torch itself needs a new store each time."""
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    for number, store in enumerate(["second", "third", "fourth"]):
        if rank == number:
            Ranks(about="load", process_group=None)  # this rank has made more objects than the others
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{store}", -1), rank=rank, world_size=3)
        async with Ranks(about="load", timeout=5.0) as ranks:
            assert await ranks.arrive("new", b"%d" % number) == [b"%d" % number] * 3
        members = [number % 3, (number + 1) % 3]
        group = dist.new_group(members)
        if rank in members:
            async with Ranks(group, about="load", timeout=5.0) as ranks:
                assert await ranks.arrive("new", b"%d" % number) == [b"%d" % number] * 2


def test_one_failure_is_raised_on_all_ranks(tmp_path: Path):
    torch.manual_seed(1)
    sync.save(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), tmp_path / "model")
    sync.save(nn.Linear(64, 64), tmp_path / "model-one")
    results = run_ranks(scenarios, 3, tmp_path, str(tmp_path))

    for rank, found in enumerate(results):
        assert found["exchange"] == ([b"\0\0\0", b"\1\1\1", b"\2\2\2"], b"1")
        check(
            results,
            "raises",
            rank,
            1,
            "CheckpointNotFoundError",
            "the load failed on rank 1: CheckpointNotFoundError: /x: nothing",
        )
        check(results, "first rank", rank, 0, "OSError", "the load failed on rank 0: OSError: [Errno 5] a disk")
        check(results, "own class", rank, 1, "OwnError", "the load failed on rank 1: OwnError: ab", cause="RankError")
        check(
            results, "interrupted", rank, 1, "KeyboardInterrupt", "the load was cancelled on rank 1", cause="NoneType"
        )
        for key in ("failed", "hostile/1"):
            assert found[key][0] == "RankError" and "sent no valid message" in found[key][1], found[key]
        check(results, "load", rank, 1, "CheckpointNotFoundError", "the load failed on rank 1: CheckpointNotFoundError")
        check(results, "module", rank, 2, "MismatchError", "the load failed on rank 2: MismatchError")
        check(results, "option", rank, 0, "ValueError", "the load failed on rank 0: ValueError: budget_bytes")
        assert found["well"][0] == found["group"][0] == found["new group"][0] == "", found
        kind, text, _, seconds = found["cancelled"]
        assert kind == ("CancelledError" if rank == 2 else "RankError") and seconds < 2
        assert rank == 2 or "the load was cancelled on rank 2" in text
        kind, text, cause, seconds = found["ended"]
        assert kind == ("CheckpointNotFoundError" if rank == 2 else "RankError") and seconds < 2
        assert rank == 2 or cause == "CheckpointNotFoundError"
    assert "rank 1 did not begin the load within 1 s (rank_timeout=)" in results[0]["late"][1]
    assert results[0]["late"][3] == (1,)
    assert [found["late"][0] for found in results] == ["RankError"] * 3


def check(
    results: list[Any], name: str, rank: int, failed: int, kind: str, text: str, cause: str | None = None
) -> None:
    """Check how a call ended on a rank: within two seconds of the end on the rank that failed."""
    __tracebackhide__ = True
    found = results[rank][name]
    assert found[4] - results[failed][name][4] < 2, found
    if rank == failed:
        assert found[0] == kind, found
    else:
        assert (found[0], found[2], found[3]) == ("RankError", cause or kind, (failed,)), found
        assert found[1].startswith(text), found


def silent_rank(victim: int, how: int, timeout: float) -> tuple[str, str, float, float]:
    """Return how a save ended, and the time until it failed: the real time, and that on the clocks of the ranks."""
    begun: list[float] = []
    failed: list[float] = []
    patch = pytest.MonkeyPatch()  # to the end of this process
    clock = replaced_clock(patch)
    clock.during_pause = lambda: time.sleep(0.001)  # of the first rank, while the others read why it has failed

    async def body() -> None:
        async with Ranks(about="save", timeout=timeout) as ranks:
            on_failure(ranks, lambda: failed.append(clock.seconds))
            pids = await ranks.arrive("begun", os.getpid(), kind=int)
            begun.append(time.monotonic())
            ranks.share("begun too", b"")
            others = {0, 1, 2} - {victim, ranks.rank}
            if ranks.rank == victim:
                for other in others:
                    await ranks.fetch("begun too", of=other)
                os.kill(os.getpid(), how)
            elif how == signal.SIGSTOP:
                assert eventually(lambda: is_stopped(pids[victim]))
                while not eventually(lambda: ranks.failure is not None, 0.01):
                    clock.advance(max(0.0, ranks._looked + timeout + 0.1 - clock.monotonic()))
                    ranks.share("time has passed")  # wakes what looks at the clock
            elif victim != 0:
                (other,) = others
                for k in itertools.count():  # in step with the other one, which so gives its signs in time
                    clock.advance(0.25)
                    ranks.share(f"step {k}")
                    await ranks.fetch(f"step {k}", of=other)
            await ranks.arrive("end")

    kind, text, _, _, end = outcome(body())
    return kind, text, end - begun[0], failed[0]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("victim", "how", "text"),
    [
        pytest.param(1, signal.SIGKILL, "rank 1 gave no sign of life for 4 s (rank_timeout=)", id="killed"),
        pytest.param(0, signal.SIGKILL, "does not answer", id="killed-with-the-store"),
        pytest.param(0, signal.SIGSTOP, "did not answer for 4 s (rank_timeout=)", id="stopped-with-the-store"),
    ],
)
def test_a_silent_rank_is_named(tmp_path: Path, victim: int, how: int, text: str):
    results = run_ranks(silent_rank, 3, tmp_path, victim, how, 4.0, killed=[victim])
    assert results[victim] is None
    for kind, message, seconds, clock_seconds in (result for result in results if result is not None):
        assert kind == "RankError" and seconds < 5.0
        assert clock_seconds < 4.0 + 2 * 0.5 + 0.5  # signs come, and are looked at, every 0.5 s
        assert clock_seconds > 4.0 or "for 4 s" not in text
        assert text in message


def test_the_errors_of_ranks_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankError("rank 3 failed", ranks=(3,))))
    assert error.ranks == (3,) and str(error) == "rank 3 failed"
    assert not issubclass(MismatchError, RankError)
