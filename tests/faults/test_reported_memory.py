"""Faults of memory that were found by use: targets and tensors without their memory (336), files that cannot be mapped (344).

The fuzz of all calls is in `memory_fuzz`; here it runs for a few seconds. `make nightly` runs it longer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerators import gpu
from counts import count
from fakes import FaultyRoot, MemoryRoot, checkpoint_files
from faults import guarded_memory
from faults.guarded_memory import READ, guarded
from faults.load_helpers import in_a_child, sparse_file
from support import bits_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import stio
import stio.compat.safetensors.numpy as safetensors_numpy
import stio.compat.safetensors.torch as safetensors_torch
import stio.saving.scheduler
from stio import sync
from stio.compat import huggingface_hub
from stio.compat.safetensors import SafetensorError, TensorSpec, safe_open, serialize
from stio.conversion.torch_files import read_pickle
from stio.device.base import resolve_device
from stio.device.copy_out import Readiness
from stio.loading.options import LoadOptions
from stio.loading.targets.module import ModuleTarget
from stio.runtime import memory
from stio.runtime.memory import WritableMemory
from stio.storage.checkpoint.open import open_checkpoint

Tensors = dict[str, torch.Tensor]
REPOSITORY = Path(__file__).resolve().parents[2]
SHAPE, NBYTES = (48, 64), 48 * 64 * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a checkpoint for a `Model`, as a file."""
    sync.save(_values(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """Make a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def _values() -> Tensors:
    return {
        "layer.weight": torch.arange(48 * 64, dtype=torch.float32).view(SHAPE),
        "layer.bias": torch.arange(48.0),
        "scale": torch.full((5,), 3.0),
    }


class Model(nn.Module):
    """A module of zeros for the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 48)
        self.register_buffer("scale", torch.zeros(5))
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.zero_()


def _is_filled(model: nn.Module) -> bool:
    return all(torch.equal(tensor, _values()[name]) for name, tensor in model.state_dict().items())


def _by_open(model: Model, source: Path) -> None:
    with sync.open(source) as checkpoint:
        checkpoint.load_into(model)


def _by_cache(model: Model, source: Path) -> None:
    with sync.HostCache(1 << 20, device="cpu") as cache:
        sync.load_into(model, source, cache=cache)


def _with_a_hook(model: Model, source: Path) -> None:
    model.layer.register_load_state_dict_post_hook(lambda *_: None)
    sync.load_into(model, source)


def _warm_start(model: Model, source: Path) -> None:
    for name, tensor in [("weight", model.layer.weight), ("bias", model.layer.bias)]:
        delattr(model.layer, name)
        model.layer.register_buffer(name, tensor.detach())
    with sync.warm_start(model, source) as warm:
        warm.done()


def _dcp_load(model: Model, source: Path) -> None:
    try:
        dcp.load(model.state_dict(), storage_reader=stio.distributed.StioStorageReader(source))
    except CheckpointException as error:
        raise error.failures[0][0] from None


FILLS: dict[str, Callable[[Model, Path], object]] = {
    "load_into": lambda model, source: sync.load_into(model, source),
    "copy": lambda model, source: sync.load_into(model, source, memory="copy"),
    "open": _by_open,
    "HostCache": _by_cache,
    "hook": _with_a_hook,
    "warm_start": _warm_start,
    "distributed": lambda model, source: sync.distributed.load_into(model, source),
    "mapping": lambda model, source: sync.distributed.load_into(model.state_dict(), source),
    "StioStorageReader": _dcp_load,
    "load_model": lambda model, source: safetensors_torch.load_model(model, source),
    "load_torch_model": lambda model, source: huggingface_hub.load_torch_model(model, source),
}
SIZES = {"freed": 0, "one-byte": 1, "half": NBYTES // 2, "one-byte-less": NBYTES - 1}


@pytest.mark.matrix
@pytest.mark.parametrize("held", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_c336_memory_that_was_freed_or_shrunk_is_refused(
    fill: Callable[[Model, Path], object], held: int, source: Path, one_rank: DeviceMesh
) -> None:
    model = Model()
    model.layer.weight.untyped_storage().resize_(held)
    weight = model.layer.weight
    with pytest.raises(
        (stio.MismatchError, SafetensorError), match=r"layer\.weight.* cannot be filled: its memory was freed"
    ) as caught:
        fill(model, source)
    assert f"expected {NBYTES:,} bytes, found {held:,} bytes" in str(caught.value)
    assert not any(tensor.any() for name, tensor in model.state_dict().items() if "weight" not in name)
    # What the message says to do.
    weight.untyped_storage().resize_(NBYTES)
    if fill is _warm_start:
        model = Model()
    fill(model, source)
    assert _is_filled(model)


def test_c336_nothing_is_read_before_the_refusal() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files(_values())))
    model = Model()
    model.layer.weight.untyped_storage().resize_(NBYTES // 2)
    with pytest.raises(stio.MismatchError) as caught:
        sync.load_into(model, root)
    assert (caught.value.expected, caught.value.found) == (f"{NBYTES:,} bytes", f"{NBYTES // 2:,} bytes")
    refused_after = root.num_reads
    sync.load_into(Model(), root)
    assert refused_after < root.num_reads - refused_after  # the headers only


def test_c336_assign_replaces_what_has_no_memory(source: Path) -> None:
    model = Model()
    for tensor in model.parameters():
        tensor.untyped_storage().resize_(0)
    sync.load_into(model, source, assign=True)
    assert _is_filled(model)


def test_c336_names_that_the_checkpoint_lacks_need_no_memory(source: Path) -> None:
    model = Model()
    model.register_buffer("more", torch.zeros(1000))
    model.more.untyped_storage().resize_(0)
    sync.load_into(model, source, strict=False)
    huggingface_hub.load_torch_model(model, source)
    del model.more
    assert _is_filled(model)


def test_c336_local_part_of_a_dtensor(source: Path, one_rank: DeviceMesh) -> None:
    model = Model()
    model.layer.weight = nn.Parameter(distribute_tensor(model.layer.weight.detach(), one_rank, [Shard(0)]))
    local = model.layer.weight.to_local()
    local.untyped_storage().resize_(NBYTES // 2)
    for target in (model, dict(model.state_dict())):
        for broadcast in (False, True):
            with pytest.raises(stio.MismatchError, match=r"layer\.weight.*memory was freed or shrunk"):
                sync.distributed.load_into(target, source, broadcast=broadcast)
    local.untyped_storage().resize_(NBYTES)
    sync.distributed.load_into(model, source)
    assert torch.equal(model.layer.weight.full_tensor(), _values()["layer.weight"])


def test_c336_view_at_the_end_of_a_shorter_storage(source: Path) -> None:
    whole = torch.zeros(2 * 48, 64)
    model = Model()
    model.layer.weight.data = whole[48:]
    whole.untyped_storage().resize_(2 * NBYTES - 4)
    with pytest.raises(stio.MismatchError, match=r"resize_\(24576\)"):
        sync.load_into(model, source)
    model.layer.weight.data = whole.as_strided(SHAPE, (64, 1))
    sync.load_into(model, source)
    assert _is_filled(model)


def test_c336_subclass_of_a_tensor(source: Path) -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.untyped_storage:
                raise AssertionError("not for a check")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Model()
    model.scale = torch.zeros(5).as_subclass(Loud)
    sync.load_into(model, source)
    assert _is_filled(model)
    with torch._C.DisableTorchFunctionSubclass():
        model.scale.untyped_storage().resize_(3)
    with pytest.raises(stio.MismatchError, match=r"scale.*memory was freed or shrunk"):
        sync.load_into(model, source)


# Memory that goes during a load or a save.


def _during(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: Callable[[], object]) -> None:
    old = getattr(place, name)

    def called(*args: Any, **keywords: Any) -> Any:
        call()
        return old(*args, **keywords)

    monkeypatch.setattr(place, name, called)


@pytest.mark.parametrize("held", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("hooked", [False, True])
def test_c336_memory_that_is_shrunk_during_the_load(
    hooked: bool, held: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    if hooked:
        model.register_load_state_dict_post_hook(lambda *_: None)
    shrink = lambda: model.layer.weight.untyped_storage().resize_(held)  # noqa: E731 - called later
    _during(monkeypatch, ModuleTarget, "_load_as_torch" if hooked else "copy", shrink)
    with pytest.raises(stio.MismatchError, match=r"layer\.weight.*memory was freed or shrunk"):
        sync.load_into(model, source)


def test_c336_received_rows_are_not_written_into_a_shorter_storage() -> None:
    model = Model()
    target = ModuleTarget(model)
    with closing(open_checkpoint(MemoryRoot(checkpoint_files(_values())))) as opened:
        target.select(opened, LoadOptions(), lambda: None)
    for held in SIZES.values():
        model.layer.weight.untyped_storage().resize_(held)
        with pytest.raises(stio.MismatchError, match=r"layer\.weight.*memory was freed or shrunk"):
            target.copy_rows("layer.weight", torch.ones(8, 64), 0, 8, SHAPE)


def test_c336_memory_that_is_freed_when_a_cancelled_load_has_returned(source: Path) -> None:
    async def cancelled(model: Model) -> None:
        loading = asyncio.ensure_future(stio.load_into(model, source))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    model = Model()
    asyncio.run(cancelled(model))
    model.layer.weight.untyped_storage().resize_(0)
    with pytest.raises(stio.MismatchError, match=r"memory was freed or shrunk"):
        sync.load_into(model, source)
    model.layer.weight.untyped_storage().resize_(NBYTES)
    sync.load_into(model, source)
    assert _is_filled(model)


def _saver(tensors: Tensors, path: Path) -> None:
    with sync.Saver() as saver:
        saver.save(tensors, path).result()


SAVES: dict[str, Callable[[Tensors, Path], object]] = {
    "save": sync.save,
    "Saver": _saver,
    "save_state": sync.save_state,
    "save_file": lambda tensors, path: safetensors_torch.save_file(tensors, path),
    "bytes": lambda tensors, path: safetensors_torch.save(tensors),
    "save_model": lambda tensors, path: safetensors_torch.save_model(_holder(tensors), path),
    "hub": lambda tensors, path: huggingface_hub.save_torch_state_dict(tensors, path.parent),
    "hub-pickle": lambda tensors, path: huggingface_hub.save_torch_state_dict(tensors, path.parent, safe_serialization=False),
    "StioStager": lambda tensors, path: stio.distributed.StioStager().stage(tensors),
}  # fmt: skip


def _holder(tensors: Tensors) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


@pytest.mark.matrix
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("held", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_c336_tensors_without_memory_are_not_saved(
    save: Callable[[Tensors, Path], object], held: int, columns: bool, tmp_path: Path
) -> None:
    tensor = torch.zeros(SHAPE)
    tensor = tensor.t() if columns else tensor
    tensor.untyped_storage().resize_(held)
    with pytest.raises(ValueError) as caught:
        save({"other": torch.ones(3), "w": tensor}, tmp_path / "x.safetensors")
    if not columns:
        assert re.search(r"['\"](w|state\['w'\])['\"] has no data: its memory was freed or shrunk", str(caught.value))
        assert f"expected {NBYTES:,} bytes, found {held:,} bytes" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
@pytest.mark.parametrize("num_tensors", [3, 3000], ids=["few", "many"])
@pytest.mark.parametrize("held", [0, 96])
@pytest.mark.parametrize("save", [sync.save, _saver], ids=["save", "Saver"])
def test_c336_memory_that_goes_before_the_snapshot(
    save: Callable[[Tensors, Path], object],
    held: int,
    num_tensors: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {f"t{k}": torch.full((48,), float(k)) for k in range(num_tensors)}
    for name in ("copy_pieces", "copy_out"):
        _during(monkeypatch, Readiness, name, lambda: tensors["t1"].untyped_storage().resize_(held))
    with pytest.raises(ValueError, match=r"'t1' has no data: its memory was freed or shrunk"):
        save(tensors, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_c336_raw_pointer_of_freed_memory() -> None:
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(0)
    spec = TensorSpec(dtype="float32", shape=list(SHAPE), data_ptr=tensor.data_ptr(), data_len=NBYTES)
    with pytest.raises(SafetensorError, match="is given by"):
        serialize({"w": spec})


def test_c336_two_keys_that_a_message_cuts_to_one_text() -> None:
    state = {"k" * 5000 + end: torch.full((3,), float(k)) for k, end in enumerate("abc")}
    staged = stio.distributed.StioStager().stage(state)
    assert all(torch.equal(staged[key], tensor) for key, tensor in state.items())


# Memory that may not be written.


def _memmap(tmp_path: Path) -> torch.Tensor:
    np.zeros(SHAPE, np.float32).tofile(tmp_path / "mapped")
    return torch.from_numpy(np.memmap(tmp_path / "mapped", mode="r", dtype=np.float32, shape=SHAPE))


def _of_another_library(tmp_path: Path) -> torch.Tensor:
    array = np.memmap(tmp_path / "mapped", mode="w+", dtype=np.float32, shape=SHAPE)
    array.flush()
    return torch.from_dlpack(
        np.asarray(torch.from_numpy(np.memmap(tmp_path / "mapped", mode="r", dtype=np.float32, shape=SHAPE)))
    )


READ_ONLY: dict[str, Callable[[Path], torch.Tensor]] = {
    "memmap": _memmap,
    "part-of-memmap": lambda tmp_path: _memmap(tmp_path).view(64, 48)[0:64].view(SHAPE),
    "protected": lambda tmp_path: guarded(torch.float32, SHAPE, READ),
    "no-access": lambda tmp_path: guarded(torch.float32, SHAPE, 0),
    "dlpack": _of_another_library,
}


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list mappings")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("make", READ_ONLY.values(), ids=READ_ONLY)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_c336_read_only_memory_is_refused(
    fill: Callable[[Model, Path], object],
    make: Callable[[Path], torch.Tensor],
    source: Path,
    tmp_path: Path,
    one_rank: DeviceMesh,
) -> None:
    model = Model()
    model.layer.weight.data = make(tmp_path)
    with pytest.raises(
        (stio.MismatchError, SafetensorError), match=r"layer\.weight.* cannot be filled: its memory is read-only"
    ):
        fill(model, source)
    assert not model.scale.any()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_c336_a_clone_of_read_only_memory_is_filled(source: Path, tmp_path: Path) -> None:
    model = Model()
    model.layer.weight.data = _memmap(tmp_path)
    model.layer.weight.data = model.layer.weight.data.clone()  # what the message says to do
    sync.load_into(model, source)
    assert _is_filled(model)
    assert not np.fromfile(tmp_path / "mapped", np.float32).any()


WRITABLE: dict[str, Callable[[Path], torch.Tensor]] = {
    "guarded": lambda tmp_path: guarded(torch.float32, SHAPE),
    "numpy": lambda tmp_path: torch.from_numpy(np.zeros(SHAPE, np.float32)),
    "bytearray": lambda tmp_path: torch.frombuffer(bytearray(NBYTES), dtype=torch.float32).view(SHAPE),
    "shared": lambda tmp_path: torch.zeros(SHAPE).share_memory_(),
    "stio-map": lambda tmp_path: sync.load(tmp_path / "model.safetensors", memory="map")["layer.weight"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("make", WRITABLE.values(), ids=WRITABLE)
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_c336_memory_that_torch_did_not_allocate_is_filled(
    fill: Callable[[Model, Path], object],
    make: Callable[[Path], torch.Tensor],
    source: Path,
    tmp_path: Path,
    one_rank: DeviceMesh,
) -> None:
    model = Model()
    model.layer.weight.data = make(tmp_path)
    before = source.read_bytes()
    fill(model, source)
    assert _is_filled(model) and source.read_bytes() == before


def test_c336_private_mapping_of_torch(source: Path, tmp_path: Path) -> None:
    for shared in (False, True):
        np.zeros(SHAPE, np.float32).tofile(tmp_path / "mapped")
        model = Model()
        model.layer.weight.data = torch.from_file(str(tmp_path / "mapped"), shared=shared, size=48 * 64).view(SHAPE)
        sync.load_into(model, source)
        assert _is_filled(model)
        assert bool(np.fromfile(tmp_path / "mapped", np.float32).any()) == shared


def test_c336_what_is_writable_of_a_list_of_mappings() -> None:
    text = (
        "1000-2000 r--p 00000000 00:00 0\n2000-3000 rw-p 00000000 00:00 0 [heap]\n"
        "3000-5000 rw-s 00001000 08:01 7 /a file\n6000-7000 -w-p 00000000 00:00 0\n7000-8000 ---p 00000000 00:00 0\n"
    )
    found = WritableMemory(text)
    assert found.holds(0x2000, 0x3000) and found.holds(0x2FFF, 2) and found.holds(0x6000, 0x1000)
    assert not found.holds(0x1FFF, 2) and not found.holds(0x4FFF, 2) and not found.holds(0x5000, 1)
    assert not found.holds(0x100, 1) and not found.holds(0x7000, 1) and not found.holds(0x9000, 1)
    assert WritableMemory(None).holds(0x100, 1)  # no such list: nothing is known


OVERLAPS = {
    "expanded": lambda: torch.zeros(48, 1).expand(SHAPE),
    "rows": lambda: torch.zeros(4000).as_strided(SHAPE, (1, 1)),
    "every-other": lambda: torch.zeros(4000).as_strided(SHAPE, (63, 1)),
}


@pytest.mark.parametrize("make", OVERLAPS.values(), ids=OVERLAPS)
def test_c336_tensors_whose_elements_share_memory_are_refused(make: Callable[[], torch.Tensor], source: Path) -> None:
    model = Model()
    model.layer.weight.data = make()
    with pytest.raises(stio.MismatchError, match=r"layer\.weight cannot be filled: its elements share memory"):
        sync.load_into(model, source)
    model.layer.weight.data = model.layer.weight.data.clone(memory_format=torch.contiguous_format)
    sync.load_into(model, source)
    assert _is_filled(model)


@gpu
@pytest.mark.parametrize("held", [0, NBYTES // 2])
def test_c336_memory_of_a_device(held: int, source: Path, tmp_path: Path) -> None:
    model = Model().to(resolve_device("auto"))
    model.layer.weight.untyped_storage().resize_(held)
    with pytest.raises(stio.MismatchError, match=r"layer\.weight.*memory was freed or shrunk"):
        sync.load_into(model, source)
    with pytest.raises(ValueError, match=r"'layer.weight' has no data"):
        sync.save(model, tmp_path / "out.safetensors")
    model.layer.weight.untyped_storage().resize_(NBYTES)
    sync.load_into(model, source)
    assert _is_filled(model.cpu())


# The fuzz.


def _fuzz(directory: Path, *options: str, preload: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", "PYTHONWARNINGS": "ignore"}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    # A real interpreter: LD_PRELOAD
    command = [sys.executable, "-m", "faults.memory_fuzz", str(directory / "fuzz"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


needs_a_compiler = pytest.mark.skipif(bool(guarded_memory.why_not()), reason=guarded_memory.why_not() or "-")


@pytest.mark.slow
@needs_a_compiler
def test_c336_fuzz_of_all_that_fills_and_saves(fast_path: Path) -> None:
    found = _fuzz(
        fast_path, "--rounds", str(count(80, 20_000)), "--seconds", "240", preload=guarded_memory.build(fast_path)
    )
    assert found.returncode == 0, (found.stdout + found.stderr)[-6000:]
    assert "findings: 0" in found.stdout and " 0 allocations" not in found.stdout


@needs_a_compiler
@pytest.mark.slow  # a control of the one before
def test_c336_fuzz_finds_what_is_not_checked(fast_path: Path) -> None:
    found = _fuzz(fast_path, "--rounds", "100", "--blind", preload=guarded_memory.build(fast_path))
    assert found.returncode != 0


# 344. Files that the system does not map.


def _refuse_maps(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system refuse to map files; memory without a file is mapped."""
    real = memory._map

    def refusing(nbytes: int, flags: int, fd: int) -> Any:
        if fd < 0:
            return real(nbytes, flags, fd)
        if number == errno.ENOMEM:
            raise memory.memory_error(nbytes, "the system refused to map memory")
        raise OSError(number, f"mmap of {nbytes:,} bytes failed: {os.strerror(number)}")

    monkeypatch.setattr(memory, "_map", refusing)


REFUSALS = pytest.mark.parametrize(
    "number", [errno.ENODEV, errno.ENOMEM, errno.EACCES, errno.EAGAIN], ids=errno.errorcode.get
)
READS: dict[str, Callable[[Path], Tensors]] = {
    "auto": lambda source: sync.load(source),
    "map": lambda source: sync.load(source, memory="map"),
    "lazy": lambda source: sync.load(source, memory="lazy"),
    "names": lambda source: sync.load(source, memory="map", names=["scale"]),
    "cast": lambda source: sync.load(source, memory="map", dtype="float64"),
    "load_state": lambda source: sync.load_state(source, memory="map"),
    "open": lambda source: _streamed(source),
    "load_file": lambda source: safetensors_torch.load_file(source),
    "safe_open": lambda source: _opened(source),
    "numpy": lambda source: {name: torch.from_numpy(one) for name, one in safetensors_numpy.load_file(source).items()},
}


def _streamed(source: Path) -> Tensors:
    with sync.open(source, memory="map") as checkpoint, checkpoint.stream() as stream:
        found = dict(stream)
        assert torch.equal(checkpoint.read("layer.weight", np.s_[:, 3:9]), _values()["layer.weight"][:, 3:9])
    return found


def _opened(source: Path) -> Tensors:
    with safe_open(source, "pt") as file:
        part = file.get_slice("layer.weight")
        assert torch.equal(part[2:9, 5:60], _values()["layer.weight"][2:9, 5:60])
        assert torch.equal(part[-3:], _values()["layer.weight"][-3:])
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.matrix
@REFUSALS
@pytest.mark.parametrize("read", READS)
def test_c344_a_file_that_is_not_mapped_is_read(
    read: str,
    number: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if read == "load_state":
        source = tmp_path / "state.safetensors"
        sync.save_state(_values(), source)
    _refuse_maps(monkeypatch, number)
    with caplog.at_level(logging.INFO, logger="stio"):
        found = READS[read](source)
    for name, tensor in found.items():
        assert bits_of(tensor) == bits_of(_values()[name].to(tensor.dtype)), name
    lines = {line.partition("mapped: ")[0] for line in caplog.messages if "cannot be mapped" in line}  # of each load
    assert len(lines) == 1 and str(source) in lines.pop()
    source.write_bytes(b"\xff" * source.stat().st_size)  # they have memory of their own
    for name, tensor in found.items():
        assert bits_of(tensor) == bits_of(_values()[name].to(tensor.dtype)), name


@REFUSALS
def test_c344_other_loads_of_a_file_that_is_not_mapped(
    number: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_maps(monkeypatch, number)
    for assign in (False, True):
        model = Model()
        sync.load_into(model, source, memory="map", assign=assign)
        assert _is_filled(model)
    model = Model().to("meta")
    model.scale = torch.zeros(5)
    with sync.warm_start(model, source) as warm:
        warm.done()
    assert _is_filled(model)


def test_c344_some_shards_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{k}": torch.full((1000,), float(k)) for k in range(6)}
    sync.save(tensors, tmp_path / "model", max_shard_size=4000)
    real, count = memory._map, iter(range(1000))

    def every_other(nbytes: int, flags: int, fd: int) -> Any:
        if fd >= 0 and next(count) % 2:
            raise OSError(errno.ENODEV, "mmap failed")
        return real(nbytes, flags, fd)

    monkeypatch.setattr(memory, "_map", every_other)
    found = sync.load(tmp_path / "model", memory="map")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not obeyed everywhere")
def test_c344_a_limit_of_address_space(zygote: Any, tmp_path: Path) -> None:
    sync.save({"small": torch.ones(7), "large": torch.zeros(24 << 20)}, tmp_path / "x.safetensors")
    torch.save({"small": torch.ones(7)}, tmp_path / "x.pt")
    sparse_file(tmp_path / "huge.safetensors", 1 << 30)
    code = """
        from stio.compat.safetensors import safe_open
        from stio.conversion.torch_files import read_pickle

        def opened():
            with safe_open(directory / "x.safetensors", "pt") as file:
                assert torch.equal(file.get_tensor("small"), torch.ones(7))

        source = directory / "x.safetensors"
        limit_address_space(80 << 20)
        attempt(lambda: sync.load(source, names=["small"]))
        attempt(lambda: sync.load(source, names=["small"], memory="lazy"))
        attempt(opened)
        attempt(lambda: sync.load(directory / "huge.safetensors", memory="map"))
    """
    *done, refused = in_a_child(zygote, code, tmp_path)
    assert done == ["done"] * 3
    assert refused.startswith("refused HostMemoryError ")


def test_c344_a_file_of_torch_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(_values(), tmp_path / "x.pt")
    real = torch.load

    def load(path: Any, *, mmap: bool = False, **options: Any) -> Any:
        if mmap:
            raise RuntimeError(f"unable to mmap 100 bytes from file <{path}>: No such device (19)")
        return real(path, **options)

    monkeypatch.setattr(torch, "load", load)
    with caplog.at_level(logging.INFO, logger="stio"):
        found = read_pickle(str(tmp_path / "x.pt"), mapped=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in _values().items())
    assert sum("cannot be mapped" in line for line in caplog.messages) == 1
