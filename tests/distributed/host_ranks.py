"""What ranks on two hosts do, for `test_hosts.py`: they save, load, raise, are killed, and lose their connection."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hosts import cut_the_cable
from rank_kills import SHARD_BYTES, Model
from support import before_writes, eventually, hook_writes
from torch.distributed.device_mesh import DeviceMesh

from stio import sync
from stio.distributed import StioStorageReader, StioStorageWriter
from stio.storage.commit import recovery
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import boot_id

RANK_TIMEOUT = 3.0

_LIVE = """
import sys, time
from pathlib import Path
from tests.storage.transactions import begin_local
from tests.storage.transactions import fill, index_of
path, folder = sys.argv[1], Path(sys.argv[2])
transaction = begin_local(path, num_shards=2)
folder.joinpath("held").touch()
while not folder.joinpath("go").exists():
    time.sleep(0.005)
fill(transaction, "live")
transaction.commit(index=index_of(transaction, "live"))
folder.joinpath("done").touch()
"""
"""A save of one process, which is under way until there is a file `go`."""


def _new_model() -> Model:
    return Model(DeviceMesh("cpu", torch.arange(dist.get_world_size())))


def outcome(body: Callable[[], object]) -> tuple[str, str, str, float]:
    """Return how a call ended: classes of its error and of the cause, the text, and when."""
    try:
        body()
    except BaseException as error:
        return type(error).__name__, type(error.__cause__).__name__, str(error), time.monotonic()
    return "", "", "", time.monotonic()


@contextmanager
def _at_the_first_write(is_victim: bool, action: Callable[[], None]) -> Iterator[None]:
    """Do something on a rank before it writes its first bytes."""
    done = []

    def act() -> None:
        if is_victim and not done:
            done.append(True)
            action()

    with before_writes(act):
        yield


def together(folder: str) -> dict[str, Any]:
    """Save and load in all ways; one rank raises in one of them."""
    found: dict[str, Any] = {
        "time": time.time(),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
    }
    model, path, distributed = _new_model(), f"{folder}/model", sync.distributed
    for generation in (1, 2):
        model.fill(generation)
        distributed.save(model, path, max_shard_size=SHARD_BYTES, hash="sha256")
    for shares in (False, True):
        model.fill(-1)
        distributed.load_into(model, path, broadcast=shares)
        assert model.holds(2)
    with distributed.Saver(keep_last=1, max_shard_size=SHARD_BYTES) as saver:
        for generation in (3, 4, 5):
            model.fill(generation)
            saver.save(model, f"{folder}/steps/{generation}")
    state = {name: held.detach() for name, held in model.named_parameters()}
    for generation in (6, 7):
        model.fill(generation)
        writer = StioStorageWriter(f"{folder}/dcp", max_shard_size=SHARD_BYTES, hash="sha256")
        dcp.save({**state, "step": generation}, storage_writer=writer)
    model.fill(-1)
    values = {**state, "step": 0}
    dcp.load(values, storage_reader=StioStorageReader(f"{folder}/dcp"))
    assert model.holds(7) and values["step"] == 7

    def fail() -> None:
        raise OSError(errno.EIO, "a disk that fails")

    with _at_the_first_write(dist.get_rank() == dist.get_world_size() - 1, fail):
        found["raises"] = outcome(lambda: distributed.save(model, path, max_shard_size=SHARD_BYTES))
    model.fill(8)
    distributed.save(model, path, max_shard_size=SHARD_BYTES)
    return found


def cut_off(path: str) -> tuple[float, tuple[str, str, str, float], tuple[str, str, str, float]]:
    """Save over a checkpoint; the last host is cut off meanwhile. Return when, and how this save and a load ended."""
    model, times = _new_model(), [0.0]
    sync.distributed.load_into(model, path)
    model.fill(100)

    def cut() -> None:
        cut_the_cable()
        times[:] = [time.monotonic()]

    with _at_the_first_write(dist.get_rank() == dist.get_world_size() - 1, cut):
        save = outcome(
            lambda: sync.distributed.save(model, path, max_shard_size=SHARD_BYTES, rank_timeout=RANK_TIMEOUT)
        )
    begin = time.monotonic()
    kind, cause, text, end = outcome(lambda: sync.distributed.load_into(model, path, rank_timeout=1.0))
    return times[0], save, (kind, cause, text, end - begin)


def killed(path: str, victim: int, sign: str) -> tuple[str, str, str, float]:
    """Save over a checkpoint; one rank is killed meanwhile, at the time that it writes into a file."""
    model = _new_model()
    sync.distributed.load_into(model, path)
    model.fill(100)

    def die() -> None:
        Path(sign).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    with _at_the_first_write(dist.get_rank() == victim, die):
        return outcome(
            lambda: sync.distributed.save(model, path, max_shard_size=SHARD_BYTES, rank_timeout=RANK_TIMEOUT)
        )


def first_killed(path: str, signs: str) -> dict[str, Any]:
    """The same of the first rank, on whose host another process saves; what the others do after that."""
    folder = Path(signs)
    if dist.get_rank() == 0:
        subprocess.Popen([sys.executable, "-c", _LIVE, path, signs])
        assert eventually(folder.joinpath("held").exists, 60)
    dist.barrier()
    found: dict[str, Any] = {"save": killed(path, 0, f"{signs}/killed")}
    begin, model = time.monotonic(), _new_model()
    kind, cause, text, end = outcome(lambda: sync.distributed.load_into(model, path, rank_timeout=60.0))
    found["load"] = kind, cause, text, end - begin
    if dist.get_rank() == dist.get_world_size() - 1:
        found["no locks"], found["gc"] = _without_locks(path), _gc(path)
        folder.joinpath("go").touch()
        assert eventually(folder.joinpath("done").exists, 60), "the save that was under way"
        found["after"] = recovery.collect_garbage(path)
    return found


def _gc(path: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "stio", "gc", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: value for name, value in json.loads(done.stdout).items() if isinstance(value, list) and value}


def _without_locks(path: str) -> tuple[str, ...]:
    """Clean up as on a network filesystem whose locks do not reach other hosts; return what is kept."""
    is_local, try_lock, unlock = recovery.is_local, calls.try_lock, calls.unlock
    recovery.is_local, calls.try_lock, calls.unlock = (lambda fd: False), (lambda fd: True), (lambda fd: None)
    try:
        return recovery.collect_garbage(path, max_age_seconds=3600).kept
    finally:
        recovery.is_local, calls.try_lock, calls.unlock = is_local, try_lock, unlock


def ended_at_some_moment(path: str, victim: int, number: int, how: str) -> tuple[str, str, str, float]:
    """Save again and again, until a rank is killed, raises, or its host is cut off at its n-th write."""
    model, left = _new_model(), [number]

    def end() -> None:
        if how == "cut off":
            cut_the_cable()
        Path(f"{path}.time").write_text(str(time.monotonic()))
        if how == "raises":
            raise OSError(errno.EIO, "a disk that fails")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def count() -> None:
        left[0] -= 1
        if dist.get_rank() == victim and left[0] == 0:
            end()

    hook_writes(count)

    def save() -> None:
        for generation in range(1, 100):
            model.fill(generation)
            sync.distributed.save(model, path, max_shard_size=SHARD_BYTES, rank_timeout=RANK_TIMEOUT)

    with suppress(FileNotFoundError):
        os.unlink(f"{path}.time")
    return outcome(save)
