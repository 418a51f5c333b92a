"""Bytes of tensors, whatever their dtype and layout, cut anywhere between elements, are those of their contiguous copy."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerators import NEEDS_GPU, gpu, keep_busy
from support import ALL_DTYPES, assorted, bits_of, needs_engine, ramp, require_equal

from stio import native
from stio.device import copy_out as copying
from stio.device.base import resolve_device
from stio.device.copy_out import Copy, Readiness
from stio.device.cuda import TorchEvent, save_stream
from stio.device.describe import describe_tensors
from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.saving.plan import plan_writes

F4 = getattr(torch, "float4_e2m1fn_x2", None)
DTYPES = [*ALL_DTYPES, *([F4] if F4 is not None else [])]
POISON = 0xCB

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "offset": lambda x: x.reshape(-1)[7:],
    "transposed": lambda x: x.permute(2, 0, 1),
    "reversed dimensions": lambda x: x.permute(2, 1, 0),
    "columns": lambda x: x[:, :, 1:4],
    "every other": lambda x: x[1::2, :, ::2],
    "expanded": lambda x: x[:1, :, 2:3].expand(3, 6, 5),
    "expanded scalar": lambda x: x[0, 0, 0].expand(4, 4),
    "scalar": lambda x: x[1, 2, 3],
    "one element": lambda x: x[1, 2, 3:6:3],
    "one row": lambda x: x[1:2].transpose(0, 1),
    "empty": lambda x: x[:, :0].transpose(0, 2),
}


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    if dtype == F4:
        return ramp(4, 6, 8, dtype=torch.uint8).view(F4)
    return ramp(4, 6, 8, dtype=dtype)


def image(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous copy; torch calls one element contiguous whatever its stride."""
    return bits_of(tensor.clone(memory_format=torch.contiguous_format))


def poisoned(nbytes: int) -> Region:
    region = memory.allocate(nbytes)
    region.write(0, bytes([POISON]) * nbytes)
    return region.sub(0, nbytes)


def brought(tensor: torch.Tensor, cuts: list[int]) -> bytes:
    """Copy a tensor out in pieces, all in one call, each between bytes that must stay as they are."""
    regions, copies = [], []
    for start, stop in pairwise(cuts):
        around = poisoned(stop - start + 32)
        regions.append(around)
        copies.append((tensor, start, around.sub(16, stop - start)))
    Readiness().copy_out(copies)
    for region in regions:
        held = region.tobytes()
        assert held[:16] == held[-16:] == bytes([POISON]) * 16
    return b"".join(region.tobytes()[16:-16] for region in regions)


def random_cuts(rng: random.Random, tensor: torch.Tensor, count: int) -> list[int]:
    inner = sorted(rng.randint(0, tensor.numel()) for _ in range(count))
    return [cut * tensor.itemsize for cut in (0, *inner, tensor.numel())]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype_and_layout(dtype: torch.dtype, layout: str) -> None:
    tensor = tensor_of(dtype)
    if dtype == F4:  # torch moves nothing of it but bits
        expected = image(LAYOUTS[layout](tensor.view(torch.uint8)))
    else:
        expected = image(LAYOUTS[layout](tensor))
    tensor = LAYOUTS[layout](tensor)
    rng = random.Random(layout)
    for count in (0, 0, 1, 2, 5, 20):
        assert brought(tensor, random_cuts(rng, tensor, count)) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "pend",
    [
        lambda x: x.conj(),
        lambda x: x.conj().imag,
        lambda x: x.real,
        lambda x: torch._neg_view(x),
        lambda x: torch._neg_view(x).conj(),
    ],
    ids=["conj", "neg imag", "real", "neg", "both"],
)
def test_pending_arithmetic(pend: Any, layout: str) -> None:
    base = torch.view_as_complex(torch.randn(4, 6, 8, 2))
    tensor = pend(LAYOUTS[layout](base))
    expected = image(tensor.resolve_conj().resolve_neg())
    rng = random.Random(layout)
    for count in (0, 1, 5, 20):
        assert brought(tensor, random_cuts(rng, tensor, count)) == expected


