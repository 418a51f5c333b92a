"""Properties of the simulated device that other tests rely on: without each of them, one kind of fault would not be found.

Each test runs on it, in a process that has it (`STIO_TEST_DEVICE=sim pytest -m gpu`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from crash.zygote import Zygote

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simdevice.installed(), reason="of the simulated device (STIO_TEST_DEVICE=sim)"),
]

DELAY_SECONDS = 0.02
DEVICE = "sim"
FRESH, RELEASED = 0xB9, 0xA7


@pytest.fixture(autouse=True)
def _delay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Delay work as this file needs it, whatever the run's own delay; begin with no memory that is kept for later."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()
    with simdevice.delayed(DELAY_SECONDS):
        yield
    simdevice.clear_faults()


def module() -> Any:
    return torch.get_device_module(DEVICE)


def pinned(value: int, nbytes: int = 4096) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8).pin_memory()


def on_new_stream() -> Any:
    return module().stream(module().Stream(device=torch.device(DEVICE, 0)))


def values(tensor: torch.Tensor) -> set[int]:
    return set(tensor.cpu().tolist())


# Order.


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    target = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize()
    with on_new_stream():
        module()._sleep(400_000_000)
        target.copy_(pinned(7), non_blocking=True)
        event = module().Event()
        event.record(module().current_stream())
    assert values(target) == {0}
    module().current_stream().wait_event(event)
    assert values(target) == {7}


def test_a_host_that_does_not_wait_writes_what_is_still_to_be_read() -> None:
    source, target = pinned(1), torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert values(target) == {2}


def test_memory_that_is_not_pinned_is_taken_at_once() -> None:
    source, target = torch.ones(4096, dtype=torch.uint8), torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert values(target) == {1}


def test_a_copy_out_of_the_device_comes_later() -> None:
    source, target = torch.full((4096,), 3, dtype=torch.uint8, device=DEVICE), pinned(0)
    target.copy_(source, non_blocking=True)
    assert set(target.tolist()) == {0}
    module().current_stream().synchronize()
    assert set(target.tolist()) == {3}


@pytest.mark.parametrize("work", ["fill", "cast", "strided", "batch"])
def test_work_is_queued(work: str) -> None:
    source = torch.arange(4096, dtype=torch.int32, device=DEVICE)
    target = torch.zeros(4096, dtype=torch.float32, device=DEVICE)
    torch.accelerator.synchronize()
    if work == "fill":
        target.fill_(1)
    elif work == "cast":
        target.copy_(source)
    elif work == "strided":
        target[::2].copy_(target[1::2])
    else:
        torch._foreach_copy_([target], [source], non_blocking=True)
    assert not module().current_stream().query()
    torch.accelerator.synchronize()
    assert module().current_stream().query()


def test_a_cast_that_does_not_block_reads_its_source_later() -> None:
    """The device does the cast, out of the bytes that it finds when it is there."""
    source, target = pinned(1), torch.empty(4096, dtype=torch.float32, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    assert values(target) == {2}
    target.copy_(source)
    source.fill_(3)
    assert values(target) == {2}


def test_an_operator_is_behind_what_its_stream_has_queued() -> None:
    target = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    target.copy_(pinned(5), non_blocking=True)
    assert int((target + 1).sum()) == 6 * 4096


def test_the_pool_has_32_streams() -> None:
    taken = [module().Stream(device=torch.device(DEVICE, 0)).stream_id for _ in range(65)]
    assert len(set(taken)) == 32
    assert taken[:32] == taken[32:64]


def test_a_copy_between_devices_is_in_the_order_of_both() -> None:
    source = torch.zeros(4096, dtype=torch.uint8, device="sim:0")
    source.copy_(pinned(9), non_blocking=True)
    assert values(source.to("sim:1", non_blocking=True)) == {9}


# Memory.


def test_memory_is_filled_when_it_is_allocated_and_released() -> None:
    tensor = torch.empty(100_000, dtype=torch.uint8, device=DEVICE)
    assert values(tensor) == {FRESH}
    tensor.fill_(1)
    torch.accelerator.synchronize()
    address = tensor.data_ptr()
    del tensor
    torch.accelerator.synchronize()
    assert set(simdevice.read(address, 100_000)) == {RELEASED}
    again = torch.empty(100_000, dtype=torch.uint8, device=DEVICE)
    assert again.data_ptr() == address, "memory goes back to its stream at once"
    assert values(again) == {FRESH}


def test_memory_that_no_stream_was_recorded_for_is_given_out_at_once() -> None:
    """What another stream still reads there is overwritten, as with CUDA."""
    shown = [_read_late(record) for record in (False, True)]
    assert shown[0] <= {FRESH, RELEASED}
    assert shown[1] == {1}


def _read_late(record: bool) -> set[int]:
    tensor = torch.full((50_000,), 1, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.synchronize()
    with on_new_stream():
        found = torch.empty_like(tensor)
        module()._sleep(200_000_000)
        found.copy_(tensor)  # later than the block that follows
        if record:
            tensor.record_stream(module().current_stream())
        reader = module().current_stream()
    del tensor
    other = torch.empty(50_000, dtype=torch.uint8, device=DEVICE)
    reader.synchronize()
    del other
    return values(found)


def test_a_part_made_by_dlpack_records_nothing() -> None:
    whole = torch.empty(50_000, dtype=torch.uint8, device=DEVICE)
    part = torch._C._from_dlpack(torch._C._to_dlpack(whole[:1000]))
    address = whole.data_ptr()
    with on_new_stream():
        module()._sleep(400_000_000)
        part.record_stream(module().current_stream())
    del whole, part
    assert torch.empty(50_000, dtype=torch.uint8, device=DEVICE).data_ptr() == address


def test_the_host_cannot_touch_it(torch_zygote: Zygote) -> None:
    done = torch_zygote.run(
        "import ctypes, simdevice, torch\n"
        "simdevice.install()\n"
        "tensor = torch.zeros(100, device='sim')\n"
        "torch.accelerator.synchronize()\n"
        "ctypes.string_at(tensor.data_ptr(), 1)\n"
    )
    assert done.returncode == -11


def test_the_memory_has_a_limit() -> None:
    total = module().get_device_properties(DEVICE).total_memory
    module().empty_cache()
    taken = module().memory_reserved(DEVICE)
    module().set_per_process_memory_fraction((taken + (1 << 20)) / total, DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 20, dtype=torch.uint8, device=DEVICE)
        for _ in range(5):  # what is freed can be had in another size
            torch.empty(900_000, dtype=torch.uint8, device=DEVICE)
            torch.empty(400_000, dtype=torch.uint8, device=DEVICE)
    finally:
        module().set_per_process_memory_fraction(1.0, DEVICE)


def test_pinned_memory_is_given_out_again_when_its_copies_are_done() -> None:
    source, target = pinned(4, 1 << 20), torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    other = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert values(target) == {4}
    again = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address
    assert set(again.tolist()) == {FRESH}
    assert again.is_pinned() and not torch.empty(5).is_pinned()
    assert simdevice.pinned_bytes() >= 2 << 20


def test_memory_that_grows_stays_on_its_device() -> None:
    """Also where another device is the current one."""
    tensor = torch.arange(5, device="sim:1").resize_(100_000)
    assert tensor[:5].tolist() == [0, 1, 2, 3, 4]
    assert tensor.untyped_storage().device == torch.device("sim", 1)
    assert torch.add(tensor, 1, out=torch.empty(0, dtype=torch.int64, device="sim:1"))[4] == 5


def test_storages_are_set_and_copied_without_strides() -> None:
    """Torch gives no strides when it copies a storage; they are those of a contiguous tensor."""
    plain = torch.arange(24, dtype=torch.int32)
    there = plain.to(f"{DEVICE}:1")
    storage = there.untyped_storage()
    for size, strides in [((2, 3), (3, 1)), ((4,), (1,)), ((), ()), ((2, 0, 3), (3, 3, 1))]:
        view = torch.empty(0, dtype=torch.int32, device=there.device).set_(storage, 5, torch.Size(size))
        assert (view.stride(), view.storage_offset()) == (strides, 5)
        expected = torch.empty(0, dtype=torch.int32).set_(plain.untyped_storage(), 5, torch.Size(size))
        assert expected.stride() == strides
        assert torch.equal(view.cpu(), expected)
    back = torch.UntypedStorage(96)
    back.copy_(storage)
    assert bytes(back) == bytes(plain.untyped_storage())
    again = torch.UntypedStorage(96, device=there.device)
    again.copy_(back)
    assert torch.equal(torch.empty(0, dtype=torch.int32, device=there.device).set_(again).cpu(), plain)
    with pytest.raises(RuntimeError, match="unequal size length"):
        there.set_(storage, 0, (2, 3), (1,))


def test_a_copy_out_of_the_middle_of_pinned_memory_may_be_recorded_for_nothing() -> None:
    """torch knows pinned memory by its allocation or its first address: a tensor that has neither does not keep it."""
    source, target = pinned(4, 1 << 20), torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    inside = torch.frombuffer(source.numpy(), dtype=torch.uint8)[8192 : 8192 + 4096]
    address = source.data_ptr()
    target.copy_(inside, non_blocking=True)
    del source, inside
    again = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address
    assert values(target) == {FRESH}


# Lists of tensors, which CUDA's kernels compute.


NANS = {
    "float16": (0x7E01, 0x7FFF),
    "bfloat16": (0xFFC1 - 0x10000, 0x7FFF),
    "float8_e5m2": (0xFE, 0xFF),
    "bool": (2, 1),
}
"""By dtype, a bit pattern as an integer, and what CUDA's kernels make of it."""


