"""`HostCache` when things go wrong: copies under way, loads that end halfway, memory that is not there, forks."""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import data_reads, recorded, size_of, watched
from crash.zygote import Zygote
from fakes import FakeDevice
from support import (
    PATIENCE_SECONDS,
    HookedRoot,
    backend_name,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    eventually,
    needs_engine,
    nothing_left,
    ramp,
    require_equal,
    save_file,
)

import stio
import stio.sync
from stio.errors import ClosedError, DeviceError, StorageError
from stio.loading.plain import PlainExecutor
from stio.runtime import memory

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [save_file({"w": ramp(200_000, start=k)}, tmp_path / str(k) / "m.safetensors").parent for k in range(3)]


# Copies under way.


@pytest.mark.parametrize("end", ["evict", "close", "drop"])
def test_p4_nothing_that_is_copied_from_is_given_back(three: list[Path], end: str) -> None:
    cache: Any = stio.sync.HostCache(64 * MIB)
    recorder = recorded(cache)
    cache.prefetch(three[0])
    held = recorder.live_bytes
    device = FakeDevice(manual=True)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(stio.sync.load, three[0], device=device, cache=cache)
        device.wait_for_pending(1)
        if end == "evict":
            assert cache.evict() == 0
        elif end == "close":
            cache.close()
        else:
            cache = None
            gc.collect()
        assert recorder.live_bytes == held
        while not load.done():
            device.step()
        assert torch.equal(load.result()["w"], ramp(200_000))
    if end == "evict":
        assert cache.stats().entries == 1
        cache.evict()
    del load
    assert eventually(lambda: not (gc.collect(), recorder.live_bytes)[1])


def test_staging_is_made_for_what_is_not_lent_only(shared: Path, tensors: Tensors) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    device = FakeDevice()
    for _ in range(2):
        require_equal(stio.sync.load(shared, device=device, cache=cache), tensors)
    assert device.num_staging == 0


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_failing_copies_spoil_nothing(shared: Path, tensors: Tensors, fault: str) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    number = 0
    while True:
        number += 1
        device = FakeDevice(delay_seconds=0.0001, **{fault: number})  # type: ignore[arg-type]
        try:
            found = stio.sync.load(shared, device=device, cache=cache, budget_bytes=4 << 20)
        except DeviceError:
            assert device.num_pending == 0
            continue
        require_equal(found, tensors)
        break
    assert number > 3
    assert cache.evict() == size_of(shared)  # nobody holds anything


# Together, and interrupted.


def test_two_loads_read_a_file_once(shared: Path, tensors: Tensors) -> None:
    cache, gate = stio.sync.HostCache(64 * MIB), threading.Event()
    roots = [watched(shared, gate=gate, gate_at=5) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(stio.sync.load, root, cache=cache, device=FakeDevice()) for root in roots]
        assert eventually(lambda: sum(root.num_waiting for root in roots) > 0)
        prefetch = pool.submit(cache.prefetch, shared)  # not before: it passes no gate, and may bring all by itself
        gate.set()
        for load in loads:
            require_equal(load.result(30), tensors)
        prefetch.result(30)
    read = sum(read.nbytes for root in roots for read in data_reads(root))
    assert read <= size_of(shared)


@pytest.mark.parametrize("way", ["fails", "is cancelled"])
def test_what_one_leaves_the_other_brings(shared: Path, tensors: Tensors, way: str) -> None:
    cache, gate = stio.sync.HostCache(64 * MIB), threading.Event()
    first = watched(shared, gate=gate, gate_at=5, fail_at=5 if way == "fails" else None)
    with ThreadPoolExecutor(2) as pool:
        checkpoint = stio.sync.open(first, cache=cache).__enter__()
        broken = pool.submit(checkpoint.load)
        first.wait_for_readers(1)
        second = pool.submit(stio.sync.load, shared, cache=cache)
        assert eventually(lambda: cache.stats().hits > 0)
        closer = threading.Thread(target=checkpoint.close)
        if way == "is cancelled":
            closer.start()
        gate.set()
        with pytest.raises(StorageError if way == "fails" else ClosedError):
            broken.result(30)
        require_equal(second.result(30), tensors)
        if way == "fails":
            closer.start()
        closer.join(30)
    assert cache.evict() == size_of(shared)


