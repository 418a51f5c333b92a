"""The iterator of names and tensors: the tensors of a load, one at a time, and nothing left however it ends."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from fakes import FakeDevice
from support import Gate, HookedRoot, nothing_left, oracle, ramp, require_equal, save_file, save_sharded

from stio.errors import CheckpointNotFoundError, FormatError, SliceError, StorageError, TensorNotFoundError
from stio.integrations.iterators import weights

KIB = 1 << 10
BUDGET_BYTES = 64 * KIB
SMALL = {"memory": "copy", "budget_bytes": BUDGET_BYTES}
"""One tensor makes a group, and not many fit the budget."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(64, 64 + k) for k in range(12)}, tmp_path_factory.mktemp("model"), 3)


@pytest.fixture
def root(directory):
    root = HookedRoot(directory)
    yield root
    root.close()


@pytest.fixture(autouse=True)
def _clean():
    gc.collect()
    with nothing_left():
        yield


@pytest.mark.parametrize("keywords", [{}, {"memory": "copy"}, {"memory": "lazy"}, SMALL], ids=str)
def test_all_tensors_of_all_shards(directory, keywords):
    require_equal(dict(weights(directory, **keywords)), oracle(directory))


def test_one_file(tmp_path):
    tensors = {"a": ramp(3, 4), "b": ramp(7, dtype=torch.bfloat16)}
    require_equal(dict(weights(save_file(tensors, tmp_path / "one.safetensors"))), tensors)


def test_names_slices_and_dtype(directory):
    index = {"layer.3": np.s_[2:4, :]}
    found = dict(weights(directory, names=["layer.3", "layer.5"], slices=index, dtype=torch.bfloat16))
    expected = oracle(directory)
    require_equal(found, {"layer.3": expected["layer.3"][2:4].bfloat16(), "layer.5": expected["layer.5"].bfloat16()})


def test_to_a_device(directory):
    require_equal(dict(weights(directory, device=FakeDevice(), budget_bytes=1 << 20)), oracle(directory))


def test_it_is_what_load_weights_takes(directory):
    class Target:
        def load_weights(self, pairs):
            self.sums = {name: tensor.double().sum().item() for name, tensor in pairs}
            return set(self.sums)

    target = Target()
    assert target.load_weights(weights(directory)) == set(oracle(directory))
    assert target.sums == {name: tensor.double().sum().item() for name, tensor in oracle(directory).items()}


# Wrong calls, broken files.


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"colour": "red"}, TypeError, "colour"),
        ({"memory": "none"}, ValueError, "memory="),
        ({"budget_bytes": 0}, ValueError, "budget_bytes"),
        ({"dtype": 16}, TypeError, "torch.dtype"),
        ({"progress": 3}, TypeError, "progress="),
    ],
)
def test_wrong_keywords_are_refused_at_the_call(keywords, error, text):
    with pytest.raises(error, match=text):
        weights("nowhere", **keywords)


def test_nothing_is_opened_before_the_first_step(tmp_path):
    pairs = weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        next(pairs)
    assert list(pairs) == []  # a generator that raised has ended


@pytest.mark.parametrize(
    ("keywords", "error"),
    [({"names": "other"}, TensorNotFoundError), ({"slices": {"layer.1": np.s_[0, 0, 0]}}, SliceError)],
)
def test_arguments_that_do_not_fit_the_checkpoint(directory, keywords, error):
    with pytest.raises(error):
        next(weights(directory, **keywords))


def test_a_broken_file(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(FormatError):
        next(weights(tmp_path / "broken.safetensors"))


def test_an_error_in_the_middle_comes_out_and_ends_it(root):
    reads = []

    def fail(name, offset, nbytes):
        reads.append(name)
        if len(reads) > 6:
            raise StorageError("the cable is out", path=name)

    root.hook = fail
    pairs = weights(root, **SMALL)
    with pytest.raises(StorageError, match="cable"):
        list(pairs)
    assert list(pairs) == []
    assert all(file.closed for file in root.files)


# Ends.


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_dropping_it_ends_the_reading(root, steps):
    pairs = weights(root, **SMALL)
    for _ in range(steps):
        next(pairs)
    del pairs
    assert all(file.closed and not file.inside for file in root.files)
    assert bool(root.files) == bool(steps)


def test_closing_it_waits_for_a_read_under_way(root):
    gate = Gate(after=2)
    root.hook = gate
    pairs = weights(root, **SMALL)
    next(pairs)
    assert gate.reached.wait(5)
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    pairs.close()
    assert gate.opened.is_set()  # so close() has waited for the read behind the gate
    opener.join()
    assert all(file.closed for file in root.files)
    assert list(pairs) == []


def test_an_error_of_the_consumers_ends_it(root):
    with pytest.raises(ZeroDivisionError):
        for _, tensor in weights(root, **SMALL):
            tensor.numel() / 0
    gc.collect()
    assert all(file.closed for file in root.files)


def test_tensors_outlive_it(directory):
    pairs = weights(directory)
    name, tensor = next(pairs)
    pairs.close()
    require_equal({name: tensor}, {name: oracle(directory)[name]})


# Memory.


def test_it_reads_no_further_ahead_than_the_budget(root, directory):
    largest = 64 * 75 * 4
    taken = padding = 0
    for _, tensor in weights(root, **SMALL):
        taken += tensor.nbytes
        padding += 2 * 4 * KIB  # a read begins and ends at a page's border
        # What was handed over, the budget, and one tensor that may be larger than what is left of it.
        assert root.data_bytes_read <= taken + padding + BUDGET_BYTES + largest
    assert taken == sum(tensor.nbytes for tensor in oracle(directory).values())


def test_it_keeps_no_tensor_that_it_has_given_out(directory):
    pairs = weights(directory, **SMALL)
    _, tensor = next(pairs)
    seen = weakref.ref(tensor)
    del tensor
    next(pairs)
    assert seen() is None
    pairs.close()


def test_iterators_of_several_threads_do_not_meet(directory):
    expected = oracle(directory)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: dict(weights(directory, **SMALL)), range(8)):
            require_equal(found, expected)
