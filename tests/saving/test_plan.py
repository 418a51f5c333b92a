"""Plans of saves, as pure values: carried out block by block they give the reference writer's files."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.distributed.placements import Cut, byte_ranges, local_part
from stio.distributed.plan_parts import _ALIGNED_BYTES, ByteRange, Window, WrittenPart, plan_parts, plan_stream
from stio.errors import LimitError, SharedTensorsError, UnsupportedDtypeError
from stio.format.dtypes import BITS, tensor_nbytes
from stio.format.files.index import check_shards, parse_index
from stio.format.header import Header, parse_header
from stio.format.shared import ALIASES_KEY, TensorSource
from stio.limits import PAGE_BYTES
from stio.saving.plan import WritePlan, plan_writes

Layout = list[tuple[str, str, tuple[int, ...]]]


def sources_of(layout: Layout, **fields: object) -> list[TensorSource]:
    """Return sources whose data are their bytes, each tensor's its own."""
    sources = []
    for name, dtype, shape in layout:
        nbytes = tensor_nbytes(dtype, shape)
        values = {"storage_key": None, "span": (0, nbytes), "layout": None, **fields}
        data = random.Random(name).randbytes(nbytes)
        sources.append(TensorSource(name=name, dtype=dtype, shape=shape, nbytes=nbytes, data=data, **values))  # type: ignore[arg-type]
    return sources


def plan_of(sources: list[TensorSource], **options: object) -> WritePlan:
    return plan_writes(sources, **{"max_shard_bytes": None, "block_bytes": PAGE_BYTES, **options})  # type: ignore[arg-type]


def written(plan: WritePlan) -> list[bytes]:
    """Carry a plan out: the files, every byte of which must have been written exactly once."""
    files = []
    for number, shard in enumerate(plan.shards):
        file = bytearray()
        for block in shard.blocks:
            assert block.shard == number
            assert block.offset == len(file)
            filled = bytearray(block.head(shard.header))
            for piece in block.pieces:
                source = plan.sources[piece.source]
                assert piece.at == len(filled)
                assert piece.nbytes > 0 or not source.nbytes
                assert piece.start * 8 % max(8, BITS[source.dtype]) == 0  # cuts fall between elements
                assert piece.ends == (piece.start + piece.nbytes == source.nbytes)
                filled += source.data[piece.start : piece.start + piece.nbytes]
            assert len(filled) == block.nbytes
            file += filled
        assert len(file) == shard.nbytes
        files.append(bytes(file))
    return files


def headers_of(files: list[bytes]) -> list[Header]:
    headers = []
    for file in files:
        end = 8 + int.from_bytes(file[:8], "little")
        headers.append(parse_header(file[8:end], file_bytes=len(file), path="x", shard="x"))
    return headers


LAYOUT: Layout = [
    ("wte", "BF16", (64, 100)),
    ("h.1", "F32", (17, 33)),
    ("h.0", "F32", (5,)),
    ("scale", "F32", ()),
    ("empty", "F32", (0, 4)),
    ("mask", "BOOL", (9, 1000)),
    ("packed", "F4", (3, 10)),
    ("count", "I64", (1,)),
]


def check(plan: WritePlan, sources: list[TensorSource]) -> list[Header]:
    """Require that the files of a plan hold exactly the sources."""
    files = written(plan)
    headers = headers_of(files)
    found = {}
    for file, header, shard in zip(files, headers, plan.shards, strict=True):
        # The reader does not tell in which order empty tensors stand.
        assert sorted(header.names) == sorted(shard.names)
        assert header.data_bytes == shard.data_bytes
        for name in header:
            info = header.info(name)
            data = file[info.file_offset : info.file_offset + info.nbytes]
            assert found.setdefault(name, (info.dtype, info.shape, data)) == (info.dtype, info.shape, data)
    assert found == {one.name: (one.dtype, one.shape, one.data) for one in sources if one.name not in plan.aliases}
    assert plan.total_bytes == sum(len(data) for _, _, data in found.values())
    return headers


# One file.


