"""`HostCache`: what was loaded once comes from memory, what changed does not, and what a tensor holds is its own."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_support import data_reads, recorded, size_of, watched
from fakes import FakeDevice, MemoryRoot, checkpoint_files
from support import eventually, needs_engine, oracle, ramp, require_equal, save_file
from torch import nn

import stio
import stio.serving.host_cache
import stio.sync
from stio.device.cuda import TorchAccelerator
from stio.errors import ClosedError, DeviceError, NoSpaceError, StorageError
from stio.limits import PAGE_BYTES
from stio.loading import planned
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.serving.host_cache import _TICK_SECONDS, _Memory, _wait_for_tick
from stio.storage.base import Identity
from stio.storage.checkpoint import caches
from stio.storage.local import LocalRoot

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20


# What is there is not read.


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [1 << 18, 512 << 20])
def test_the_second_load_reads_headers_only(shared: Path, tensors: Tensors, device: Any, budget_bytes: int) -> None:
    cache = stio.HostCache(64 * MIB)
    for turn in range(3):
        root = watched(shared)
        require_equal(stio.sync.load(root, device=device, cache=cache, budget_bytes=budget_bytes), tensors)
        assert bool(data_reads(root)) == (turn == 0)
        stats = cache.stats()
        assert (stats.entries, stats.held_bytes) == (3, size_of(shared))
        assert (stats.hits, stats.misses, stats.evictions) == (3 * turn, 3, 0)


def test_no_byte_is_read_twice(shared: Path, device: Any) -> None:
    root = watched(shared)
    stio.sync.load(root, device=device, cache=stio.HostCache(64 * MIB), budget_bytes=1 << 18)
    assert sum(read.nbytes for read in data_reads(root)) <= size_of(shared)


@pytest.mark.anyio
async def test_prefetch(shared: Path, tensors: Tensors) -> None:
    events: list[Any] = []
    async with stio.HostCache(64 * MIB) as cache:
        await cache.prefetch(shared, progress=events.append)
        assert events[-1].done_bytes == events[-1].total_bytes == sum(t.nbytes for t in tensors.values())
        root = watched(shared)
        require_equal(await stio.load(root, device=FakeDevice(), cache=cache), tensors)
        assert not data_reads(root)
        assert cache.stats() == stio.CacheStats(entries=3, held_bytes=size_of(shared), hits=3, misses=3, evictions=0)
        again = watched(shared)
        await cache.prefetch(again)
        assert not data_reads(again)
    with pytest.raises(ClosedError):
        await cache.prefetch(shared)


def test_the_blocking_twin(shared: Path, tensors: Tensors) -> None:
    with stio.sync.HostCache(64 * MIB) as cache:
        cache.prefetch(shared)
        root = watched(shared)
        with stio.sync.open(root, cache=cache) as checkpoint:
            require_equal(dict(checkpoint.stream()), tensors)
            assert torch.equal(checkpoint.read("large.3", slice(7, None, 2)), tensors["large.3"][7::2])
            assert torch.equal(checkpoint.read("large.4", slice(5, 9)), tensors["large.4"][5:9])
        assert not data_reads(root)
    assert cache.stats().entries == cache.stats().held_bytes == 0


@pytest.mark.matrix
@pytest.mark.parametrize("is_there", [False, True])
def test_parts_slices_and_casts(shared: Path, tensors: Tensors, device: Any, is_there: bool) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    if is_there:
        cache.prefetch(shared)
    some = sorted(tensors)[::2]
    found = stio.sync.load(shared, names=some, cache=cache, device=device, dtype=torch.bfloat16)
    require_equal(found, {n: tensors[n].bfloat16() if tensors[n].is_floating_point() else tensors[n] for n in some})
    slices = {"large.1": (slice(None, None, 3),), "large.2": slice(None, None, -1)}
    found = stio.sync.load(shared, slices=slices, cache=cache, device=device, budget_bytes=1 << 20)
    require_equal(found, tensors | {"large.1": tensors["large.1"][::3], "large.2": tensors["large.2"].flip(0)})


def test_a_small_part_is_read_by_itself(shared: Path, tensors: Tensors) -> None:
    """Memory for a file of which a row is wanted would cost more than the row."""
    cache = stio.sync.HostCache(64 * MIB)
    with stio.sync.open(shared, cache=cache) as checkpoint:
        assert torch.equal(checkpoint.read("large.1", slice(3, 9)), tensors["large.1"][3:9])
    assert cache.stats() == stio.CacheStats(misses=1)


def test_modules_and_states(tmp_path: Path) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    save_file({"weight": ramp(5, 4), "bias": ramp(5)}, tmp_path / "m.safetensors")
    for assign in (False, True):
        module = nn.Linear(4, 5)
        stio.sync.load_into(module, tmp_path / "m.safetensors", cache=cache, assign=assign)
        assert torch.equal(module.weight, ramp(5, 4))
    assert cache.stats().hits == 1
    stio.sync.save_state({"a": [ramp(50), 3]}, tmp_path / "s.safetensors")
    for _ in range(2):
        assert torch.equal(stio.sync.load_state(tmp_path / "s.safetensors", cache=cache)["a"][0], ramp(50))
    assert cache.stats().hits == 2


# P5: what was handed out is the caller's.


def test_p5_tensors_are_copies(shared: Path, tensors: Tensors, device: Any) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    first = stio.sync.load(shared, cache=cache, device=device)
    second = stio.sync.load(shared, cache=cache, device=device)
    for tensor in first.values():
        tensor.zero_()
    require_equal(second, tensors)
    require_equal(stio.sync.load(shared, cache=cache, device=device), tensors)
    assert cache.evict() == size_of(shared)
    gc.collect()
    require_equal(second, tensors)


# Which memory it is.


@pytest.mark.parametrize(
    ("device", "has_streams", "is_pinned"),
    [("auto", True, True), ("auto", False, False), ("cuda:1", True, True), (1, True, True), ("cpu", True, False)],
)
def test_memory_is_pinned_for_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, device: Any, has_streams: bool, is_pinned: bool
) -> None:
    fake, asked, resolved = FakeDevice(), [], []

    def accelerator(found: torch.device) -> FakeDevice:
        asked.append(found)
        return fake

    def resolve(device: Any) -> torch.device:
        resolved.append(device)
        return torch.device("cpu" if device == "cpu" else "cuda:1")

    monkeypatch.setattr(stio.serving.host_cache, "resolve_device", resolve)
    monkeypatch.setattr(accelerator, "supports", lambda device: has_streams, raising=False)
    monkeypatch.setattr(accelerator, "has_pinned", TorchAccelerator.has_pinned, raising=False)
    monkeypatch.setattr(stio.serving.host_cache, "TorchAccelerator", accelerator)
    made = _Memory(device)
    regions = []
    for use in (1, 2):
        made.begin_use()
        regions += [made.allocate(4096) for _ in range(2)]
        assert asked == [torch.device("cuda:1")] * (use * is_pinned)  # a new one, which has not been refused
    assert resolved == [device]  # once
    assert fake.staging_bytes == 4 * 4096 * is_pinned
    assert all(region.nbytes == 4096 for region in regions)


# What changed is not what was there.


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_changed_file_is_another_one(tmp_path: Path, change: str) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": ramp(1000)}, path)
    before = path.stat()
    cache = stio.sync.HostCache(64 * MIB)
    stio.sync.load(path, cache=cache)
    data = save_file({"w": ramp(1000, start=9)}, tmp_path / "other").read_bytes()
    if change == "in place":
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time of change as they were
    else:
        (tmp_path / "other").replace(path)
    assert torch.equal(stio.sync.load(path, cache=cache)["w"], ramp(1000, start=9))
    assert cache.stats() == stio.CacheStats(entries=1, held_bytes=len(data), hits=0, misses=2, evictions=1)


@pytest.mark.parametrize(("age_seconds", "waits"), [(0.0, True), (0.02, True), (1.0, False), (-3600.0, True)])
def test_a_file_that_was_written_just_now_is_waited_for(age_seconds: float, waits: bool) -> None:
    """Within one tick of the clock it might change again and look the same. A clock that is ahead is not waited for."""
    changed = time.time() - age_seconds
    start = time.monotonic()
    _wait_for_tick([source_of(0), source_of(changed)])
    seconds = time.monotonic() - start
    assert seconds >= (min(_TICK_SECONDS, _TICK_SECONDS - age_seconds) - 0.005 if waits else 0)
    assert seconds < 1
    if waits and age_seconds >= 0:
        assert time.time() >= changed + _TICK_SECONDS
    _wait_for_tick([])


def source_of(changed: float) -> Any:
    return SimpleNamespace(identity=Identity(1, 1, 1, 1, int(changed * 1e9)))


def test_both_kinds_of_load_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(stio.serving.host_cache, "_wait_for_tick", lambda files: asked.append(len(files)))
    path = save_file({"w": ramp(10)}, tmp_path / "m.safetensors")
    cache = stio.sync.HostCache(64 * MIB)
    cache.prefetch(path)
    stio.sync.load(path, cache=cache)
    assert asked == [1, 1]


def test_a_file_that_changes_while_it_is_cached(shared: Path, tmp_path: Path) -> None:
    """The load that saw it raises, as any load does; what it left is never used."""
    path = tmp_path / "m.safetensors"
    save_file({"w": ramp(1000)}, path)
    cache = stio.sync.HostCache(64 * MIB)
    with stio.sync.open(path, cache=cache) as checkpoint:
        path.write_bytes(save_file({"w": ramp(1000, start=5)}, tmp_path / "other").read_bytes())
        os.utime(path, ns=(0, 0))
        with pytest.raises(stio.ChangedDuringReadError):
            checkpoint.load()
    assert torch.equal(stio.sync.load(path, cache=cache)["w"], ramp(1000, start=5))


def test_links_and_the_file_itself_are_one_entry(tmp_path: Path) -> None:
    path = save_file({"w": ramp(1000)}, tmp_path / "blobs" / "abc")
    link = tmp_path / "snapshot" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(path)
    cache = stio.sync.HostCache(64 * MIB)
    stio.sync.load(link, cache=cache)
    os.link(path, tmp_path / "again.safetensors")  # moves the time of change: read again, which is safe
    stio.sync.load(tmp_path / "again.safetensors", cache=cache)
    stio.sync.load(link, cache=cache)
    assert (cache.stats().entries, cache.stats().hits) == (1, 1)


# Room.


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [save_file({"w": ramp(200_000, start=k)}, tmp_path / str(k) / "m.safetensors").parent for k in range(3)]


def test_the_least_recently_used_goes(three: list[Path]) -> None:
    a, b, c = three
    cache = stio.sync.HostCache(2 * size_of(a))
    for directory in (a, b, a, c):
        stio.sync.load(directory, cache=cache)
    assert cache.stats() == stio.CacheStats(entries=2, held_bytes=2 * size_of(a), hits=1, misses=3, evictions=1)
    for directory, is_there in ((a, True), (c, True), (b, False)):
        root = watched(directory)
        stio.sync.load(root, cache=cache)
        assert bool(data_reads(root)) != is_there


def test_what_is_larger_than_the_budget(three: list[Path]) -> None:
    a, b, _ = three
    cache = stio.sync.HostCache(size_of(a) - 1)
    assert torch.equal(stio.sync.load(a, cache=cache)["w"], ramp(200_000))
    assert cache.stats() == stio.CacheStats(misses=1)
    with pytest.raises(NoSpaceError, match="larger budget") as caught:
        cache.prefetch(b)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (size_of(b), size_of(b) - 1)
    assert caught.value.path == str(b)


def test_a_checkpoint_that_fits_in_part(shared: Path, tensors: Tensors, three: list[Path]) -> None:
    """A load keeps the files that fit, and they stay through its repetitions; a prefetch is all or nothing."""
    sizes = sorted(file.stat().st_size for file in shared.glob("*.safetensors"))
    cache = stio.sync.HostCache(size_of(shared) - 1)
    stio.sync.load(three[0], cache=cache)
    with pytest.raises(NoSpaceError):
        cache.prefetch(shared)
    assert (cache.stats().entries, cache.stats().evictions) == (1, 0)  # nothing went in vain
    for hits in (0, 2, 4):
        require_equal(stio.sync.load(shared, cache=cache), tensors)
        stats = cache.stats()
        assert stats.hits == hits
        assert stats.held_bytes >= sizes[0] + sizes[1]
        assert stats.evictions <= 1


def test_what_is_in_use_does_not_go(three: list[Path]) -> None:
    a, b, _ = three
    cache = stio.sync.HostCache(size_of(a))
    gate = threading.Event()
    root = watched(a, gate=gate, gate_at=2)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(stio.sync.load, root, cache=cache)
        root.wait_for_readers(1)
        assert cache.evict() == cache.evict(a) == 0
        assert torch.equal(stio.sync.load(b, cache=cache)["w"], ramp(200_000, start=1))
        with pytest.raises(NoSpaceError) as caught:
            cache.prefetch(b)
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (size_of(b), 0)
        gate.set()
        assert torch.equal(load.result(30)["w"], ramp(200_000))
    assert cache.stats().entries == 1
    cache.prefetch(b)
    assert (cache.stats().entries, cache.stats().evictions) == (1, 1)


@pytest.fixture
def pinned_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Caches pin memory without a device, in small segments; return what they have pinned, one after the other."""
    sizes: list[int] = []

    def pin(nbytes: int) -> Region:
        sizes.append(nbytes)
        region = memory.allocate(nbytes)
        region.owner.is_pinned = True
        weakref.finalize(region.owner.pages, sizes.append, -nbytes)
        return region

    monkeypatch.setattr(caches.FileImage, "SEGMENT_BYTES", 64 << 10)
    monkeypatch.setattr(_Memory, "begin_use", lambda self: setattr(self, "_make", pin))
    return sizes


