"""Loads into memory on the CPU: the engine copies bytes that stay as they are, and no tensor is made for them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import module_of, needs_engine, nothing_left, ramp, require_equal, save_file
from torch import nn

import stio
from stio import native, sync
from stio.device import copy_in
from stio.loading import planned, read_paths
from stio.runtime.operation import Cancelled, Operation

SOURCES = {f"t{k}": ramp(3, 4, start=k) for k in range(20)} | {"empty": torch.zeros(0, 4), "one": torch.tensor(3.0)}


@pytest.fixture(autouse=True)
def by_the_engine(monkeypatch):
    """Small files as large ones, although they are in the page cache."""
    monkeypatch.setattr(planned, "_AT_ONCE_BYTES", -1)


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.fixture
def file(tmp_path):
    return save_file(SOURCES, tmp_path / "model.safetensors")


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in SOURCES.items()}


@pytest.fixture
def num_made(monkeypatch):
    """The numbers of tensors that were made over host memory, a number for each call."""
    numbers, make = [], read_paths.tensors_in

    def tensors_in(region, names, *others):
        numbers.append(len(names))
        return make(region, names, *others)

    monkeypatch.setattr(read_paths, "tensors_in", tensors_in)
    return numbers


@needs_engine
@pytest.mark.parametrize("options", [{}, {"memory": "copy"}, {"cache": True}], ids=repr)
def test_one_tensor_of_bytes_for_a_group(file, num_made, options):
    """Beside a busy Python thread the ends of 10,000 temporary tensors took 18 s (two cores)."""
    module = module_of(zeros())
    with stio.HostCache(1 << 20) as cache:
        sync.load_into(module, file, **{name: cache if name == "cache" else one for name, one in options.items()})
        require_equal(module.state_dict(), SOURCES)
    assert num_made == [1]


@needs_engine
@pytest.mark.parametrize(
    "other", [torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, 3).t()], ids=["dtype", "layout"]
)
def test_a_group_with_a_tensor_that_torch_copies_is_one_of_tensors(file, num_made, other):
    module = module_of(zeros() | {"t7": other})
    sync.load_into(module, file)
    require_equal(module.state_dict(), SOURCES | {"t7": SOURCES["t7"].to(other.dtype)})
    assert num_made == [len(SOURCES)]


def test_versions_are_raised_once(file):
    module = module_of(zeros())
    before = {name: tensor._version for name, tensor in module.state_dict(keep_vars=True).items()}
    sync.load_into(module, file)
    assert {name: tensor._version - 1 for name, tensor in module.state_dict(keep_vars=True).items()} == before


@needs_engine
def test_inference_tensors_have_no_version(file, num_made):
    with torch.inference_mode():
        module = module_of(zeros())
        sync.load_into(module, file)
        require_equal(module.state_dict(), SOURCES)
    assert num_made == [1]


@needs_engine
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_cast_on_the_way_is_no_copy_of_bytes(tmp_path, num_made, dtype):
    tensors = {"a": torch.tensor([1.001]), "b": torch.tensor([1.0], dtype=torch.float16)}
    module = module_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    sync.load_into(module, save_file(tensors, tmp_path / "x.safetensors"), dtype=dtype)
    assert module.a.item() == (tensors["a"].to(dtype) if dtype else tensors["a"]).item()
    assert num_made == ([1] if dtype is None else [2])


class Overriding(nn.Parameter):
    """A parameter with functions of its own, as those of vLLM."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


@needs_engine
def test_a_subclass_that_overrides_functions_needs_no_second_copy(file, num_made):
    module = module_of({name: one for name, one in zeros().items() if name != "t7"})
    parameter = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    parameter.__class__ = Overriding
    module.register_parameter("t7", parameter)
    sync.load_into(module, file)
    require_equal({name: one.detach().as_subclass(torch.Tensor) for name, one in module.state_dict().items()}, SOURCES)
    assert num_made == [len(SOURCES)]


@needs_engine
def test_a_lazy_load_leaves_the_reads_of_its_pages_to_its_own_thread(file, num_made):
    """In a thread of the engine a disk that stands still would stop other loads."""
    module = module_of(zeros())
    sync.load_into(module, file, memory="lazy")
    require_equal(module.state_dict(), SOURCES)
    assert num_made == [len(SOURCES)]


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("shift", [0, 1000])
def test_memory_that_overlaps_gets_the_tensors_in_their_order(tmp_path, num_made, shift):
    """By chunks of the engine it would get a mix of both."""
    tensors = {"a": torch.full((6_000_000,), 1.0), "b": torch.full((6_000_000,), 2.0)}
    file = save_file(tensors, tmp_path / "x.safetensors")
    memory = torch.zeros(6_000_000 + shift)
    state = {"a": memory[:6_000_000], "b": memory[shift:]}
    asyncio.run(stio.distributed.load_into(state, file))
    assert set(memory[shift:].tolist()) == {2.0}
    assert set(memory[:shift].tolist()) <= {1.0}
    assert sum(num_made) == 2


