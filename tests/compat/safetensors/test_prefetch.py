"""Tensors that are declared ahead and read in the background: in any order, within a budget, and released."""

from __future__ import annotations

import errno
import gc
import inspect
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as official
import torch
from accelerators import gpu, rig_of
from fakes import FakeDevice
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import PATIENCE_SECONDS, eventually, needs_f4, nothing_left, num_threads, ramp, require_equal

import stio
import stio.compat.safetensors as package
from stio import native
from stio.compat.safetensors import PrefetchLoader, SafetensorError, TensorMeta, _tensors, safe_open
from stio.device.base import resolve_device
from stio.errors import StorageError
from stio.runtime.operation import Operation
from stio.storage.local import LocalFile

BACKENDS = ("mmap", "pread")
Tensors = dict[str, torch.Tensor]

STUB = {
    "prefetch": "(self, plan=None, *, device=None, threads=8)",
    "get_tensor_meta": "(self, name)",
    "PrefetchLoader": {
        "names": "(self)",
        "__len__": "(self)",
        "take": "(self, name)",
        "__iter__": "(self)",
        "close": "(self)",
        "__enter__": "(self)",
        "__exit__": "(self, _exc_type, _exc_value, _traceback)",
    },
    "TensorMeta": ["dtype", "shape", "data_offsets"],
    "safetensors": ["PrefetchLoader", "PySafeSlice", "SafetensorError", "TensorMeta", "TensorSpec", "safe_open"],
}
"""From the stub file of safetensors 0.9.0rc1, without its annotations."""


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    chance = random.Random(1)
    found = {f"t{k:02}": ramp(chance.choice([1, 7, 300, 3000, 20_000]), start=k) for k in range(50)}
    return (
        found
        | {"w": ramp(60, 8, 10), "half": ramp(40, 6, dtype=torch.bfloat16), "none": torch.zeros(0, 3)}
        | {"scalar": torch.tensor(3.0)}
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    path = tmp_path_factory.mktemp("prefetch") / "model.safetensors"
    official.save_file(tensors, path, {"stio.aliases": json.dumps({"tied": "w"})})
    return path


@pytest.fixture
def own_file(tmp_path: Path, tensors: Tensors) -> Path:
    """Return a file that the test may change."""
    path = tmp_path / "model.safetensors"
    official.save_file(tensors, path)
    return path


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Stand for "cuda:0"."""
    fake = FakeDevice(delay_seconds=0.0001)
    monkeypatch.setattr(_tensors, "served", lambda device: fake if device in ("cuda:0", 0) else None)
    return fake


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        before = num_threads()
        yield
        gc.collect()
        eventually(lambda: num_threads() <= before)  # a loader that was deleted closes its file on its own thread


class Reads:
    """Holds the plain executor's reads after the first ones until they are let go, or makes them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.passing = 10_000
        self.error: Exception | None = None
        real = LocalFile.read_into

        def read_into(source: LocalFile, offset: int, regions: Any) -> None:
            if source.path == str(path) and offset > 0:
                self.passing -= 1
                if self.passing < 0:
                    self.reached.set()
                    assert self.opened.wait(PATIENCE_SECONDS), "nobody let the reads go"
                if self.error is not None:
                    raise self.error
            real(source, offset, regions)

        monkeypatch.setattr(LocalFile, "read_into", read_into)
        monkeypatch.setattr(native, "available", lambda: False)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Call functions at the same time; return their results, errors among them."""
    results: list[Any] = [None] * len(calls)

    def call(k: int) -> None:
        try:
            results[k] = calls[k]()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            results[k] = error

    threads = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "a call waits for ever"
    return results


def is_full(loader: PrefetchLoader) -> bool:
    """Return whether a loader reads no more until tensors are taken."""
    load = loader._load
    scheduler = load._scheduler
    return scheduler is not None and scheduler._blocked and set(scheduler.budget._held) <= load._arrived


def too_large(loader: PrefetchLoader, tensors: Tensors) -> str:
    """Return the name of a tensor that a loader will not read until others are taken."""
    assert eventually(lambda: is_full(loader))
    name = max(set(tensors) - set(loader._load._delivered), key=lambda name: (tensors[name].nbytes, name))
    assert tensors[name].nbytes == 80_000
    return name


# The interface.


def parameters(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=kept, return_annotation=signature.empty))


def test_the_names_and_signatures_are_those_of_the_stub() -> None:
    assert parameters(safe_open.prefetch) == STUB["prefetch"].replace(")", ", budget_bytes=None)")
    assert parameters(safe_open.get_tensor_meta) == STUB["get_tensor_meta"]
    for name, signature in STUB["PrefetchLoader"].items():
        found = parameters(getattr(PrefetchLoader, name))
        if name == "__exit__":  # they are passed by position
            assert found.count(",") == signature.count(",")
        else:
            assert found == signature, name
    assert list(TensorMeta.__slots__) == STUB["TensorMeta"]
    assert set(STUB["safetensors"]) < set(package.__all__)
    for value in (PrefetchLoader, TensorMeta):
        assert value.__module__ == "stio.compat.safetensors"
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = package.other


def test_meta(file: Path, tensors: Tensors) -> None:
    text = file.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    with safe_open(file, "np") as opened:
        for name in tensors:
            meta = opened.get_tensor_meta(name)
            assert {"dtype": meta.dtype, "shape": meta.shape, "data_offsets": [*meta.data_offsets]} == header[name]
            assert isinstance(meta.data_offsets, tuple)
        with pytest.raises(SafetensorError, match="does not contain tensor absent"):
            opened.get_tensor_meta("absent")
        with pytest.raises(AttributeError):
            meta.dtype = "U8"  # type: ignore[misc]  # that is refused
    with pytest.raises(SafetensorError, match="File is closed"):
        opened.get_tensor_meta("w")


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_all_of_a_file(file: Path, tensors: Tensors, device: FakeDevice, backend: str, place: str) -> None:
    with safe_open(file, "pt", device=place, backend=backend) as opened, opened.prefetch() as loader:
        assert loader.names() == opened.offset_keys()
        assert len(loader) == len(tensors)
        first = loader.take("t07")
        found = dict(loader)
        assert set(found) == set(tensors) - {"t07"}
        assert list(loader) == []
        require_equal(opened.get_tensors(), tensors)  # the file object has not changed
    require_equal(found | {"t07": first}, tensors)
    assert (device.num_copies > 0) == (place == "cuda")
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    del first, found, tensor
    gc.collect()
    assert device.used_bytes == 0


@pytest.mark.parametrize("place", [None, "cuda", "cuda:0", 0, "cpu"])
def test_the_device_of_a_loader(file: Path, tensors: Tensors, device: FakeDevice, place: Any) -> None:
    with (
        safe_open(file, "pt", device="cuda") as opened,
        opened.prefetch({"w": None}, device=place, threads=1) as loader,
    ):
        assert torch.equal(loader.take("w"), tensors["w"])
    assert (device.num_copies > 0) == (place != "cpu")


def test_a_device_without_streams_is_torchs(file: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []

    def to(self: torch.Tensor, device: Any) -> torch.Tensor:
        moved.append(device)
        return self

    there = torch.device("mps", 0)
    monkeypatch.setattr(_tensors, "served", lambda device: None)
    monkeypatch.setattr(_tensors, "resolve_device", lambda device: there)
    monkeypatch.setattr(torch.Tensor, "to", to)
    with safe_open(file, "pt") as opened, opened.prefetch({"w": None}, device="mps") as loader:
        assert torch.equal(loader.take("w"), tensors["w"])
    assert moved == [there]


@gpu
def test_on_an_accelerator(file: Path, tensors: Tensors) -> None:
    where = resolve_device("auto")
    served = where.index if where.type not in ("cuda", "xpu") else str(where)
    order = list(tensors)
    random.Random(3).shuffle(order)
    with safe_open(file, "pt") as opened:
        for budget in (1, 60_000, None):
            with opened.prefetch(dict.fromkeys(order), device=served, budget_bytes=budget) as loader:
                found = {name: loader.take(name) for name in order[:20]} | dict(loader)
            assert {tensor.device for tensor in found.values()} == {where}
            require_equal(found, tensors)
        plan = {"w": (slice(None), [slice(0, 2), slice(6, 8)]), "half": slice(3, 9)}
        with opened.prefetch(plan, device=served) as loader:
            parts = dict(loader)
    require_equal(parts, {"w": torch.cat([tensors["w"][:, :2], tensors["w"][:, 6:]], 1), "half": tensors["half"][3:9]})


@gpu
def test_memory_of_a_taken_tensor_stays_until_its_stream_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors share memory; each is taken on its own, by a stream that reads it later, and dropped at once."""
    tensors = {f"t{k}": torch.arange(200, dtype=torch.uint8).roll(k).repeat(20) for k in range(6)}
    official.save_file(tensors, tmp_path / "f")
    rig = rig_of("real", monkeypatch)
    later: dict[str, Callable[[], bytes]] = {}
    with safe_open(tmp_path / "f", "pt") as opened, rig.own_stream():
        with opened.prefetch(device=0) as loader:
            for name in reversed(loader.names()):
                later[name] = rig.read_later(loader.take(name))
        gc.collect()
        others = dict(opened.prefetch({"t0": None}, device=0))
    assert {name: read() for name, read in later.items()} == {name: bytes(t.tolist()) for name, t in tensors.items()}
    require_equal(others, {"t0": tensors["t0"]})


def test_a_loader_has_no_more_threads_than_it_may(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_threads()
    with safe_open(own_file, "pt", backend="pread") as opened:
        for most in (1, 3):
            reads = Reads(monkeypatch, own_file)
            reads.passing = 0
            with opened.prefetch(threads=most) as loader:
                assert reads.reached.wait(PATIENCE_SECONDS)
                assert eventually(lambda most=most: num_threads() == before + 1 + most)  # one waits for those that read
                reads.opened.set()
                loader.take("w")
            assert eventually(lambda: num_threads() == before)


# Parts.


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_parts(file: Path, tensors: Tensors, device: FakeDevice, backend: str, place: str) -> None:
    w, half = tensors["w"], tensors["half"]
    cases: list[tuple[Any, torch.Tensor]] = [
        (slice(2, 9), w[2:9]),
        (slice(-3, None), w[-3:]),
        (slice(5, 5), w[5:5]),
        (slice(None), w),
        (slice(0, 60, 7), w[::7]),
        (3, w[3]),
        ((..., 2), w[..., 2]),
        ((slice(4, 6), slice(None), slice(2, 5)), w[4:6, :, 2:5]),
        ((slice(None), slice(0, 8, 3)), w[:, ::3]),
        ([], w[[]]),
        ([5, 1], w[[5, 1]]),
        (np.s_[..., None], w[..., None]),
        ([slice(0, 8), slice(40, 48)], torch.cat([w[0:8], w[40:48]])),
        ([slice(40, 48), slice(0, 8)], torch.cat([w[40:48], w[0:8]])),
        ((slice(None), [slice(0, 2), slice(6, 8)]), torch.cat([w[:, 0:2], w[:, 6:8]], 1)),
        ((..., [slice(8, 10), slice(1, 3)]), torch.cat([w[..., 8:10], w[..., 1:3]], 2)),
    ]
    with safe_open(file, "pt", device=place, backend=backend) as opened:
        for index, expected in cases:
            with opened.prefetch({"w": index, "half": slice(1, 4), "t01": None}, budget_bytes=1 << 20) as loader:
                assert loader.names() == [name for name in opened.offset_keys() if name in ("w", "half", "t01")]
                found = dict(loader)
            require_equal(found, {"w": expected, "half": half[1:4], "t01": tensors["t01"]})


@needs_f4
def test_parts_of_packed_pairs(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    path = tmp_path / "f4"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(16)))
    with safe_open(path, "pt") as opened:
        with opened.prefetch({"x": slice(1, 3)}) as loader:
            part = loader.take("x")
        assert part.dtype == torch.float4_e2m1fn_x2
        assert part.view(torch.uint8).flatten().tolist() == list(range(4, 12))
        with pytest.raises(SafetensorError, match="F4 packs two elements"):
            opened.prefetch({"x": (slice(None), slice(0, 4))})


# What is refused.


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"absent": None}, "File does not contain tensor absent"),
        ({}, "prefetch plan selects no tensors"),
        ({3: None}, "prefetch plan keys must be tensor names"),
        ({"w": 60}, "out of range"),
        ({"w": slice(0, 3, 0)}, "zero"),
        ({"w": (0, 0, 0, 0)}, "more indices than dimensions"),
        ({"w": "rows"}, "'w': the index does not fit"),
        ({"scalar": slice(0, 1)}, "more indices than dimensions"),
    ],
)
def test_a_plan_that_does_not_fit(file: Path, plan: Any, message: str) -> None:
    with safe_open(file, "pt") as opened, pytest.raises(SafetensorError, match=message):
        opened.prefetch(plan)