@pytest.mark.parametrize("rank", range(1, 6))
def test_any_permutation_and_step(rank: int) -> None:
    rng = random.Random(rank)
    for _ in range(30):
        tensor = ramp(*(rng.randint(1, 6) for _ in range(rank)), dtype=rng.choice([torch.int16, torch.float64]))
        tensor = tensor.permute(rng.sample(range(rank), rank))
        tensor = tensor[tuple(slice(rng.randint(0, 1), None, rng.randint(1, 3)) for _ in range(rank))]
        assert brought(tensor, random_cuts(rng, tensor, 4)) == image(tensor)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("size", [127, 128, 129, 300])
def test_tiles(dtype: torch.dtype, size: int) -> None:
    base = ramp(3, size, 70, dtype=dtype)
    for tensor in (
        base.transpose(1, 2),
        base.permute(2, 0, 1),
        base[1].t(),
        base.expand(2, 3, size, 70).transpose(2, 3),
    ):
        assert brought(tensor, random_cuts(random.Random(size), tensor, 3)) == image(tensor)
    if dtype.is_complex:
        tensor = base.transpose(1, 2).conj()
        assert brought(tensor, random_cuts(random.Random(size), tensor, 3)) == image(tensor.resolve_conj())


def test_contiguous_memory_may_be_cut_anywhere() -> None:
    tensor = ramp(1000, dtype=torch.float64)
    assert brought(tensor, [0, 1, 3, 4097, 8000]) == bits_of(tensor)


@pytest.mark.parametrize("nbytes", [1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_short_and_long_copies(nbytes: int) -> None:
    tensor = ramp(nbytes, dtype=torch.uint8)
    assert brought(tensor, [0, nbytes]) == bits_of(tensor)


def test_parameters_and_gradients() -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 7))
    assert brought(parameter, [0, 140]) == bits_of(parameter)
    assert brought(parameter.t(), [0, 60, 140]) == bits_of(parameter.t())  # a view that autograd tracks
    with torch.inference_mode():
        tensor = torch.randn(5, 7).t()
    assert brought(tensor, [0, 60, 140]) == bits_of(tensor)


def test_nan_payloads_survive() -> None:
    tensor = torch.tensor([0x7FC00001, 0x7F800001, -1] * 4, dtype=torch.int32).view(torch.float32).reshape(4, 3).t()
    assert brought(tensor, [0, 16, 48]) == bits_of(tensor)


def test_a_snapshot_is_of_now() -> None:
    """Fault 111: what changes afterwards is not what was copied."""
    tensor = torch.zeros(100)
    region = poisoned(400)
    Readiness().copy_out([(tensor, 0, region)])
    tensor.fill_(1)
    assert region.tobytes() == bytes(400)


