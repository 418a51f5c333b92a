"""New weights for a module on a device: its tensors keep their addresses and change in the order of the stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import gpu, keep_busy, module_of
from fakes import write_checkpoint
from support import HookedRoot, eventually, needs_engine, require_equal
from torch import nn

import stio
from stio.device import TargetMemory
from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator

MIB = 1 << 20
NUM_LAYERS = 24
WIDTH = 512  # 1 MiB of float32 a layer

MIN_BYTES = 512
"""What the allocator takes for the smallest tensor: torch makes one, for a moment, when it puts a tensor over a storage."""

own_streams = pytest.mark.parametrize("own_stream", [False, True])


def new_module(device: torch.device) -> nn.Module:
    """Return layers whose weights are zero."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(NUM_LAYERS)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    torch.accelerator.synchronize(device)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {f"{k}.weight": torch.rand(WIDTH, WIDTH, generator=chance) + 1 for k in range(NUM_LAYERS)}


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("refresh"), weights, 2)


@pytest.mark.matrix
@gpu
@own_streams
def test_addresses_stay_and_values_change_in_the_order_of_the_stream(
    weights_path: Path, weights: dict[str, torch.Tensor], own_stream: bool
) -> None:
    """What was queued before the call reads the old weights, and what is queued behind it the new ones."""
    device = resolve_device("auto")
    module = new_module(device)
    state = module.state_dict()
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    versions = {name: parameter._version for name, parameter in module.named_parameters()}
    streams = module_of(device)
    stream = streams.Stream(device) if own_stream else streams.current_stream(device)
    with streams.stream(stream):
        keep_busy()
        old = {name: tensor.clone() for name, tensor in state.items()}
        stio.sync.load_into(module, weights_path, budget_bytes=4 * MIB)
        new = {name: tensor.clone() for name, tensor in state.items()}
        stream.synchronize()
    require_equal(new, weights)
    require_equal(old, {name: torch.zeros(WIDTH, WIDTH) for name in weights})
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == addresses
    assert all(parameter._version > versions[name] for name, parameter in module.named_parameters())


@gpu
def test_the_device_needs_no_more_memory_than_the_budget(weights_path: Path) -> None:
    device = resolve_device("auto")
    module, budget_bytes = new_module(device), 4 * MIB
    torch.accelerator.synchronize(device)
    module_of(device).empty_cache()  # a block that another test left may be larger than what is asked for
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    stio.sync.load_into(module, weights_path, budget_bytes=budget_bytes)
    torch.accelerator.synchronize(device)
    extra = torch.accelerator.max_memory_allocated(device) - before
    assert 0 < extra <= budget_bytes + MIN_BYTES < NUM_LAYERS * MIB


class Kinds(nn.Module):
    """Tensors that get their bytes as they are, and others, which are cast or have gaps."""

    def __init__(self, device: torch.device, num_small: int = 40) -> None:
        super().__init__()
        for k in range(num_small):
            self.register_buffer(f"small_{k:02d}", torch.zeros(k % 7, 3, dtype=DTYPES[k % len(DTYPES)], device=device))
        self.register_buffer("cast", torch.zeros(5, 6, dtype=torch.float64, device=device))
        self.register_buffer("turned", torch.zeros(6, 5, device=device).t())
        self.register_buffer("apart", torch.zeros(5, 12, device=device)[:, ::2])
        self.register_buffer("within", torch.zeros(100, device=device)[7:37].view(5, 6))
        self.scalar = nn.Parameter(torch.zeros((), device=device))
        self.tied = self.scalar


DTYPES = [torch.float32, torch.uint8, torch.bfloat16, torch.bool, torch.float64, torch.int16]