@pytest.mark.parametrize("call", ["copy", "clone"])
@pytest.mark.parametrize("dtype", NANS)
def test_a_list_goes_through_the_type_of_arithmetic(dtype: str, call: str) -> None:
    before, after = NANS[dtype]
    integer = torch.uint8 if 0 < before < 0x100 else torch.int16
    source = torch.tensor([before, 1, 0] * 100, dtype=integer, device=DEVICE)
    typed = source.view(getattr(torch, dtype))
    if call == "clone":
        (target,) = torch._foreach_clone([typed])
    else:
        target = torch.empty_like(typed)
        torch._foreach_copy_([target], [typed])
    assert target.view(integer).tolist() == [after, 1, 0] * 100
    assert typed.clone().view(integer).tolist() == source.tolist()


@pytest.mark.parametrize("other", ["another device", "another dtype", "another stride"])
def test_a_list_that_the_kernel_does_not_take_is_copied_one_by_one(other: str) -> None:
    bits = torch.tensor([[0x7E01, 1], [2, 3]], dtype=torch.int16, device=DEVICE)
    target, source = torch.empty_like(bits).view(torch.float16), bits.view(torch.float16)
    targets, sources = [target], [source]
    if other == "another device":
        targets, sources = [target, torch.empty(1)], [source, torch.ones(1)]
    elif other == "another dtype":
        targets, sources = [target, torch.empty(1, device=DEVICE)], [source, torch.ones(1, device=DEVICE)]
    else:
        sources = [source.t().contiguous().t()]
    torch._foreach_copy_(targets, sources)
    assert target.view(torch.int16).tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_dtypes_that_the_kernel_refuses(dtype: str) -> None:
    tensor = torch.zeros(8, dtype=torch.uint8, device=DEVICE).view(getattr(torch, dtype))
    with pytest.raises(NotImplementedError, match="foreach_tensor_copy"):
        torch._foreach_copy_([tensor.clone()], [tensor])


