"""Orders between streams, host and memory: each test makes one side late, so that a wait that is missing shows each time.

A stream is made late by work that is queued there first (`late_copies`, `keep_busy`), on a GPU as on the simulated device.
What only the simulated device can be told to do (faults, delays) is skipped elsewhere. Loads of files are carried out by
the engine (unless `STIO_NATIVE=0`), those of other roots by the plain executor: most tests run with both.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cufile_stand_in
import pytest
import simdevice
import torch
from accelerators import busy_event, gpu, keep_busy, module_of, needs_two_devices, new_rings, on_copy_stream
from fakes import MemoryDestination, MemoryRoot, checkpoint_files, write_checkpoint
from support import HookedRoot, bits_of, eventually, needs_engine, require_equal
from torch import nn

import stio
import stio.sync
from stio import LazyTensor, native
from stio.device import cuda as cuda_module
from stio.device.base import resolve_device
from stio.device.copy_out import Readiness
from stio.errors import DeviceError
from stio.loading import planned
from stio.loading.read_paths import DevicePath
from stio.runtime.memory import num_processors
from stio.runtime.reports.trace import Trace
from stio.serving.warm_start import api as load

Tensors = dict[str, torch.Tensor]
KIB, MIB = 1 << 10, 1 << 20

LITTLE = 2 * MIB
"""A budget whose slots are made at once: pinning those of the usual one takes as long as a stream is late here."""

LATE_CYCLES = 300_000_000
"""About 0.15 s: a stream that is late by it is overtaken by whatever does not wait for it."""
LONG_CYCLES = 600_000_000
"""About 0.3 s: the host does something else in this time, and is not late."""

simulated = pytest.mark.skipif(not simdevice.installed(), reason="only the simulated device can be told to do this")
sources = pytest.mark.parametrize("source", ["file", "root"])
"""Files are moved by the engine, a root of one's own by the plain executor."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The accelerator. When a test ends nothing is under way on it, no fault is left behind, and no memory is kept."""
    device = resolve_device("auto")
    yield device
    if simdevice.installed():
        simdevice.clear_faults()
        new_rings()
        torch.accelerator.empty_host_cache()
    torch.accelerator.synchronize(device)
    module_of(device).empty_cache()


@pytest.fixture
def slow_copies() -> Iterator[None]:
    """Delay each copy of the simulated device by 20 ms."""
    simdevice.set_delay(0.02)
    yield
    simdevice.set_delay(float(os.environ.get("STIO_TEST_DEVICE_DELAY", "0")))


