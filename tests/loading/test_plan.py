"""Plans, as pure values: how many reads, where they begin, and that they bring exactly the bytes that are wanted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.errors import FormatError, SliceError, TensorNotFoundError
from stio.format.dtypes import tensor_nbytes
from stio.format.header import Header, build_header, parse_header
from stio.limits import PAGE_BYTES
from stio.loading.plan import GAP, Block, FileSelection, ReadPlan, plan_reads, select_names, stored_shape

MIB = 1 << 20
Layout = list[tuple[str, str, tuple[int, ...]]]


def header_of(layout: Layout, *, shard: str = "x", data_start: int | None = None) -> Header:
    """Return a header with the tensors in the order given."""
    head, _ = build_header(layout)
    parsed = parse_header(head[8:], file_bytes=len(head) + _size(layout), path=shard, shard=shard)
    begins, ends, at = [], [], 0
    for _, dtype, shape in layout:
        begins.append(at)
        at += tensor_nbytes(dtype, shape)
        ends.append(at)
    return Header(
        shard=shard,
        metadata={},
        data_start=parsed.data_start if data_start is None else data_start,
        names=[name for name, _, _ in layout],
        dtypes=[dtype for _, dtype, _ in layout],
        shapes=[shape for _, _, shape in layout],
        begins=begins,
        ends=ends,
    )


def _size(layout: Layout) -> int:
    return sum(tensor_nbytes(dtype, shape) for _, dtype, shape in layout)


def plan_of(headers: Sequence[Header], names: object = None, slices: object = None, **options: int) -> ReadPlan:
    positions = select_names(headers, names, path="x")  # type: ignore[arg-type]
    sizes = {"block_bytes": 32 * MIB, **options}
    selections = [
        FileSelection(header=header, positions=p, **sizes) for header, p in zip(headers, positions, strict=True)
    ]
    return plan_reads(selections, slices or {})  # type: ignore[arg-type]


def llama(num_layers: int = 32, width: int = 4096, hidden: int = 11008) -> Layout:
    """Return the tensors of a 7B model, BF16: 291 of them, 13.5 GB."""
    layout: Layout = [("model.embed_tokens.weight", "BF16", (32000, width))]
    for k in range(num_layers):
        name = f"model.layers.{k}"
        layout += [(f"{name}.self_attn.{p}_proj.weight", "BF16", (width, width)) for p in "qkvo"]
        layout += [(f"{name}.mlp.{p}_proj.weight", "BF16", (hidden, width)) for p in ("gate", "up")]
        layout += [(f"{name}.mlp.down_proj.weight", "BF16", (width, hidden))]
        layout += [(f"{name}.{p}_layernorm.weight", "BF16", (width,)) for p in ("input", "post_attention")]
    return [*layout, ("model.norm.weight", "BF16", (width,)), ("lm_head.weight", "BF16", (32000, width))]


# What the plans look like.


def test_llama_takes_few_long_reads() -> None:
    layout = llama()
    plan = plan_of([header_of(layout)])
    total = _size(layout)
    assert plan.total_bytes == total
    assert plan.num_tensors == len(layout) == 291
    assert total / (32 * MIB) <= plan.num_reads <= 1.5 * total / (32 * MIB) + len(plan.groups)
    assert all(block.nbytes <= 32 * MIB for group in plan.groups for block in group.blocks)
    assert all(block.offset % PAGE_BYTES == 0 for group in plan.groups for block in group.blocks)
    read = sum(block.nbytes for group in plan.groups for block in group.blocks)
    assert read <= total + len(plan.groups) * PAGE_BYTES


def test_order_is_that_of_the_file() -> None:
    plan = plan_of([header_of(llama(2)), header_of(llama(2), shard="y")])
    places = [(group.selection, block.offset) for group in plan.groups for block in group.blocks]
    assert places == sorted(places)
    assert [group.index for group in plan.groups] == list(range(len(plan.groups)))
    assert all(block.group == group.index for group in plan.groups for block in group.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [4096, 1 * MIB, 32 * MIB, 1 << 40])
def test_groups_are_cut_by_size(block_bytes: int) -> None:
    header = header_of(llama(4))
    plan = plan_of([header], block_bytes=block_bytes)
    assert [name for group in plan.groups for name in group.names] == header.names
    for group in plan.groups:
        assert group.payload_bytes <= block_bytes or len(group.names) == 1
    if block_bytes == 1 << 40:
        assert len(plan.groups) == 1


def test_oversized_tensor_is_alone() -> None:
    layout: Layout = [("a", "U8", (10,)), ("big", "U8", (10 * MIB,)), ("b", "U8", (10,)), ("c", "U8", (10,))]
    plan = plan_of([header_of(layout)], block_bytes=MIB)
    assert [list(group.names) for group in plan.groups] == [["a"], ["big"], ["b", "c"]]
    assert len(plan.groups[1].blocks) == 11  # its first byte is inside a page


def test_small_gaps_are_read_through_and_large_ones_are_not() -> None:
    layout: Layout = [(f"t{k}", "U8", (100_000 if k % 2 else 40_000,)) for k in range(20)]
    header, wanted = header_of(layout), [f"t{k}" for k in range(0, 20, 2)]
    assert plan_of([header], wanted).num_reads == 1
    assert plan_of([header], wanted, gap_bytes=100_000).num_reads == 1
    apart = plan_of([header], wanted, gap_bytes=99_999)
    assert apart.num_reads == len(apart.groups) == 10
    assert apart.total_bytes == 400_000


def test_compact_images_hold_no_gaps() -> None:
    layout: Layout = [(f"t{k}", "U8", (100_000 if k % 2 else 40_000,)) for k in range(20)]
    (group,) = plan_of([header_of(layout)], [f"t{k}" for k in range(0, 20, 2)]).groups
    assert group.offset == -1
    assert group.payload_bytes == 400_000 <= group.nbytes < 402_000
    assert sum(length for at, length in group.blocks[0].scatter if at == GAP) == 900_000
    assert all(offset % 64 == 0 for offset in group.offsets)


def test_nearly_whole_runs_stay_dense() -> None:
    layout: Layout = [(f"t{k}", "U8", (10_000,)) for k in range(20)]
    (group,) = plan_of([header_of(layout)], [f"t{k}" for k in range(20) if k != 7]).groups
    assert group.offset % PAGE_BYTES == 0
    assert group.offset >= 0
    assert all(not block.scatter for block in group.blocks)


def test_many_tiny_tensors_do_not_swell_their_image() -> None:
    """Alignment costs less than the tensors do, and what a block fills fits a slot of a block's size."""
    layout: Layout = [(f"t{k}", "BOOL" if k % 4 < 2 else "F64", (1,)) for k in range(20_000)]
    plan = plan_of([header_of(layout)], [f"t{k}" for k in range(0, 20_000, 2)], block_bytes=16384)
    for group in plan.groups:
        assert group.nbytes <= 2 * group.payload_bytes
        for block in group.blocks:
            assert landing_end(block) - block.at <= 16384
            assert block.nbytes <= 16384


