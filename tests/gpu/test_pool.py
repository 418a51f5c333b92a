"""`stio.ModelPool` on a device: its memory is bounded, is free after an eviction, and is reused behind the users' work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import Place, gpu, keep_busy, module_of, needs_two_devices
from support import bits_of, eventually, require_equal
from torch import nn

from stio import sync
from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator
from stio.errors import DeviceError, DeviceMemoryError
from stio.serving.pool.api import RING_BYTES

MIB = 1 << 20
WIDTH = 1024
TENSOR_BYTES = 4 * MIB + 512
MODEL_BYTES = TENSOR_BYTES + 512
"""What the pool reserves: torch allocates the least block for a moment when it puts a tensor over a storage."""

pytestmark = pytest.mark.filterwarnings("ignore:stio.sync blocks the running event loop")


def tensors_of(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"w": torch.full((WIDTH, WIDTH), value, dtype=dtype), "b": torch.full((3,), value, dtype=dtype)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"m{k}.safetensors" for k in range(5)]
    for k, path in enumerate(paths):
        sync.save(tensors_of(float(k)), path)
    return paths


@pytest.fixture
def real() -> Iterator[Place]:
    place = Place("real")
    yield place
    simdevice.clear_faults() if simdevice.installed() else None
    place.require_freed()


def pool_of(files: list[Path], *, room: int = 2, **options: Any) -> sync.ModelPool:
    pool = sync.ModelPool(
        **{"device": resolve_device("auto"), "device_bytes": room * MODEL_BYTES, "max_hold_seconds": 0.05} | options
    )
    for k, file in enumerate(files):
        pool.add(str(k), file)
    return pool


def make() -> nn.Module:
    with torch.device("meta"):
        module = nn.Module()
        module.w = nn.Parameter(torch.empty(WIDTH, WIDTH))
        module.register_buffer("b", torch.empty(3))
    module.register_buffer("table", torch.arange(4.0), persistent=False)
    return module


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("host_bytes", [0, RING_BYTES + 64 * MIB])
def test_right_weights_and_a_bound_that_the_device_counts(files: list[Path], real: Place, host_bytes: int) -> None:
    module = module_of(real.device)
    with pool_of(files, host_bytes=host_bytes) as pool:
        for k, file in enumerate(files):
            pool.add(f"module {k}", file, make=make)
        module.empty_cache()
        module.reset_peak_memory_stats(real.device)
        before = module.memory_allocated(real.device)
        for name in ["0", "1", "2", "m0", "3", "m1", "4", "0", "m2", "m1", "2"]:
            k = int(name[-1])
            with pool.use(f"module {k}" if name[0] == "m" else name) as model:
                if name[0] == "m":
                    assert model.table.tolist() == [0, 1, 2, 3] and model.table.device == real.device
                    model = dict(model.state_dict())
                assert {tensor.device for tensor in model.values()} == {real.device}
                require_equal({key: tensor.cpu() for key, tensor in model.items()}, tensors_of(float(k)))
                del model
        peak = module.max_memory_allocated(real.device) - before
        assert MODEL_BYTES < peak <= 2 * MODEL_BYTES
        assert pool.stats().peak_device_bytes <= 2 * MODEL_BYTES


@gpu
def test_an_eviction_frees_the_memory_of_the_device(files: list[Path], real: Place) -> None:
    before = real.used_bytes()
    with pool_of(files, room=1) as pool:
        for name in "0123401234":
            with pool.use(name):
                assert real.used_bytes() - before == TENSOR_BYTES
        pool.add("module", files[0], make=make)
        with pytest.raises(DeviceMemoryError), pool.use("module"):
            pass  # the buffer that no file has needs room too
    assert real.used_bytes() == before


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_memory_is_reused_behind_the_work_that_a_block_has_queued(
    files: list[Path], real: Place, own_stream: bool
) -> None:
    module = module_of(real.device)
    with pool_of(files, room=1) as pool:
        for name in "01234":  # what is loaded first is imported
            with pool.use(name):
                pass
        for name, after in ("01", "12", "23"):
            with real.own_stream() if own_stream else nullcontext():
                with pool.use(name) as tensors:
                    keep_busy()
                    seen = tensors["w"].clone()
                with pool.use(after) as others:
                    found = others["w"].clone()
                module.current_stream(real.device).synchronize()
                assert bits_of(seen) == bits_of(tensors_of(float(name))["w"])
                assert bits_of(found) == bits_of(tensors_of(float(after))["w"])
            del seen, found


@gpu
def test_a_load_does_not_wait_for_the_work_of_other_models(files: list[Path], real: Place) -> None:
    """A user of one model queues work; another model is loaded and evicted beside it."""
    module = module_of(real.device)
    with pool_of(files) as pool, pool.use("0") as tensors:
        with pool.use("1"):
            pass
        keep_busy(2_000_000_000)
        behind = module.Event()
        behind.record(module.current_stream(real.device))
        done = threading.Event()

        def use() -> None:
            with real.own_stream(), pool.use("2"):
                done.set()

        thread = threading.Thread(target=use)
        thread.start()
        assert done.wait(10) and not behind.query()
        thread.join()
        behind.synchronize()
        assert float(tensors["w"][0, 0]) == 0.0


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("kind", ["dictionary", "module"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_update_in_place_keeps_addresses_and_bits(
    tmp_path: Path, real: Place, kind: str, dtype: torch.dtype
) -> None:
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    pattern = torch.arange(-(WIDTH * WIDTH) // 2, WIDTH * WIDTH // 2).to(bits).view(dtype).reshape(WIDTH, WIDTH)
    new = {"w": pattern, "b": pattern[0, :3].clone()}
    sync.save(tensors_of(1.0, dtype), tmp_path / "old.safetensors")
    sync.save(new, tmp_path / "new.safetensors")

    def make_one() -> nn.Module:
        return make().to(dtype)

    with pool_of([], room=40) as pool:
        pool.add("m", tmp_path / "old.safetensors", make=None if kind == "dictionary" else make_one)

        def state(model: Any) -> dict[str, torch.Tensor]:
            return dict(model) if kind == "dictionary" else dict(model.state_dict())

        with pool.use("m") as model:
            addresses = {name: tensor.data_ptr() for name, tensor in state(model).items()}
        pool.update("m", tmp_path / "new.safetensors")
        with real.own_stream(), pool.use("m") as model:
            require_equal({name: tensor.cpu() for name, tensor in state(model).items()}, new)
            assert {name: tensor.data_ptr() for name, tensor in state(model).items()} == addresses
            del model
        assert (pool.stats().num_updates, pool.stats().num_loads) == (1, 1)


@gpu
def test_an_update_waits_for_the_work_that_was_queued(files: list[Path], real: Place) -> None:
    with pool_of(files, room=40) as pool:
        with pool.use("1") as tensors:
            keep_busy()
            seen = tensors["w"].clone()
        pool.update("1", files[2])
        assert bits_of(seen) == bits_of(tensors_of(1.0)["w"])
        del seen


@gpu
def test_memory_that_others_have_taken(files: list[Path], real: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where less is free than the pool may take, it evicts more, and says what it needs if that is not enough."""
    free = [MODEL_BYTES]
    held = module_of(real.device).memory_allocated(real.device)

    def free_now(device: torch.device) -> int:
        return free[0] - (module_of(device).memory_allocated(device) - held)

    with pool_of(files) as pool:
        for name in "01":
            with pool.use(name):
                pass
        assert pool.stats().device_bytes == 2 * MODEL_BYTES
        monkeypatch.setattr(TorchAccelerator, "free_bytes", free_now)
        with pool.use("2") as tensors:
            assert float(tensors["w"][0, 0]) == 2.0
        assert pool.stats().device_bytes == MODEL_BYTES
        assert pool.stats().num_evictions == 2
        free[0] = MODEL_BYTES - 512
        with pytest.raises(DeviceMemoryError, match="'3' does not fit") as caught, pool.use("3"):
            pass
        assert caught.value.needed_bytes == MODEL_BYTES
        free[0] = 2 * MODEL_BYTES
        with pool.use("3") as tensors:
            assert float(tensors["w"][0, 0]) == 3.0