@pytest.fixture
def kinds(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """Return values for `Kinds`, and their checkpoint."""
    chance = torch.Generator().manual_seed(1)
    values = {
        name: (torch.rand(tensor.shape, generator=chance) * 9).to(torch.float32 if name == "cast" else tensor.dtype)
        for name, tensor in Kinds(torch.device("cpu")).state_dict().items()
        if name != "tied"
    }
    return values, write_checkpoint(tmp_path / "kinds", values)


def require_kinds(module: Kinds, values: dict[str, torch.Tensor]) -> None:
    require_equal(dict(module.state_dict()), {**values, "cast": values["cast"].double(), "tied": values["scalar"]})


@gpu
@pytest.mark.parametrize("alone", [None, "cast", "turned", "apart", "within", "scalar"])
def test_all_kinds_of_memory_are_filled(kinds: tuple[dict[str, torch.Tensor], Path], alone: str | None) -> None:
    """In a group with others and in one of its own; what is beside a part of a storage does not change."""
    values, path = kinds
    module = Kinds(resolve_device("auto"))
    beside = [(tensor, tensor.untyped_storage().nbytes() // 4) for tensor in (module.apart, module.within)]
    if alone is not None:
        path = write_checkpoint(path.parent / "alone", {alone: values[alone]})
        values = {name: value if name == alone else torch.zeros_like(value) for name, value in values.items()}
    versions = {name: tensor._version for name, tensor in module.state_dict().items()}
    stio.sync.load_into(module, path, strict=False)
    require_kinds(module, values)
    for name, tensor in module.state_dict().items():
        is_written = alone in (None, name) or (name == "tied" and alone == "scalar")
        assert (tensor._version > versions[name]) == is_written
    for tensor, num_elements in beside:
        whole = tensor.as_strided((num_elements,), (1,), 0)
        assert whole.count_nonzero() == tensor.count_nonzero()


@gpu
@needs_engine
@pytest.mark.parametrize("cast", [False, True], ids=["as they are", "one is cast"])
def test_small_tensors_need_no_tensors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cast: bool
) -> None:
    """The end of each would release the GIL, which takes 5 ms beside a busy Python thread."""
    device, made = resolve_device("auto"), []
    allocate = TorchAccelerator.allocate
    monkeypatch.setattr(
        TorchAccelerator, "allocate", lambda self, wanted: (made.extend(wanted), allocate(self, wanted))[1]
    )
    values = {f"{k:03d}": torch.rand(16, 16) for k in range(500)}
    module = nn.ParameterDict({name: torch.zeros(16, 16, device=device) for name in values})
    if cast:
        module["003"] = torch.zeros(16, 16, device=device, dtype=torch.float64)
    stio.sync.load_into(module, write_checkpoint(tmp_path / "many", values))
    require_equal(dict(module.state_dict()), {k: v.to(module[k].dtype) for k, v in values.items()})
    assert [dtype for dtype, _ in made] == ([torch.float32] * 500 if cast else [torch.uint8])


@pytest.fixture
def plain(kinds: tuple[dict[str, torch.Tensor], Path]) -> tuple[Kinds, dict[str, torch.Tensor], Path]:
    """Return a module, all of whose tensors are copied as bytes, with values and their checkpoint."""
    values, path = kinds
    module = Kinds(resolve_device("auto"))
    del module.cast, module.turned, module.apart
    return module, {name: value for name, value in values.items() if hasattr(module, name)}, path


def before_copies(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something just before the bytes are copied into the module, as another task may."""
    copy = TargetMemory.copy_image
    monkeypatch.setattr(TargetMemory, "copy_image", lambda *given, **named: (act(), copy(*given, **named))[1])


@gpu
@needs_engine
def test_memory_that_is_freed_during_the_load_is_not_written(
    plain: tuple[Kinds, dict[str, torch.Tensor], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its group is; the next load fills all."""
    module, values, path = plain
    storage = module.small_03.untyped_storage()
    held = storage.nbytes()
    before_copies(monkeypatch, lambda: storage.resize_(0))
    with pytest.raises(stio.MismatchError, match="small_03 cannot be filled: its memory was freed"):
        stio.sync.load_into(module, path, strict=False)
    storage.resize_(held)
    assert all(not tensor.count_nonzero() for name, tensor in module.state_dict().items() if name != "small_03")
    monkeypatch.undo()
    stio.sync.load_into(module, path, strict=False)
    require_equal(dict(module.state_dict()), {**values, "tied": values["scalar"]})


CHANGES = {
    "half": lambda data: data.half(),
    "double": lambda data: data.double(),
    "gaps": lambda data: torch.zeros(10, 6, device=data.device)[::2],
    "larger": lambda data: torch.zeros(50, 6, device=data.device),
    "smaller": lambda data: torch.zeros(2, 6, device=data.device),
}


@gpu
@needs_engine
@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_is_another_during_the_load(
    plain: tuple[Kinds, dict[str, torch.Tensor], Path], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It gets the values as torch copies them, or the load fails; no byte beside it changes."""
    module, values, path = plain
    module.within = nn.Parameter(module.within, requires_grad=False)
    changed = CHANGES[change](module.within.data)
    before_copies(monkeypatch, lambda: setattr(module.within, "data", changed))
    if change in ("larger", "smaller"):
        with pytest.raises(RuntimeError, match="size"):
            stio.sync.load_into(module, path, strict=False)
        assert not changed.count_nonzero()
    else:
        stio.sync.load_into(module, path, strict=False)
        expected = {**values, "within": values["within"].to(changed.dtype), "tied": values["scalar"]}
        require_equal(dict(module.state_dict()), expected)
        if change == "gaps":
            assert not changed.as_strided((5, 6), (12, 1), 6).count_nonzero()


@gpu
@needs_engine
@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_copy_that_is_refused(
    plain: tuple[Kinds, dict[str, torch.Tensor], Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """One into the group's memory, or so many into the module: versions say so. The next load fills all."""
    if not simdevice.installed():
        pytest.skip("copies are refused by the simulated device")
    module, values, path = plain
    versions = {name: tensor._version for name, tensor in module.state_dict().items()}
    if number:
        before_copies(monkeypatch, lambda: simdevice.refuse_copy(number))
    else:
        simdevice.refuse_copy(1)
    with pytest.raises(stio.DeviceError, match="copying on sim:0 failed"):
        stio.sync.load_into(module, path, strict=False)
    simdevice.clear_faults()
    monkeypatch.undo()
    assert all((tensor._version > versions[name]) == (number > 0) for name, tensor in module.state_dict().items())
    torch.accelerator.synchronize()
    num_written = sum(bool(tensor.count_nonzero()) for tensor in module.state_dict().values())
    assert (num_written > 0) == (number > 1)
    stio.sync.load_into(module, path, strict=False)
    require_equal(dict(module.state_dict()), {**values, "tied": values["scalar"]})


@gpu
@needs_engine
def test_what_is_queued_just_before_the_copies_reads_the_old_values(
    plain: tuple[Kinds, dict[str, torch.Tensor], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are copied in the order of the current stream, and not of another one."""
    module, values, path = plain
    streams, old = module_of(resolve_device("auto")), []
    before_copies(monkeypatch, lambda: (keep_busy(), old.append(module.within.clone())))
    with streams.stream(streams.Stream(module.within.device)):
        stio.sync.load_into(module, path, strict=False)
        torch.accelerator.synchronize()
    assert [int(tensor.count_nonzero()) for tensor in old] == [0]
    require_equal(dict(module.state_dict()), {**values, "tied": values["scalar"]})


@gpu
@needs_engine
def test_another_stream_is_current_when_the_bytes_are_copied(
    weights_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A current stream belongs to the thread, and another task of the loop may have changed it."""
    device = resolve_device("auto")
    module, streams = new_module(device), module_of(device)
    mine, other = streams.Stream(device), streams.Stream(device)
    copy = TargetMemory.copy_image

    def on_other(*given: Any, **named: Any) -> None:
        with streams.stream(other):
            copy(*given, **named)

    monkeypatch.setattr(TargetMemory, "copy_image", on_other)
    with streams.stream(mine), simdevice.delayed(0.002):
        stio.sync.load_into(module, weights_path, budget_bytes=4 * MIB)
    torch.accelerator.synchronize(device)
    require_equal(dict(module.state_dict()), weights)


@gpu
def test_load_hooks_run_under_the_stream_of_the_caller(weights_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """They run on the load's thread, whose own current stream is another one."""
    device = resolve_device("auto")
    module, streams, seen = new_module(device), module_of(device), []
    module.register_load_state_dict_pre_hook(lambda *_: seen.append(streams.current_stream(device)))
    name = next(iter(weights))
    mine = streams.Stream(device)
    with streams.stream(mine):
        keep_busy()
        old = module.state_dict()[name].clone()
        stio.sync.load_into(module, weights_path)
    torch.accelerator.synchronize(device)
    assert seen == [mine]
    assert not old.count_nonzero()
    require_equal(dict(module.state_dict()), weights)


@gpu
def test_after_an_error_each_tensor_is_old_or_new(weights_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """The version counter tells which; addresses stay; the next load repairs it."""
    device = resolve_device("auto")
    module = new_module(device)
    parameters = dict(module.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    versions = {name: parameter._version for name, parameter in parameters.items()}

    def num_changed() -> int:
        return sum(parameter._version > versions[name] for name, parameter in parameters.items())

    numbers = itertools.count()

    def fail_in_the_middle(name: str, offset: int, nbytes: int) -> None:
        if next(numbers) >= NUM_LAYERS // 2:  # a read brings at most one layer
            assert eventually(lambda: num_changed() > 0)
            raise stio.StorageError("this read fails", path=name, offset=offset)

    root = HookedRoot(weights_path, fail_in_the_middle)
    with pytest.raises(stio.StorageError, match="this read fails"):
        stio.sync.load_into(module, root, budget_bytes=4 * MIB)
    torch.accelerator.synchronize(device)
    zero = torch.zeros(WIDTH, WIDTH)
    for name, parameter in parameters.items():
        is_new = parameter._version > versions[name]
        require_equal({name: parameter.detach()}, {name: weights[name] if is_new else zero})
    assert 0 < num_changed() < NUM_LAYERS
    stio.sync.load_into(module, weights_path)
    require_equal(dict(module.state_dict()), weights)
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == addresses