def test_pinned_memory_of_an_evicted_file_is_used_again(three: list[Path], pinned_sizes: list[int]) -> None:
    """As long as its segments have the same size; so the memory of all together stays within the budget."""
    a, b, _ = three
    budget = size_of(a)
    with stio.sync.HostCache(budget) as cache:
        cache.prefetch(a)
        whole, rest = divmod(-(-size_of(a) // 4096) * 4096, 64 << 10)
        assert sorted(pinned_sizes) == sorted([64 << 10] * whole + [rest])
        before = pinned_sizes.copy()
        cache.prefetch(b)
        assert cache.stats().evictions == 1
        assert pinned_sizes.count(64 << 10) == whole  # no more were pinned
        assert sum(pinned_sizes) <= sum(before)
        require_equal(stio.sync.load(b, cache=cache), oracle(b))
    assert eventually(lambda: sum(pinned_sizes) == 0)


def test_pinned_memory_of_a_closed_cache_is_released_with_its_last_load(
    three: list[Path], pinned_sizes: list[int]
) -> None:
    """It is not kept for a next file."""
    cache = stio.sync.HostCache(64 * MIB)
    cache.prefetch(three[0])
    with LocalRoot(three[0]) as root, closing(root.open("m.safetensors")) as file:
        (held,) = cache.hold([(file, file.identity.nbytes)])
    assert held is not None
    cache.close()
    assert sum(pinned_sizes) > 64 << 10
    held.release()
    assert eventually(lambda: sum(pinned_sizes) == 0)


@needs_engine
def test_segments_are_filled_while_others_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning takes long: the third segment is pinned here only when the bytes of the first one are there."""
    tensors = {f"w{k}": torch.full((MIB,), k, dtype=torch.uint8) for k in range(12)}
    path = save_file(tensors, tmp_path / "m.safetensors")
    head, segments = path.read_bytes()[:MIB], []

    def pin(nbytes: int) -> Region:
        assert len(segments) < 2 or eventually(lambda: segments[0].sub(0, MIB).tobytes() == head)
        segments.append(memory.allocate(nbytes))
        return segments[-1]

    monkeypatch.setattr(caches.FileImage, "SEGMENT_BYTES", MIB)
    monkeypatch.setattr(planned, "GROUP_BYTES", MIB)
    monkeypatch.setattr(_Memory, "begin_use", lambda self: setattr(self, "_make", pin))
    with stio.sync.HostCache(64 * MIB) as cache:
        cache.prefetch(path)
        assert len(segments) == -(-path.stat().st_size // MIB) > 10


@pytest.mark.parametrize("end", ["evict", "close"])
def test_pinned_memory_that_is_kept_is_released(three: list[Path], pinned_sizes: list[int], end: str) -> None:
    """Of a file whose successor is smaller."""
    a = three[0]
    small = a.with_name("small.safetensors")
    stio.sync.save({"w": torch.ones(10)}, small)
    with stio.sync.HostCache(size_of(a)) as cache:
        cache.prefetch(a)
        cache.prefetch(small)
        assert cache.stats().entries == 1
        assert sum(pinned_sizes) > 64 << 10
        getattr(cache, end)()
        assert eventually(lambda: sum(pinned_sizes) == 0)


def test_evict_by_source(shared: Path, three: list[Path], tmp_path: Path) -> None:
    cache = stio.sync.HostCache(64 * MIB)
    for source in (shared, *three):
        cache.prefetch(source)
    assert cache.stats().entries == 6
    assert cache.evict(three[0] / "m.safetensors") == size_of(three[0])
    assert cache.evict(watched(three[1])) == size_of(three[1])
    assert cache.evict(tmp_path / "nothing") == cache.evict(f"{three[2]}0") == 0
    assert cache.evict(shared / "model.safetensors.index.json") == size_of(shared)
    assert cache.evict(f"{tmp_path}/{three[2].name}/../{three[2].name}/") == size_of(three[2])
    assert cache.stats() == stio.CacheStats(misses=6, evictions=6)


def test_p8_memory_is_within_the_budget_and_comes_back(three: list[Path]) -> None:
    a, b, c = three
    cache = stio.sync.HostCache(2 * size_of(a))
    recorder = recorded(cache)
    for directory in (a, b, c, a, c, b):
        stio.sync.load(directory, cache=cache, device=FakeDevice())
        assert 0 < recorder.live_bytes < 2 * (size_of(a) + PAGE_BYTES)
    cache.evict(b)
    assert recorder.live_bytes < size_of(a) + PAGE_BYTES
    cache.close()
    assert eventually(lambda: recorder.live_bytes == 0)


# Wrong uses.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"budget_bytes": 0}, ValueError), ({"budget_bytes": -5}, ValueError), ({"budget_bytes": 1.5}, TypeError),
        ({"budget_bytes": True}, TypeError), ({"budget_bytes": 1, "device": FakeDevice()}, TypeError),
        ({"budget_bytes": 1, "device": {"": "cpu"}}, TypeError),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        stio.HostCache(**options)


def test_wrong_keywords_of_loads(shared: Path) -> None:
    with pytest.raises(TypeError, match="HostCache"):
        stio.sync.load(shared, cache="large")  # type: ignore[arg-type]
    for way in ("map", "lazy"):
        with pytest.raises(ValueError, match="choose one"):
            stio.sync.load(shared, cache=stio.HostCache(1), memory=way)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        stio.sync.load(shared, cache=stio.HostCache(1, device="nonsense"))
    with pytest.raises(stio.CheckpointNotFoundError):
        stio.sync.HostCache(1).prefetch(shared / "nothing")


def test_files_without_an_inode_are_not_cached(tensors: Tensors) -> None:
    cache, root = stio.sync.HostCache(64 * MIB), MemoryRoot(checkpoint_files(tensors))
    other = MemoryRoot(
        checkpoint_files(
            {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        )
    )
    require_equal(stio.sync.load(root, cache=cache), tensors)
    assert torch.equal(stio.sync.load(other, cache=cache)["large.1"], tensors["large.1"] + 1)
    assert cache.stats().entries == 0
    with pytest.raises(StorageError, match="inode"):
        cache.prefetch(root)


def test_verify_reads_the_disk(tmp_path: Path) -> None:
    stio.sync.save({"w": ramp(1000)}, tmp_path / "m", hash="sha256")
    cache = stio.sync.HostCache(64 * MIB)
    for _ in range(2):
        root = watched(tmp_path / "m")
        assert torch.equal(stio.sync.load(root, cache=cache, verify=True)["w"], ramp(1000))
        assert data_reads(root)
    assert cache.stats().hits == 1
