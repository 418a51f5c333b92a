"""Splitting by the hub's rules: sizes, the greedy rule, storages, patterns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from stio.compat import huggingface_hub as hub


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1KB", 1000),
        (" 10 KB ", 10_000),
        ("20mb", 20_000_000),
        ("1.5GB", 1_500_000_000),
        ("2Tb", 2 * 10**12),
        ("1e3KB", 10**6),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert hub.parse_size_to_int(text) == expected


@pytest.mark.parametrize(("text", "nbytes"), [("1KiB", 1024), ("1.5gib", 3 << 29), ("17", 17), (" 17 ", 17)])
def test_max_shard_size_takes_units_that_the_hub_refuses(text: str, nbytes: int) -> None:
    with pytest.raises(ValueError, match="Unit '.*' not supported"):
        hub.parse_size_to_int(text)
    assert not split({"a": nbytes - 1, "b": 1}, text).is_sharded
    assert split({"a": nbytes, "b": 1}, text).is_sharded


@pytest.mark.parametrize(
    "text",
    [
        "-1KB",
        "-1",
        "infGB",
        "-infGB",
        "1e999GB",
        "nanKB",
        "1ooKB",
        "GB",
        "KB1",
        "0.5",
        "0.",
        "0",
        "0KB",
        "1XB",
        "5 apples",
        "",
        "1B",
    ],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="Could not parse the size value|Unit '.*' not supported"):
        hub.parse_size_to_int(text)
    with pytest.raises(ValueError, match="Could not parse the size value"):
        split({"a": 1}, text)


def sizes(**kinds: int) -> dict[str, int]:
    return kinds


def split(state: dict[str, Any], most: Any, **keywords: Any) -> hub.StateDictSplit:
    keywords = {"get_storage_size": lambda size: size, "filename_pattern": "f{suffix}.x", **keywords}
    return hub.split_state_dict_into_shards_factory(state, max_shard_size=most, **keywords)


@pytest.mark.parametrize(
    "state, most, files",
    [
        (sizes(a=10, b=30, c=1), 10, [["b"], ["a"], ["c"]]),
        (sizes(a=6, b=10, c=30, d=2, e=2), 10, [["a"], ["c"], ["b"], ["d", "e"]]),
        (sizes(a=5, b=5, c=1), 10, [["a", "b"], ["c"]]),
        (sizes(a=5, b=6), 11, [["a", "b"]]),
        (sizes(a=0, b=3, c=0), 0, [["b"], ["a", "c"]]),
        (sizes(a=3), "2", [["a"]]),
        (sizes(a=600, b=600), "1KB", [["a"], ["b"]]),
        (sizes(a=600, b=424), "1KiB", [["a", "b"]]),
        (sizes(a=2, b=1), 2.5, [["a"], ["b"]]),
        ({}, 10, []),
    ],
)
def test_greedy(state: dict[str, int], most: Any, files: list[list[str]]) -> None:
    found = split(state, most)
    assert list(found.filename_to_tensors.values()) == files
    assert found.is_sharded == (len(files) > 1)
    assert found.metadata == {"total_size": sum(state.values())}
    names = ["f.x"] if len(files) == 1 else [f"f-{k + 1:05d}-of-{len(files):05d}.x" for k in range(len(files))]
    assert list(found.filename_to_tensors) == names
    assert found.tensor_to_filename == {
        tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors
    }


def test_a_storage_is_counted_once_and_stays_together() -> None:
    asked: list[tuple[str, int]] = []

    def size(value: tuple[str, int]) -> int:
        asked.append(value)
        return value[1]

    state = {"a": ("s", 1), "b": ("t", 2), "c": ("s", 1), "d": (None, 2), "e": ("t", 9)}
    found = split(state, 1, get_storage_size=size, get_storage_id=lambda value: value[0])
    assert list(found.filename_to_tensors.values()) == [["b", "e"], ["d"], ["a", "c"]]
    assert found.metadata == {"total_size": 5}
    assert asked == [("s", 1), ("t", 2), (None, 2)]  # the others' sizes are not asked for: that may cost


@pytest.mark.parametrize("most", [100, 1])
def test_text_is_left_out(most: int) -> None:
    found = split({"a": 6, "note": "quantized", "b": 10}, most)
    assert set(found.tensor_to_filename) == {"a", "b"}
    assert found.metadata == {"total_size": 16}


@pytest.mark.parametrize(
    "pattern", ["model.safetensors", "{suffix", "model{}.x", "model{other}{suffix}.x", "a{{suffix}}"]
)
@pytest.mark.parametrize("most", [100, 1])
def test_b_a_pattern_needs_its_suffix(pattern: str, most: int) -> None:
    with pytest.raises(ValueError, match=r"suffix|expected '}'"):
        split(sizes(a=3, b=3), most, filename_pattern=pattern)


@pytest.mark.parametrize("most", [-1, "-1KB", math.inf, math.nan, "infGB"])
def test_b_no_negative_or_infinite_maximum(most: Any) -> None:
    with pytest.raises(ValueError):
        split(sizes(a=3), most)


def test_split_is_a_plain_dataclass() -> None:
    found = hub.StateDictSplit(metadata={}, filename_to_tensors={"a": ["x"], "b": ["y"]}, tensor_to_filename={})
    assert found.is_sharded
    assert not replace(found, filename_to_tensors={}).is_sharded
    assert found == hub.StateDictSplit({}, {"a": ["x"], "b": ["y"]}, {})


def test_torch_split_goes_through_the_module() -> None:
    tensor = torch.zeros(4)
    with mock.patch.object(hub, "split_state_dict_into_shards_factory") as factory:
        hub.split_torch_state_dict_into_shards({"a": tensor}, max_shard_size=3)
    factory.assert_called_once_with(
        {"a": tensor},
        max_shard_size=3,
        filename_pattern="model{suffix}.safetensors",
        get_storage_size=hub.get_torch_storage_size,
        get_storage_id=hub.get_torch_storage_id,
    )


def test_torch_split_counts_storages() -> None:
    whole = torch.zeros(100)
    found = hub.split_torch_state_dict_into_shards(
        {"a": whole[:10], "b": torch.zeros(1), "c": whole}, max_shard_size=400
    )
    assert found.metadata == {"total_size": 404}
    assert list(found.filename_to_tensors.values()) == [["a", "c"], ["b"]]


# Storages.


def test_storage_of_a_plain_tensor() -> None:
    whole = torch.arange(10.0)
    assert hub.get_torch_storage_id(whole) == (torch.device("cpu"), whole.data_ptr(), 40)
    assert hub.get_torch_storage_id(whole[3:5].view(2, 1)) == hub.get_torch_storage_id(whole)
    assert hub.get_torch_storage_size(whole[3:5]) == 40
    assert hub.get_torch_storage_id(whole.clone()) != hub.get_torch_storage_id(whole)


def test_storage_on_meta() -> None:
    assert hub.get_torch_storage_id(torch.empty(5, device="meta")) is None
    assert hub.get_torch_storage_size(torch.empty(5, device="meta")) == 20


def test_storage_of_wrappers_is_nested() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    wrapper = TwoTensor(one, TwoTensor(two, one))
    addresses = (one.data_ptr(), (two.data_ptr(), one.data_ptr()))
    assert hub.get_torch_storage_id(wrapper) == (torch.device("cpu"), addresses, 24)
    assert hub.get_torch_storage_size(wrapper) == 24


def test_storage_of_a_distributed_tensor() -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    distributed.init_process_group(backend="gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        local = torch.zeros(100)[:5]  # a storage that is larger than what the tensor says
        tensor = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert hub.get_torch_storage_size(tensor) == 20
        assert hub.get_torch_storage_id(tensor) == (torch.device("cpu"), local.data_ptr(), 20)
    finally:
        distributed.destroy_process_group()
