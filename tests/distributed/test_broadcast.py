"""Broadcast loads: each rank reads a part of what several need; a rank that fails ends the load on all."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import trio
from accelerators import gpu, keep_busy
from counts import count
from distributed.ranks import run_ranks
from fakes import FaultyRoot, MemoryRoot, checkpoint_files
from servers import Fault, HttpServer, Request, http_server
from test_load import WAYS, local_of, new_model, odd_tensors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import stio
from stio import sync
from stio.device.base import resolve_device
from stio.distributed import ranks
from stio.errors import RankError
from stio.loading.options import LoadOptions
from stio.loading.targets.module import ModuleTarget
from stio.runtime import calls
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Operation
from stio.storage.checkpoint.open import open_checkpoint
from stio.storage.open import open_directory

pytestmark = pytest.mark.slow  # its ranks do all that it looks at for any of its tests

HEADER_READ = (0, (128 << 10) - 1)
"""The range that each rank reads when it opens a file."""


class Mixed(nn.Module):
    """Replicated tensors of many kinds, and tied names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(700, 1000))
        self.twin = self.table
        self.large_row = nn.Parameter(torch.zeros(1, 1, 300_000))
        self.part = nn.Linear(40, 30)
        self.register_buffer("number", torch.tensor(0.0))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("transposed", torch.zeros(50, 60).t())
        for k, dtype in enumerate(DTYPES):
            self.register_buffer(f"kind{k}", torch.zeros(3, 5).to(dtype))
        for k in range(300):
            self.register_buffer(f"small{k}", torch.zeros(3))


