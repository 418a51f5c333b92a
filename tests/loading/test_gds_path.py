"""Loads by GPUDirect Storage: the same tensors, nothing written too early, no copies; and the fallback to staged reads."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cufile_stand_in
import numpy as np
import pytest
import torch
from fake_driver import Place
from fakes import FakeDevice, write_checkpoint
from support import eventually, needs_engine, nothing_left, require_equal

import stio
import stio.sync
from stio import native
from stio.errors import DeviceError, DeviceMemoryError, TruncatedError
from stio.loading import gds_path, planned
from stio.loading.gds_path import GdsPath
from stio.runtime.reports.trace import Trace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GPUDirect Storage is Linux's")

BUDGET = 512 << 10
"""Blocks of 128 KiB: a load of many reads."""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:03}": torch.randn(k % 50 + 1, generator=chance) for k in range(100)}
    return small | {f"large.{k}": torch.randn(400, 400 + k, generator=chance) for k in range(6)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gds"), tensors, 2)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take all files for cold: what was just written is not."""
    monkeypatch.setattr(planned, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(planned, "resident_fraction", lambda file: 0.0)
    with nothing_left():
        yield


class GdsPlace(Place):
    """A fake device, and a stand-in for cuFile that writes there; see `cufile_stand_in`."""

    def __init__(self, patch: pytest.MonkeyPatch, *, driver: dict[str, Any] | None = None, **faults: Any) -> None:
        super().__init__(patch, **(driver or {}))
        self.device = FakeDevice(delay_seconds=0.0001)
        self.cufile = cufile_stand_in.install(patch, **faults)

    def load(self, source: Path, **options: Any) -> dict[str, torch.Tensor]:
        return super().load(source, **{"memory": "gds", "budget_bytes": BUDGET, **options})

    def require_freed(self, *, num_copies: int = 0) -> None:
        super().require_freed(num_copies=self.device.num_copies)  # those of the trials, and waits
        assert eventually(lambda: self.cufile.num_open == 0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., GdsPlace]:
    if not native.available():
        pytest.skip("there is no engine here (STIO_NATIVE=0, no compiler)")
    return lambda **faults: GdsPlace(monkeypatch, **faults)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "stio")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [64 << 10, BUDGET, 512 << 20])
def test_large_tensors_are_read_by_cufile_and_small_ones_by_the_ring(
    make, source, tensors, warnings, budget_bytes
) -> None:
    here, trace = make(), Trace()
    found = here.load(source, budget_bytes=budget_bytes, trace=trace)
    require_equal(found, tensors)
    assert here.device.num_staging == 0
    assert warnings() == []
    assert {span.detail for span in trace.spans if span.name == "read"} == {"GdsPath"}
    large = sum(t.nbytes for t in tensors.values() if t.nbytes > 100_000)
    read = here.cufile.read_bytes
    assert read == large if budget_bytes > BUDGET else read <= large
    assert here.driver.num_copies >= 100
    del found
    here.require_freed()


def test_no_host_memory(make, tmp_path) -> None:
    here, tensors = make(), {"w": torch.randn(1 << 20), "v": torch.randn(300, 1001)}
    require_equal(here.load(write_checkpoint(tmp_path, tensors), budget_bytes=64 << 20), tensors)
    assert (here.driver.num_copies, here.ring.held_bytes) == (0, 0)


def test_streams_and_casts(make, source, tensors) -> None:
    here = make()
    options = {"device": here.device, "memory": "gds", "budget_bytes": BUDGET, "dtype": torch.bfloat16}
    with stio.sync.open(source, **options) as checkpoint:
        found = dict(checkpoint.stream())
    require_equal(found, {name: t.bfloat16() for name, t in tensors.items()})
    del found
    here.require_freed()


def test_slices_of_columns(make, source, tensors) -> None:
    """Read as rows, cut on the device."""
    here = make()
    cut = np.s_[:, 7:90]
    found = here.load(source, names=["large.1"], slices={"large.1": cut})
    require_equal(found, {"large.1": tensors["large.1"][cut]})
    del found
    here.require_freed()


def test_scattered_pieces_go_through_the_ring(make, source, tensors) -> None:
    """Each would be a read of the disk's."""
    here = make()
    names = [f"small.{k:03}" for k in range(0, 100, 4)]  # every other one of the first shard
    found = here.load(source, names=names)
    require_equal(found, {name: tensors[name] for name in names})
    assert here.cufile.num_reads == 0
    assert here.driver.num_copies
    del found
    here.require_freed()


