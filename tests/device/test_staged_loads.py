"""Whole loads to a device: whatever is refused, fails or is cancelled, copies end and memory comes back."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from fakes import FakeDevice, FaultyRoot, MemoryRoot, checkpoint_files
from support import nothing_left

import stio.sync
from stio.errors import DeviceError, DeviceMemoryError, SliceError, StorageError
from stio.loading import planned
from stio.runtime.memory import Region


def require_freed(device: FakeDevice) -> None:
    """Wait until all memory is back: threads may still be ending."""
    deadline = time.monotonic() + 30
    while device.used_bytes or device.staging_bytes:
        gc.collect()
        assert time.monotonic() < deadline, (device.used_bytes, device.staging_bytes)
        threading.Event().wait(0.001)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:03}": torch.randn(k % 50 + 1, generator=chance) for k in range(200)}
    large = {f"large.{k}": torch.randn(400, 400 + k, generator=chance) for k in range(8)}
    odd = {"e": torch.empty(0, 2), "flag": torch.tensor([True, False, True]), "n": torch.arange(7, dtype=torch.int16)}
    return small | large | odd


@pytest.fixture(scope="module")
def files(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return checkpoint_files(tensors, 2)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(torch.equal(found[name], t) for name, t in expected.items())


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [64 << 10, 1 << 20, 512 << 20])
def test_load(files: dict[str, bytes], tensors: dict[str, torch.Tensor], budget_bytes: int) -> None:
    device = FakeDevice()
    assert same(stio.sync.load(MemoryRoot(files), device=device, budget_bytes=budget_bytes), tensors)
    assert device.num_pending == 0
    assert device.peak_staging_bytes <= budget_bytes
    require_freed(device)


def test_p8_stream_stays_within_the_budget(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    device, budget = FakeDevice(), 2 << 20
    with stio.sync.open(MemoryRoot(files), device=device, budget_bytes=budget) as checkpoint:
        seen = {}
        for name, tensor in checkpoint.stream():
            seen[name] = bool(torch.equal(tensor, tensors[name]))
            del tensor
    assert set(seen) == set(tensors)
    assert all(seen.values())
    assert device.peak_staging_bytes + device.peak_bytes <= budget + max(t.nbytes for t in tensors.values())


def test_slices_and_casts(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    device = FakeDevice()
    with stio.sync.open(MemoryRoot(files), device=device, budget_bytes=256 << 10) as checkpoint:
        assert torch.equal(
            checkpoint.read("large.3", (slice(None, None, 3), slice(5, 9))), tensors["large.3"][::3, 5:9]
        )
        assert torch.equal(checkpoint.read("large.2", slice(None, None, -1)), tensors["large.2"].flip(0))
        every_other = checkpoint.load(names=sorted(tensors)[::2])
    assert same(every_other, {name: tensors[name] for name in sorted(tensors)[::2]})
    cast = stio.sync.load(MemoryRoot(files), device=FakeDevice(), dtype=torch.bfloat16)
    assert same(cast, {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()})


def test_every_other_small_tensor_among_large_gaps() -> None:
    """Bytes that are read through and thrown away never reach a tensor, whatever their number."""
    chance = torch.Generator().manual_seed(1)
    tensors = {f"t{k:04}": torch.randint(0, 255, (7 if k % 2 else 90_001,), generator=chance).byte() for k in range(60)}
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.nbytes == 7}
    for budget in (64 << 10, 512 << 20):
        found = stio.sync.load(
            MemoryRoot(checkpoint_files(tensors)), device=FakeDevice(), names=list(wanted), budget_bytes=budget
        )
        assert same(found, wanted)


def test_c96_out_of_memory(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    device = FakeDevice(memory_bytes=3 << 20)
    with pytest.raises(DeviceMemoryError) as caught:
        stio.sync.load(MemoryRoot(files), device=device, budget_bytes=1 << 20)
    assert caught.value.needed_bytes is not None
    assert caught.value.needed_bytes > (caught.value.free_bytes or 0)
    assert device.num_pending == 0
    del caught
    require_freed(device)


@pytest.mark.slow
def test_c96_no_memory_is_allocated_ahead_of_casts() -> None:
    """What is not cast yet would need the memory of the tensors that are."""
    tensors = {f"large.{k}": torch.full((1 << 18,), float(k)) for k in range(24)}  # 1 MiB each
    device = FakeDevice(memory_bytes=16 << 20)
    found = stio.sync.load(
        MemoryRoot(checkpoint_files(tensors)), device=device, dtype=torch.bfloat16, budget_bytes=2 << 20
    )
    assert same(found, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    del found
    require_freed(device)


@pytest.mark.parametrize("fault", ["refuse_copy", pytest.param("fail_copy", marks=pytest.mark.slow)])
def test_failing_copy_at_every_number(files: dict[str, bytes], tensors: dict[str, torch.Tensor], fault: str) -> None:
    number = failed = 0
    while True:
        number += 1
        device = FakeDevice(delay_seconds=0.0001, **{fault: number})  # type: ignore[arg-type]
        try:
            loaded = stio.sync.load(MemoryRoot(files), device=device, budget_bytes=2 << 20)
        except DeviceError:
            failed += 1
            assert device.num_pending == 0
            require_freed(device)
            continue
        assert same(loaded, tensors)
        assert device.num_copies < number  # it got away only because there was no such copy
        break
    assert failed == number - 1 >= 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_who_leaves_a_stream_early_has_no_tensor_of_a_failed_copy(
    files: dict[str, bytes], tensors: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Behind a cast either: the cast's own event says nothing of what it read."""
    for k in range(80):
        device = FakeDevice(delay_seconds=0.0001, fail_copy=k % 8 + 1)
        with stio.sync.open(MemoryRoot(files), device=device, dtype=dtype, budget_bytes=2 << 20) as checkpoint:
            try:
                with checkpoint.stream() as stream:
                    for _, (name, tensor) in zip(range(5), stream, strict=False):
                        expected = tensors[name]
                        assert torch.equal(tensor, expected.to(dtype) if expected.is_floating_point() else expected)
            except DeviceError:
                pass