@gpu
def test_what_the_device_says_to_be_free(real: Place) -> None:
    before = TorchAccelerator.free_bytes(real.device)
    assert before is not None
    taken = torch.empty(64 * MIB, dtype=torch.uint8, device=real.device)
    after = TorchAccelerator.free_bytes(real.device)
    assert after is not None
    assert before - after >= 64 * MIB
    del taken
    torch.accelerator.synchronize(real.device)
    assert (TorchAccelerator.free_bytes(real.device) or 0) - after >= 64 * MIB, "memory of the allocator counts as free"


@gpu
def test_casts_are_within_the_bound(files: list[Path], real: Place) -> None:
    module = module_of(real.device)
    with sync.ModelPool(device=real.device, device_bytes=8 * MIB) as pool:
        for k, file in enumerate(files):
            pool.add(str(k), file, dtype="float16")
        module.reset_peak_memory_stats(real.device)
        before = module.memory_allocated(real.device)
        for name in "0123":
            with pool.use(name) as tensors:
                assert tensors["w"].dtype == torch.float16 and float(tensors["w"][-1, -1]) == float(name)
                assert real.used_bytes() - before == 2 * MIB + 512
        assert module.max_memory_allocated(real.device) - before <= pool.stats().peak_device_bytes <= 8 * MIB


