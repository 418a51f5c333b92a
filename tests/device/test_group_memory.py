"""The device memory of a group: each byte where it belongs, tensors with storages of their own, nothing left behind."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass

import pytest
import torch
from fakes import FakeDevice

from stio.device import torch_private
from stio.device.tensors import TORCH_DTYPES, GroupMemory, bytes_of_tensor
from stio.errors import DeviceMemoryError
from stio.format.dtypes import tensor_nbytes


def group_memory(device: FakeDevice, layout: list[tuple[str, tuple[int, ...], int]]) -> GroupMemory:
    """Allocate for tensors given as dtype, shape and unwanted bytes before it."""
    offsets, at = [], 0
    for dtype, shape, gap in layout:
        at += gap
        offsets.append(at)
        at += tensor_nbytes(dtype, shape)
    names = [f"t{k}" for k in range(len(layout))]
    return GroupMemory.allocate(
        device, [Tensors(names, [d for d, _, _ in layout], [s for _, s, _ in layout], offsets)]
    )[0]


@dataclass
class Tensors:
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    nbytes: int = 0
    posts: tuple[int, ...] = ()


LARGE = (1 << 18,)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [
        [("F32", LARGE, 0), ("F32", LARGE, 0)],
        [("F32", (5,), 0), ("BF16", (3,), 2), ("U8", (1,), 0)],
        [("F32", (4,), 0), ("BF16", (3, 3), 16), ("F32", (), 2), ("F32", (), 0), ("U8", (16,), 4)],
        [("F32", (), 0)] * 6 + [("F16", (9,), 0)] * 2,
        [("U8", (3,), 5), ("F32", LARGE, 0), ("F32", (7,), 0), ("I64", (2,), 0)],
        [("U8", (1,), 0), ("F64", (4,), 0), ("I16", (2,), 1)],  # misaligned in the file
        [("F32", (0, 3), 0), ("F32", (2,), 0), ("F32", (0,), 0)],
        [("F4", (2, 6), 0), ("C64", (2,), 2), ("BOOL", (), 0)],
    ],
)
@pytest.mark.parametrize("slot_bytes", [5, 4096, 100_001, 8 << 20])
def test_bytes_are_copied_where_they_belong(layout: list[tuple[str, tuple[int, ...], int]], slot_bytes: int) -> None:
    if any(dtype not in TORCH_DTYPES for dtype, _, _ in layout):
        pytest.skip("this torch lacks one of the dtypes")
    device = FakeDevice(manual=True)
    total = sum(gap + tensor_nbytes(dtype, shape) for dtype, shape, gap in layout)
    slot_bytes = max(slot_bytes, total // 50)
    data = random.Random(total).randbytes(total)
    memory = group_memory(device, layout)
    starts = list(range(0, total, slot_bytes))
    random.Random(0).shuffle(starts)  # workers finish in any order
    for start in starts:
        part = data[start : start + slot_bytes]
        slot = device.staging(len(part))
        slot.write(0, part)
        device.copy(memory.copies(start, slot))
        device.step()
    assert list(memory.tensors) == [f"t{k}" for k in range(len(layout))]
    at = 0
    for (dtype, shape, gap), tensor in zip(layout, memory.tensors.values(), strict=True):
        at += gap
        nbytes = tensor_nbytes(dtype, shape)
        assert tensor.dtype == TORCH_DTYPES[dtype]
        assert bytes(bytes_of_tensor(tensor, 0, nbytes).tolist()) == data[at : at + nbytes]
        assert tensor.untyped_storage().nbytes() == nbytes == tensor.nbytes
        assert not tensor._is_view()
        at += nbytes
    addresses = [tensor.untyped_storage().data_ptr() for tensor in memory.tensors.values() if tensor.nbytes]
    assert len(set(addresses)) == len(addresses)


def test_groups_are_allocated_together_and_have_memory_of_their_own() -> None:
    device = FakeDevice()
    layouts = [Tensors([f"t{k}", f"u{k}"], ["U8", "F32"], [(3,), (k, 2)], [0, 3]) for k in range(4)]
    memories = GroupMemory.allocate(device, layouts)
    assert [list(one.tensors) for one in memories] == [[f"t{k}", f"u{k}"] for k in range(4)]
    assert [[place[2:] for place in one.places(1, 3)] for one in memories] == [[(1, 2)]] + [[(1, 2), (3, 1)]] * 3
    assert GroupMemory.allocate(device, []) == []


def test_a_group_whose_bytes_are_copied_gets_one_tensor() -> None:
    """Not if a name is of another kind, or if more is read than is selected."""
    device = FakeDevice()
    layouts = [
        Tensors(["a", "b"], ["BF16", "F32"], [(3,), (2,)], [5, 11], 19),
        Tensors(["c", "x"], ["BF16", "F32"], [(3,), (2,)], [0, 6], 14),
        Tensors(["d"], ["F32"], [(2,)], [0], 8, (0,)),
    ]
    first, *others = GroupMemory.allocate(device, layouts, {"a", "b", "c", "d"})
    assert first.image is not None
    assert (first.tensors, first.image.tensors) == (
        {},
        {"a": (5, torch.bfloat16, (3,)), "b": (11, torch.float32, (2,))},
    )
    assert (first.image.memory.dtype, first.image.memory.shape) == (torch.uint8, (19,))
    assert list(first.places(2, 15)) == [(first.image.memory, 2, 2, 15)]
    assert [(list(one.tensors), one.image) for one in others] == [(["c", "x"], None), (["d"], None)]


@pytest.mark.parametrize("by_torch", [True, False])
def test_new_tensors(monkeypatch: pytest.MonkeyPatch, by_torch: bool) -> None:
    """By the function that compiled models call, and by storages: tensors of one kind."""
    made = {"cpu": torch._C._dynamo.guards._empty_strided_cpu} if by_torch else {}
    monkeypatch.setattr(torch_private, "EMPTY_STRIDED", made)
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3, 4)]
    wanted = [(dtype, shape) for dtype in TORCH_DTYPES.values() for shape in shapes]
    with torch.inference_mode(False):
        tensors = torch_private.new_tensors(wanted, torch.device("cpu"))
    for (dtype, shape), tensor in zip(wanted, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.is_contiguous()
        assert (tensor._is_view(), tensor.requires_grad, tensor.storage_offset(), tensor._version) == (
            False,
            False,
            0,
            0,
        )
    assert torch_private.new_tensors([], torch.device("cpu")) == []


def test_a_tensor_is_freed_alone() -> None:
    device = FakeDevice()
    memory = group_memory(device, [("U8", (100,), 0), ("U8", (7,), 0)])
    kept = memory.tensors["t1"]
    del memory
    gc.collect()
    assert (device.used_bytes, kept.nbytes) == (7, 7)


def test_without_memory_what_was_allocated_is_free_again() -> None:
    device = FakeDevice(memory_bytes=3 << 20)
    with pytest.raises(DeviceMemoryError):
        group_memory(device, [("F32", LARGE, 0)] * 4)
    gc.collect()
    assert device.used_bytes == 0