@pytest.mark.parametrize("block_bytes", [4096, 8192, 1 << 20])
def test_one_file(block_bytes: int) -> None:
    sources = sources_of(LAYOUT)
    plan = plan_of(sources, block_bytes=block_bytes, metadata={"step": "7"})
    (header,) = check(plan, sources)
    assert header.metadata == {"format": "pt", "step": "7"}
    assert [block.offset for block in plan.shards[0].blocks] == list(range(0, plan.shards[0].nbytes, block_bytes))


def test_official_order_in_the_file() -> None:
    plan = plan_of(sources_of(LAYOUT))
    assert plan.shards[0].names == ("count", "empty", "h.0", "h.1", "scale", "wte", "packed", "mask")


def test_equal_to_the_reference_library() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    sources = sources_of([("b", "F32", (1000,)), ("a", "I64", (77,)), ("c", "U8", (5, 5))])
    dtypes = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
    tensors = {
        one.name: torch.frombuffer(bytearray(one.data), dtype=dtypes[one.dtype]).reshape(one.shape) for one in sources
    }
    assert written(plan_of(sources)) == [safetensors.save(tensors, {"format": "pt"})]


def test_the_callers_format_wins() -> None:
    (header,) = headers_of(written(plan_of(sources_of(LAYOUT), metadata={"format": "mlx"})))
    assert header.metadata == {"format": "mlx"}


def test_no_tensors() -> None:
    for maximum in (None, 10):
        plan = plan_of([], max_shard_bytes=maximum)
        (header,) = check(plan, [])
        assert header.metadata == {"format": "pt"}
        assert plan.total_bytes == 0
        assert [len(shard.blocks) for shard in plan.shards] == [1]
        assert json.loads(plan.index(["x"])) == {"metadata": {"total_size": 0}, "weight_map": {}}