def test_a_list_with_targets_of_two_dtypes_would_be_written_as_the_first() -> None:
    """CUDA's kernel compares the dtypes of sources only."""
    sources = [torch.ones(4, device=DEVICE)] * 2
    targets = [torch.empty(4, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64)]
    with pytest.raises(RuntimeError, match="another dtype"):
        torch._foreach_copy_(targets, sources)


def test_a_copy_of_each_dtype_in_place_keeps_its_bits() -> None:
    raw = torch.arange(256, dtype=torch.int16).to(torch.uint8).repeat(8).to(DEVICE)
    for name in ("bool", "float4_e2m1fn_x2", "float8_e8m0fnu", "bfloat16", "complex64"):
        source = raw.view(getattr(torch, name))
        target = torch.empty_like(source).copy_(source)
        assert torch.equal(target.view(torch.uint8), raw), name


# The GIL.


@contextmanager
def busy_thread() -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=lambda: all(not stop.is_set() for _ in iter(int, 1)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


TURN_SECONDS, NUM_CALLS = 0.02, 10


def gil_calls() -> dict[str, Callable[[], object]]:
    """Return calls that release the GIL with CUDA once, and one that holds it."""
    tensor, host, stream = torch.zeros(64, device=DEVICE), pinned(1, 256), module().Stream()
    event = module().Event()
    event.record(stream)
    held: list[object] = []
    return {
        "record_stream": lambda: tensor.record_stream(stream),
        "allocation": lambda: held.append(torch.empty(64, device=DEVICE)),
        "copy": lambda: tensor.view(torch.uint8).copy_(host, non_blocking=True),
        "list": lambda: torch._foreach_copy_([tensor] * 3, [tensor] * 3),
        "record": lambda: event.record(stream),
        "wait": lambda: stream.wait_event(event),
        "synchronize": lambda: event.synchronize(),
        "query": lambda: event.query(),
        "storage": lambda: held.append(torch.UntypedStorage(64, device=DEVICE)),
    }


HOLD = {"query", "storage"}


@pytest.mark.parametrize("name", [
    "record_stream", "allocation", "copy", "list", "record", "wait", "synchronize", "query", "storage",
])  # fmt: skip
def test_the_gil_is_released_where_calls_for_cuda_release_it(name: str) -> None:
    """A thread that is busy gets it there, for a switch interval."""
    call = gil_calls()[name]
    interval = sys.getswitchinterval()
    simdevice.set_released(simdevice.RELEASED_SECONDS)
    sys.setswitchinterval(TURN_SECONDS)
    try:
        with busy_thread():
            seconds = []
            for _ in range(NUM_CALLS):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
    finally:
        sys.setswitchinterval(interval)
        simdevice.set_released(0)
    turns = sum(one > TURN_SECONDS / 2 for one in seconds)
    assert turns <= NUM_CALLS // 2 if name in HOLD else turns > NUM_CALLS // 2, seconds


# What is refused.


@pytest.mark.parametrize(
    "call",
    [
        lambda: module().current_stream(7),
        lambda: module().memory_allocated(-1),
        lambda: module().set_device(2),
        lambda: torch.zeros(1, device="sim:7"),
        lambda: torch.Stream(stream_id=99, device_index=0, device_type=20).query(),
        lambda: torch.cat([torch.ones(2, device=DEVICE), torch.ones(2)]),
        lambda: torch.equal(torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")),
    ],
    ids=["stream", "memory", "current", "tensor", "stream number", "host and device", "two devices"],
)
def test_wrong_devices(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        call()


def test_an_event_belongs_to_one_device() -> None:
    event = module().Event()
    event.record(module().current_stream(0))
    with pytest.raises(RuntimeError, match="another device"):
        event.record(module().current_stream(1))


# Faults.


def test_faults_that_are_asked_for() -> None:
    target = torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    simdevice.refuse_copy(2)
    target.copy_(pinned(1), non_blocking=True)
    with pytest.raises(RuntimeError, match="refuse this copy"):
        target.copy_(pinned(2), non_blocking=True)
    simdevice.fail_copy(1)
    target.copy_(pinned(3), non_blocking=True)
    event = module().Event()
    event.record(module().current_stream())
    with pytest.raises(RuntimeError, match="fail in this copy"):
        event.synchronize()
    simdevice.refuse_pinning()
    with pytest.raises(RuntimeError, match="refuse pinning"):
        torch.empty(5, pin_memory=True)
    simdevice.clear_faults()
    target.copy_(pinned(4), non_blocking=True)
    assert values(target) == {4}


# Contexts.


def test_contexts_are_made_as_cuda_makes_them(torch_zygote: Zygote) -> None:
    """By a driver's call with the device as the thread's current one; not by the way back from another device."""
    done = torch_zygote.run(
        """
        import os, simdevice, torch
        module = simdevice.install()
        assert simdevice.contexts() == set() and not module.is_initialized()

        def to_the_other():
            with module.device(1):
                stream = module.Stream(device=torch.device("sim", 1))
                event = module.Event()
                event.record(stream)
                tensor = torch.zeros(10, device="sim:1")
            stream.wait_event(event)
            tensor.cpu()
            assert simdevice.contexts() == {1} and module.current_device() == 0
            return stream, event

        def query():
            to_the_other()[1].query()

        def synchronize():
            to_the_other()
            torch.accelerator.synchronize(1)

        def generic_event():
            torch.Event().record(to_the_other()[0])

        for touch in (query, synchronize, generic_event):  # each makes a context on device 0, the current one
            child = os.fork()
            if child == 0:
                touch()
                os._exit(0 if simdevice.contexts() == {0, 1} else 1)
            assert os.waitpid(child, 0)[1] == 0, touch
        """
    )
    assert done.returncode == 0, done.stderr


def test_each_thread_has_its_own_current_device() -> None:
    seen: list[int] = []
    with module().device(1):
        thread = threading.Thread(target=lambda: seen.append(module().current_device()))
        thread.start()
        thread.join()
        assert (module().current_device(), seen) == (1, [0])


def test_a_forked_child_is_refused(torch_zygote: Zygote) -> None:
    done = torch_zygote.run(
        """
        import os, simdevice, torch
        module = simdevice.install()
        tensor = torch.zeros(10, device="sim")
        child = os.fork()
        if child == 0:
            try:
                torch.zeros(10, device="sim")
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) and module._is_in_bad_fork() else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert tensor.sum() == 0
        """
    )
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_there_is_a_reason_and_one_that_fails_is_an_error(
    torch_zygote: Zygote, tmp_path: Path
) -> None:
    """Tests that were skipped because it fails would be missed."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho it fails >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = torch_zygote.run(
        """
        import os, sys
        from pathlib import Path
        import simdevice
        simdevice._writable_folder = lambda: Path(sys.argv[1])  # where it was not compiled before
        os.environ["PATH"] = sys.argv[1] + "/none"
        try:
            simdevice.install()
        except simdevice.Unavailable as error:
            assert "g++" in str(error) and str(error) == simdevice.why_unavailable()
        else:
            raise SystemExit("installed without a compiler")
        os.environ["PATH"] = sys.argv[1] + "/bin:/usr/bin:/bin"
        try:
            simdevice.install()
        except RuntimeError as error:
            assert "it fails" in str(error)
        else:
            raise SystemExit("installed by a compiler that fails")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