def test_failing_reads_at_every_number(shared: Path, tensors: Tensors, device: Any) -> None:
    """Each try goes on where the last one broke off."""
    cache = stio.sync.HostCache(64 * MIB)
    for number in range(1, 60):
        root = watched(shared, fail_at=number)
        try:
            found = stio.sync.load(root, device=device, cache=cache, budget_bytes=4 << 20)
        except StorageError:
            assert root.num_open == 0
            continue
        require_equal(found, tensors)
        break
    assert number > 4
    assert cache.evict() == size_of(shared)


def test_closing_ends_a_prefetch(shared: Path) -> None:
    cache, gate = stio.sync.HostCache(64 * MIB), threading.Event()
    recorder = recorded(cache)
    root = watched(shared, gate=gate, gate_at=5)
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        prefetch = pool.submit(cache.prefetch, root)
        root.wait_for_readers(1)
        cache.close()
        cache.close()
        gate.set()
        with pytest.raises(ClosedError):
            prefetch.result(30)
    with pytest.raises(ClosedError):
        stio.sync.load(shared, cache=cache)
    assert eventually(lambda: not (gc.collect(), recorder.live_bytes)[1])
    assert cache.stats().held_bytes == 0


# Memory that is not there.


@pytest.mark.matrix
@pytest.mark.parametrize("refuse", [1, 2, 3])
def test_no_memory(shared: Path, tensors: Tensors, device: Any, refuse: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    recorder = recorded(cache, refuse=refuse)
    with caplog.at_level(logging.WARNING, "stio"):
        require_equal(stio.sync.load(shared, cache=cache, device=device), tensors)
    assert [record.message for record in caplog.records if "too little host memory" in record.message]
    assert cache.stats().entries == 2  # the file that it was refused for is gone
    require_equal(stio.sync.load(shared, cache=cache, device=device), tensors)
    assert cache.stats().entries == 3
    cache.evict()
    assert recorder.live_bytes == 0
    recorded(cache, refuse=refuse)
    with pytest.raises(MemoryError):
        cache.prefetch(shared)
    cache.prefetch(shared)


def test_a_host_that_is_short_of_memory(
    shared: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    monkeypatch.setattr(memory, "fits", lambda nbytes: False)
    with caplog.at_level(logging.WARNING, "stio"):
        require_equal(stio.sync.load(shared, cache=cache), tensors)
    assert "short" in caplog.text
    with pytest.raises(MemoryError):
        cache.prefetch(shared)
    assert cache.stats().entries == cache.stats().held_bytes == 0


# Other processes.


@pytest.mark.slow
def test_c100_a_forked_child_begins_afresh(zygote: Zygote, shared: Path) -> None:
    """A lock that another thread holds at that moment, and chunks that it claimed, are not the child's."""
    found = zygote.run(
        """
        import os, sys, threading
        import torch
        torch.set_num_threads(1)
        import stio.sync
        from stio.storage.local import LocalRoot
        from fakes import FaultyRoot
        from support import oracle, require_equal
        from pathlib import Path

        directory = Path(sys.argv[1])
        cache, gate = stio.sync.HostCache(64 << 20), threading.Event()
        cache.prefetch(next(directory.glob("*2-of*.safetensors")))
        root = FaultyRoot(LocalRoot(directory), gate=gate, gate_at=5)
        busy = threading.Thread(target=stio.sync.load, args=(root,), kwargs={"cache": cache})
        busy.start()
        root.wait_for_readers(1)
        cache._entries._lock.acquire()
        child = os.fork()
        if not child:
            try:
                assert cache.stats() == type(cache.stats())(), cache.stats()
                for _ in range(2):
                    require_equal(stio.sync.load(directory, cache=cache), oracle(directory))
                assert cache.stats().hits == 3
                os._exit(0)
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(1)
        cache._entries._lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.set()
        busy.join()
        assert cache.stats().entries == 3
        """,
        shared,
    )
    assert found.returncode == 0, found.stderr


# Cancels.


@pytest.mark.costly("a fault at each call")
@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("way", ["load", "load to a device", "prefetch", "stream"])
async def test_c95_a_cancel_at_every_await(shared: Path, tensors: Tensors, way: str, anyio_backend: Any) -> None:
    cache = stio.HostCache(64 * MIB)

    async def once() -> None:
        cache.evict()
        if way == "prefetch":
            await cache.prefetch(shared)
        elif way == "stream":
            async with stio.open(shared, cache=cache, device=FakeDevice(), budget_bytes=4 << 20) as checkpoint:
                async for _ in checkpoint.stream():
                    pass
        else:
            device: Any = "cpu" if way == "load" else FakeDevice()
            await stio.load(shared, cache=cache, device=device)

    assert await cancelled_at_every_await(once) > 0
    if backend_name(anyio_backend) == "asyncio":
        for at_resume in (False, True):
            await cancelled_natively_at_every_await(once, at_resume=at_resume)
    require_equal(await stio.load(shared, cache=cache), tensors)
    assert cache.evict() == size_of(shared)
    assert cache.stats().held_bytes == 0


@pytest.mark.slow
def test_c95_a_cancel_at_every_read(shared: Path, tensors: Tensors) -> None:
    """Whoever comes after it finds what was read, and reads the rest."""
    cache = stio.sync.HostCache(64 * MIB)
    for number in range(5, 12):
        gate = threading.Event()
        root = watched(shared, gate=gate, gate_at=number)
        cache.evict()
        with ThreadPoolExecutor(1) as pool:
            checkpoint = stio.sync.open(root, cache=cache, device=FakeDevice(), budget_bytes=4 << 20).__enter__()
            load = pool.submit(checkpoint.load)
            if not eventually(lambda root=root, load=load: root.num_waiting > 0 or load.done()):  # type: ignore[misc]
                raise AssertionError
            closer = threading.Thread(target=checkpoint.close)
            closer.start()
            gate.set()
            closer.join(30)
            if load.exception(30) is None:
                require_equal(load.result(), tensors)
            else:
                assert isinstance(load.exception(), ClosedError)
        require_equal(stio.sync.load(shared, cache=cache), tensors)


# While it is filled.


@pytest.mark.slow
@needs_engine
def test_what_is_there_is_loaded_while_the_rest_is_coming(tmp_path: Path) -> None:
    """The rest comes first in the file, on its way from a store that does not answer yet.

    It has more blocks than a load has workers.
    """
    names = [f"w{k:02}" for k in range(20)]
    tensors = {name: torch.full((2 * MIB,), k, dtype=torch.uint8) for k, name in enumerate(names)}
    directory = save_file(tensors, tmp_path / "model" / "m.safetensors").parent
    gate, seen = threading.Event(), [0]
    slow = HookedRoot(directory, lambda *_: None if gate.wait(PATIENCE_SECONDS) else pytest.fail("no answer"))
    with stio.sync.HostCache(64 * MIB) as cache, ThreadPoolExecutor(2) as pool:
        stio.sync.load(HookedRoot(directory), names=set(names[9:]), cache=cache)
        filling = pool.submit(cache.prefetch, slow)
        assert eventually(lambda: slow.log)
        loading = pool.submit(
            stio.sync.load,
            directory,
            cache=cache,
            budget_bytes=16 * MIB,  # for groups of 4 MiB
            progress=lambda event: seen.append(event.done_bytes),
        )
        progressed = eventually(lambda: seen[-1] >= 20 * MIB)
        gate.set()
        assert progressed
        assert not filling.exception(PATIENCE_SECONDS)
        require_equal(loading.result(PATIENCE_SECONDS), tensors)


@needs_engine
def test_the_engine_loads_what_a_cache_holds_of_a_store(
    shared: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is there as a whole needs no read of its source, so it does not matter whose it is."""
    made: list[str] = []
    init = PlainExecutor.__init__
    monkeypatch.setattr(PlainExecutor, "__init__", lambda *a, **k: (made.append("plain"), init(*a, **k))[1])
    with stio.sync.HostCache(64 * MIB) as cache:
        for _ in range(2):
            root = watched(shared)
            require_equal(stio.sync.load(root, cache=cache), tensors)
            assert made == ["plain"]  # by the first load
    assert not data_reads(root)