def test_what_the_page_cache_holds_is_staged(make, source, tensors, monkeypatch) -> None:
    here = make()
    monkeypatch.setattr(planned, "resident_fraction", lambda file: 1.0)
    require_equal(here.load(source), tensors)
    assert here.cufile.num_opened == 0


def test_tensors_on_the_cpu_beside(make, source, tensors) -> None:
    here = make()
    found = stio.sync.load(source, device={"": here.device, "large.3": "cpu"}, memory="gds", budget_bytes=BUDGET)
    require_equal(found, tensors)
    assert here.cufile.num_reads > 2
    del found
    here.require_freed()


def test_short_reads_go_on(make, source, tensors, warnings) -> None:
    here = make(max_bytes=7001)
    require_equal(here.load(source), tensors)
    assert warnings() == []
    assert here.cufile.num_reads > 500


def test_begin_waits_until_the_device_is_done(make, source, tensors, monkeypatch) -> None:
    """The allocator gives memory out again for work that is queued behind its last use; cuFile is in no queue."""
    here = make()
    num_calls, begin = 0, GdsPath.begin

    def begun(path: GdsPath, groups: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        with here.device._passing:  # the queue stands still
            thread = threading.Thread(target=begin, args=(path, groups))
            thread.start()
            thread.join(0.05)
            assert thread.is_alive()
        thread.join(30)

    monkeypatch.setattr(GdsPath, "begin", begun)
    require_equal(here.load(source), tensors)
    assert num_calls == 1  # for both files


# Compatibility mode.


def test_compatibility_mode_is_used_and_named(make, source, tensors, warnings) -> None:
    here = make(has_driver=0)
    require_equal(here.load(source), tensors)
    assert here.cufile.num_reads > 10
    (warning,) = warnings()  # once a load, not for each file
    assert "compatibility mode" in warning
    assert "no faster" in warning


# Fallback.


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"open_code": 5001}, "nvidia-fs is not loaded"),
        ({"refuse_file": 1}, "the filesystem of this file"),
        ({"refuse_file": 2}, "the filesystem of this file"),
        ({"fail_read": 1}, "cuFile's error 5044"),
        ({"fail_read": 1, "fail_code": 5}, "Input/output error"),
        ({"fail_read": 1, "fail_code": 0}, "the file ends there"),
    ],
    ids=str,
)
def test_what_does_not_serve_is_staged(make, source, tensors, warnings, fault, says) -> None:
    """Said once, not for each file."""
    here = make(**fault)
    found = here.load(source)
    require_equal(found, tensors)
    (warning,) = warnings()
    assert "files are read through the host" in warning
    assert says in warning
    assert here.cufile.num_reads <= native.MAX_THREADS
    del found
    here.require_freed()


@pytest.mark.slow
def test_failing_read_at_every_number(make, source, tensors, warnings) -> None:
    """The ring reads the rest into the same memory, whichever read failed."""
    number = 0
    while True:
        number += 1
        here = make(fail_read=number, fail_code=5 if number % 2 else -5044)
        found = here.load(source, budget_bytes=2 << 20)
        require_equal(found, tensors)
        del found
        here.require_freed()
        if here.cufile.num_reads < number:
            break
        assert len(warnings()) == number, number  # one for each load, whichever files it had
        assert here.cufile.num_reads < number + native.MAX_THREADS  # it is not tried again
    assert number > 8


def test_no_room_for_the_tensors(make, source, tensors) -> None:
    here = make()
    here.device._memory_bytes = sum(t.nbytes for t in tensors.values()) // 2
    with pytest.raises(DeviceMemoryError):
        here.load(source)
    here.require_freed()


@pytest.mark.parametrize("fault", [{"refuse_copy": 4}, {"fail_event": 2}])
def test_a_copy_that_fails(make, source, fault) -> None:
    """Both kinds of reads end, and the files are closed."""
    here = make(driver=fault)
    with pytest.raises(DeviceError, match="as the test asked"):
        here.load(source)
    here.require_freed()