@gpu
@pytest.mark.skipif(not simdevice.installed(), reason="counted by the simulated device only")
def test_host_memory_is_pinned_and_within_its_bound(files: list[Path], real: Place) -> None:
    before = simdevice.pinned_bytes()
    with pool_of(files, room=1, host_bytes=RING_BYTES + 9 * MIB) as pool:
        for name in "01234":
            pool.prefetch(name)
        assert 8 * MIB <= pool.stats().host_bytes <= 9 * MIB
        assert simdevice.pinned_bytes() - before >= 8 * MIB
        assert [pool.status(name).tier for name in "0134"] == ["source", "source", "host", "host"]
        for name in "43210":
            with pool.use(name) as tensors:
                assert float(tensors["w"][0, 0]) == float(name)
            assert simdevice.pinned_bytes() - before <= RING_BYTES + 9 * MIB


@gpu
@needs_two_devices
def test_another_device_than_the_first(files: list[Path], real: Place) -> None:
    second = torch.device(real.device.type, 1)
    with pool_of(files, device=second, host_bytes=RING_BYTES + 64 * MIB) as pool:
        pool.add("module", files[3], make=make)
        for name in "012":
            with pool.use(name) as tensors:
                assert tensors["w"].device == second and float(tensors["w"][0, 0]) == float(name)
        with pool.use("module") as model:
            assert model.w.device == model.table.device == second and float(model.w.detach()[0, 0]) == 3.0
    torch.accelerator.set_device_index(0)


@gpu
@pytest.mark.skipif(not simdevice.installed(), reason="needs a device that fails on request")
def test_a_copy_that_fails_is_an_error_of_its_load_alone(files: list[Path], real: Place) -> None:
    with pool_of(files, room=1) as pool:
        with pool.use("0"):
            pass
        simdevice.fail_copy(1)
        with pytest.raises(DeviceError), pool.use("1"):
            pass
        simdevice.clear_faults()
        assert eventually(lambda: pool.stats().device_bytes == 0)
        for name in "12":
            with pool.use(name) as tensors:
                assert float(tensors["w"][0, 0]) == float(name)


@gpu
@pytest.mark.skipif(not simdevice.installed(), reason="needs a device that fails on request")
def test_work_of_a_user_that_fails_does_not_end_the_pool(files: list[Path], real: Place) -> None:
    with pool_of(files, room=1) as pool:
        for _ in range(2):
            with real.own_stream(), pool.use("0") as tensors:
                keep_busy(20_000_000)
                simdevice.fail_copy(1)
                seen = tensors["w"].clone()
        with pool.use("1") as tensors:
            assert float(tensors["w"][0, 0]) == 1.0
        simdevice.clear_faults()
        del seen
