"""Loads that the engine carries out, to the simulated device: its ring, its failures, several devices, forks and exits.

The orders between streams are in test_orders.py, where most loads are of files too. What the engine promises without a
device is in tests/native.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import simdevice
import torch
from accelerators import (
    NEEDS_GPU,
    busy_event,
    module_of,
    needs_two_devices,
    new_rings,
    on_copy_stream,
    settled_pinned_bytes,
    trim_rings,
)
from crash.zygote import Zygote
from fakes import write_checkpoint
from support import eventually, eventually_async, require_equal
from torch import nn

import stio
import stio.sync
from stio import native
from stio.device import cuda
from stio.device.base import resolve_device
from stio.errors import ClosedError, DeviceError, TruncatedError
from stio.runtime.reports.trace import Trace

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(not native.available(), reason="there is no engine here (STIO_NATIVE=0, or no library)"),
    pytest.mark.skipif(not simdevice.installed(), reason="only the simulated device can be told to do this"),
]

Tensors = dict[str, torch.Tensor]
KIB, MIB = 1 << 10, 1 << 20
LONG_CYCLES = 600_000_000
"""About 0.3 s."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The accelerator, and no ring. When a test ends nothing is under way on it, and no fault is left behind."""
    device = resolve_device("auto")
    new_rings()
    yield device
    simdevice.clear_faults()
    new_rings()
    torch.accelerator.synchronize(device)
    module_of(device).empty_cache()


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """Tensors of 30 MiB: 15 chunks and more."""
    chance = torch.Generator().manual_seed(0)
    large = {f"large.{k}": torch.randint(0, 255, (5, MIB), generator=chance, dtype=torch.uint8) for k in range(6)}
    return large | {f"small.{k}": torch.randn(1000 + k, generator=chance) for k in range(30)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine"), tensors, 2)


def held_bytes() -> int:
    return sum(ring.held_bytes for ring in list(cuda._rings.values()))


def used_bytes(device: torch.device) -> int:
    gc.collect()
    return int(module_of(device).memory_allocated(device))


def test_files_are_moved_by_the_engine(
    device: torch.device, path: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    """Or nothing here would show anything."""
    with caplog.at_level(logging.DEBUG, "stio"):
        require_equal(stio.sync.load(path, device=device), tensors)
    assert any("DevicePath, engine" in record.getMessage() for record in caplog.records)
    assert held_bytes()


# The ring.


@pytest.mark.slow
def test_loads_share_a_ring_and_give_it_back_when_it_is_idle(
    device: torch.device, path: Path, tensors: Tensors
) -> None:
    """Slots are pinned while loads come, and returned soon after the last one."""
    gc.collect()
    before = settled_pinned_bytes()
    max_bytes = 3 * native.CHUNK_BYTES * 16
    try:
        with ThreadPoolExecutor(3) as pool:
            for found in pool.map(lambda _: stio.sync.load(path, device=device), range(6)):
                require_equal(found, tensors)
        held = held_bytes()
        assert 0 < held == simdevice.pinned_bytes() - before <= max_bytes
        native.set_idle(0.05)
        assert eventually(lambda: simdevice.pinned_bytes() == before)
        assert held_bytes() == 0
        require_equal(stio.sync.load(path, device=device), tensors)  # it is made again
        assert eventually(lambda: simdevice.pinned_bytes() == before)
    finally:
        native.set_idle(10)


def test_a_ring_in_use_is_not_given_back(device: torch.device, path: Path, tensors: Tensors) -> None:
    """A stream whose consumer is slow uses it; `trim_rings` returns, and takes nothing away."""
    try:
        native.set_idle(0)
        with stio.sync.open(path, device=device, budget_bytes=8 * MIB) as opened, simdevice.delayed(0.005):
            seen = {}
            for name, tensor in opened.stream():
                trim_rings()
                seen[name] = tensor.clone()
        require_equal(seen, tensors)
        assert eventually(lambda: held_bytes() == 0)
    finally:
        native.set_idle(10)


@pytest.mark.slow
def test_loads_at_once_on_their_own_streams(device: torch.device, path: Path, tensors: Tensors) -> None:
    """Each drops what the others take over, while copies are slow."""
    module, barrier = module_of(device), threading.Barrier(4)

    def rounds(number: int) -> list[Tensors]:
        found = []
        with module.stream(module.Stream(device=device)):
            barrier.wait(30)
            for k in range(2):
                loaded = stio.sync.load(path, device=device, budget_bytes=(number + k) % 3 * 6 * MIB + MIB)
                found.append({name: tensor.clone() for name, tensor in loaded.items()})
                del loaded
            module.current_stream(device).synchronize()
        return found

    with simdevice.delayed(0.003), ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rounds, range(4)))
    for found in results:
        for one in found:
            require_equal(one, tensors)