def test_where_the_kernel_does_not_say_what_is_in_memory(make, source, tensors, monkeypatch) -> None:
    """`memory="gds"` decides then."""
    here = make()
    monkeypatch.setattr(planned, "resident_fraction", lambda file: planned.UNKNOWN)
    require_equal(here.load(source), tensors)
    assert here.cufile.num_opened == 2


def test_c90_truncated_file(make, tmp_path, tensors) -> None:
    here = make()
    place = write_checkpoint(tmp_path / "m", tensors)
    with stio.sync.open(place, device=here.device, memory="gds", budget_bytes=BUDGET) as checkpoint:
        with open(place / "model.safetensors", "rb+") as file:
            file.truncate(2_000_000)
        with pytest.raises(TruncatedError):
            list(checkpoint.stream())
    here.require_freed()


def test_c90_truncated_while_it_is_read(make, tmp_path) -> None:
    """cuFile reports the end; the error is that of any load."""
    here = make(hold_read=3)
    place = write_checkpoint(tmp_path / "m", {"w": torch.zeros(8 << 20)})
    failed: list[BaseException] = []

    def load() -> None:
        try:
            here.load(place, budget_bytes=256 << 20)
        except TruncatedError as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert eventually(lambda: here.cufile.is_held)
    with open(place / "model.safetensors", "rb+") as file:
        file.truncate(20_000_000)
    here.cufile.hold_read = 0
    thread.join(30)
    assert [error.offset >= 20_000_000 for error in failed] == [True]
    failed.clear()
    here.require_freed()


def test_c90_truncated_second_file(make, tmp_path, tensors) -> None:
    """What was opened for the first is closed."""
    here = make()
    place = write_checkpoint(tmp_path / "m", tensors, 2)
    with stio.sync.open(place, device=here.device, memory="gds", budget_bytes=BUDGET) as checkpoint:
        with open(place / "model-00002-of-00002.safetensors", "rb+") as file:
            file.truncate(800_000)
        with pytest.raises(TruncatedError):
            list(checkpoint.stream())
    assert here.cufile.num_opened == 2
    here.require_freed()


def test_cancel(make, source) -> None:
    """In the middle of a read: it is waited for, no further one begins, and nothing is left on the device."""
    here = make(hold_read=10)

    async def cancel_in_a_read() -> None:
        task = asyncio.create_task(stio.load(source, device=here.device, memory="gds", budget_bytes=BUDGET))
        assert await asyncio.to_thread(eventually, lambda: here.cufile.is_held)
        task.cancel()
        threading.Timer(0.1, lambda: setattr(here.cufile, "hold_read", 0)).start()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert here.cufile.hold_read == 0  # it was waited for

    asyncio.run(cancel_in_a_read())
    assert here.cufile.num_reads < 10 + native.MAX_THREADS
    here.require_freed()


# Without the engine, without cuFile, wrong arguments.


def test_without_the_engine(source, tensors, monkeypatch, warnings) -> None:
    """cuFile is not looked for."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(gds_path, "_cufile_paths", list)
    device = FakeDevice()
    require_equal(stio.sync.load(source, device=device, memory="gds"), tensors)
    (warning,) = warnings()
    assert "needs the engine" in warning
    assert device.num_staging


def test_on_a_device_that_is_not_nvidia_s(source, tensors, monkeypatch, warnings) -> None:
    require_equal(stio.sync.load(source, device=FakeDevice(), memory="gds"), tensors)
    (warning,) = warnings()
    assert "it needs " in warning


@needs_engine
def test_without_cufile(make, source, monkeypatch) -> None:
    here = make()
    monkeypatch.setattr(gds_path, "_cufile_paths", lambda: ["/nowhere/libcufile.so.0"])
    with pytest.raises(
        ImportError, match=r"pip install 'stio-torch\[gds\]', or, .*libcufile.*cannot open shared object"
    ):
        here.load(source)
    gc.collect()
    assert (here.device.used_bytes, here.device.staging_bytes) == (0, 0)


def test_on_the_cpu_alone(source) -> None:
    """Refused before cuFile is looked for."""
    with pytest.raises(DeviceError, match="reads to an accelerator"):
        stio.sync.load(source, device="cpu", memory="gds")


def test_beside_a_cache(source) -> None:
    with pytest.raises(ValueError, match="cache="), stio.sync.HostCache(1 << 20) as cache:
        stio.sync.load(source, device=FakeDevice(), memory="gds", cache=cache)
