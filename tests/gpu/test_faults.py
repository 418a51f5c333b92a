"""Known faults of the device path, by number: what is promised of each, and does not hold today (see the reasons).

Where a promise holds again its mark is taken off; a test that passes by surprise fails until then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import gpu, keep_busy, module_of, on_copy_stream
from crash.zygote import Zygote
from fakes import MemoryDestination, MemoryRoot, checkpoint_files, write_checkpoint
from support import bits_of, eventually, require_equal, settled
from torch import nn

import stio.sync
from stio import native
from stio.device import cuda, pinned
from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator
from stio.runtime import operation as runtime
from stio.saving import staging_pool

MIB = 1 << 20
LITTLE = 2 * MIB
"""A budget for which little is pinned."""
CYCLES = 400_000_000
"""About a fifth of a second."""

simulated = pytest.mark.skipif(not simdevice.installed(), reason="only the simulated device counts what is pinned")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The accelerator. When a test ends nothing is under way on it, and no memory is kept."""
    device = resolve_device("auto")
    yield device
    torch.accelerator.synchronize(device)
    module_of(device).empty_cache()
    if simdevice.installed():
        torch.accelerator.empty_host_cache()


class StillThere(Exception):
    """The fault shows. Whatever else goes wrong in its test fails as usual."""


def promise(kept: bool) -> None:
    if not kept:
        raise StillThere


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(bits_of(found[name]) == bits_of(expected[name]) for name in expected)


