"""Splitting, sizes and the index are the hub's, but where the hub's would lose data."""

from __future__ import annotations

import json
import random
import time

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.format.files.index import parse_index
from stio.format.files.names import FilePattern
from stio.limits import parse_size
from stio.saving.plan import build_index, split_into_shards

PATTERN = "model{suffix}.safetensors"

# Sizes.


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (1, 1), (5_000_000_000, 5_000_000_000), ("123", 123), (" 7 ", 7), ("5GB", 5 * 10**9), ("5gb", 5 * 10**9),
        ("2TB", 2 * 10**12), ("3MB", 3 * 10**6), ("4 KB", 4000), (" 1.5 Mb ", 1_500_000), ("1e3KB", 10**6),
        ("1KiB", 1024), ("2mib", 2 << 20), ("0.5GiB", 1 << 29), ("1TIB", 1 << 40), ("0.0019KB", 1),
    ],
)  # fmt: skip
def test_sizes(size: int | str, nbytes: int) -> None:
    assert parse_size(size) == nbytes


@pytest.mark.parametrize(
    "size",
    [
        0, -1, "0", "-5", "-1GB", "0GB", "0.0001KB", "infGB", "-infGB", "nanGB", "1e999TB", "GB", "", " ", "1.5",
        "5PB", "5 G", "5B", "five GB", "5GBGB", "0x10", "9" * 5000 + "GB",
    ],
)  # fmt: skip
def test_no_sizes(size: int | str) -> None:
    with pytest.raises(ValueError, match="size") as caught:
        parse_size(size)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("size", [True, False, 1.5, None, b"5GB", [1]])
def test_sizes_of_another_type(size: object) -> None:
    with pytest.raises(TypeError):
        parse_size(size)  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.floats(0.001, 1e6), st.sampled_from(["KB", "MB", "GB", "TB"]), st.sampled_from([str.upper, str.lower]))
def test_sizes_are_the_hubs(number: float, unit: str, case: object) -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    text = f" {number} {unit}"
    assert parse_size(text) == base.parse_size_to_int(text)


# Splitting.


@pytest.mark.parametrize(
    ("sizes", "maximum", "shards"),
    [
        ([("a", 10), ("b", 30), ("c", 1)], 10, [["b"], ["a"], ["c"]]),
        ([("a", 6), ("b", 6), ("c", 2), ("d", 6), ("e", 2), ("f", 2)], 10, [["a"], ["b", "c"], ["d", "e", "f"]]),
        ([], 10, []),
        ([("a", 0), ("b", 0)], 1, [["a", "b"]]),
        ([("a", 10), ("b", 0), ("c", 1)], 10, [["a", "b"], ["c"]]),
        ([("a", 11)], 10, [["a"]]),
    ],
)
def test_splits(sizes: list[tuple[str, int]], maximum: int, shards: list[list[str]]) -> None:
    assert split_into_shards(sizes, maximum) == shards


@settings(max_examples=count(75, 300), deadline=None)
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_splits_are_the_hubs(tensors: list[int], maximum: int) -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    state = {f"t{k}": nbytes for k, nbytes in enumerate(tensors)}
    expected = base.split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda nbytes: nbytes,
        get_storage_id=lambda nbytes: None,
        filename_pattern=PATTERN,
        max_shard_size=maximum,
    )
    shards = split_into_shards(state.items(), maximum)
    assert shards == list(expected.filename_to_tensors.values())
    if shards:
        assert [FilePattern(PATTERN).shard(k, len(shards)) for k in range(len(shards))] == list(
            expected.filename_to_tensors
        )


# The index.

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)


@pytest.mark.slow
@given(st.dictionaries(text, text, max_size=6), st.integers(0, 2**70), st.dictionaries(text, text, max_size=4))
def test_index_is_what_json_writes(weight_map: dict[str, str], total: int, metadata: dict[str, str]) -> None:
    metadata.pop("total_size", None)
    document = {"metadata": {"total_size": total, **dict(sorted(metadata.items()))}, "weight_map": weight_map}
    assert build_index(weight_map, total, metadata) == json.dumps(document, indent=2).encode()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_index_of_100_000_tensors() -> None:
    weight_map = {f"layer.{k}.é": f"model-{k // 30_000 + 1:05d}-of-00004.safetensors" for k in range(100_000)}
    start = time.perf_counter()
    index = build_index(weight_map, 7, {"b": "2", "a": "1"})
    assert time.perf_counter() - start < 5  # 0.06 s on a quiet machine
    document = {"metadata": {"total_size": 7, "a": "1", "b": "2"}, "weight_map": weight_map}
    assert index == json.dumps(document, indent=2).encode()
    assert parse_index(index, path="x").weight_map == weight_map


def test_metadata_order_does_not_matter() -> None:
    items = [(f"k{k}", str(k)) for k in range(20)]
    shuffled = random.Random(0).sample(items, len(items))
    assert build_index({}, 0, dict(items)) == build_index({}, 0, dict(shuffled))


@pytest.mark.parametrize(
    ("weight_map", "total", "metadata", "error"),
    [
        ({}, 0, {"total_size": "1"}, ValueError),
        ({}, 0, {"k": 1}, TypeError),
        ({}, 0, {1: "v"}, TypeError),
        ({}, 0, {"k": None, 1: "v"}, TypeError),
        ({}, 0, {"k": "\ud800"}, ValueError),
        ({"\udfff": "x"}, 0, {}, ValueError),
        ({"x": "\udfff"}, 0, {}, ValueError),
        ({"x": 1}, 0, {}, TypeError),
        ({1: "x"}, 0, {}, TypeError),
        ({}, 1.5, {}, TypeError),
    ],
)
def test_index_refusals(weight_map: object, total: object, metadata: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        build_index(weight_map, total, metadata)  # type: ignore[arg-type]
