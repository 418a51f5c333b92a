"""Loads into memory on the CPU: the engine copies bytes that stay as they are, and no tensor is made for them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support import module_of, needs_engine, nothing_left, ramp, require_equal, save_file

import stio
from stio import native, sync
from stio.device import tensor_memory
from stio.loading import read_paths, target
from stio.runtime.operation import Cancelled, Operation

SOURCES = {f"t{k}": ramp(3, 4, start=k) for k in range(20)} | {"empty": torch.zeros(0, 4), "one": torch.tensor(3.0)}


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.fixture
def file(tmp_path):
    return save_file(SOURCES, tmp_path / "model.safetensors")


def zeros(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in SOURCES.items()}


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
@pytest.mark.parametrize("change", ["layout", "dtype"])
def test_what_has_changed_since_the_load_began_is_copied_by_torch(file, monkeypatch, change):
    module, copy = module_of(zeros()), target.copy_from_image

    def changed(*given, **named):
        old = module.t7
        new = torch.zeros(4, 3).t() if change == "layout" else torch.zeros(3, 4, dtype=torch.float64)
        old.data = new
        return copy(*given, **named)

    monkeypatch.setattr(target, "copy_from_image", changed)
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
    sync.load_into(module, file)
    require_equal(module.state_dict(), SOURCES)
    assert len(calls) == 2


@needs_engine
def test_a_cancel_ends_a_copy_within_a_second(monkeypatch):
    ended, waits, limit = threading.Event(), threading.Event(), time.perf_counter() + 10

    def take(seconds):
        waits.set()
        time.sleep(seconds)
        return ["a group"] * (time.perf_counter() > limit)

    endless = SimpleNamespace(add=lambda ranges: None, take=take, end=ended.set)
    monkeypatch.setattr(native, "Transfer", lambda: endless)
    ranges = native.Ranges()
    ranges.host_to_host(0, 1, 1, 1)
    raised = []

    def body(operation):
        try:
            tensor_memory._has_copied(ranges)
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