def landing_end(block: Block) -> int:
    return max((at + length for at, length in block.scatter if at != GAP), default=block.at + block.nbytes)


def test_a65_empty_tensors() -> None:
    layout: Layout = [
        ("a", "F32", (0, 4)),
        ("b", "F32", (3,)),
        ("c", "F32", (0,)),
        ("d", "F32", (2,)),
        ("e", "I8", (0,)),
    ]
    header = header_of(layout)
    assert plan_of([header]).num_reads == 1
    for names in (["a"], ["c", "e"], ["a", "c", "e"]):
        plan = plan_of([header], names)
        assert (plan.num_reads, plan.total_bytes, plan.num_tensors) == (0, 0, len(names))
    assert plan_of([header], []).groups == ()
    assert plan_of([header_of([])]).groups == ()


# Slices.


@pytest.mark.parametrize(
    ("index", "num_reads", "num_bytes"),
    [
        (np.s_[0:128, :], 1, 128 * 8192),
        (np.s_[5], 1, 8192),
        (np.s_[...], 1, 1024 * 8192),
        (np.s_[:, 0:2048], 1, 1024 * 8192),  # gaps of 4 KiB: whole rows are read
        (np.s_[::2, :], 1, 1023 * 8192),
        ([slice(0, 8), slice(512, 520)], 2, 16 * 8192),
        ([slice(0, 8), slice(16, 24)], 1, 24 * 8192),
        (np.s_[::512], 2, 2 * 8192),  # of 4 MiB are not
        (np.s_[3:3], 0, 0),
    ],
)
def test_slices(index: object, num_reads: int, num_bytes: int) -> None:
    header = header_of([("first", "U8", (10,)), ("w", "BF16", (1024, 4096))])
    plan = plan_of([header], ["w"], {"w": index})
    assert (plan.num_reads, plan.total_bytes) == (num_reads, num_bytes)
    assert plan.groups[0].sliced


