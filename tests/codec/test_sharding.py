"""Splitting, sharing, names and the index are the hub's, but where the hub's would lose data."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.codec.index import check_shard_name, parse_index
from stio.codec.sharding import (
    TensorSource,
    aliases_json,
    build_index,
    check_pattern,
    index_name,
    is_checkpoint_file,
    manifest_name,
    parse_size,
    resolve_shared,
    shard_name,
    split_into_shards,
)
from stio.errors import SharedTensorsError

PATTERN = "model{suffix}.safetensors"
SAVE_ID = "0123456789ab"


def source(name: str, key: object = None, span: tuple[int, int] = (0, 4), **fields: object) -> TensorSource:
    values = {"dtype": "F32", "shape": (1,), "nbytes": span[1] - span[0], "layout": (1,), "data": None, **fields}
    return TensorSource(name=name, storage_key=key, span=span, **values)  # type: ignore[arg-type]


def kept(sources: list[TensorSource], policy: str = "dedupe") -> tuple[list[str], dict[str, str]]:
    left, aliases = resolve_shared(sources, policy)  # type: ignore[arg-type]
    return [one.name for one in left], aliases


# Shared memory.


def test_equal_tensors_are_saved_once_under_the_first_name() -> None:
    sources = [source("c", "s"), source("a", "s"), source("b", "s"), source("x")]
    assert kept(sources) == (["a", "x"], {"b": "a", "c": "a"})
    assert kept(sources[::-1]) == (["x", "a"], {"b": "a", "c": "a"})


@pytest.mark.parametrize(
    "other",
    [
        {"key": "t"},
        {"key": None},
        {"span": (0, 8)},
        {"span": (4, 8)},
        {"dtype": "I32"},
        {"shape": (1, 1)},
        {"layout": (2,)},
    ],
)
def test_what_differs_at_all_has_bytes_of_its_own(other: dict[str, object]) -> None:
    sources = [source("a", key="s"), source("b", **{"key": "s", **other})]  # type: ignore[arg-type]
    assert kept(sources) == (["a", "b"], {})


def test_a_view_and_its_base_are_both_kept() -> None:
    """The hub would keep the base alone."""
    sources = [source("view", "s", (4, 8)), source("base", "s", (0, 16)), source("twin", "s", (4, 8))]
    assert kept(sources) == (["base", "twin"], {"view": "twin"})


def test_empty_tensors_are_nobodys_alias() -> None:
    sources = [source("a", "s", (0, 0)), source("b", "s", (0, 0))]
    assert kept(sources) == (["a", "b"], {})
    assert kept(sources, "error") == (["a", "b"], {})


def test_clone_keeps_everything() -> None:
    assert kept([source("b", "s"), source("a", "s")], "clone") == (["b", "a"], {})


def test_no_such_policy() -> None:
    with pytest.raises(ValueError, match="'dedupe', 'clone' or 'error'"):
        resolve_shared([], "drop")  # type: ignore[arg-type]


def test_error_names_the_groups() -> None:
    sources = [
        source("whole", "s", (0, 100)),
        source("left", "s", (0, 10)),
        source("right", "s", (50, 60)),  # begins after `left` ends, but not after `whole` does
        source("beside", "s", (100, 110)),
        source("alone", "t"),
        source("tied", "u"),
        source("tied too", "u"),
    ]
    with pytest.raises(SharedTensorsError) as caught:
        resolve_shared(sources, "error")
    assert "'left', 'whole', 'right'; 'tied', 'tied too'." in str(caught.value)
    assert "beside" not in str(caught.value) and "alone" not in str(caught.value)


def test_error_passes_disjoint_parts_of_one_storage() -> None:
    sources = [source("right", "s", (4, 8)), source("left", "s", (0, 4)), source("x")]
    assert kept(sources, "error") == (["right", "left", "x"], {})


def test_error_stays_short() -> None:
    sources = [source(f"{k}{'x' * 300}", k // 100) for k in range(1000)]
    with pytest.raises(SharedTensorsError, match="and 95 others.*and 7 more groups") as caught:
        resolve_shared(sources, "error")
    assert len(str(caught.value)) < 4000


def test_aliases_as_text() -> None:
    aliases = {"é": "a", "b\n": 'a"'}
    assert aliases_json(aliases) == json.dumps(aliases, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert aliases_json({}) == "{}"


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
        ([("a", 5, "s"), ("b", 9), ("c", 5, "s"), ("d", 1, "t"), ("e", 7, "t")], 10, [["a", "c"], ["b", "d", "e"]]),
        ([("a", 20, "s"), ("b", 1), ("c", 20, "s")], 10, [["a", "c"], ["b"]]),
    ],
)
def test_splits(sizes: list[tuple[object, ...]], maximum: int, shards: list[list[str]]) -> None:
    assert split_into_shards([(*one, None)[:3] for one in sizes], maximum) == shards  # type: ignore[misc]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 4)), max_size=20), st.integers(1, 40))
def test_splits_are_the_hubs(tensors: list[tuple[int, int | None]], maximum: int) -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    state = {f"t{k}": tensor for k, tensor in enumerate(tensors)}
    expected = base.split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor[0],
        get_storage_id=lambda tensor: tensor[1],
        filename_pattern=PATTERN,
        max_shard_size=maximum,
    )
    shards = split_into_shards([(name, *tensor) for name, tensor in state.items()], maximum)
    assert shards == list(expected.filename_to_tensors.values())
    if shards:
        assert [shard_name(PATTERN, k, len(shards)) for k in range(len(shards))] == list(expected.filename_to_tensors)


# Names.


def test_names() -> None:
    assert shard_name(PATTERN, 0, 1) == "model.safetensors"
    assert shard_name(PATTERN, 0, 3) == "model-00001-of-00003.safetensors"
    assert shard_name(PATTERN, 2, 3) == "model-00003-of-00003.safetensors"
    assert shard_name(PATTERN, 0, 1, save_id=SAVE_ID) == f"model-{SAVE_ID}-00001-of-00001.safetensors"
    assert shard_name(PATTERN, 1, 2, save_id=SAVE_ID) == f"model-{SAVE_ID}-00002-of-00002.safetensors"
    assert index_name(PATTERN) == "model.safetensors.index.json"
    assert manifest_name(PATTERN) == "model.safetensors.manifest.json"
    assert shard_name("{{a}}{suffix}.x.safetensors", 0, 2) == "{a}-00001-of-00002.x.safetensors"


@pytest.mark.parametrize(("k", "n"), [(-1, 1), (1, 1), (0, 0), (3, 3)])
def test_no_such_shard(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="no shard"):
        shard_name(PATTERN, k, n)


@pytest.mark.parametrize("save_id", ["", "abc", "ABCDEF01", "finetuned", "../01234", "0" * 33, "01234567\n"])
def test_no_save_id(save_id: str) -> None:
    with pytest.raises(ValueError, match="save id"):
        shard_name(PATTERN, 0, 1, save_id=save_id)


@pytest.mark.parametrize(
    "pattern", [PATTERN, "x{suffix}.v1.safetensors", "diffusion_pytorch_model{suffix}.fp16.safetensors", "é{suffix}.safetensors"]
)  # fmt: skip
def test_patterns(pattern: str) -> None:
    check_pattern(pattern)
    for k, n, save_id in [(0, 1, None), (1, 3, None), (0, 1, SAVE_ID), (4, 100_000, SAVE_ID)]:
        name = shard_name(pattern, k, n, save_id=save_id)
        check_shard_name(name, path="x")
        assert is_checkpoint_file(name, pattern)
    assert is_checkpoint_file(index_name(pattern), pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.safetensors", "", "model{suffix}.bin", "model.safetensors{suffix}", "{suffix}", "{suffix}.safetensors",
        "model{suffix}{suffix}.safetensors", "model{suffix}{rank}.safetensors", "model{}{suffix}.safetensors",
        "model{suffix:>20}.safetensors", "model{suffix!r}.safetensors", "model{suffix.safetensors", "model{{suffix}}.safetensors",
        "a/model{suffix}.safetensors", "..\\model{suffix}.safetensors", "/model{suffix}.safetensors", "m\0{suffix}.safetensors",
        "C:model{suffix}.safetensors", "m\n{suffix}.safetensors", "m%2e{suffix}.safetensors", "m\ud800{suffix}.safetensors",
    ],
)  # fmt: skip
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="filename pattern"):
        check_pattern(pattern)


def test_a_pattern_is_text() -> None:
    with pytest.raises(TypeError):
        check_pattern(b"model{suffix}.safetensors")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model-100000-of-100000.safetensors", True),
        ("model.safetensors.index.json", True),
        ("model-00001-of-00002.safetensors.index.json", True),
        (f"model-{SAVE_ID}-00001-of-00002.safetensors", True),
        ("model-finetuned-00001-of-00002.safetensors", False),
        (f"model-{SAVE_ID}.safetensors", False),
        ("model.safetensors.backup", False),
        ("model.safetensors.manifest.json", False),
        ("model-1-of-2.safetensors", False),
        ("model-\u0660\u0660\u0660\u0660\u0661-of-00002.safetensors", False),
        ("model-00001-of-00002.safetensors\n", False),
        ("modelXsafetensors", False),
        ("old-model.safetensors", False),
        ("config.json", False),
    ],
)
def test_what_belongs_to_a_checkpoint(name: str, belongs: bool) -> None:
    assert is_checkpoint_file(name, PATTERN) is belongs


# The index.

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=8)


@given(st.dictionaries(text, text, max_size=6), st.integers(0, 2**70), st.dictionaries(text, text, max_size=4))
def test_index_is_what_json_writes(weight_map: dict[str, str], total: int, metadata: dict[str, str]) -> None:
    metadata.pop("total_size", None)
    document = {"metadata": {"total_size": total, **dict(sorted(metadata.items()))}, "weight_map": weight_map}
    assert build_index(weight_map, total, metadata) == json.dumps(document, indent=2).encode()


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