@pytest.mark.slow
def test_refused_pinning_is_told_once_and_tried_again_by_the_next_ring(
    device: torch.device, path: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    before = settled_pinned_bytes()
    simdevice.refuse_pinning()
    for _ in range(2):
        require_equal(stio.sync.load(path, device=device), tensors)
    assert simdevice.pinned_bytes() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    simdevice.refuse_pinning(False)
    trim_rings()
    require_equal(stio.sync.load(path, device=device), tensors)
    assert simdevice.pinned_bytes() > before


# Refusals, failures, cancels.


@pytest.mark.matrix
@pytest.mark.parametrize("number", [1, 2, 9])
@pytest.mark.parametrize("fault", [simdevice.refuse_copy, simdevice.fail_copy], ids=["refused", "failed"])
@pytest.mark.parametrize("call", ["load", "stream", "into a module", "warm start"])
def test_a_copy_that_does_not_come(
    device: torch.device, tmp_path: Path, call: str, fault: Callable[[int], None], number: int
) -> None:
    """The error says so, no tensor of that group is delivered, the memory is free, and the next load has a new ring."""
    tensors = {f"w{k}": torch.randint(0, 255, (3, MIB), dtype=torch.uint8) for k in range(6)}
    path = write_checkpoint(tmp_path, tensors)
    before, seen = used_bytes(device), {}
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty_like(tensor, device="meta"))
    # Before the warm start: its buffers are there when it begins.
    with simdevice.delayed(0.01), pytest.raises(DeviceError, match="was told to"):
        fault(number)
        if call == "load":
            stio.sync.load(path, device=device)
        elif call == "stream":
            with stio.sync.open(path, device=device) as opened:
                for name, tensor in opened.stream():
                    seen[name] = tensor.clone()
        elif call == "into a module":
            stio.sync.load_into(module, path, device=device, assign=True)
        else:
            with stio.sync.warm_start(module, path, device=device) as warm:
                warm.done()
    simdevice.clear_faults()
    require_equal(seen, {name: tensors[name] for name in seen})
    seen.clear()
    tensor = None
    assert tensor is None
    del module
    assert eventually(lambda: used_bytes(device) == before)
    require_equal(stio.sync.load(path, device=device), tensors)


def test_copies_before_a_refused_one_have_ended(device: torch.device, path: Path) -> None:
    """When the error is raised nothing writes to the memory, which the next allocation may get."""
    stio.sync.load(path, device=device)
    torch.accelerator.synchronize(device)
    with on_copy_stream(device):
        event = busy_event(device, LONG_CYCLES)
    simdevice.refuse_copy(3)
    with pytest.raises(DeviceError, match="refuse this copy"):
        stio.sync.load(path, device=device)
    assert event.query()


@pytest.mark.slow
def test_a_file_that_is_cut_while_copies_are_slow(
    device: torch.device, path: Path, tensors: Tensors, tmp_path: Path
) -> None:
    """The copies under way have ended when the error is raised, and the ring goes on."""
    cut = write_checkpoint(tmp_path, tensors)
    before = used_bytes(device)
    with stio.sync.open(cut, device=device) as opened:
        file = next(cut.glob("*.safetensors"))
        with open(file, "r+b") as opened_file:
            opened_file.truncate(file.stat().st_size * 2 // 3)
        with simdevice.delayed(0.04), pytest.raises(TruncatedError):
            opened.load()
        assert simdevice_is_idle(device)
    assert used_bytes(device) == before
    ring = cuda._rings[device]
    require_equal(stio.sync.load(path, device=device), tensors)
    assert cuda._rings[device] is ring


def simdevice_is_idle(device: torch.device) -> bool:
    """Whether nothing is under way on the stream of copies."""
    with on_copy_stream(device):
        event = module_of(device).Event()
        event.record(module_of(device).current_stream(device))
    return eventually(event.query, 0.015)  # of the mark itself; a copy takes 40 ms


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("num_copies", [0, 1, 4, 12])
async def test_a_cancel_while_copies_are_slow(
    device: torch.device, path: Path, tensors: Tensors, num_copies: int
) -> None:
    """It takes effect within a chunk for each slot; what was queued has ended, and the memory is free."""
    await stio.load(path, device=device)
    before, start = used_bytes(device), simdevice.num_copies()
    with simdevice.delayed(0.04):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: stio.load(path, device=device))
            assert await eventually_async(lambda: simdevice.num_copies() - start >= num_copies)
            group.cancel_scope.cancel()
        assert simdevice_is_idle(device)
    assert used_bytes(device) == before
    require_equal(await stio.load(path, device=device), tensors)


# Devices.


@pytest.mark.slow
@needs_two_devices
def test_several_devices(device: torch.device, path: Path, tensors: Tensors) -> None:
    """In one load, and by loads at once; each device has its own ring and stream."""
    second = torch.device(device.type, 1)

    def where(name: str) -> torch.device:
        return second if int(name.split(".")[1]) % 2 else device

    def load(target: Any) -> Tensors:
        return stio.sync.load(path, device=target, budget_bytes=16 * MIB)

    with simdevice.delayed(0.003), ThreadPoolExecutor(3) as pool:
        both, one, other = pool.map(load, [where, device, second])
    for found in (both, one, other):
        require_equal(found, tensors)
    assert {name: tensor.device for name, tensor in both.items()} == {name: where(name) for name in tensors}
    assert {tensor.device for tensor in other.values()} == {second}
    assert {ring.device for ring in cuda._rings.values()} == {device, second}
    assert all(ring.stream.device_index == ring.device.index for ring in cuda._rings.values())
    torch.accelerator.synchronize(second)