def test_slices_beside_whole_tensors() -> None:
    plan = plan_of([header_of(llama(1))], None, {"model.norm.weight": np.s_[:8]})
    assert sum(group.sliced for group in plan.groups) == 1
    assert plan.num_tensors == 12
    assert [list(group.names) for group in plan.groups if group.sliced] == [["model.norm.weight"]]


def test_slice_that_does_not_fit() -> None:
    with pytest.raises(SliceError, match=r"'w': .* out of range"):
        plan_of([header_of([("w", "F32", (3,))])], None, {"w": np.s_[5]})


def test_f4_is_sliced_by_pairs() -> None:
    assert stored_shape("F4", (3, 8), name="w") == ((3, 4), 1)
    assert stored_shape("F32", (3, 8), name="w") == ((3, 8), 4)
    with pytest.raises(FormatError, match="tensor 'w': torch has no rows of F4"):
        stored_shape("F4", (2, 3), name="w")
    (group,) = plan_of([header_of([("w", "F4", (3, 8))])], None, {"w": np.s_[1, 1:3]}).groups
    assert (group.payload_bytes, group.shapes[0]) == (2, (4,))


# Names.


def test_names() -> None:
    headers = [header_of([("a", "U8", (1,)), ("b", "U8", (1,))]), header_of([("c", "U8", (1,))], shard="y")]
    assert [list(found) for found in select_names(headers, None, path="x")] == [[0, 1], [0]]
    assert select_names(headers, "b", path="x") == [[1], []]
    assert select_names(headers, ["c", "a", "c"], path="x") == [[0], [0]]
    assert select_names(headers, lambda name: name > "a", path="x") == [[1], [0]]
    assert select_names(headers, iter(["a"]), path="x") == [[0], []]
    assert select_names(headers, [], path="x") == [[], []]


def test_unknown_names_get_suggestions() -> None:
    headers = [header_of(llama(2))]
    with pytest.raises(TensorNotFoundError, match=r"did you mean.*'model.layers.1.self_attn.q_proj.weight'") as caught:
        select_names(headers, ["model.layers.1.self_attn.q_proj.wieght"], path="some/model")
    assert caught.value.path == "some/model"
    with pytest.raises(TensorNotFoundError, match="has 21 others"):
        select_names(headers, "zzz", path="x")
    with pytest.raises(TensorNotFoundError, match="for a pattern pass a function"):
        select_names(headers, "model.layers.*", path="x")


# Carried out on bytes.


def carry_out(plan: ReadPlan, files: Sequence[bytes], block_bytes: int) -> dict[str, bytes]:
    """Do what the scheduler does, and check on the way that nothing is read twice or lands twice."""
    found: dict[str, bytes] = {}
    for group in plan.groups:
        image, taken = bytearray(group.nbytes), bytearray(group.nbytes)
        end = -1
        for block in group.blocks:
            assert 0 < block.nbytes <= block_bytes
            assert block.offset >= end, "blocks go forward"
            end = block.offset + block.nbytes
            data = files[group.selection][block.offset : end]
            assert len(data) == block.nbytes, "inside the file"
            at = 0
            for to, length in block.scatter or ((block.at, block.nbytes),):
                assert length > 0
                if to != GAP:
                    assert not any(taken[to : to + length])
                    image[to : to + length] = data[at : at + length]
                    taken[to : to + length] = b"\1" * length
                at += length
            assert at == block.nbytes
            assert landing_end(block) - block.at <= block_bytes
        assert len(image) == group.nbytes
        if group.offset >= 0 and group.blocks:
            assert group.offset % PAGE_BYTES == 0
            assert all(block.offset == group.offset + block.at for block in group.blocks)
        for k, name in enumerate(group.names):
            nbytes = tensor_nbytes(group.dtypes[k], group.shapes[k])
            start = group.offsets[k]
            assert all(taken[start : start + nbytes]), name
            found[name] = bytes(image[start : start + nbytes])
    return found