@pytest.fixture
def late_casts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make casts, and copies of tensors that are there, late, on whatever stream they are queued."""
    copy, copy_of, num_late = torch.Tensor.copy_, load.copy_of, 0

    def late_copy(tensor: torch.Tensor, source: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        nonlocal num_late
        if tensor.device == source.device == device and tensor.dtype != source.dtype:
            num_late += 1
            keep_busy(LATE_CYCLES)
        return copy(tensor, source, *args, **keywords)

    def late_copy_of(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_late
        num_late += 1
        keep_busy(LATE_CYCLES)
        return copy_of(tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    monkeypatch.setattr(load, "copy_of", late_copy_of)
    yield
    assert num_late, "casts are made in another way now: this proves nothing any more"


def late_copies(device: torch.device, cycles: int = LATE_CYCLES) -> Any:
    """Keep the stream busy that all copies of loads are queued on; return an event behind that."""
    with on_copy_stream(device):
        return busy_event(device, cycles)


def on_own_stream(device: torch.device) -> Any:
    module = module_of(device)
    return module.stream(module.Stream(device=device))


def numbers(*, num_large: int = 0, num_small: int = 0, seed: int = 0) -> Tensors:
    """Tensors of 2.5 MiB, with memory of their own, and small ones."""
    chance = torch.Generator().manual_seed(seed)
    large = {f"large.{k}": torch.randn(5, 128 * KIB, generator=chance) for k in range(num_large)}
    return large | {f"small.{k}": torch.randn(1000 + k, generator=chance) for k in range(num_small)}


def root_of(tensors: Tensors) -> MemoryRoot:
    return MemoryRoot(checkpoint_files(tensors))


def source_of(tensors: Tensors, path: Path, source: str) -> Any:
    """Return a checkpoint; see `sources`."""
    return write_checkpoint(path, tensors) if source == "file" else root_of(tensors)


def late_source(device: torch.device, path: Path, tensors: Tensors, source: str) -> Any:
    """Return a checkpoint whose copies come late."""
    if source == "root":
        return late_root(device, path, tensors)
    write_checkpoint(path, tensors)
    late_copies(device)
    return path


def late_root(device: torch.device, path: Path, tensors: Tensors) -> HookedRoot:
    """Return a checkpoint whose copies come late, counted from the first read of its data."""
    started = threading.Lock()

    def hook(name: str, offset: int, nbytes: int) -> None:
        if started.acquire(blocking=False):
            late_copies(device)

    return HookedRoot(write_checkpoint(path, tensors), hook)


def saved_at(path: Path) -> Tensors:
    return stio.sync.load(path, device="cpu", memory="copy")


# What is delivered.


@pytest.mark.matrix
@gpu
@sources
@pytest.mark.parametrize("call", ["load", "stream", "into a module", "warm start"])
def test_what_is_delivered_is_there_for_any_stream(
    device: torch.device, tmp_path: Path, source: str, call: str
) -> None:
    """The host has waited for the copies: no stream of a consumer does, and none was told to."""
    tensors = {f"w{k}": tensor for k, tensor in enumerate(numbers(num_large=1, num_small=4).values())}
    given, seen, kept = late_source(device, tmp_path, tensors, source), {}, []
    module = parameters(**{name: tensor.shape for name, tensor in tensors.items()})
    other = module_of(device).Stream(device=device)
    options: dict[str, Any] = {"device": device, "budget_bytes": 4 * MIB}

    def use(name: str, tensor: torch.Tensor) -> None:
        kept.append(tensor)  # as torch demands, unless it is recorded: the memory is of the caller's stream
        with module_of(device).stream(other):
            seen[name] = tensor.detach().clone()

    if call == "stream":
        with stio.sync.open(given, **options) as opened:
            for name, tensor in opened.stream():
                use(name, tensor)
    elif call == "load":
        for name, tensor in stio.sync.load(given, **options).items():
            use(name, tensor)
    elif call == "into a module":
        stio.sync.load_into(module, given, assign=True, **options)
        for name in tensors:
            use(name, getattr(module, name))
    else:
        with stio.sync.warm_start(module, given, **options):
            for name in tensors:
                use(name, getattr(module, name))
    other.synchronize()
    require_equal(seen, tensors)


@gpu
@sources
def test_no_other_stream_than_the_caller_s_is_waited_for(device: torch.device, tmp_path: Path, source: str) -> None:
    """A load on a stream of one's own is over, and all of it is there, while the default stream is busy."""
    tensors = numbers(num_large=2, num_small=4)
    given = source_of(tensors, tmp_path, source)
    stio.sync.load(given, device=device, budget_bytes=LITTLE)  # the ring is there
    torch.accelerator.synchronize(device)
    event = busy_event(device, 5 * LONG_CYCLES)
    with on_own_stream(device):
        found = stio.sync.load(given, device=device, budget_bytes=LITTLE)
        seen = {name: tensor.clone() for name, tensor in found.items()}
        module_of(device).current_stream(device).synchronize()
        assert not event.query()
    require_equal(seen, tensors)