@needs_two_devices
def test_a_failure_on_one_device_leaves_the_other_s_ring(device: torch.device, path: Path, tensors: Tensors) -> None:
    second = torch.device(device.type, 1)
    stio.sync.load(path, device=second)
    ring = cuda._rings[second]
    simdevice.refuse_copy(1)
    with pytest.raises(DeviceError, match="refuse this copy"):
        stio.sync.load(path, device=device)
    require_equal(stio.sync.load(path, device=second), tensors)
    assert cuda._rings[second] is ring


# Processes.


def run_on_the_device(zygote: Zygote, code: str, path: Path) -> str:
    """Run a script with the simulated device, `directory`, and what it needs; return what it prints."""
    head = """
        import os, sys, threading, time
        import simdevice, torch
        simdevice.install()
        import stio.sync
        from stio import native
        directory = sys.argv[1]
        """
    done = zygote.run(_dedent(head) + _dedent(code), path)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def _dedent(code: str) -> str:
    lines = [line for line in code.splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[indent:] for line in lines) + "\n"


@pytest.mark.slow
def test_the_caller_s_current_device_stays(torch_zygote: Zygote, device: torch.device, path: Path) -> None:
    """The engine's threads make contexts current, the caller's never do; a load to one device makes no other's."""
    code = """
        assert simdevice.contexts() == set()
        for where in ("sim:1", "sim:1"):
            found = stio.sync.load(directory, device=where)
            assert torch.accelerator.current_device_index() == 0
            assert simdevice.contexts() == {1}, simdevice.contexts()
        for tensor in found.values():
            tensor.cpu()
        native.set_idle(0)
        while simdevice.pinned_bytes():
            time.sleep(0.01)
        assert simdevice.contexts() == {1}, simdevice.contexts()
        """
    run_on_the_device(torch_zygote, code, path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before a load", "during a load"])
def test_a_forked_child(torch_zygote: Zygote, device: torch.device, path: Path, moment: str) -> None:
    """It loads to the CPU by threads of its own, and is refused the device; its parent goes on."""
    code = f"""
        expected = stio.sync.load(directory, device="cpu")
        stio.sync.load(directory, device="sim")
        found = []
        if {moment == "during a load"}:
            simdevice.set_delay(0.02)
            before = simdevice.num_copies()
            loading = threading.Thread(target=lambda: found.append(stio.sync.load(directory, device="sim")))
            loading.start()
            while simdevice.num_copies() == before:
                time.sleep(0.001)
        child = os.fork()
        if child == 0:
            try:
                again = stio.sync.load(directory, device="cpu", memory="copy")
                assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
                assert native.num_threads() > 0
                try:
                    stio.sync.load(directory, device="sim")
                except (stio.StioError, RuntimeError) as error:
                    assert "fork" in str(error), error
                    os._exit(7)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        if {moment == "during a load"}:
            loading.join()
        else:
            found.append(stio.sync.load(directory, device="sim"))
        assert all(torch.equal(found[0][name].cpu(), tensor) for name, tensor in expected.items())
        """
    run_on_the_device(torch_zygote, code, path)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "how"), [("load", "returns"), ("load", "sys.exit"), ("stream", "returns")])
def test_an_exit_during_a_load(torch_zygote: Zygote, device: torch.device, path: Path, call: str, how: str) -> None:
    """The process ends, soon and without a crash, though a daemon thread waits for slow copies."""
    ends = {"returns": "pass", "sys.exit": "sys.exit(0)"}[how]
    code = f"""
        stio.sync.load(directory, device="sim")
        simdevice.set_delay(0.05)
        before = simdevice.num_copies()

        def load():
            if {call == "load"}:
                stio.sync.load(directory, device="sim")
            else:
                with stio.sync.open(directory, device="sim") as opened:
                    list(opened.stream())

        threading.Thread(target=load, daemon=True).start()
        while simdevice.num_copies() < before + 2:
            time.sleep(0.001)
        {ends}
        """
    run_on_the_device(torch_zygote, code, path)


def test_a_stream_that_is_left_alone(device: torch.device, path: Path, tensors: Tensors) -> None:
    """Dropped without a close, with groups that nobody took: the next load is right, and nothing stays."""
    stio.sync.load(path, device=device)
    before = used_bytes(device)
    trace = Trace()
    with suppress(ClosedError), simdevice.delayed(0.005):
        with stio.sync.open(path, device=device, budget_bytes=16 * MIB, trace=trace) as opened:
            next(opened.stream())
    assert eventually(lambda: used_bytes(device) == before)
    require_equal(stio.sync.load(path, device=device), tensors)