def test_only_empty_tensors() -> None:
    sources = sources_of([("a", "F32", (0,)), ("b", "BF16", (3, 0))])
    plan = plan_of(sources, max_shard_bytes=1)
    check(plan, sources)
    assert [(piece.source, piece.nbytes, piece.ends) for piece in plan.shards[0].blocks[0].pieces] == [
        (0, 0, True),
        (1, 0, True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [0, 8, PAGE_BYTES])
def test_an_empty_tensor_at_the_end_of_a_block(nbytes: int) -> None:
    """Where header or data end with their block, no block follows; each tensor has its piece."""
    for padding in range(0, 2 * PAGE_BYTES, 8):
        sources = sources_of([("a", "U8", (nbytes,)), ("b", "U8", (0,))])
        plan = plan_of(sources, metadata={"n": "n" * padding})
        written(plan)
        pieces = [piece.source for block in plan.shards[0].blocks for piece in block.pieces if piece.ends]
        assert sorted(pieces) == [0, 1]


def test_a_header_of_many_blocks() -> None:
    sources = sources_of([("x" * 3000, "U8", (5000,)), ("y", "U8", (0,)), ("z" * 3000, "U8", (1,))])
    plan = plan_of(sources, metadata={"note": "n" * 20_000})
    check(plan, sources)
    assert [sum(piece.source == k for block in plan.shards[0].blocks for piece in block.pieces) for k in (1, 2)] == [
        1,
        1,
    ]
    assert plan.shards[0].blocks[2].head(plan.shards[0].header) == plan.shards[0].header[8192:12288]
    check(plan_of([], metadata={"note": "n" * 20_000}), [])


def test_a_file_that_ends_with_a_block() -> None:
    (start,) = (len(shard.header) for shard in plan_of(sources_of([("a", "U8", (4000,))])).shards)
    sources = sources_of([("a", "U8", (2 * 4096 - start,))])
    plan = plan_of(sources)
    check(plan, sources)
    assert [block.nbytes for block in plan.shards[0].blocks] == [4096, 4096]


# Several files.


def test_shards_and_their_index() -> None:
    sources = sources_of(LAYOUT)
    plan = plan_of(sources, max_shard_bytes=9000, metadata={"step": "7", "format": "x"})
    headers = check(plan, sources)
    # wte (12,800) is too large, and at once; mask (9,000) would not fit behind the others.
    assert [sorted(shard.names) for shard in plan.shards] == [
        ["wte"], ["empty", "h.0", "h.1", "scale"], ["mask"], ["count", "packed"],
    ]  # fmt: skip
    assert all(header.metadata == {"step": "7", "format": "x"} for header in headers)  # 403
    names = [f"{k}.safetensors" for k in range(4)]
    index = parse_index(plan.index(names), path="x")
    assert index.metadata == {"total_size": plan.total_bytes, "format": "x", "step": "7"}
    assert check_shards(index, headers, strict=True, path="x")[1] == []
    # As the hub lists them: by shard, then in the caller's order.
    assert list(index.weight_map) == ["wte", "h.1", "h.0", "scale", "empty", "mask", "packed", "count"]


def test_index_is_the_hubs() -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    sources = sources_of(LAYOUT)
    split = base.split_state_dict_into_shards_factory(
        {one.name: one for one in sources},
        get_storage_size=lambda one: one.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=9000,
    )
    document = {"metadata": {**split.metadata, "step": "7"}, "weight_map": split.tensor_to_filename}
    plan = plan_of(sources, max_shard_bytes=9000, metadata={"step": "7"})
    assert plan.index(list(split.filename_to_tensors)) == json.dumps(document, indent=2).encode()


def test_index_of_one_file_tells_all_too() -> None:
    plan = plan_of(sources_of(LAYOUT[:2]), metadata={"step": "7"})
    index = json.loads(plan.index(["m.safetensors"]))
    assert index == {
        "metadata": {"total_size": plan.total_bytes, "step": "7"},
        "weight_map": {"wte": "m.safetensors", "h.1": "m.safetensors"},
    }


def test_index_wants_a_name_for_each_shard() -> None:
    plan = plan_of(sources_of(LAYOUT), max_shard_bytes=9000)
    with pytest.raises(ValueError, match="shorter"):
        plan.index(["x"])


# Shared memory.


def tied() -> list[TensorSource]:
    return sources_of([("head", "F32", (10,)), ("emb", "F32", (10,))], storage_key="s") + sources_of(LAYOUT[:1])


def test_aliases_go_into_the_header_of_one_file() -> None:
    sources = tied()
    plan = plan_of(sources, metadata={"a": "b"})
    assert plan.aliases == {"emb": "head"}
    (header,) = check(plan, sources)
    assert header.metadata == {"format": "pt", "a": "b", ALIASES_KEY: '{"emb":"head"}'}
    assert json.loads(plan.index(["x"]))["metadata"] == {"total_size": 12840, "a": "b", ALIASES_KEY: '{"emb":"head"}'}


def test_aliases_go_into_the_index_of_several() -> None:
    sources = tied()
    plan = plan_of(sources, max_shard_bytes=100)
    assert all(header.metadata == {"format": "pt"} for header in check(plan, sources))
    index = json.loads(plan.index(["x", "y"]))
    assert index["metadata"][ALIASES_KEY] == '{"emb":"head"}'
    assert "emb" not in index["weight_map"]


def test_clone_and_error() -> None:
    sources = tied()
    assert check(plan_of(sources, shared="clone"), sources)[0].metadata == {"format": "pt"}
    with pytest.raises(SharedTensorsError):
        plan_of(sources, shared="error")


def test_parts_of_one_storage_are_counted_each() -> None:
    halves = [
        *sources_of([("a", "U8", (60,))], storage_key="s", span=(0, 60)),
        *sources_of([("b", "U8", (60,))], storage_key="s", span=(60, 120)),
    ]
    assert [shard.names for shard in plan_of(halves, max_shard_bytes=100).shards] == [("a",), ("b",)]


# All of it.

layouts = st.lists(
    st.tuples(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=5),
        st.sampled_from(["U8", "BF16", "F32", "I64", "C64", "BOOL", "F8_E4M3"]),
        st.lists(st.integers(0, 30), max_size=3).map(tuple),
    ),
    max_size=10,
    unique_by=lambda tensor: tensor[0],
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(layouts, st.none() | st.integers(1, 20_000), st.sampled_from([4096, 12288]))
def test_any_plan_brings_every_byte(layout: Layout, maximum: int | None, block_bytes: int) -> None:
    sources = sources_of(layout)
    plan = plan_of(sources, max_shard_bytes=maximum, block_bytes=block_bytes)
    check(plan, sources)
    assert plan_of(sources_of(layout), max_shard_bytes=maximum, block_bytes=block_bytes) == plan
    for shard in plan.shards:
        assert maximum is None or shard.data_bytes <= maximum or len(shard.names) == 1


@pytest.mark.matrix
@pytest.mark.costly("large numbers are what it is about")
@pytest.mark.parametrize(
    ("layout", "options", "error"),
    [
        ([("__metadata__", "F32", (1,))], {}, ValueError),
        ([("a\0b", "F32", (1,))], {}, ValueError),
        ([("a", "F128", (1,))], {}, UnsupportedDtypeError),
        ([], {"metadata": {ALIASES_KEY: "{}"}}, ValueError),
        ([], {"metadata": {"total_size": "1"}}, ValueError),
        ([], {"metadata": {"k": 1}}, TypeError),
        ([], {"metadata": {"k": "\ud800"}}, ValueError),
        ([], {"metadata": {"k": "x" * 100_000_000}}, LimitError),
        ([], {"block_bytes": 0}, ValueError),
        ([], {"block_bytes": 4097}, ValueError),
        ([], {"max_shard_bytes": 0}, ValueError),
    ],
)
def test_refusals(layout: Layout, options: dict[str, object], error: type[Exception]) -> None:
    sources = [
        TensorSource(name=n, dtype=d, shape=s, nbytes=4, storage_key=None, span=(0, 4), layout=None, data=b"1234")
        for n, d, s in layout
    ]
    with pytest.raises(error):
        plan_of(sources, **options)


def test_metadata_of_several_files_are_checked_before_anything_is_written() -> None:
    with pytest.raises(TypeError):
        plan_of(sources_of(LAYOUT), max_shard_bytes=100, metadata={"k": 1})


@pytest.mark.parametrize("name", ["__metadata__", "z\0", "z\ud800"])
def test_an_alias_has_a_name_that_can_be_written(name: str) -> None:
    sources = sources_of([("A", "F32", (10,)), ("B", "F32", (10,))], storage_key="s")
    bad = [sources[0], TensorSource(**{f: getattr(sources[1], f) for f in TensorSource.__slots__} | {"name": name})]
    with pytest.raises(ValueError, match="name"):
        plan_of(bad)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_100_000_tensors() -> None:
    sources = [
        TensorSource(
            name=f"layer.{k}.weight",
            dtype=("BF16", "F32")[k % 2],
            shape=(2, 8),
            nbytes=(32, 64)[k % 2],
            storage_key=k,
            span=(0, 64),
            layout=None,
            data=None,
        )
        for k in range(100_000)
    ]
    start = time.perf_counter()
    plan = plan_of(sources, max_shard_bytes=1 << 20, block_bytes=1 << 20)
    assert time.perf_counter() - start < 20  # 0.7 s on a quiet machine
    assert plan.total_bytes == 4_800_000
    assert len(plan.shards) == 5


# Plans of parts.


def random_parts(plan: WritePlan, num_processes: int, chance: random.Random) -> list[dict[str, WrittenPart]]:
    """Give each element of each tensor to one process, in boxes; a tensor below a byte an element goes as a whole."""
    parts: list[dict[str, WrittenPart]] = [{} for _ in range(num_processes)]
    for source in plan.sources:
        whole = tuple(slice(0, size) for size in source.shape)
        sizes = [num_processes if source.shape and chance.random() < 0.8 and BITS[source.dtype] >= 8 else 1]
        dim = chance.randrange(len(source.shape)) if source.shape else 0
        if sizes[0] == 1:
            held = [(chance.randrange(num_processes), whole)]
        else:
            held = [(rank, local_part(source.shape, sizes, [rank], [Cut(dim)])) for rank in range(num_processes)]
        for rank, index in held:
            itemsize = BITS[source.dtype] // 8
            if itemsize:
                ranges = byte_ranges(source.shape, index, itemsize)
            else:
                ranges = [ByteRange(0, source.nbytes)] if source.nbytes else []
            data = b"".join(
                source.data[one.start + k * one.stride :][: one.nbytes] for one in ranges for k in range(one.num_ranges)
            )
            if data or chance.random() < 0.5:
                local = dataclasses.replace(source, nbytes=len(data), data=data)
                parts[rank][source.name] = WrittenPart(local, ranges)
    return parts


def write_parts(plan: WritePlan, files: list[bytearray], counts: list[bytearray], block_bytes: int) -> None:
    """Carry out one process's plan of parts; count how often each byte is written."""
    ended = []
    for number, shard in enumerate(plan.shards):
        for block in shard.blocks:
            assert block.shard == number and block.runs and block.nbytes <= block_bytes
            memory = bytearray(block.nbytes)
            head = block.head(shard.header)
            memory[: len(head)] = head
            for piece in block.pieces:
                source = plan.sources[piece.source]
                assert piece.start * 8 % max(8, BITS[source.dtype]) == 0  # cuts fall between elements
                memory[piece.at : piece.at + piece.nbytes] = source.data[piece.start : piece.start + piece.nbytes]
                ended += [source.name] * piece.ends
            assert block.offset == block.runs[0].offset
            for run in block.runs:
                if run.num_ranges == 1 and run.nbytes >= _ALIGNED_BYTES:
                    assert (run.offset - run.at) % PAGE_BYTES == 0, "its pages can be written past the page cache"
                for k in range(run.num_ranges):
                    begin, at = run.offset + k * run.stride, run.at + k * run.nbytes
                    files[number][begin : begin + run.nbytes] = memory[at : at + run.nbytes]
                    counts[number][begin : begin + run.nbytes] = bytes(
                        count + 1 for count in counts[number][begin : begin + run.nbytes]
                    )
            assert block.file_bytes == sum(run.nbytes * run.num_ranges for run in block.runs)
    assert sorted(ended) == sorted(source.name for source in plan.sources if source.nbytes), "each ends once"


def random_plan(chance: random.Random) -> tuple[WritePlan, int]:
    """Return a plan of random tensors, and its block size."""
    dtypes = ["F32", "BF16", "I64", "BOOL", "F8_E4M3", "F4"]
    layout = []
    for k in range(chance.randint(0, 12)):
        shape = tuple(chance.choice([0, 1, 3, 7, 40, 150]) for _ in range(chance.randint(0, 3)))
        dtype = chance.choice(dtypes)
        if dtype == "F4":
            shape = (*shape, 2 * chance.randint(0, 50))
        layout.append((f"t{k}", dtype, shape))
    sources = sources_of(layout)
    block_bytes = PAGE_BYTES * chance.choice([1, 2, 16, 64])
    metadata = {"k": "x" * chance.choice([1, 10_000])}
    shard_bytes = chance.choice([None, 100_000])
    return plan_of(sources, max_shard_bytes=shard_bytes, metadata=metadata, block_bytes=block_bytes), block_bytes


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(40))
def test_parts_of_several_processes_make_up_the_files(seed: int) -> None:
    """Each byte is written once, by the plans of 1 to 4 processes; runs in one block lie one after the other."""
    chance = random.Random(seed)
    plan, block_bytes = random_plan(chance)
    expected = written(plan)
    files, counts = [bytearray(len(file)) for file in expected], [bytearray(len(file)) for file in expected]
    for rank, parts in enumerate(random_parts(plan, chance.randint(1, 4), chance)):
        of_rank = plan_parts(plan, parts, block_bytes, with_headers=rank == 0)
        assert of_rank.index([f"{k}" for k in range(len(plan.shards))]) == plan.index(
            [f"{k}" for k in range(len(plan.shards))]
        )
        write_parts(of_rank, files, counts, block_bytes)
    assert files == expected
    assert all(set(count) <= {1} for count in counts), "each byte is written once"