@gpu
@simulated
@sources
def test_copies_are_behind_the_allocation_itself(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Until the allocator has given memory out, another thread may free it behind work that it has just queued."""
    allocate = cuda_module.new_tensors

    def behind_work(wanted: Any, where: torch.device) -> Any:
        keep_busy(LATE_CYCLES)
        return allocate(wanted, where)

    tensors = numbers(num_large=1, num_small=4)
    given = source_of(tensors, tmp_path, source)
    stio.sync.load(given, device=device, budget_bytes=LITTLE)  # the ring is there
    monkeypatch.setattr(cuda_module, "new_tensors", behind_work)
    with on_own_stream(device):
        found = stio.sync.load(given, device=device, budget_bytes=LITTLE)
        torch.accelerator.synchronize(device)
        require_equal(found, tensors)


@pytest.mark.matrix
@gpu
@simulated
@sources
@pytest.mark.parametrize("call", ["stream", "warm start"])
def test_a_tensor_is_delivered_behind_the_last_of_its_copies(
    device: torch.device, tmp_path: Path, slow_copies: None, source: str, call: str
) -> None:
    """It has many, and the first ones have ended long before."""
    tensors = {"weight": torch.randn(9, 512 * KIB), "bias": torch.randn(1000)}
    given, other = source_of(tensors, tmp_path, source), module_of(device).Stream(device=device)
    options: dict[str, Any] = {"device": device, "budget_bytes": 64 * MIB}
    before = simdevice.num_copies()
    if call == "stream":
        seen, kept = {}, []
        with stio.sync.open(given, **options) as opened:
            for name, tensor in opened.stream():
                kept.append(tensor)
                with module_of(device).stream(other):
                    seen[name] = tensor.clone()
    else:
        module = parameters(**{name: tensor.shape for name, tensor in tensors.items()})
        with stio.sync.warm_start(module, given, **options), module_of(device).stream(other):
            seen = {name: getattr(module, name).detach().clone() for name in tensors}
    other.synchronize()
    assert simdevice.num_copies() - before >= 3
    require_equal(seen, tensors)


@pytest.mark.matrix
@gpu
@sources
@pytest.mark.parametrize("call", ["load", "load of an open one", "stream", "read", "into a module"])
def test_memory_is_of_the_stream_that_is_current_in_the_caller_s_thread(
    device: torch.device, tmp_path: Path, source: str, call: str
) -> None:
    """What is queued there may still read memory that is free: the copies wait for it, those to other memory do not.

    The stream is the current one at the call, not where the checkpoint was opened.
    """
    first, second = ({"weight": numbers(num_large=1, seed=seed)["large.0"]} for seed in (0, 1))
    given = source_of(second, tmp_path, source)
    options: dict[str, Any] = {"device": device, "budget_bytes": 4 * MIB}
    stio.sync.load(given, **options)  # the ring is there
    module_of(device).empty_cache()
    with stio.sync.open(given, **options) as opened, on_own_stream(device):
        old = first["weight"].to(device)
        keep_busy(LATE_CYCLES)
        seen, address = old.clone(), old.data_ptr()
        del old
        gc.collect()
        if call == "load":
            found = stio.sync.load(given, **options)["weight"]
        elif call == "load of an open one":
            found = opened.load()["weight"]
        elif call == "stream":
            ((_, found),) = opened.stream()
        elif call == "read":
            found = opened.read("weight")
        else:
            module = parameters(weight=first["weight"].shape)
            opened.load_into(module, assign=True)
            found = module.weight.detach()
        assert found.data_ptr() == address or not simdevice.installed(), "another stream's memory"
        module_of(device).current_stream(device).synchronize()
        require_equal({"weight": seen}, first)
        require_equal({"weight": found}, second)


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("own_stream", [False, True], ids=["usual stream", "own stream"])
@pytest.mark.parametrize("kind", ["large", "small"])
@sources
def test_dropped_memory_stays_until_its_reader_is_through(
    device: torch.device, tmp_path: Path, source: str, kind: str, own_stream: bool
) -> None:
    """The next load takes over the memory of tensors that were dropped, and a stream may still have to read them."""
    counts = {"num_large": 2} if kind == "large" else {"num_small": 9}
    first, second = numbers(**counts), numbers(**counts, seed=1)
    given, next_one = source_of(first, tmp_path / "first", source), source_of(second, tmp_path / "second", source)
    stio.sync.load(given, device=device, budget_bytes=LITTLE)  # the ring is there, so the copies come early
    with on_own_stream(device) if own_stream else torch.no_grad():
        loaded = stio.sync.load(given, device=device, budget_bytes=LITTLE)
        keep_busy(LATE_CYCLES)
        seen = {name: tensor.clone() for name, tensor in loaded.items()}
        del loaded
        gc.collect()
        again = stio.sync.load(next_one, device=device, budget_bytes=LITTLE)
        torch.accelerator.synchronize(device)
        require_equal(seen, first)
        require_equal(again, second)


@gpu
def test_dropped_memory_of_a_module_stays_until_its_reader_is_through(device: torch.device) -> None:
    """`assign=True` hands tensors over as `load` does."""
    first, second = ({"weight": numbers(num_large=1, seed=seed)["large.0"]} for seed in (0, 1))
    module = parameters(weight=first["weight"].shape)
    with on_own_stream(device):
        stio.sync.load_into(module, root_of(first), device=device, budget_bytes=LITTLE, assign=True)
        keep_busy(LATE_CYCLES)
        seen = {"weight": module.weight.detach().clone()}
        del module
        gc.collect()
        again = stio.sync.load(root_of(second), device=device, budget_bytes=LITTLE)
        torch.accelerator.synchronize(device)
        require_equal(seen, first)
        require_equal(again, second)


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("own_stream", [False, True], ids=["usual stream", "own stream"])
@pytest.mark.parametrize("kind", ["parameter", "tied parameter", "buffer"])
def test_dropped_memory_of_a_warm_start_stays_until_its_reader_is_through(
    device: torch.device, tmp_path: Path, kind: str, own_stream: bool
) -> None:
    """It is memory of the copy stream, recorded for the stream that is current where the warm start begins."""
    paths, values = [], [numbers(num_large=1, seed=seed)["large.0"] for seed in (0, 1)]
    for k, value in enumerate(values):
        paths.append(tmp_path / f"{k}.safetensors")
        stio.sync.save({"one": value, "two": value if kind == "tied parameter" else value + 1}, paths[-1])

    def started(path: Path) -> Any:
        module = parameters(one=values[0].shape, two=values[0].shape)
        if kind == "buffer":
            module = nn.Module()
            for name in ("one", "two"):
                module.register_buffer(name, torch.empty_like(values[0], device="meta"))
        with stio.sync.warm_start(module, path, device=device) as warm:
            warm.done()
        return module

    started(paths[0])  # the ring is there
    gc.collect()
    torch.accelerator.synchronize(device)
    with on_own_stream(device) if own_stream else torch.no_grad():
        module = started(paths[0])
        keep_busy(LATE_CYCLES)
        seen = {name: getattr(module, name).detach().clone() for name in ("one", "two")}
        del module
        gc.collect()
        again = started(paths[1])
        torch.accelerator.synchronize(device)
        for found, path in ((seen, paths[0]), (again.state_dict(), paths[1])):
            require_equal(found, saved_at(path))


@gpu
@sources
@pytest.mark.parametrize("call", ["load", "stream", "into a module", "warm start", "buffer of a warm start"])
def test_a_tensor_is_read_behind_its_cast(
    device: torch.device, late_casts: None, tmp_path: Path, source: str, call: str
) -> None:
    """Casts come behind the copies, on the stream of the caller: a tensor is not there when its copies are.

    A warm start's are there for any stream. The cast loses nothing: a load waits for the numbers of lost values.
    """
    tensors = {"weight": torch.randn(300, 100).half()}
    expected = {"weight": tensors["weight"].float()}
    root = source_of(tensors, tmp_path, source)
    module = parameters(weight=(300, 100))
    if call == "load":
        with on_own_stream(device):
            seen = stio.sync.load(root, device=device, budget_bytes=LITTLE, dtype=torch.float32)["weight"].clone()
    elif call == "stream":
        options = {"device": device, "budget_bytes": LITTLE, "dtype": torch.float32}
        with stio.sync.open(root, **options) as opened, on_own_stream(device):
            seen = {name: tensor.clone() for name, tensor in opened.stream()}
        seen = seen["weight"]
    elif call == "into a module":
        with on_own_stream(device):
            stio.sync.load_into(module, root, device=device, budget_bytes=LITTLE, dtype=torch.float32, assign=True)
            seen = module.weight.detach().clone()
    else:
        if call.startswith("buffer"):
            module = nn.Module()
            module.register_buffer("weight", torch.empty(300, 100, device="meta"))
        with (
            stio.sync.warm_start(module, root, device=device, budget_bytes=LITTLE, dtype=torch.float32),
            on_own_stream(device),
        ):
            seen = module.weight.detach().clone()
    torch.accelerator.synchronize(device)
    require_equal({"weight": seen}, expected)


def parameters(where: Any = "meta", **shapes: Any) -> Any:
    """A module without data."""
    module = nn.Module()
    for name, shape in shapes.items():
        setattr(module, name, nn.Parameter(torch.empty(shape, device=where)))
    return module


@gpu
def test_both_of_two_tied_parameters_of_a_warm_start_are(
    device: torch.device, late_casts: None, tmp_path: Path
) -> None:
    """The checkpoint has one tensor for two names, the module two parameters."""
    weight = torch.randn(300, 100)
    stio.sync.save({"one": weight, "two": weight}, tmp_path / "m.safetensors")
    module = parameters(one=(300, 100), two=(300, 100))
    with (
        stio.sync.warm_start(module, tmp_path / "m.safetensors", device=device, budget_bytes=LITTLE),
        on_own_stream(device),
    ):
        seen = {name: getattr(module, name).detach().clone() for name in ("one", "two")}
        torch.accelerator.synchronize(device)
    assert module.one is not module.two
    require_equal(seen, {"one": weight, "two": weight})


@gpu
@sources
def test_a_module_is_filled_behind_the_copies(device: torch.device, tmp_path: Path, source: str) -> None:
    """`load_into` copies on the caller's stream, out of tensors whose copies have ended."""
    tensors = {"weight": torch.randn(300, 100)}
    module = parameters(device, weight=(300, 100))
    with on_own_stream(device):
        given = late_source(device, tmp_path, tensors, source)
        stio.sync.load_into(module, given, device=device, budget_bytes=LITTLE)
        seen = {"weight": module.weight.detach().clone()}
        module_of(device).current_stream(device).synchronize()
    require_equal(seen, tensors)


# The ring.


def more_than_all_slots() -> Tensors:
    """Return tensors that fill each slot of a ring, and some of them twice."""
    chance = torch.Generator().manual_seed(0)
    num_slots = 3 * min(16, max(4, num_processors()))
    return {
        f"large.{k}": torch.randint(0, 255, (6, native.CHUNK_BYTES // 2), generator=chance, dtype=torch.uint8)
        for k in range(num_slots // 2)
    }


@pytest.mark.matrix
@gpu
@sources
@pytest.mark.parametrize("budget_bytes", [MIB, 256 * MIB])
def test_a_slot_is_filled_again_behind_its_copies(
    device: torch.device, tmp_path: Path, source: str, budget_bytes: int
) -> None:
    """There are more chunks than slots, while none of the copies has begun."""
    tensors = numbers(num_large=1, num_small=20) if budget_bytes == MIB else more_than_all_slots()
    given = late_source(device, tmp_path, tensors, source)
    require_equal(stio.sync.load(given, device=device, budget_bytes=budget_bytes), tensors)


@pytest.mark.slow
@gpu
@simulated
@pytest.mark.parametrize("budget_bytes", [4 * MIB, 256 * MIB])
def test_slots_are_filled_again_while_copies_are_slow(
    device: torch.device, tmp_path: Path, slow_copies: None, budget_bytes: int
) -> None:
    """All through a load, the ring is full."""
    tensors = numbers(num_large=16, num_small=9)
    path = write_checkpoint(tmp_path, tensors, 2)
    for _ in range(2):
        require_equal(stio.sync.load(path, device=device, budget_bytes=budget_bytes), tensors)


@gpu
@sources
def test_no_copy_is_under_way_when_a_stream_was_left(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The copies that were queued have ended before memory is given back: nothing writes to it any more."""
    tensors = numbers(num_small=4)
    given, trace = source_of(tensors, tmp_path, source), Trace()
    stio.sync.load(given, device=device, budget_bytes=LITTLE)  # the ring is there
    close, ended = DevicePath.close, []

    def closed(path: DevicePath) -> None:
        ended.append(event.query())
        close(path)

    monkeypatch.setattr(DevicePath, "close", closed)
    with stio.sync.open(given, device=device, budget_bytes=LITTLE, trace=trace) as opened:
        event = late_copies(device, LONG_CYCLES)
        before = simdevice.num_copies() if simdevice.installed() else 0
        with opened.stream():
            assert eventually(lambda: any(span.name == "begin" for span in list(trace.spans)))
            if simdevice.installed():
                assert eventually(lambda: simdevice.num_copies() > before)
            assert not event.query()
        assert ended == [True] or not simdevice.installed()  # on a GPU no copy may have been queued yet


@gpu
@needs_engine
def test_a_disk_writes_behind_what_is_queued_for_the_memory(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cuFile writes waits for no stream: the host waits until its consumer's work in dropped memory is done."""
    monkeypatch.setattr(planned, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(planned, "resident_fraction", lambda file: 0.0)
    cufile = cufile_stand_in.install(monkeypatch)
    tensors, seen = numbers(num_large=10), {}
    with (
        on_own_stream(device),
        stio.sync.open(
            write_checkpoint(tmp_path, tensors), device=device, memory="gds", budget_bytes=12 * MIB
        ) as opened,
        opened.stream() as stream,
    ):
        for name, tensor in stream:
            keep_busy(LATE_CYCLES // 4)
            seen[name] = tensor.clone()
            tensor.fill_(7)
            del tensor
    torch.accelerator.synchronize(device)
    require_equal(seen, tensors)
    assert cufile.read_bytes >= 25 * MIB


@gpu
def test_a_cache_keeps_what_is_copied_from(device: torch.device, tmp_path: Path) -> None:
    """`evict` lets go of files that no load uses. A load whose copies are to come uses them."""
    tensors = numbers(num_large=2)
    path = write_checkpoint(tmp_path, tensors)
    found: list[Tensors] = []
    with stio.sync.HostCache(64 * MIB, device=device) as cache:
        cache.prefetch(path)
        event = late_copies(device)
        load = threading.Thread(
            target=lambda: found.append(stio.sync.load(path, device=device, budget_bytes=LITTLE, cache=cache))
        )
        load.start()
        assert eventually(lambda: cache.stats().hits == 1)
        while load.is_alive():
            if cache.evict():
                assert event.query(), "evicted while copies were to come"
                break
        load.join()
    require_equal(found[0], tensors)


# Devices.


@gpu
@needs_two_devices
@pytest.mark.parametrize("named", [False, True])
def test_another_device_than_the_thread_s_first(device: torch.device, tmp_path: Path, named: bool) -> None:
    """What goes to the second one is there; whether it is named, or the caller's current one."""
    second = torch.device(device.type, 1)
    tensors = numbers(num_large=1, num_small=3)
    path = write_checkpoint(tmp_path, tensors)
    module = parameters(small_0=tensors["small.0"].shape)
    wanted: Any = second if named else second.type
    try:
        with torch.get_device_module(device).device(0 if named else 1):
            found = stio.sync.load(path, device=wanted, budget_bytes=LITTLE)
            with stio.sync.open(path, device=wanted, budget_bytes=LITTLE) as opened:
                streamed = dict(opened.stream())
            with stio.sync.HostCache(64 * MIB, device=wanted) as cache:
                again = stio.sync.load(path, device=wanted, budget_bytes=LITTLE, cache=cache)
            with stio.sync.warm_start(
                module, root_of({"small_0": tensors["small.0"]}), device=wanted, budget_bytes=LITTLE
            ):
                pass
            for one in (found, streamed, again):
                assert {tensor.device for tensor in one.values()} == {second}
                require_equal(one, tensors)
            assert module.small_0.device == second
            stio.sync.save(found, tmp_path / "saved.safetensors")
        require_equal(saved_at(tmp_path / "saved.safetensors"), tensors)
    finally:
        torch.accelerator.synchronize(second)


@gpu
@needs_two_devices
@needs_engine
def test_a_disk_writes_to_the_second_device_as_the_thread_s_current_one(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUDirect Storage takes the current device for the one that an address belongs to."""
    monkeypatch.setattr(planned, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(planned, "resident_fraction", lambda file: 0.0)
    second = torch.device(device.type, 1)

    cufile = cufile_stand_in.install(monkeypatch, device=1)
    tensors = numbers(num_large=1, num_small=3)
    found = stio.sync.load(write_checkpoint(tmp_path, tensors), device=second, budget_bytes=LITTLE, memory="gds")
    require_equal(found, tensors)
    assert cufile.read_bytes > MIB
    assert not cufile.is_misused


# Saves.


@gpu
def test_a_save_is_behind_what_the_caller_has_queued(device: torch.device, tmp_path: Path) -> None:
    """And before what is queued there after the save has returned."""
    plain = torch.zeros(100, 2000, device=device)
    torch.accelerator.synchronize(device)
    tensors = {"plain": plain, "turned": plain.t()}
    with on_own_stream(device), stio.sync.Saver() as saver:
        keep_busy(LATE_CYCLES)
        plain.fill_(7)
        pending = saver.save(tensors, tmp_path / "m.safetensors", shared="clone")
        plain.fill_(8)
        pending.result()
    found = saved_at(tmp_path / "m.safetensors")
    assert {float(value) for tensor in found.values() for value in tensor.unique()} == {7.0}


@gpu
@needs_two_devices
@pytest.mark.parametrize("late", [0, 1])
def test_a_save_of_two_devices_is_behind_both(device: torch.device, tmp_path: Path, late: int) -> None:
    """The caller has a stream on each, and one of them is late."""
    module, second = module_of(device), torch.device(device.type, 1)
    tensors = {str(where): torch.zeros(1000, device=where) for where in (device, second)}
    for where in (device, second):
        torch.accelerator.synchronize(where)
    with on_own_stream(device), module.device(second), on_own_stream(second):
        for where, tensor in tensors.items():
            with module.device(where):
                if where == f"{device.type}:{late}":
                    module._sleep(LATE_CYCLES)
                tensor.fill_(7)
        stio.sync.save(tensors, tmp_path / "m.safetensors")
    assert {float(value) for tensor in saved_at(tmp_path / "m.safetensors").values() for value in tensor} == {7.0}


@gpu
def test_what_is_made_for_a_save_is_saved_behind_its_making(device: torch.device, tmp_path: Path) -> None:
    """A producer queues work on its own thread's stream, and returns before that is done."""

    def produce() -> torch.Tensor:
        made = torch.zeros(1000, device=device)
        keep_busy(LATE_CYCLES)
        return made.fill_(5)

    stio.sync.save({"made": LazyTensor(torch.float32, [1000], produce)}, tmp_path / "m.safetensors")
    assert saved_at(tmp_path / "m.safetensors")["made"].unique().tolist() == [5.0]


@gpu
def test_staging_memory_of_a_save_is_used_again_behind_its_write(device: torch.device) -> None:
    """There is one block for all, and the first write waits."""
    tensors = {f"w{k}": torch.full((MIB // 4,), float(k), device=device) for k in range(4)}
    gate = threading.Event()
    place = MemoryDestination(gate=gate)
    opening = threading.Timer(0.1, gate.set)  # in this time the block would be filled again
    opening.start()
    with stio.sync.Saver(budget_bytes=MIB) as saver:
        saver.save(tensors, place).result()
    opening.join()
    found = stio.sync.load(MemoryRoot(place.files), device="cpu")
    require_equal(found, {name: tensor.cpu() for name, tensor in tensors.items()})


@gpu
@pytest.mark.parametrize("whose", ["the caller's", "that of loads"])
def test_a_save_waits_for_no_other_stream(device: torch.device, tmp_path: Path, whose: str) -> None:
    """Only for what the caller had queued before: not for what is queued there later, nor for copies of loads."""
    module = module_of(device)
    tensor = torch.full((1000,), 6.0, device=device)
    torch.accelerator.synchronize(device)
    mine = module.current_stream(device)
    events: list[Any] = []

    def produce() -> torch.Tensor:
        if whose == "that of loads":
            events.append(late_copies(device, LONG_CYCLES))
        else:
            with module.stream(mine):
                events.append(busy_event(device, LONG_CYCLES))
        return torch.zeros(1)

    def overtakes() -> bool:
        """Whether a save ends before what was queued on the other stream while it ran."""
        tensors = {"a": LazyTensor(torch.float32, [1], produce), "b": tensor}
        with (
            on_own_stream(device) if whose == "that of loads" else torch.no_grad(),
            stio.sync.Saver() as saver,  # it keeps its pinned memory: CUDA's call that unpins waits for all work
        ):
            saver.save(tensors, tmp_path / "m.safetensors", durability="none").result()
            first = not events.pop().query()
        assert saved_at(tmp_path / "m.safetensors")["b"].unique().tolist() == [6.0]
        return first

    assert overtakes()


# Refusals and failures.


@gpu
@simulated
def test_a_refused_copy_of_a_save_is_told_when_the_others_are_done(device: torch.device, tmp_path: Path) -> None:
    """Their staging memory is free from then on."""
    tensors = {"a": torch.full((1000,), 3.0, device=device), "b": torch.zeros(1000, device=device)}
    region = Readiness.now(tensors).staging_allocator()(8000)
    turned = tensors["a"].view(10, 100).t()  # a copy of its own, by way of a temporary
    torch.accelerator.synchronize(device)
    ready = Readiness.now(tensors)
    with simdevice.delayed(0.05):
        simdevice.refuse_copy(3)  # after the one into the temporary, and the one out of it
        with pytest.raises(DeviceError, match="refuse this copy"):
            ready.copy_out([(turned, 0, region.sub(0, 4000)), (tensors["b"], 0, region.sub(4000, 4000))])
        assert region.sub(0, 4000).tobytes() == bits_of(torch.full((1000,), 3.0))


@pytest.mark.matrix
@gpu
@simulated
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("call", ["load", "stream", "save", "warm start"])
@sources
def test_a_copy_that_fails_is_told(device: torch.device, tmp_path: Path, source: str, call: str, number: int) -> None:
    """The driver reports it with the event behind the copy: without a look at that, old bytes would be handed out."""
    tensors = {"large_0": torch.randn(17, 128 * KIB)}  # more than three chunks
    root = source_of(tensors, tmp_path / "model", source)
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    torch.accelerator.synchronize(device)
    if call == "save":
        there |= {f"{k}": torch.zeros(9, device=device)[::k] for k in (2, 3)}  # copies of their own
        torch.accelerator.synchronize(device)
    simdevice.fail_copy(number)
    with pytest.raises(DeviceError, match="fail in this copy"):
        if call == "load":
            stio.sync.load(root, device=device, budget_bytes=4 * MIB)
        elif call == "stream":
            with stio.sync.open(root, device=device, budget_bytes=4 * MIB) as opened:
                list(opened.stream())
        elif call == "save":
            stio.sync.save(there, tmp_path / "m.safetensors")
        else:
            module = parameters(large_0=tensors["large_0"].shape)
            with stio.sync.warm_start(module, root, device=device, budget_bytes=4 * MIB):
                pass
    assert not (tmp_path / "m.safetensors").exists()
    simdevice.clear_faults()
    require_equal(stio.sync.load(root, device=device, budget_bytes=LITTLE), tensors)


@gpu
@simulated
def test_without_pinned_memory_all_goes_on(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower, with a warning."""
    tensors = numbers(num_large=1, num_small=3)
    path = write_checkpoint(tmp_path / "model", tensors)
    new_rings()
    simdevice.refuse_pinning()
    found = stio.sync.load(path, device=device, budget_bytes=MIB)
    require_equal(found, tensors)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with stio.sync.HostCache(64 * MIB, device=device) as cache:
        for _ in range(2):
            require_equal(stio.sync.load(path, device=device, budget_bytes=LITTLE, cache=cache), tensors)
    stio.sync.save(found, tmp_path / "m.safetensors")
    require_equal(saved_at(tmp_path / "m.safetensors"), tensors)
    assert "pinning host memory failed" in caplog.text