@pytest.mark.parametrize(
    ("start", "nbytes"), [(-1, 4), (0, 401), (400, 1), (396, 8)], ids=["before", "long", "behind", "over"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_range_outside_the_tensor(start: int, nbytes: int, transposed: bool) -> None:
    tensor = torch.zeros(10, 10)
    good, bad = poisoned(8), poisoned(nbytes)
    with pytest.raises(ValueError, match="of a tensor of 400"):
        Readiness().copy_out([(tensor, 0, good), (tensor.t() if transposed else tensor, start, bad)])
    assert good.tobytes() == bytes([POISON]) * 8  # refused before anything was copied


@pytest.mark.parametrize(("start", "nbytes"), [(1, 4), (0, 3), (2, 4)])
def test_an_element_is_not_cut(start: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="cut an element"):
        Readiness().copy_out([(torch.zeros(10, 10).t(), start, poisoned(nbytes))])


def test_memory_that_torch_owns() -> None:
    """Pinned staging is a tensor's."""
    owner = torch.full((4096,), POISON, dtype=torch.uint8)
    region = Region(owner.data_ptr(), 4096, owner)
    tensor = ramp(8, 8, dtype=torch.int16)
    Readiness().copy_out([(tensor, 0, region.sub(64, 128)), (tensor.t(), 0, region.sub(1024, 128))])
    assert region.sub(64, 128).tobytes() == bits_of(tensor)
    assert region.sub(1024, 128).tobytes() == bits_of(tensor.t())


def test_no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = ramp(2048, 1024, dtype=torch.float32).t()
    region = poisoned(tensor.nbytes - 4096)
    Readiness().copy_out([(tensor, 0, poisoned(4096))])
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Readiness().copy_out([(tensor, 4096, region)])
    events = [event for event in profile.key_averages() if event.self_cpu_memory_usage > 1 << 20]
    assert events == []
    assert region.tobytes() == bits_of(tensor)[4096:]


def test_files_are_what_the_reference_library_reads(tmp_path: Path) -> None:
    tensors = assorted() | {
        "transposed": ramp(70, 300).t(),
        "expanded": ramp(1, 9).expand(50, 9),
        "conj": torch.randn(9, 7, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(100, 3)),
    }
    plan = plan_writes(describe_tensors(tensors), max_shard_bytes=100_000, block_bytes=8192)
    found = {}
    for k, shard in enumerate(plan.shards):
        file = b""
        for block in shard.blocks:
            region = poisoned(block.nbytes)
            region.write(0, block.head(shard.header))
            pieces = block.pieces
            Readiness().copy_out([(plan.sources[p.source].data, p.start, region.sub(p.at, p.nbytes)) for p in pieces])
            file += region.tobytes()
        path = tmp_path / f"{k}.safetensors"  # each stays as it is: the library maps it
        path.write_bytes(file)
        found |= safetensors.torch.load_file(path)  # `load` of bytes does not know every dtype
    assert len(plan.shards) > 1
    for name in ("conj", "parameter"):
        tensors[name] = tensors[name].detach().resolve_conj()
    require_equal(found, tensors)


def test_nothing_to_copy() -> None:
    Readiness().copy_out([])
    Readiness().copy_out([(torch.zeros(3), 12, Region(0, 0)), (torch.zeros(0), 0, Region(0, 0))])


def test_staging_allocator_the_cpu() -> None:
    assert Readiness.now({"x": torch.zeros(1), "y": object()}).staging_allocator() == memory.allocate
    assert Readiness.now({}).staging_allocator() == memory.allocate


# Devices, with a module in their stead.


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.done: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        raise AssertionError("the copies of another save would wait too")

    wait_stream = wait_event

    def synchronize(self) -> None:
        self.done.append("synchronize")


class FakeEvent:
    fails = False

    def __init__(self, device: torch.device | None = None) -> None:
        self.recorded: FakeStream | None = None
        self.passed = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream

    def synchronize(self) -> None:
        self.passed = True
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")


CURRENT = FakeStream()
DEVICE = torch.device("cpu")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand for `torch.cuda`, over the CPU."""
    module = types.SimpleNamespace(
        current_stream=lambda device: CURRENT,
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch, "Stream", FakeStream)
    return module


def device_copy(copies: list[Copy], ready: Readiness | None = None) -> FakeEvent:
    made = copying._queue_copies(DEVICE, copies, ready or Readiness(), [])
    made.synchronize()
    assert isinstance(made, TorchEvent)
    event = made.event
    assert isinstance(event, FakeEvent)
    assert event.passed
    return event


def ready_at(module: types.SimpleNamespace) -> tuple[Readiness, FakeEvent]:
    """Return readiness for the device, and its event."""
    event = TorchEvent(module, DEVICE, CURRENT)
    return Readiness({DEVICE: event}), event.event


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part_bytes", [1 << 20, 32], ids=["whole", "parts"])
def test_device_copies(
    module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, layout: str, part_bytes: int
) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", part_bytes)
    rng = random.Random(layout)
    for base in (ramp(4, 6, 8), torch.view_as_complex(torch.randn(4, 6, 8, 2)).conj()):
        tensor = LAYOUTS[layout](base)
        cuts = random_cuts(rng, tensor, 3)
        regions = [poisoned(stop - start + 1).sub(0, stop - start) for start, stop in pairwise(cuts)]
        pairs = zip(cuts, regions, strict=False)
        device_copy([(tensor, start, region) for start, region in pairs if region.nbytes])
        expected = image(tensor.resolve_conj())
        assert b"".join(region.tobytes() for region in regions) == expected


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("is_known", [True, False])
def test_copies_begin_when_the_caller_s_work_is_done(
    module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, turned: bool, is_known: bool
) -> None:
    """The thread waits, and not the stream that all saves share. Without readiness: for what this thread has queued."""
    made: list[FakeEvent] = []

    class Event(FakeEvent):
        def __init__(self, device: torch.device | None = None) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(torch, "Event", Event)
    ready = ready_at(module)[0] if is_known else None
    passed = []
    for name in ("copy_each", "_queue_strided"):
        monkeypatch.setattr(copying, name, lambda *_, **__: passed.append(made[0].passed))
    tensor = torch.zeros(4, 4).t() if turned else torch.zeros(4)
    event = device_copy([(tensor, 0, poisoned(16))], ready)
    assert made == [made[0], event]
    assert made[0].recorded is CURRENT
    assert passed == [True]
    assert event.recorded is save_stream(module, DEVICE)


def test_a_failure_of_the_caller_s_work_is_told_as_it_is(module: types.SimpleNamespace) -> None:
    ready, event = ready_at(module)
    event.fails = True
    region = poisoned(16)
    with pytest.raises(DeviceError, match="^copying on cpu failed: an illegal memory access"):
        device_copy([(torch.zeros(4), 0, region)], ready)
    assert region.tobytes() == bytes([POISON]) * 16


def test_the_cpu_needs_no_event() -> None:
    assert Readiness.now({"x": torch.zeros(3), "y": object()}) == Readiness()


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError, DeviceError), (torch.OutOfMemoryError, DeviceMemoryError)]
)
def test_a_refused_copy_waits_for_what_was_queued(
    module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: type[Exception], raised: type[Exception]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error("no")

    monkeypatch.setattr(copying, "copy_each", refuse)
    with pytest.raises(raised):
        device_copy([(torch.zeros(4), 0, poisoned(16))])
    assert save_stream(module, DEVICE).done == ["synchronize"]


def test_a_wrong_range_waits_for_what_was_queued(module: types.SimpleNamespace) -> None:
    copies = [(torch.zeros(4), 0, poisoned(16)), (torch.zeros(4, 4).t(), 1, poisoned(8))]
    with pytest.raises(ValueError, match="cut an element"):
        device_copy(copies)
    assert save_stream(module, DEVICE).done == ["synchronize"]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_all_events_are_waited_for_though_one_fails(
    module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The driver's error becomes one of stio."""
    events = {name: TorchEvent(module, DEVICE, FakeStream()) for name in "ab"}
    monkeypatch.setattr(copying, "_queue_copies", lambda device, *_: events[device])
    events[failing].event.fails = True
    tensors: list[Any] = [types.SimpleNamespace(nbytes=4, is_cpu=False, device=name) for name in events]
    with pytest.raises(DeviceError, match="illegal memory access"):
        Readiness().copy_out([(tensor, 0, poisoned(4)) for tensor in tensors])
    assert all(event.event.passed for name, event in events.items() if name != failing)


# Real devices.


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_accelerator(dtype: torch.dtype, layout: str) -> None:
    device = torch.accelerator.current_accelerator()
    tensor = tensor_of(dtype).to(device)
    expected = image(LAYOUTS[layout](tensor.cpu().view(torch.uint8) if dtype == F4 else tensor.cpu()))
    tensor = LAYOUTS[layout](tensor)
    ready = Readiness.now({"x": tensor})
    region = ready.staging_allocator()(4096).sub(0, tensor.nbytes)
    ready.copy_out([(tensor, 0, region)])
    assert region.tobytes() == expected
    assert brought(tensor, random_cuts(random.Random(0), tensor, 5)) == expected


@pytest.mark.slow
@gpu
def test_accelerator_work_so_far_comes_first() -> None:
    device = torch.accelerator.current_accelerator()
    tensor = torch.zeros(64 << 20, device=device)
    torch.accelerator.synchronize()
    keep_busy()
    tensor.fill_(50)
    ready = Readiness.now({"x": tensor})
    region = ready.staging_allocator()(4096)
    ready.copy_out([(tensor, 0, region)])
    tensor.fill_(51)
    assert region.tobytes() == bits_of(torch.full((1024,), 50.0))


# Many pieces in one block.


def pieces_of(tensors: list[torch.Tensor], rng: random.Random | None = None) -> tuple[Any, list[Any], bytes]:
    """Describe tensors, cut them, and lay the pieces into a block; return its bytes too."""
    sources = describe_tensors({str(k): tensor for k, tensor in enumerate(tensors)})
    pieces, expected = [], b""
    for k, tensor in enumerate(tensors):
        data = image(tensor.cpu().resolve_conj().resolve_neg()) if tensor.numel() else b""
        cuts = [0, *random_cuts(rng, tensor, 2)[1:-1], len(data)] if rng and tensor.numel() else [0, len(data)]
        for start, stop in pairwise(cuts):
            pieces.append((k, start, len(expected), stop - start, stop == len(data)))
            expected += data[start:stop]
    return sources, pieces, expected


def many_kinds() -> list[torch.Tensor]:
    numbers, wave = torch.arange(48, dtype=torch.int16).reshape(6, 8), torch.randn(5, 4, dtype=torch.complex64)
    return [
        numbers, numbers + 1, numbers[2:4], numbers.t(), torch.randn(3, 5), torch.randn(7), wave.conj(), wave,
        wave.conj().imag, torch.nn.Parameter(torch.randn(4)), torch.empty(0, 3), torch.ones((1 << 18) + 1),
        torch.randn(9).bfloat16(), torch.rand(9) > 0.5, torch.randn(3, dtype=torch.float64), torch.tensor(5),
        torch.randn(8)[::2], torch.randn(33).to(torch.float8_e5m2), torch.randn(2, 2), torch.randn(1, 3).expand(2, 3),
    ]  # fmt: skip


def copy_by_engine(sources: Any, pieces: list[Any], target: Region, ready: Readiness | None = None) -> None:
    """Let the engine copy what it can."""
    ranges = native.Ranges()
    storages = (ready or Readiness()).copy_pieces(sources, pieces, target, ranges, 7)
    assert len(storages) == len(ranges)
    if storages:
        transfer = native.Transfer()
        transfer.add(ranges)
        assert [one.group for one in transfer.take()] == [7]
        transfer.end()


def copy_here(sources: Any, pieces: list[Any], target: Region, ready: Readiness | None = None) -> None:
    (ready or Readiness()).copy_pieces(sources, pieces, target)


WAYS = [pytest.param(copy_here, id="here"), pytest.param(copy_by_engine, marks=needs_engine, id="engine")]


@needs_engine
def test_the_engine_gets_what_is_contiguous_on_the_cpu() -> None:
    """The others are copied at once. What keeps the memory is held, whatever becomes of the tensor."""
    tensors = [torch.full((100,), 1.0), torch.randn(20, 5).t(), torch.full((100,), 2.0)]
    sources, pieces, expected = pieces_of(tensors)
    block, ranges = poisoned(1200), native.Ranges()
    storages = Readiness().copy_pieces(sources, pieces, block, ranges, 0)
    assert block.tobytes() == bytes([POISON]) * 400 + expected[400:800] + bytes([POISON]) * 400
    assert [storage.data_ptr() for storage in storages] == [tensors[0].data_ptr(), tensors[2].data_ptr()]
    for tensor in tensors:
        tensor.data = torch.zeros(1)
    others = [torch.full((100,), 3.0) for _ in range(100)]  # in memory that is free
    transfer = native.Transfer()
    transfer.add(ranges)
    assert transfer.take()
    transfer.end()
    assert block.tobytes() == expected
    del others


@pytest.mark.matrix
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=NEEDS_GPU)])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("copy", WAYS)
def test_many_pieces(cut: bool, device: str, shift: int, copy: Callable[..., object]) -> None:
    """Each of them where it belongs, in aligned memory and in memory that is not."""
    where = resolve_device(device)
    for seed in range(5):
        rng = random.Random(seed)
        tensors = [tensor.to(where) for tensor in many_kinds() if where.type == "cpu" or not tensor.is_complex()]
        if where.type != "cpu":
            tensors[4] = tensors[4].cpu()  # in the middle
        rng.shuffle(tensors)
        if where.type != "cpu":  # as a file has them: each aligned to its elements. Only bytes need no alignment there
            tensors.sort(key=lambda tensor: -tensor.itemsize)
            tensors = [tensor for tensor in tensors if not shift or tensor.is_contiguous()]
        sources, pieces, expected = pieces_of(tensors, rng if cut else None)
        ready = Readiness.now({str(k): tensor for k, tensor in enumerate(tensors)})
        block = ready.staging_allocator()(len(expected) + 64)
        block.write(0, bytes([POISON]) * block.nbytes)
        copy(sources, pieces, block.sub(32 + shift, len(expected)), ready)
        held = block.tobytes()
        assert held[32 + shift : 32 + shift + len(expected)] == expected
        assert {*held[: 32 + shift], *held[32 + shift + len(expected) :]} == {POISON}