def stream_of(plan: WritePlan, block_bytes: int) -> bytes:
    """Carry out the plan of a stream."""
    (shard,) = plan.shards
    stream, ended = bytearray(shard.nbytes), []
    for number, block in enumerate(shard.blocks):
        assert (block.offset, block.runs) == (number * block_bytes, ())
        assert 0 < block.nbytes <= block_bytes
        for piece in block.pieces:
            source = plan.sources[piece.source]
            assert piece.start * 8 % max(8, BITS[source.dtype]) == 0  # cuts fall between elements
            assert piece.at + piece.nbytes <= block.nbytes
            begin = block.offset + piece.at
            stream[begin : begin + piece.nbytes] = source.data[piece.start : piece.start + piece.nbytes]
            ended += [source.name] * piece.ends
    assert not shard.blocks or block.offset + block.nbytes == shard.nbytes
    assert sorted(ended) == sorted(source.name for source in plan.sources if source.nbytes), "each ends once"
    return bytes(stream)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(40))
def test_packets_of_several_processes_make_up_the_files(seed: int) -> None:
    """Each byte behind the headers is sent once, by 1 to 4 processes, in the window that it belongs to."""
    chance = random.Random(seed)
    plan, block_bytes = random_plan(chance)
    expected = written(plan)
    window_bytes = min(block_bytes, PAGE_BYTES * chance.choice([1, 3, 16]))
    windows = [
        Window(number, begin, min(begin + window_bytes, len(file)))
        for number, file in enumerate(expected)
        for begin in range(0, len(file), window_bytes)
    ]
    if chance.random() < 0.5:  # the windows of several files in turn
        windows.sort(key=lambda window: window.begin)
    files = [bytearray(shard.header.ljust(shard.nbytes, b"\0")) for shard in plan.shards]
    counts = [bytearray(b"\1" * len(shard.header)).ljust(shard.nbytes, b"\0") for shard in plan.shards]
    for parts in random_parts(plan, chance.randint(1, 4), chance):
        own, packets = plan_stream(plan, parts, windows, block_bytes)
        stream = stream_of(own, block_bytes)
        assert [packet.window for packet in packets] == sorted({packet.window for packet in packets})
        assert not packets or packets[-1].begin + packets[-1].nbytes == len(stream)
        for packet in packets:
            window = windows[packet.window]
            assert packet.begin // block_bytes == (packet.begin + packet.nbytes - 1) // block_bytes, "in one block"
            data = stream[packet.begin : packet.begin + packet.nbytes]
            for run in packet.runs:
                for k in range(run.num_ranges):
                    begin, at = run.offset + k * run.stride, run.at + k * run.nbytes
                    assert window.begin <= begin and begin + run.nbytes <= window.end and at + run.nbytes <= len(data)
                    files[window.file][begin : begin + run.nbytes] = data[at : at + run.nbytes]
                    for position in range(begin, begin + run.nbytes):
                        counts[window.file][position] += 1
    assert files == expected
    assert all(set(count) <= {1} for count in counts), "each byte is sent once"