@needs_engine
def test_memory_that_a_tensor_no_longer_has_is_held_during_the_copies(file, monkeypatch):
    """`module.half()` in another thread would free it, and the engine would write to memory of others."""
    module, move, held = module_of(zeros()), copy_in._move, []

    def changed(transfer, ranges):
        storage = weakref.ref(module.t7.untyped_storage())
        module.t7.data = torch.zeros(3, 4)
        held.append(storage() is not None)
        move(transfer, ranges)

    monkeypatch.setattr(copy_in, "_move", changed)
    sync.load_into(module, file)
    require_equal(module.state_dict(), SOURCES | {"t7": torch.zeros(3, 4)})
    assert held == [True]


@needs_engine
@pytest.mark.parametrize("function", ["extent_of", "traits_of"])
def test_a_tensor_that_gets_other_memory_between_two_checks(file, monkeypatch, function):
    """The engine never writes to an address of which the storage is not held."""
    module, check, copy, old = module_of(zeros()), getattr(copy_in, function), copy_in.TargetMemory.copy_image, []
    tensor, held = module.t7, []

    def changed(*given, **named):
        found = check(*given, **named)
        if old == [] and any(one is tensor for one in given):
            old.append(weakref.ref(tensor.untyped_storage()))
            tensor.data = torch.zeros(3, 4)
        return found

    def copying(*given, **named):
        monkeypatch.setattr(copy_in, function, changed)  # not when the load begins, which calls it too
        copy(*given, **named)

    def moving(transfer, ranges):
        held.append(old[0]() is not None)
        move(transfer, ranges)

    move = copy_in._move
    monkeypatch.setattr(copy_in.TargetMemory, "copy_image", copying)
    monkeypatch.setattr(copy_in, "_move", moving)
    sync.load_into(module, file)
    assert held == [True]
    require_equal(module.state_dict() | {"t7": SOURCES["t7"]}, SOURCES)


@needs_engine
def test_a_tie_in_a_state_is_no_overlap(file, num_made):
    state = zeros()
    state["t8"] = state["t7"]
    sources = SOURCES | {"t8": SOURCES["t7"]}
    other = file.with_name("tied.safetensors")
    sync.save(sources, other)
    asyncio.run(stio.distributed.load_into(state, other))
    require_equal(state, sources)
    assert num_made == [1]


@needs_engine
def test_a_short_tensor_alone_is_copied_without_the_engine(tmp_path, num_made, monkeypatch):
    """To wake a thread for it takes longer."""
    calls, make = [], native.Transfer
    monkeypatch.setattr(native, "Transfer", lambda **named: (calls.append(named), make(**named))[1])
    module = module_of({"a": torch.zeros(4)})
    sync.load_into(module, save_file({"a": ramp(4)}, tmp_path / "x.safetensors"))
    require_equal(module.state_dict(), {"a": ramp(4)})
    assert len(calls) == 1  # that of the load


@needs_engine
@pytest.mark.parametrize("change", ["layout", "dtype"])
def test_what_has_changed_since_the_load_began_is_copied_by_torch(file, monkeypatch, change):
    module, copy = module_of(zeros()), copy_in.TargetMemory.copy_image

    def changed(*given, **named):
        old = module.t7
        new = torch.zeros(4, 3).t() if change == "layout" else torch.zeros(3, 4, dtype=torch.float64)
        old.data = new
        return copy(*given, **named)

    monkeypatch.setattr(copy_in.TargetMemory, "copy_image", changed)
    sync.load_into(module, file)
    require_equal(module.state_dict(), SOURCES | {"t7": SOURCES["t7"].to(module.t7.dtype)})
    assert not module.t7.is_contiguous() or change == "dtype"


@needs_engine
@pytest.mark.parametrize("fails", ["for the copies", "for all"])
def test_where_no_thread_can_be_started_torch_copies(file, monkeypatch, fails):
    make, calls = native.Transfer, []

    def transfer(**named):
        calls.append(named)
        if fails == "for all" or len(calls) > 1:
            raise OSError("the engine cannot start a thread")
        return make(**named)

    monkeypatch.setattr(native, "Transfer", transfer)
    module = module_of(zeros())
    before = module.t7._version
    sync.load_into(module, file)
    require_equal(module.state_dict(), SOURCES)
    assert len(calls) == 2
    assert module.t7._version == before + 1


@needs_engine
def test_a_cancel_ends_a_copy_within_a_second():
    ended, waits, limit = threading.Event(), threading.Event(), time.perf_counter() + 10

    def take(seconds):
        waits.set()
        time.sleep(seconds)
        return ["a group"] * (time.perf_counter() > limit)

    endless = SimpleNamespace(add=lambda ranges: None, take=take, end=ended.set)
    ranges = native.Ranges()
    ranges.host_to_host(0, 1, 1, 1)
    raised: list[BaseException] = []

    def body(operation):
        try:
            copy_in._move(endless, ranges)
        except BaseException as error:
            raised.append(error)
            raise

    operation = Operation(body, name="copy").start()
    assert waits.wait(10)
    begin = time.perf_counter()
    operation.close()
    assert time.perf_counter() - begin < 1
    assert ended.is_set()
    assert isinstance(raised.pop(), Cancelled)