def numbers(count: int, *, size: int = 1000, seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {f"w{k}": torch.randn(size, generator=chance) for k in range(count)}


def pinned_bytes() -> int:
    """What is pinned, without rings: those grow with the threads that take part in a load."""
    gc.collect()
    in_rings = sum(ring.held_bytes for ring in cuda._rings.values())
    pinned = simdevice.pinned_bytes(with_cached=native.available())  # without the engine torch keeps what is released
    return pinned - in_rings


# 1


@gpu
@pytest.mark.parametrize("size", [1000, MIB // 2], ids=["small", "large"])
def test_fault_1_a_user_s_record_stream_counts(device: torch.device, size: int) -> None:
    """A tensor is used on another stream, recorded for it as torch demands, and dropped."""
    first, second = numbers(2, size=size), numbers(2, size=size, seed=1)
    module = module_of(device)
    side = module.Stream(device=device)
    loaded = stio.sync.load(MemoryRoot(checkpoint_files(first)), device=device, budget_bytes=LITTLE)
    seen = {name: torch.empty_like(tensor) for name, tensor in loaded.items()}
    side.wait_stream(module.current_stream(device))
    with module.stream(side):
        keep_busy(CYCLES)
        for name, tensor in loaded.items():
            seen[name].copy_(tensor)
            tensor.record_stream(side)
    del loaded, tensor
    gc.collect()
    again = stio.sync.load(MemoryRoot(checkpoint_files(second)), device=device, budget_bytes=LITTLE)
    torch.accelerator.synchronize(device)
    require_equal(again, second)
    promise(equal(seen, first))


# 2


@gpu
def test_fault_2_saves_share_a_stream(device: torch.device) -> None:
    """torch gives out 32 streams in turn: which one is next shows how many were taken meanwhile."""
    tensors = {"w": torch.ones(10, device=device)}
    place = MemoryDestination()
    stio.sync.save(tensors, place)
    turns = streams_of_the_pool(device)
    for _ in range(40):
        stio.sync.save(tensors, place)
    promise(module_of(device).Stream(device=device).stream_id == turns[0])


@gpu
def test_fault_2_no_save_copies_on_the_stream_of_loads(device: torch.device) -> None:
    module = module_of(device)
    theirs = TorchAccelerator(device).copy_stream.stream_id
    turns = streams_of_the_pool(device)
    for _ in range(turns.index(theirs)):
        module.Stream(device=device)
    tensors = {"w": torch.ones(10, device=device)}
    torch.accelerator.synchronize(device)
    with on_copy_stream(device):
        keep_busy(CYCLES)
        event = module.Event()
        event.record(module.current_stream(device))
    with stio.sync.Saver() as saver:  # it keeps its pinned memory: CUDA's call that unpins waits for all work
        saver.save(tensors, MemoryDestination()).result()
        promise(not event.query())  # or it waited for a load's copies


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("first", ["a load", "a save"])
def test_fault_2_whichever_stream_is_made_first(torch_zygote: Zygote, device: torch.device, first: str) -> None:
    """In a new process, where the next stream that torch gives out is the one that is there already."""
    done = torch_zygote.run(
        """
        import sys
        import simdevice, torch
        kind, first = sys.argv[1:]
        if kind == "sim":
            simdevice.install()
        from stio.device.cuda import TorchAccelerator, save_stream

        device = torch.device(kind, 0)
        module = torch.get_device_module(device)

        def of_loads():
            return TorchAccelerator(device).copy_stream.stream_id

        def of_saves():
            return save_stream(module, device).stream_id

        makes = [of_loads, of_saves] if first == "a load" else [of_saves, of_loads]
        mine = makes[0]()
        while torch.Stream(device=device).stream_id != mine:
            pass
        for _ in range(31):
            torch.Stream(device=device)
        assert makes[1]() != mine
        """,
        device.type,
        first,
    )
    assert done.returncode == 0, done.stderr


@gpu
def test_fault_2_a_save_waits_for_nothing_that_another_one_waits_for(device: torch.device) -> None:
    """They share a stream. One is of a stream with much to do, the other begins later and ends first."""
    module = module_of(device)
    mine, place = module.Stream(device=device), MemoryDestination()
    one, other = torch.zeros(1000, device=device), torch.ones(1000, device=device)
    torch.accelerator.synchronize(device)
    with stio.sync.Saver() as saver:
        with module.stream(mine):
            keep_busy(2 * CYCLES)
            one.fill_(7)
            late = module.Event()
            late.record(mine)
            with_stream = threading.Event()

            def save() -> None:
                with module.stream(mine):
                    with_stream.set()
                    saver.save({"w": one}, place)

            saving = threading.Thread(target=save)
            saving.start()
        assert with_stream.wait(5)
        assert eventually(lambda: bool(saver.pending))
        quick = MemoryDestination()
        with stio.sync.Saver() as second:  # see above
            second.save({"w": other}, quick).result()
            is_over = late.query()
        saving.join(5)
    require_equal(stio.sync.load(MemoryRoot(quick.files), device="cpu"), {"w": torch.ones(1000)})
    require_equal(stio.sync.load(MemoryRoot(place.files), device="cpu"), {"w": torch.full((1000,), 7.0)})
    promise(not is_over)


def streams_of_the_pool(device: torch.device) -> list[int]:
    """Return torch's streams in the order in which they are given out, the next one first."""
    turns = [module_of(device).Stream(device=device).stream_id for _ in range(32)]
    if len(set(turns)) < 32:
        pytest.skip("torch's pool of streams is of another size here")
    return turns


# 3


@gpu
def test_fault_3_a_save_can_be_cancelled_while_memory_is_pinned(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel` never blocks; pinning takes 0.2 to 0.5 seconds for each GB."""
    pin, pinning, go_on = pinned.pin, threading.Event(), threading.Event()

    def slow_pin(*args: Any) -> Any:
        pinning.set()
        assert go_on.wait(5)
        return pin(*args)

    tensors = {"w": torch.ones(10, device=device)}
    monkeypatch.setattr(pinned, "pin", slow_pin)
    saver = stio.sync.Saver()

    def save() -> None:
        with suppress(stio.ClosedError), saver:
            saver.save(tensors, MemoryDestination())

    saving = threading.Thread(target=save)
    saving.start()
    assert pinning.wait(5)
    (pending,) = saver.pending
    cancelling = threading.Thread(target=pending.cancel)
    cancelling.start()
    cancelling.join(0.1)
    was_blocked = cancelling.is_alive()
    go_on.set()
    cancelling.join(5)
    saving.join(5)
    assert not saving.is_alive()
    promise(not was_blocked)


@gpu
@simulated
def test_fault_3_a_saver_without_a_budget_pins_no_more_than_the_host_has(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the host has 16 MiB left, and the snapshot takes 40: it is staged while it is written."""
    torch.accelerator.empty_host_cache()
    before = settled(pinned_bytes)
    monkeypatch.setattr(staging_pool, "room_in_memory", lambda: 16 * MIB - (pinned_bytes() - before))
    tensors = {f"w{k}": torch.ones(4 * MIB, dtype=torch.uint8, device=device) for k in range(10)}
    with stio.sync.Saver() as saver:
        saver.save(tensors, MemoryDestination()).result()
        pinned = pinned_bytes() - before
    assert pinned
    promise(pinned <= 16 * MIB)


# 4


@gpu
@simulated
@pytest.mark.parametrize("what", ["a cache", "a saver"])
def test_fault_4_pinned_memory_is_given_back(device: torch.device, tmp_path: Path, what: str) -> None:
    """When a cache or a saver is closed. What a load pinned may stay for the next one."""
    tensors = {"w": torch.ones(3 * MIB, dtype=torch.uint8)}
    path = write_checkpoint(tmp_path, tensors)
    there = stio.sync.load(path, device=device, budget_bytes=LITTLE)
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_host_cache()
    before = settled(pinned_bytes)
    if what == "a cache":
        with stio.sync.HostCache(64 * MIB, device=device) as cache:
            cache.prefetch(path)
            assert pinned_bytes() > before
    else:
        with stio.sync.Saver() as saver:
            saver.save(there, MemoryDestination()).result()
            assert pinned_bytes() > before
    promise(eventually(lambda: pinned_bytes() == before))


@gpu
@simulated
def test_fault_4_what_a_load_uses_is_given_back_when_it_ends(device: torch.device, tmp_path: Path) -> None:
    """The cache was closed meanwhile."""
    tensors = {f"w{k}": torch.ones(3 * MIB, dtype=torch.uint8) for k in range(3)}
    path = write_checkpoint(tmp_path, tensors)
    stio.sync.load(path, device=device, budget_bytes=LITTLE)
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_host_cache()
    before = settled(pinned_bytes)
    cache = stio.sync.HostCache(64 * MIB, device=device)
    # With so small a budget the load goes on until its consumer has taken more.
    with stio.sync.open(path, device=device, cache=cache, budget_bytes=4 * MIB) as opened:
        with opened.stream() as stream:
            name, tensor = next(stream)
            cache.close()
            # What the close itself releases, and what else is free by then, is returned before the load ends.
            assert eventually(
                lambda: not any(operation._name == "release" for operation in list(runtime.counters.running))
            )
            assert pinned_bytes() > before
            require_equal({name: tensor}, {name: tensors[name]})
    del tensor
    promise(eventually(lambda: pinned_bytes() <= before))


@gpu
@simulated
def test_fault_4_what_is_evicted_by_name_is_given_back(device: torch.device, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"w": torch.ones(3 * MIB, dtype=torch.uint8)})
    torch.accelerator.empty_host_cache()
    before = settled(pinned_bytes)
    with stio.sync.HostCache(64 * MIB, device=device) as cache:
        cache.prefetch(path)
        assert pinned_bytes() > before
        assert cache.evict(path)
        promise(eventually(lambda: pinned_bytes() == before))


@gpu
@simulated
def test_fault_4_a_saver_keeps_its_memory_between_saves(device: torch.device) -> None:
    """To pin it again would take longer than a copy into it."""
    tensors = {"w": torch.ones(3 * MIB, dtype=torch.uint8, device=device)}
    with stio.sync.Saver() as saver:
        saver.save(tensors, MemoryDestination()).result()
        pinned = pinned_bytes()
        for _ in range(2):
            saver.save(tensors, MemoryDestination()).result()
            assert pinned_bytes() == pinned


# 5


@gpu
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied in the checkpoint alone"])
def test_fault_5_a_warm_start_waits_for_no_work_of_the_user(device: torch.device, tmp_path: Path, tied: bool) -> None:
    """A forward runs on the default stream, 0.3 seconds long: the parameters are there before it has ended."""
    module = nn.Module()
    names = ["one", "two"]
    for name in names:
        setattr(module, name, nn.Parameter(torch.empty(50, device="meta")))
    weight = torch.rand(50)
    other = weight if tied else weight.clone()
    stio.sync.save({"one": weight, "two": other}, tmp_path / "m.safetensors")
    keep_busy(3 * CYCLES // 2)
    event = module_of(device).Event()
    event.record()
    with stio.sync.warm_start(module, tmp_path / "m.safetensors", device=device, budget_bytes=LITTLE) as warm:
        warm.done()
    is_over = event.query()
    require_equal({name: getattr(module, name).detach() for name in names}, {"one": weight, "two": weight})
    promise(not is_over)


# 6


@gpu
@simulated
def test_fault_6_a_device_whose_module_has_no_streams_of_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has generic ones for it: `torch.Stream`, `torch.Event`."""
    module = module_of(device)
    monkeypatch.delattr(module, "Stream")
    monkeypatch.delattr(module, "Event")
    tensors = numbers(3)
    found = stio.sync.load(MemoryRoot(checkpoint_files(tensors)), device=device, budget_bytes=LITTLE)
    place = MemoryDestination()
    stio.sync.save(found, place)
    require_equal(found, tensors)


# Found beside these


@gpu
@simulated
@pytest.mark.parametrize("what", ["a saver", "a cache"])
def test_after_a_refusal_memory_is_pinned_again(
    device: torch.device, tmp_path: Path, what: str, request: pytest.FixtureRequest
) -> None:
    """The system refused once, in a process that runs for weeks."""
    request.addfinalizer(simdevice.clear_faults)
    tensors = {"w": torch.ones(3 * MIB, dtype=torch.uint8)}
    path = write_checkpoint(tmp_path, tensors)
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    torch.accelerator.synchronize(device)
    torch.accelerator.empty_host_cache()
    before = settled(pinned_bytes)

    def pinned() -> int:
        """Return how much is pinned by a use that begins now."""
        if what == "a cache":
            cache.evict()
            cache.prefetch(path)
            return pinned_bytes() - before
        saver.save(there, MemoryDestination()).result()
        return pinned_bytes() - before

    with stio.sync.HostCache(64 * MIB, device=device) as cache, stio.sync.Saver() as saver:
        simdevice.refuse_pinning()
        assert not pinned()
        simdevice.refuse_pinning(False)
        promise(pinned() > 0)