def test_neighbouring_parts_are_one_run() -> None:
    """All rows of the even tensors: two ranges, whose pages are cut where the file's are."""
    sources = sources_of([(f"t{k}", "F32", (64, 256)) for k in range(4)])
    plan = plan_of(sources, block_bytes=16 * PAGE_BYTES)
    parts = {
        source.name: WrittenPart(source, [ByteRange(0, source.nbytes)]) for source in sources if source.name != "t2"
    }
    (shard,) = plan_parts(plan, parts, 1 << 20, with_headers=True).shards
    runs = [run for block in shard.blocks for run in block.runs]
    assert [(run.offset, run.nbytes) for run in runs] == [
        (0, len(shard.header) + 2 * 65536),
        (len(shard.header) + 3 * 65536, 65536),
    ]
    end = len(shard.header) + 2 * 65536
    (shard,) = plan_parts(plan, parts, 16 * PAGE_BYTES, with_headers=True).shards
    runs = [run for block in shard.blocks for run in block.runs]
    cuts = {run.offset + run.nbytes for run in runs} - {end, end + 2 * 65536}
    assert len(cuts) == len(runs) - 2 and all(cut % PAGE_BYTES == 0 for cut in cuts)


def test_metadata_that_no_reader_of_an_index_takes() -> None:
    for text in ({"k": "v" * (11 << 20)}, {f"k{k}": "v" for k in range(30_000)}):
        with pytest.raises(ValueError, match="more than readers of an index take"):
            plan_writes([], 4096, max_shard_bytes=1000, metadata=text)
    many = {f"k{k}": "v" for k in range(20_000)}
    parse_index(plan_writes([], 4096, max_shard_bytes=1000, metadata=many).index(["m"]), path="m")