def test_arguments_that_are_wrong(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(file, "pt") as opened:
        with pytest.raises(TypeError, match="'plan'"):
            opened.prefetch(["w"])  # type: ignore[arg-type]  # that is refused
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="threads must be positive"):
                opened.prefetch(threads=wrong)
            with pytest.raises(ValueError, match="positive"):
                opened.prefetch(budget_bytes=wrong)
        with pytest.raises(SafetensorError, match="device blah is invalid"):
            opened.prefetch(device="blah")
        if not torch.accelerator.is_available():
            with pytest.raises(SafetensorError, match="no such device"):
                opened.prefetch(device="cuda:7")
    with pytest.raises(SafetensorError, match="File is closed"):
        opened.prefetch()
    with safe_open(file, "np") as opened, pytest.raises(SafetensorError, match='only compatible with framework="pt"'):
        opened.prefetch()
    with pytest.raises(TypeError):
        PrefetchLoader()  # type: ignore[call-arg]  # only `prefetch` makes one


def test_a_dtype_that_torch_has_not(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]},
        }
    ).encode()
    path = tmp_path / "f"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    with safe_open(path, "pt") as opened:
        for plan in (None, {"a": None}):
            with pytest.raises(SafetensorError, match="^Dtype not understood: F6_E2M3"):
                opened.prefetch(plan)
        with opened.prefetch({"b": None}) as loader:
            assert loader.take("b").tolist() == [100]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    official.save_file({}, tmp_path / "f")
    with safe_open(tmp_path / "f", "pt") as opened, opened.prefetch() as loader:
        assert (len(loader), loader.names(), list(loader)) == (0, [], [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_tensor_once(file: Path, tensors: Tensors, backend: str) -> None:
    with safe_open(file, "pt", backend=backend) as opened, opened.prefetch({"w": None, "half": None}) as loader:
        results = in_threads(*[lambda: loader.take("w")] * 6)
        errors = [result for result in results if isinstance(result, BaseException)]
        assert len(errors) == 5
        for error in errors:
            with pytest.raises(SafetensorError, match="already delivered"):
                raise error
        with pytest.raises(SafetensorError, match="t01 is not in the prefetch plan"):
            loader.take("t01")
        with pytest.raises(TypeError, match="'name'"):
            loader.take(3)  # type: ignore[arg-type]  # that is refused
        assert [name for name, _ in loader] == ["half"]
        with pytest.raises(SafetensorError, match="already delivered"):
            loader.take("half")


# The budget.


ORDERS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@ORDERS
@given(
    chance=st.randoms(use_true_random=False),
    budget=st.sampled_from([1, 3000, 20_000, 90_000, 1 << 20]),
    num_takers=st.integers(1, 4),
    num_iterating=st.integers(0, 2),
    backend=st.sampled_from(["mmap", "pread", "device"]),
)
def test_any_order_ends_within_the_budget(
    file: Path, tensors: Tensors, chance: random.Random, budget: int, num_takers: int, num_iterating: int, backend: str
) -> None:
    """Threads that take in orders of their own, beside others that iterate, get everything, and each tensor once."""
    fake = FakeDevice(delay_seconds=0.0001)
    order = list(tensors)
    chance.shuffle(order)
    taken = order[: len(order) // 2] if num_iterating else order
    seen: list[str] = []

    def check(name: str, tensor: torch.Tensor) -> None:
        assert torch.equal(tensor, tensors[name]), name
        seen.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tensors, "served", lambda device: fake)
        on_device = backend == "device"
        with (
            safe_open(
                file, "pt", device="cuda" if on_device else "cpu", backend="pread" if on_device else backend
            ) as f,
            f.prefetch(budget_bytes=budget) as loader,
        ):

            def take(names: list[str]) -> Callable[[], None]:
                def run() -> None:
                    for name in names:
                        try:
                            tensor = loader.take(name)
                        except SafetensorError as error:  # one that iterates was before us
                            assert num_iterating, error
                            continue
                        check(name, tensor)
                        del tensor

                return run

            def iterate() -> None:
                for name, tensor in loader:
                    check(name, tensor)
                    del tensor

            results = in_threads(
                *[take(taken[k::num_takers]) for k in range(num_takers)], *[iterate for _ in range(num_iterating)]
            )
    assert results == [None] * (num_takers + num_iterating)
    assert sorted(seen) == sorted(tensors)
    largest = max(tensor.nbytes for tensor in tensors.values())
    # What was read and not taken, and one tensor in each thread that takes.
    assert fake.peak_bytes <= max(budget, largest) + (num_takers + num_iterating) * (largest + 4096)
    gc.collect()
    assert eventually(lambda: fake.used_bytes == 0)


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [40_000, 120_000])
def test_nothing_is_read_beyond_the_budget(file: Path, tensors: Tensors, device: FakeDevice, budget: int) -> None:
    """And a tensor that is not read for that reason is read when it is asked for, beside the budget."""
    assert sum(tensor.nbytes for tensor in tensors.values()) > 3 * budget
    with safe_open(file, "pt", device="cuda") as opened, opened.prefetch(budget_bytes=budget) as loader:
        assert eventually(lambda: is_full(loader))
        before = device.used_bytes
        assert 0 < before <= max(budget, *(tensor.nbytes for tensor in tensors.values()))
        last = too_large(loader, tensors)
        assert torch.equal(loader.take(last), tensors[last])
        gc.collect()
        assert device.used_bytes == before  # it was read alone, and dropped
        found = dict(loader)
    require_equal(found, {name: tensor for name, tensor in tensors.items() if name != last})


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_nobody_wants_any_more_is_not_read(tmp_path: Path, device: FakeDevice, place: str) -> None:
    """A group that is a single tensor is read once, also if its tensor was read alone."""
    tensors = {f"t{k}": ramp(50_000, start=k) for k in range(8)}
    path = tmp_path / "model.safetensors"
    official.save_file(tensors, path)
    before = stio.stats().read_bytes
    with safe_open(path, "pt", device=place, backend="pread") as opened:
        with opened.prefetch(budget_bytes=200_000) as loader:
            found = {name: loader.take(name) for name in reversed(loader.names())}
    require_equal(found, tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert nbytes <= stio.stats().read_bytes - before <= nbytes + 9 * 2 * 4096


# Its end.


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("end", ["close", "block", "error", "deleted"])
def test_what_was_not_taken_is_released(file: Path, tensors: Tensors, device: FakeDevice, place: str, end: str) -> None:
    with safe_open(file, "pt", device=place, backend="pread") as opened, nothing_left():
        before = num_threads()
        loader = opened.prefetch(budget_bytes=100_000)
        kept = loader.take("w")
        if end == "close":
            loader.close()
            loader.close()
        elif end == "block":
            with loader:
                pass
        elif end == "error":
            with pytest.raises(KeyError), loader:
                raise KeyError
        elif end == "deleted":
            del loader
            assert eventually(lambda: num_threads() <= before)
        if end != "deleted":
            for call in (lambda: loader.take("t01"), lambda: loader.take("w"), lambda: next(iter(loader))):
                with pytest.raises(SafetensorError, match="prefetch loader closed"):
                    call()
            assert len(loader) == len(loader.names()) == len(tensors)
    gc.collect()
    assert eventually(lambda: device.used_bytes <= kept.nbytes)
    assert torch.equal(kept, tensors["w"])


def test_iteration_ends_when_the_loader_is_closed(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        loader = opened.prefetch()
        pairs = iter(loader)
        next(pairs)
        loader.close()
        with pytest.raises(SafetensorError, match="prefetch loader closed"):
            next(pairs)


def test_a_close_ends_the_wait_of_others(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(own_file, "pt", backend="pread") as opened:
        reads = Reads(monkeypatch, own_file)
        reads.passing = 0
        loader = opened.prefetch()
        assert reads.reached.wait(PATIENCE_SECONDS)

        def close() -> None:
            assert eventually(lambda: len(loader._load._notifier._wakers) == 2)  # both of the others wait
            loader.close()

        def let_go() -> None:
            assert eventually(lambda: loader._load._operation.cancelled)
            reads.opened.set()

        waiting, iterating, *others = in_threads(lambda: loader.take("w"), lambda: list(loader), close, let_go)
        assert others == [None, None]
        for error in (waiting, iterating):
            assert isinstance(error, SafetensorError)
            assert "prefetch loader closed" in str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_outlives_its_file(file: Path, tensors: Tensors, backend: str) -> None:
    opened = safe_open(file, "pt", backend=backend)
    with opened:
        loader = opened.prefetch(budget_bytes=50_000)
    del opened
    gc.collect()
    with loader:
        require_equal(dict(loader), tensors)


@pytest.mark.slow
def test_several_loaders_of_one_file(file: Path, tensors: Tensors, device: FakeDevice) -> None:
    with safe_open(file, "pt") as opened:
        loaders = [opened.prefetch(device=place, budget_bytes=60_000) for place in ("cpu", "cuda", "cpu")]
        found: list[Tensors] = [{}, {}, {}]
        for name in tensors:
            for loader, got in zip(loaders, found, strict=True):
                got[name] = loader.take(name)
        for loader, got in zip(loaders, found, strict=True):
            loader.close()
            require_equal(got, tensors)


@pytest.mark.skipif(sys.platform != "linux", reason="signals a thread")
@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupt_leaves_the_loader_as_it_was(
    own_file: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Also if the tensor is being read alone, because the budget is full."""
    with safe_open(own_file, "pt", backend="pread") as opened:
        reads = Reads(monkeypatch, own_file)
        if not alone:
            reads.passing = 0
        with opened.prefetch(budget_bytes=30_000 if alone else None) as loader:
            name = too_large(loader, tensors) if alone else "w"
            reads.passing = 0

            def interrupt() -> None:
                assert reads.reached.wait(PATIENCE_SECONDS)
                assert eventually(lambda: bool(loader._load._notifier._wakers) or bool(loader._load._alone))
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if alone:  # the load of that tensor ends before the call does
                    assert eventually(lambda: loader._load._alone[0].cancelled)
                    reads.opened.set()

            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    loader.take(name)
            finally:
                thread.join()
                reads.opened.set()
            reads.passing = 10_000
            assert torch.equal(loader.take(name), tensors[name])
            require_equal(dict(loader), {other: tensor for other, tensor in tensors.items() if other != name})


@pytest.mark.slow
def test_fork(file: Path, torch_zygote: Any) -> None:
    """A child's loader is closed, the parent's goes on."""
    code = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
torch.set_num_threads(1)
from stio.compat.safetensors import SafetensorError, safe_open
opened = safe_open(sys.argv[1], "pt", backend="pread")
loader = opened.prefetch(budget_bytes=30_000)
first = loader.names()[0]
loader.take(first)
pid = os.fork()
if not pid:
    code = 1
    try:
        try:
            loader.take(loader.names()[-1])
        except SafetensorError as error:
            assert "closed" in str(error)
            loader.close()
            del loader
            with opened.prefetch() as again:
                code = 0 if len(dict(again)) == len(again) else 2
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
with loader:
    assert len(dict(loader)) == len(loader) - 1
print("done")
"""
    found = subprocess.run(
        [torch_zygote.python, "-c", code, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.stdout, found.stderr) == ("done\n", "")


# Errors.


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("how", ["take", "iterate"])
def test_a_disk_that_fails(
    own_file: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    with safe_open(own_file, "pt", device=place, backend="pread") as opened:
        reads = Reads(monkeypatch, own_file)
        reads.error = StorageError("broken", errno=errno.EIO)
        with opened.prefetch() as loader:
            for _ in range(2):  # it stays broken
                with pytest.raises(OSError, match="broken") as caught:
                    loader.take("w") if how == "take" else list(loader)
                assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(own_file))
    assert device.num_pending == 0


def test_a_disk_that_fails_before_prefetch_returns(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a read is raised where its tensor is taken, however early it occurs."""
    with safe_open(own_file, "pt", backend="pread") as opened:
        reads = Reads(monkeypatch, own_file)
        reads.error = StorageError("broken", errno=errno.EIO)
        whole = Operation.wait_until
        monkeypatch.setattr(Operation, "wait_until", lambda self, ready: whole(self, lambda: False))
        loader = opened.prefetch()
        monkeypatch.undo()
        with loader, pytest.raises(OSError, match="broken"):
            loader.take("w")


def test_a_read_alone_that_fails_may_be_repeated(
    own_file: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with safe_open(own_file, "pt", backend="pread") as opened, opened.prefetch(budget_bytes=30_000) as loader:
        last = too_large(loader, tensors)
        reads = Reads(monkeypatch, own_file)
        reads.error = StorageError("broken", errno=errno.EIO)
        with pytest.raises(OSError, match="broken"):
            loader.take(last)
        reads.error = None
        assert torch.equal(loader.take(last), tensors[last])
        assert len(dict(loader)) == len(tensors) - 1


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_file_that_is_cut(own_file: Path, device: FakeDevice, place: str) -> None:
    with safe_open(own_file, "pt", device=place, backend="pread") as opened:
        os.truncate(own_file, 5000)
        with pytest.raises(OSError, match="changed"):
            opened.prefetch()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_was_replaced(own_file: Path, tensors: Tensors, backend: str) -> None:
    """An open descriptor leads to the file that was opened."""
    with safe_open(own_file, "pt", backend=backend) as opened:
        official.save_file({"w": torch.zeros(3)}, own_file.parent / "new")
        os.replace(own_file.parent / "new", own_file)
        with opened.prefetch() as loader:
            require_equal(dict(loader), tensors)


def test_a_device_that_is_full(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "served", lambda device: FakeDevice(memory_bytes=1000))
    with safe_open(file, "pt") as opened, opened.prefetch(device="cuda") as loader:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            list(loader)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            loader.take("w")


def test_a_device_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "served", lambda device: FakeDevice(fail_copy=1))
    with (
        safe_open(file, "pt", device="cuda") as opened,
        opened.prefetch() as loader,
        pytest.raises(SafetensorError, match="failed"),
    ):
        list(loader)


def test_a_system_without_threads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, *, name: str) -> None:
        raise RuntimeError("can't start new thread")

    operation = __import__("stio.runtime.operation", fromlist=["start_thread"])
    monkeypatch.setattr(operation, "start_thread", refuse)
    with safe_open(file, "pt") as opened, nothing_left(), pytest.raises(OSError) as caught:
        opened.prefetch()
    assert caught.value.errno == errno.EAGAIN


# How it is used by others.


def test_code_for_the_earlier_state_gets_the_right_tensors(file: Path, tensors: Tensors) -> None:
    """`prefetch` and then `get_tensor` of the file object, as often as it likes."""
    with safe_open(file, "pt", backend="pread") as opened:
        opened.prefetch()
        for name in itertools.chain(tensors, tensors):
            assert torch.equal(opened.get_tensor(name), tensors[name])


@pytest.mark.slow
def test_files_in_turn_with_the_next_one_ahead(file: Path, tensors: Tensors, device: FakeDevice) -> None:
    """The use of an inference server: each file's loader is started while the one before it is consumed."""
    loaders: list[PrefetchLoader] = []
    found: list[Tensors] = []
    for _ in range(4):
        with safe_open(file, "pt") as opened:
            plan = {name: slice(0, 30) if name == "w" else None for name in opened.offset_keys()}
            loaders.append(opened.prefetch(plan, device="cuda:0", threads=2, budget_bytes=200_000))
        if len(loaders) == 2:
            with loaders.pop(0) as loader:
                found.append(dict(loader))
    with loaders.pop() as loader:
        found.append({name: loader.take(name) for name in loader.names()})
    for one in found:
        require_equal(one, {**tensors, "w": tensors["w"][:30]})


@pytest.mark.slow
def test_numpy_needs_no_torch(file: Path) -> None:
    code = (
        "import sys; from stio.compat import safetensors\n"
        f"with safetensors.safe_open({str(file)!r}, 'np') as f: f.get_tensor_meta('w')\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None\n"  # so an import of it fails, and takes no seconds
        "try: safetensors.PrefetchLoader\n"
        "except ImportError as error: print(error.name)"
    )
    # A real interpreter without torch: what it imports.
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "torch\n"