DTYPES = [
    *(torch.uint8, torch.bool, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return values for a module's tensors, the same in each process."""
    generator = torch.Generator().manual_seed(5)
    values = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        bits = torch.randint(0, 100, tensor.shape, generator=generator)
        values[name] = bits.to(tensor.dtype).clone()
    values["twin"] = values["table"]
    return values


def replicated_tensors(path: str, hooked: bool = False, **options: Any) -> int:
    """Load tensors of all kinds; return their number. A module with a hook is loaded by each rank alone."""
    module = Mixed()
    if hooked:
        module.part.register_load_state_dict_post_hook(lambda module, keys: None)
    expected = values_of(module)
    report = sync.distributed.load_into(module, path, broadcast=True, **options)
    assert (report.missing, report.unexpected) == ((), ())
    found = module.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    return len(found)


def every_way(path: str) -> None:
    """Shard a model in every way: copies of HSDP, columns, and rows that each rank reads itself."""
    for shard in WAYS:
        model = new_model()
        shard(model)
        expected = {name: local_of(tensor).detach().clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                local_of(tensor).fill_(-1)
        sync.distributed.load_into(model, path, broadcast=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(local_of(tensor), expected[name]), (shard.__name__, name)


def all_placements(path: str) -> None:
    tensors = sync.load(path)
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    mesh = init_device_mesh("cpu", (2, 2))
    for chosen in [[a, b] for a in choices for b in choices][:: count(2, 1)]:
        module = nn.Module()
        expected = {}
        for name, tensor in tensors.items():
            spread = distribute_tensor(tensor.clone(), mesh, chosen)
            expected[name] = spread.to_local().clone()
            spread.to_local().zero_()
            module.register_buffer(name, spread)
        sync.distributed.load_into(module, path, broadcast=True)
        for name, tensor in expected.items():
            assert torch.equal(local_of(getattr(module, name)), tensor), (chosen, name)


class Large(nn.Module):
    """Replicated tensors of 12 MB, rows that each rank holds alone, and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(500, 1000) for _ in range(6))

    def spread(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for k, placement in ((1, Shard(0)), (4, Shard(1))):
            self.layers[k] = nn.Parameter(distribute_tensor(self.layers[k].detach(), mesh, [placement]))


def large_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {f"layers.{k}": torch.randn(500, 1000, generator=generator) for k in range(6)}


def filled(module: Large) -> bool:
    """Return whether a module holds its values."""
    found = []
    for k, (tensor, expected) in enumerate(zip(module.layers, large_tensors().values(), strict=True)):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.append(torch.equal(whole, expected))
        assert found[-1], k
    return all(found)


def from_a_store(url: str) -> None:
    """Load by "auto", mixed placements too, on each kind of event loop."""
    for number, run in enumerate((run_blocking, asyncio.run, lambda body: trio.run(lambda: body))):
        module = Large()
        if number != 1:
            module.spread()
        run(stio.distributed.load_into(module, f"{url}/large{number}.safetensors"))
        assert filled(module)
    module = Large()
    sync.distributed.load_into(module, f"{url}/off.safetensors", broadcast=False)
    assert filled(module)


def outcome(body: Awaitable[Any]) -> tuple[str, str, str, float]:
    """Return how a load ended: class and text of its error, class of the cause, seconds."""
    begin = time.monotonic()
    try:
        run_blocking(body)  # type: ignore[arg-type]
    except BaseException as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__, time.monotonic() - begin
    return "", "", "", time.monotonic() - begin


def cancelled(source: str, rank: int) -> tuple[str, str, str, tuple[float, float]]:
    """Load, and cancel the load on one rank when some of its bytes are there; return when that was, and the end."""
    since = 0.0

    async def body() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def on_progress(event: stio.ProgressEvent) -> None:
            nonlocal since
            if event.done_bytes and not since and dist.get_rank() == rank:
                since = time.monotonic()
                loop.call_soon_threadsafe(task.cancel)

        await stio.distributed.load_into(Large(), source, broadcast=True, budget_bytes=8 << 20, progress=on_progress)

    try:
        asyncio.run(body())
    except BaseException as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__, (since, time.monotonic())
    return "", "", "", (since, time.monotonic())


def cancelled_early(source: str) -> tuple[str, str, str, float]:
    """Cancel the load on the first rank, while it waits for the others to begin."""
    if dist.get_rank():
        dist.barrier()
        return outcome(stio.distributed.load_into(Large(), source, broadcast=True))
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(stio.distributed.load_into(Large(), source, broadcast=True), 0.3))
    seconds = time.monotonic() - begin
    dist.barrier()
    return "TimeoutError", "", "", seconds


def cancelled_while_connecting(source: str) -> tuple[str, str, str, float]:
    """Cancel the load on the first rank, when it waits for Gloo's connection to the last one, which does not connect."""
    rank, plain, ended = dist.get_rank(), dist.ProcessGroupGloo, threading.Event()
    since = [time.monotonic()]  # stays if the cancel is reported before this rank connects

    async def body() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def connect(*arguments: Any) -> Any:
            since[0] = time.monotonic()
            if rank == 0:
                loop.call_soon_threadsafe(task.cancel)
            if rank == 3:
                ended.wait()
            return plain(*arguments)

        for group in ranks._groups.values():
            group.groups.clear()
        with patch.object(dist, "ProcessGroupGloo", connect):
            await stio.distributed.load_into(Large(), source, broadcast=True)

    try:
        asyncio.run(body())
    except BaseException as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__, time.monotonic() - since[0]
    finally:
        ended.set()
    return "", "", "", 0.0


def keys_in_the_store(path: str) -> list[int]:
    """Load often; return how many keys the store of the process group has after each load."""
    store, found = dist.distributed_c10d._get_default_store(), []
    for _ in range(14):
        sync.distributed.load_into(new_model(), path, broadcast=True)
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found


def connected_late(path: str) -> None:
    """Load where Gloo connects at the first use, and looks for addresses then."""
    for group in ranks._groups.values():
        group.groups.clear()
    with patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        module = Large()
        sync.distributed.load_into(module, path, broadcast=True)
        assert filled(module)


def resources(url: str, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the numbers of descriptors and threads, when those of the last load have ended: its connections may take
    some seconds on a busy machine.

    Connections to the store stay open for the next load, and do not count. Without numbers from before, they are the
    least ones of a second.
    """
    gc.collect()
    until = time.monotonic() + 30  # the client of stores keeps a thread that has nothing to do for 10 s
    while threads() > threads.least and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.05)
    if not before[0]:
        until = time.monotonic() + 1
    port, least = int(url.rpartition(":")[2]), sys.maxsize
    while True:
        least = min(least, sum(not is_connected_to(port, int(name)) for name in os.listdir("/proc/self/fd")))
        if least <= before[0] or time.monotonic() > until:
            return least, threads()
        time.sleep(0.05)


def is_connected_to(port: int, descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as one:
            return bool(one.getpeername()[1:2] == (port,))
    except OSError:  # closed since it was listed, or not connected
        return False


def threads() -> int:
    """Return the number of threads, without those of the engine, which stay, of gloo, which connects when it must, and of
    requests that a cancelled load has left behind: they end with their answer.
    """
    return len(names_of_threads()) - len(calls._under_way)


def names_of_threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sorted(name for name in names if not re.fullmatch(r"gloo_tcp_loop|pt_gloo_runloop|stio-\d+", name))


threads.least = 0  # type: ignore[attr-defined]


def failures(folder: str, url: str) -> dict[str, Any]:
    rank = dist.get_rank()
    load = stio.distributed.load_into
    path = f"{folder}/large"
    found: dict[str, Any] = {}
    sync.distributed.load_into(Large(), path, broadcast=True)
    cancelled(f"{url}/slow.safetensors", 1)  # the client of stores has threads and descriptors, which stay
    threads.least = threads()  # type: ignore[attr-defined]
    before = resources(url)
    with ExitStack() as closing:
        root: Any = path
        if rank == 2:
            root = FaultyRoot(closing.enter_context(open_directory(path, follow_symlinks=False)))
            root.fail_at = 6  # the index, its file, the header, and then data
        found["faulty"] = outcome(load(Large(), root, broadcast=True, memory="copy", budget_bytes=4 << 20))
    found["mode"] = outcome(load(Large(), path, broadcast=rank != 1))
    found["value"] = outcome(load(Large(), path, broadcast="yes"))  # type: ignore[arg-type]
    found["another"] = outcome(load(Large(), f"{folder}/{'other' if rank == 3 else 'large'}", broadcast=True))
    found["strict"] = outcome(load(nn.Linear(3, 3) if rank == 1 else Large(), path, broadcast=True))
    found["early"] = cancelled_early(path)
    found["connecting"] = cancelled_while_connecting(path)
    found["cancelled"] = cancelled(f"{url}/slow.safetensors", 1)
    found["stalled"] = cancelled(f"{url}/stalled.safetensors", 0)
    module = Large()
    module.spread()
    sync.distributed.load_into(module, path, broadcast=True)
    found["filled"] = filled(module)
    found["resources"] = before, resources(url, before)
    found["threads"] = names_of_threads(), [thread.name for thread in threading.enumerate()]
    return found


def within_budget(path: str) -> int:
    """Return how much the peak of this process's memory grows by a load with a small budget."""
    module = Large()
    sync.distributed.load_into(module, path, broadcast=True, budget_bytes=2 << 20)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    sync.distributed.load_into(module, path, broadcast=True, memory="copy", budget_bytes=2 << 20)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)
    assert found
    return int(found[1]) * 1024


def everything(folder: str, url: str) -> dict[str, Any]:
    """Do all that the tests look at: the start of a process costs more."""
    found: dict[str, Any] = {"kinds": replicated_tensors(f"{folder}/mixed")}
    for budget_bytes in (1, 1 << 20)[count(1, 0) :]:
        replicated_tensors(f"{folder}/mixed", budget_bytes=budget_bytes, memory="copy")
    replicated_tensors(f"{folder}/mixed", hooked=True)
    every_way(f"{folder}/model")
    found["keys"] = keys_in_the_store(f"{folder}/model")
    all_placements(f"{folder}/odd.safetensors")
    from_a_store(url)
    connected_late(f"{folder}/large")
    found["peak"] = within_budget(f"{folder}/large")
    return found | failures(folder, url)


def stalls(number: int, request: Request) -> Fault | None:
    """Answer nothing for the second half of one object."""
    first = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
    if request.path == "/stalled.safetensors" and first > 6_000_000:
        return Fault(hang=True)
    if request.path == "/slow.safetensors" and first > 0:
        time.sleep(0.2)
    return None


@pytest.fixture(scope="module", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Reach the servers of the tests where the environment names a proxy."""
    pytest.importorskip("obstore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what each of four ranks has found, the server, and the size of its objects."""
    folder = tmp_path_factory.mktemp("broadcast")
    sync.save(new_model(), folder / "model", max_shard_size=3000)
    odd = odd_tensors()
    sync.save(odd, folder / "odd.safetensors")
    mixed = values_of(Mixed())
    sync.save(mixed, folder / "mixed", max_shard_size=1_000_000)
    sync.save(large_tensors(), folder / "large", max_shard_size=5_000_000)
    sync.save(large_tensors(), folder / "other", max_shard_size=3_000_000)
    sync.save(large_tensors(), folder / "one.safetensors")
    data = (folder / "one.safetensors").read_bytes()
    with http_server(fault=stalls) as server:
        for name in ("large0", "large1", "large2", "off", "slow", "stalled"):
            server.put(f"/{name}.safetensors", data)
        yield run_ranks(everything, 4, folder, str(folder), server.url), server, len(data)


def test_all_kinds_of_tensors(found: Any) -> None:
    """The processes compare all values; here the comparisons are counted."""
    assert {one["kinds"] for one in found[0]} == {len(Mixed().state_dict())}


def num_bytes(server: HttpServer, name: str) -> int:
    """Return the bytes that were requested of an object, without the first reads of headers."""
    total = 0
    for request in server.requests:
        if request.path == f"/{name}.safetensors" and request.method == "GET" and "range" in request.headers:
            first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
            total += last + 1 - first if (first, last) != HEADER_READ else 0
    return total


def test_a_store_sends_every_byte_once(found: Any) -> None:
    _, server, nbytes = found
    for name in ("large0", "large1", "large2"):
        assert nbytes * 0.99 < num_bytes(server, name) < nbytes * 1.01
    assert num_bytes(server, "off") > 3.9 * nbytes


def test_memory_stays_within_the_budget(found: Any) -> None:
    assert max(one["peak"] for one in found[0]) < 4 << 20, "2 MiB, and 2 MiB for threads and connections"


def test_one_failure_is_raised_on_all_ranks(found: Any) -> None:
    for name in ("cancelled", "stalled"):
        since = max(one[name][3][0] for one in found[0])  # one clock for all processes
        for one in found[0]:
            one[name] = (*one[name][:3], one[name][3][1] - since)
    for rank, one in enumerate(found[0]):
        check(one["faulty"], rank, 2, "StorageError", "StorageError")
        check(one["another"], rank, 0, "ChangedDuringReadError", "have opened different checkpoints")
        check(one["strict"], rank, 1, "MismatchError", "have no name in common")
        check(one["early"], rank, 0, "TimeoutError", "the load was cancelled on rank 0", cause="NoneType", seconds=4)
        check(one["connecting"], rank, 0, "CancelledError", "the load was cancelled on rank 0", cause="NoneType")
        check(one["cancelled"], rank, 1, "CancelledError", "the load was cancelled on rank 1", cause="NoneType")
        check(one["stalled"], rank, 0, "CancelledError", "the load was cancelled on rank 0", cause="NoneType")
        assert one["mode"][0] == ("ValueError" if rank == 0 else "RankError") or rank != 1
        assert "broadcast= must be the same on all ranks" in one["mode"][1]
        assert one["value"][0] in ("ValueError", "RankError") and "takes True, False or 'auto'" in one["value"][1]
        assert one["filled"]


def check(
    found: Any, rank: int, failed: int, kind: str, text: str, cause: str | None = None, seconds: float = 2
) -> None:
    __tracebackhide__ = True
    assert found[3] < seconds, found
    if rank == failed:
        assert found[0] == kind, found
    else:
        assert found[0] == "RankError" and found[2] == (cause or kind) and text in found[1], found


def test_the_store_of_the_group_gets_no_more_keys(found: Any) -> None:
    """Those of eight loads stay."""
    for one in found[0]:
        assert one["keys"][-5:] == one["keys"][-1:] * 5, one["keys"]


def test_no_descriptor_and_no_thread_is_left(found: Any) -> None:
    for one in found[0]:
        (descriptors, num_threads), after = one["resources"]
        assert after[0] <= descriptors and after[1] <= num_threads, (one["resources"], one["threads"])


@gpu
@pytest.mark.slow
def test_rows_are_copied_to_a_device() -> None:
    """On a thread that is not the caller's, so not in the order of its stream: what is queued there comes first."""
    expected = torch.randn(64, 32)
    module = nn.Linear(32, 64, bias=False, device=resolve_device("auto"))
    target = ModuleTarget(module)
    with closing(open_checkpoint(MemoryRoot(checkpoint_files({"weight": expected})))) as opened:
        target.select(opened, LoadOptions(), lambda: None)
    keep_busy()
    with torch.no_grad():
        module.weight.fill_(-1)

    def copy(operation: Operation[None]) -> None:
        target.synchronize()
        for begin in range(0, 64, 16):
            rows = expected[begin : begin + 16].clone()
            target.copy_rows("weight", rows, 0, begin, (64, 32))
            rows.fill_(0)

    Operation(copy, name="copy").result()
    assert torch.equal(module.weight.cpu(), expected)


def killed_rank(url: str, victim: int) -> tuple[str, str, tuple[int, ...], float]:
    """Load, and kill one rank when some of its bytes are there."""
    begin = time.monotonic()

    def on_progress(event: stio.ProgressEvent) -> None:
        if event.done_bytes and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as raised:
        path, options = f"{url}/slow.safetensors", {"budget_bytes": 8 << 20, "rank_timeout": 3.0}
        sync.distributed.load_into(Large(), path, progress=on_progress, **options)  # type: ignore[arg-type]
    return type(raised.value).__name__, str(raised.value), raised.value.ranks, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_an_error_within_the_timeout(tmp_path: Path, victim: int) -> None:
    """The connections to it break; the first rank finds out that it gives no more signs of life."""
    sync.save(large_tensors(), tmp_path / "one.safetensors")
    with http_server(fault=stalls) as server:
        server.put("/slow.safetensors", (tmp_path / "one.safetensors").read_bytes())
        results = run_ranks(killed_rank, 4, tmp_path, server.url, victim, killed=[victim])
    for rank, one in enumerate(results):
        if rank != victim:
            assert one[3] < 8, one
            assert victim == 0 or (one[2] == (victim,) and f"rank {victim} gave no sign of life for 3 s" in one[1]), one