DTYPES = {"U8": "u1", "I16": "<i2", "F32": "<f4", "F64": "<f8"}
layouts = st.lists(
    st.tuples(
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.tuples(st.integers(500, 3000)),
    ),
    max_size=25,
)
sizes = st.fixed_dictionaries(
    {
        "block_bytes": st.sampled_from([4096, 8192, 1 << 20]),
        "gap_bytes": st.sampled_from([0, 1, 64, 3000, 1 << 20]),
    }
)


def file_of(header: Header, seed: int) -> bytes:
    return random.Random(seed).randbytes(header.data_start + (header.ends[-1] if header.ends else 0))


@settings(max_examples=count(75, 300), deadline=None)
@given(layouts, st.data(), sizes, st.integers(8, 9000))
def test_whole_tensors_get_exactly_their_bytes(
    layout: list[tuple[str, tuple[int, ...]]], data: st.DataObject, sizes: dict[str, int], data_start: int
) -> None:
    tensors: Layout = [(f"t{k}", dtype, shape) for k, (dtype, shape) in enumerate(layout)]
    header = header_of(tensors, data_start=data_start)
    wanted = [name for name, _, _ in tensors if data.draw(st.booleans(), label=name)]
    plan = plan_of([header], wanted, **sizes)
    raw = file_of(header, len(layout))
    found = carry_out(plan, [raw], sizes["block_bytes"])
    assert found == {
        name: raw[data_start + header.begins[k] : data_start + header.ends[k]]
        for k, name in enumerate(header.names)
        if name in wanted
    }
    assert plan.total_bytes == sum(map(len, found.values()))
    assert plan.num_tensors == len(wanted)


indices = st.one_of(
    st.integers(-4, 3),
    st.builds(
        slice, st.integers(-5, 5) | st.none(), st.integers(-5, 5) | st.none(), st.sampled_from([None, 1, 2, -1, 3])
    ),
)


@pytest.mark.slow
@settings(max_examples=count(75, 300), deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([(4,), (4, 5), (4, 6, 7), (4, 1, 300), (4, 2000)]),
    st.lists(indices, min_size=1, max_size=3),
    sizes,
    st.integers(8, 9000),
)
def test_slices_get_exactly_their_bytes(
    dtype: str, shape: tuple[int, ...], index: list[object], sizes: dict[str, int], data_start: int
) -> None:
    header = header_of([("before", "U8", (13,)), ("w", dtype, shape), ("after", "F32", (9,))], data_start=data_start)
    raw = file_of(header, len(index))
    whole = np.frombuffer(raw, DTYPES[dtype], np.prod(shape), data_start + 13).reshape(shape)
    part = tuple(index)
    try:
        expected = whole[part]
    except IndexError:
        with pytest.raises(SliceError):
            plan_of([header], "w", {"w": part}, **sizes)
        return
    plan = plan_of([header], ["before", "w"], {"w": part}, **sizes)
    found = carry_out(plan, [raw], sizes["block_bytes"])
    assert found["before"] == raw[data_start : data_start + 13]
    (group,) = (group for group in plan.groups if group.sliced)
    found_part = np.frombuffer(found["w"], DTYPES[dtype]).reshape(group.shapes[0])
    if 0 in group.posts:
        chosen = group.posts[0]
        found_part = found_part if chosen.post is None else found_part[chosen.post]
        found_part = np.flip(found_part, chosen.flip) if chosen.flip else found_part
    assert found_part.shape == expected.shape
    assert found_part.tobytes() == expected.tobytes()


@pytest.mark.parametrize("num_bytes", [8 * MIB, 32 * MIB, 8 * MIB - 100])
def test_a_rest_of_less_than_a_page_is_no_read_of_its_own(num_bytes: int) -> None:
    """An image begins at a page boundary, a tensor does not: its last bytes are in one page more."""
    header = header_of([("w", "U8", (num_bytes,))], data_start=1000)
    cut, joined = (
        plan_of([header], block_bytes=8 * MIB, rest_bytes=rest_bytes).groups[0].blocks for rest_bytes in (0, PAGE_BYTES)
    )
    assert len(joined) == -(-num_bytes // (8 * MIB))
    assert sum(block.nbytes for block in joined) == sum(block.nbytes for block in cut) == num_bytes + 1000
    assert [block.at for block in joined] == [k * 8 * MIB for k in range(len(joined))]
    assert max(block.nbytes for block in joined) < 8 * MIB + PAGE_BYTES
