"""Who copies from pinned memory, or to it, waits for the copies before it is unpinned: after errors and cancels too.

Nothing records the copies. Here each use ends early while copies are slow, and its memory is dropped at once. The
simulated device counts what is unpinned while a copy uses it (`_nothing_is_unpinned_early`), and a late copy to memory
that is unmapped ends the process.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import simdevice
import torch
from accelerators import HAVE_GPU, NEEDS_GPU, keep_busy, needs_two_devices, settled_pinned_bytes, trim_rings
from fakes import FaultyRoot, MemoryDestination, MemoryRoot, checkpoint_files, write_checkpoint
from support import eventually, needs_engine, require_equal

import stio
import stio.sync
from stio.device import pinned
from stio.device.base import resolve_device
from stio.distributed import StioStager
from stio.errors import StioError
from stio.runtime import operation as runtime
from stio.runtime.memory import Region
from stio.storage.local import LocalRoot

MIB = 1 << 20
DELAY_SECONDS = 0.01

pytestmark = [
    *NEEDS_GPU,
    needs_engine,
    pytest.mark.skipif(
        HAVE_GPU and not simdevice.installed(), reason="only the simulated device counts what is pinned"
    ),
]

Tensors = dict[str, torch.Tensor]
Use = Callable[[], Tensors]


@pytest.fixture
def tensors() -> Tensors:
    return {f"w{k}": torch.full((3 * MIB,), k + 1, dtype=torch.uint8) for k in range(6)}


@pytest.fixture(params=[0, 1], ids=["first device", "second device"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield torch.device(resolve_device("auto").type, request.param)
    simdevice.clear_faults()
    gc.collect()
    trim_rings()
    assert eventually(lambda: simdevice.pinned_bytes() == stio.stats().pinned_bytes)


@pytest.fixture
def released() -> Iterator[None]:
    """Nothing more is pinned behind the test than before it."""
    trim_rings()
    before = settled_pinned_bytes()
    yield
    gc.collect()
    trim_rings()
    assert eventually(lambda: simdevice.pinned_bytes() <= before)


USES = ["saver", "stager", "cache, by the engine", "cache, by the plain executor", "slots of the plain executor"]


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest, device: torch.device, tensors: Tensors, tmp_path: Path) -> Use:
    """Return a function that copies from or to pinned memory, and drops that memory at its end; it returns tensors."""
    if request.param == "saver":
        of_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        torch.accelerator.synchronize(device)

        def save() -> Tensors:
            place = MemoryDestination()
            with stio.sync.Saver() as saver:
                saver.save(of_device, place).result()
            return stio.sync.load(MemoryRoot(place.files), device="cpu")

        return save
    if request.param == "stager":
        of_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        torch.accelerator.synchronize(device)

        def stage() -> Tensors:
            stager = StioStager()
            try:
                return stager.stage(of_device)
            finally:
                stager.close()

        return stage
    if request.param == "slots of the plain executor":
        return lambda: stio.sync.load(MemoryRoot(checkpoint_files(tensors)), device=device)
    path = write_checkpoint(tmp_path / "model", tensors)
    source = path if request.param == "cache, by the engine" else FaultyRoot(LocalRoot(path))

    def load() -> Tensors:
        with stio.sync.HostCache(64 * MIB, device=device) as cache:
            cache.prefetch(path)
            return stio.sync.load(source, device=device, cache=cache)

    return load


@pytest.mark.matrix
@pytest.mark.usefixtures("released")
def test_it_ends_well(use: Use, tensors: Tensors) -> None:
    with simdevice.delayed(DELAY_SECONDS):
        found = use()
    require_equal(found, tensors)


@pytest.mark.matrix
@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("number", [1, 3])
def test_a_refused_copy(use: Use, number: int) -> None:
    with simdevice.delayed(DELAY_SECONDS):
        simdevice.refuse_copy(number)
        with pytest.raises(StioError) if number == 1 else suppress(StioError):  # some have one copy only
            use()


@pytest.mark.matrix
@pytest.mark.parametrize("number", [1, 3])
def test_a_copy_that_fails(use: Use, number: int) -> None:
    """A device that is lost does not unpin: the memory stays until the process ends."""
    with simdevice.delayed(DELAY_SECONDS):
        simdevice.fail_copy(number)
        with pytest.raises(StioError) if number == 1 else suppress(StioError):
            use()


@pytest.mark.matrix
@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("num_copies", [1, 3])
def test_a_cancel_while_copies_are_slow(use: Use, num_copies: int) -> None:
    start, ended = simdevice.num_copies(), threading.Event()

    def run() -> None:
        try:
            use()
        except (StioError, runtime.Cancelled):
            pass
        finally:
            ended.set()

    with simdevice.delayed(DELAY_SECONDS):
        thread = threading.Thread(target=run)
        thread.start()
        assert eventually(lambda: simdevice.num_copies() - start >= num_copies or ended.is_set())
        for operation in list(runtime.counters.running):
            operation.cancel()
        thread.join(60)
        assert ended.is_set()


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("which", [[0, 1], [1, 0]], ids=["first", "second"])
@needs_two_devices
def test_a_save_of_two_devices_that_fails_on_one(device: torch.device, tensors: Tensors, which: list[int]) -> None:
    """The copies of the other one are waited for too: they write to the same memory."""
    kind = device.type
    there = {name: tensor.to(f"{kind}:{which[k % 2]}") for k, (name, tensor) in enumerate(tensors.items())}
    for index in which:
        torch.accelerator.synchronize(index)
    with simdevice.delayed(DELAY_SECONDS), stio.sync.Saver() as saver:
        simdevice.refuse_copy(4)
        with pytest.raises(StioError):
            saver.save(there, MemoryDestination()).result()


@pytest.mark.usefixtures("released")
def test_blocks_of_a_save_are_filled_while_others_are_pinned(
    device: torch.device, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third block is pinned here only when a copy into an earlier one was queued."""
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    torch.accelerator.synchronize(device)
    start, num_pinned, pin = simdevice.num_copies(), 0, pinned.pin

    def slow(nbytes: int, device: torch.device) -> Region:
        nonlocal num_pinned
        num_pinned += 1
        assert num_pinned < 3 or eventually(lambda: simdevice.num_copies() > start)
        return pin(nbytes, device)

    monkeypatch.setattr(pinned, "pin", slow)
    with stio.sync.Saver() as saver:
        place = MemoryDestination()
        saver.save(there, place).result()
        require_equal(stio.sync.load(MemoryRoot(place.files), device="cpu"), tensors)
    assert num_pinned > 3


@pytest.mark.slow
@pytest.mark.usefixtures("released")
def test_a_stager_s_copies_stay_within_pinned_pieces(device: torch.device) -> None:
    """A tensor larger than a piece has several pieces, and a driver refuses copies over the end of one."""
    large = torch.ones(513 * MIB, dtype=torch.uint8, device=device)
    keep_busy(1)
    staged = StioStager().stage({"w": large})["w"]
    assert staged.is_pinned()
    assert int(staged[::4096].sum(dtype=torch.int64)) == 513 * MIB // 4096