@gpu
@needs_engine
def test_many_tensors_of_a_device_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call drops the GIL, and each temporary tensor at its end: beside a busy Python thread that may cost 5 ms."""
    where = resolve_device("auto")
    dtypes = [torch.float64, torch.float32, torch.int8]
    tensors = [torch.full((3, 8), k % 100, dtype=dtype, device=where) for dtype in dtypes for k in range(500)]
    sources, pieces, expected = pieces_of(tensors)
    ready = Readiness.now({"x": tensors[0]})
    calls: list[int] = []
    real = copying.queue_copies
    monkeypatch.setattr(
        copying,
        "queue_copies",
        lambda *given, **keywords: (calls.append(len(given[2])), real(*given, **keywords))[1],
    )
    monkeypatch.setattr(copying, "bytes_of", lambda region: pytest.fail("a tensor was made"))
    block = ready.staging_allocator()(len(expected))
    ready.copy_pieces(sources, pieces, block)
    assert calls == [1500]
    assert block.tobytes()[: len(expected)] == expected


@gpu
@pytest.mark.parametrize("change", ["other", "half", "freed"])
def test_a_tensor_that_gets_other_memory_while_its_save_waits(change: str) -> None:
    """What it held at the beginning is saved, unless that was freed."""
    device = resolve_device("auto")
    tensor = torch.full((64, 8), 7.0, device=device)
    torch.accelerator.synchronize(device)

    class Event:
        def synchronize(self) -> None:
            if change == "freed":
                tensor.untyped_storage().resize_(0)
            else:
                tensor.data = torch.zeros(64, 8, device=device) if change == "other" else tensor.data.half()

        def query(self) -> bool:
            return True

    sources, pieces, expected = pieces_of([tensor])
    block = Readiness.now({"x": tensor}).staging_allocator()(len(expected))
    block.write(0, bytes([POISON]) * block.nbytes)
    if change == "freed":
        with pytest.raises(ValueError, match="a tensor has no data: its memory was freed"):
            Readiness({device: Event()}).copy_pieces(sources, pieces, block)
        assert block.tobytes() == bytes([POISON]) * block.nbytes
    else:
        Readiness({device: Event()}).copy_pieces(sources, pieces, block)
        assert block.tobytes() == expected


@pytest.mark.parametrize(("start", "at", "nbytes"), [(0, 0, 97), (90, 0, 8), (-1, 0, 8), (0, 64, 8), (0, -1, 8)])
@pytest.mark.parametrize("copy", WAYS)
def test_pieces_outside_their_tensor_or_target_are_refused(
    start: int, at: int, nbytes: int, copy: Callable[..., object]
) -> None:
    region = poisoned(128)
    sources = describe_tensors({"x": torch.zeros(24)})
    with pytest.raises(ValueError, match="outside|bytes"):
        copy(sources, [(0, start, at, nbytes, True)], region.sub(0, 68))
    assert region.tobytes() == bytes([POISON]) * 128


@pytest.mark.parametrize("copy", WAYS)
def test_a_tensor_that_has_changed_is_not_read_outside_its_memory(copy: Callable[..., object]) -> None:
    """Another thread gave it other memory since it was described."""
    tensor = torch.zeros(1000)
    sources = describe_tensors({"x": tensor})
    region = poisoned(4000)
    tensor.data = torch.ones(1).expand(1000)
    copy(sources, [(0, 0, 0, 4000, True)], region)
    assert region.tobytes() == bits_of(torch.ones(1000))
    tensor.data = torch.ones(10)
    with pytest.raises(ValueError, match="of a tensor of 40"):
        copy(sources, [(0, 0, 0, 4000, True)], region)