@pytest.mark.slow
def test_failing_read_at_every_number(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    number = 0
    while True:
        number += 1
        root, device = FaultyRoot(MemoryRoot(files), fail_at=number), FakeDevice(delay_seconds=0.0001)
        try:
            loaded = stio.sync.load(root, device=device, budget_bytes=2 << 20)
        except StorageError:
            assert device.num_pending == 0
            assert root.num_open == 0
            require_freed(device)
            continue
        assert same(loaded, tensors)
        break
    assert number > 5


def test_no_staging_memory_at_every_number(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    for number in range(1, 30):
        device = FakeDevice(refuse_staging=number)
        try:
            loaded = stio.sync.load(MemoryRoot(files), device=device, budget_bytes=1 << 20)
        except MemoryError:
            assert device.num_pending == 0
            require_freed(device)
            continue
        assert same(loaded, tensors)
        break
    assert 2 <= number <= 5  # a slot for each worker


def test_little_is_pinned_for_a_slice(files: dict[str, bytes], tensors: dict[str, torch.Tensor]) -> None:
    name, tensor = max(tensors.items(), key=lambda item: item[1].numel())
    device = FakeDevice()
    part = stio.sync.load(
        MemoryRoot(files), names=name, slices={name: slice(0, 1)}, device=device, budget_bytes=1 << 20
    )
    assert torch.equal(part[name], tensor[0:1])
    assert device.num_staging == 1


class Gated(FakeDevice):
    """Makes staging memory once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def staging(self, nbytes: int) -> Region:
        self.entered.set()
        assert self.go.wait(30)
        return super().staging(nbytes)


def test_what_is_refused_before_anything_is_read_needs_no_staging_memory(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()

    def refuse(*_: object, **__: object) -> None:
        raise SliceError("no")

    monkeypatch.setattr(planned, "plan_reads", refuse)
    with nothing_left(), pytest.raises(SliceError):
        stio.sync.load(MemoryRoot(files), device=device, budget_bytes=1 << 20)
    assert device.num_staging == 0


def test_p4_cancel_while_slots_are_made(files: dict[str, bytes]) -> None:
    device = Gated()
    with nothing_left(), stio.sync.open(MemoryRoot(files), device=device, budget_bytes=1 << 20) as checkpoint:
        stream = checkpoint.stream()
        stream.__enter__()
        assert device.entered.wait(30)
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join(0.02)
        assert closer.is_alive()  # the memory is being made for us
        device.go.set()
        closer.join(30)
        assert not closer.is_alive()
    del stream
    require_freed(device)


def test_p4_cancel_waits_for_copies(files: dict[str, bytes]) -> None:
    """When closing returns, nothing reads a slot or writes a tensor any more."""
    device = FakeDevice(manual=True)
    with stio.sync.open(MemoryRoot(files), device=device, budget_bytes=1 << 20) as checkpoint:
        stream = checkpoint.stream()
        stream.__enter__()
        device.wait_for_pending(1)
        closer = threading.Thread(target=stream.close)
        closer.start()
        while closer.is_alive():
            device.step()
            closer.join(0.001)
        assert device.num_pending == 0
    del stream
    require_freed(device)
