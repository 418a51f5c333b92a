"""Saving as its users call it: what is on disk afterwards, and which programs can read it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import weakref
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from huggingface_hub import load_torch_model, save_torch_state_dict
from support import INDEX, assorted, nothing_left, oracle, ramp, require_equal
from torch import nn

import stio
import stio.sync
from stio import native

pytestmark = pytest.mark.anyio

KIB, MIB = 1 << 10, 1 << 20
STEPS = ("stage", "write")


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def by_index(directory):
    """Read a sharded checkpoint as transformers does: the index, then each shard by path."""
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    found = {}
    for shard in dict.fromkeys(weight_map.values()):
        with safetensors.safe_open(directory / shard, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert set(found) == set(weight_map)
    return found


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight


# What is written.


async def test_every_dtype_and_shape_reads_back_by_the_official_reader(tmp_path):
    tensors = assorted()
    result = await stio.save(tensors, tmp_path / "a.safetensors")
    require_equal(oracle(tmp_path / "a.safetensors"), tensors)
    require_equal(await stio.load(tmp_path / "a.safetensors"), tensors)
    assert result.path == str(tmp_path / "a.safetensors")
    assert result.files == ("a.safetensors",)
    assert result.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert result.file_bytes == (tmp_path / "a.safetensors").stat().st_size
    assert 0 < result.staged_seconds <= result.written_seconds <= result.committed_seconds
    assert not result.aliases
    assert not result.hashes


async def test_a_file_is_what_the_official_writer_writes(tmp_path):
    tensors = assorted()
    await stio.save(tensors, tmp_path / "ours.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("size", ["1KB", "20KB", "5GB"])
async def test_a_directory_is_what_the_hub_writes(tmp_path, size):
    tensors = {f"layer.{k}.{name}": ramp(16, 8 + k) for k in range(12) for name in ("w", "b")}
    result = await stio.save(tensors, tmp_path / "ours", max_shard_size=size)
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(tensors, tmp_path / "theirs", max_shard_size=size)
    ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name == INDEX:
            assert json.loads(ours[name]) == json.loads(theirs[name])
        else:
            assert ours[name] == theirs[name]
    assert list(result.files) == [name for name in ours if name != INDEX]


async def test_bytes_are_the_same_each_time(tmp_path):
    tensors, metadata = assorted(), {f"key {k}": "v" * k for k in range(20)}
    for name in ("a", "b"):
        await stio.save(tensors, tmp_path / name, max_shard_size="200KB", metadata=metadata)
        metadata = dict(reversed(metadata.items()))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


async def test_metadata_comes_back(tmp_path):
    tensors = {f"t{k}": ramp(64) for k in range(4)}
    for name, size in (("one", None), ("many", "300")):
        await stio.save(tensors, tmp_path / name, max_shard_size=size, metadata={"step": "7"})
        async with stio.open(tmp_path / name) as checkpoint:
            assert checkpoint.metadata["step"] == "7"
            assert checkpoint.metadata["format"] == "pt"


async def test_layouts_that_are_not_contiguous(tmp_path):
    base = torch.arange(24 * 36, dtype=torch.float32).reshape(24, 36)
    complex_ = torch.randn(5, 6, dtype=torch.complex64)
    tensors = {
        "t": base.t(),
        "step": base[::3, 1::5],
        "expanded": torch.arange(5.0).expand(7, 5),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "part": base[3:5],
        "zero": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(3)),
    }
    await stio.save(tensors, tmp_path / "x.safetensors")
    plain = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    require_equal(oracle(tmp_path / "x.safetensors"), plain)


@pytest.mark.matrix
async def test_large_tensors_cross_blocks(tmp_path):
    tensors = {"a": torch.randn(3 * MIB + 5), "b": torch.randn(1000, 1001).t(), "c": torch.randn(7)}
    await stio.save(tensors, tmp_path / "x.safetensors", budget_bytes=4 * MIB)
    require_equal(oracle(tmp_path / "x.safetensors"), {name: t.contiguous() for name, t in tensors.items()})


async def test_nothing_to_save(tmp_path):
    result = await stio.save({}, tmp_path / "empty")
    assert result.total_bytes == 0
    assert await stio.load(tmp_path / "empty") == {}


# Tied weights.


async def test_a_module_with_ties_and_back(tmp_path):
    model = Model()
    result = await stio.save(model, tmp_path / "model")
    assert result.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in oracle(tmp_path / "model" / "model.safetensors")
    loaded = await stio.load(tmp_path / "model")
    assert loaded["head.weight"] is loaded["embed.weight"]
    other = Model()
    report = await stio.load_into(other, tmp_path / "model")
    assert not report.missing
    require_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("size", [None, "500"])
async def test_the_hub_loads_a_tied_model(tmp_path, size):
    model, other = Model(), Model()
    await stio.save(model, tmp_path, max_shard_size=size)
    load_torch_model(other, tmp_path, strict=False)
    require_equal(other.state_dict(), model.state_dict())


async def test_shared_policies(tmp_path):
    weight = torch.randn(8, 8)
    tensors = {"b": weight, "a": weight, "rows": weight[2:4]}
    deduped = await stio.save(tensors, tmp_path / "dedupe")
    assert deduped.aliases == {"a": "b"}
    cloned = await stio.save(tensors, tmp_path / "clone", shared="clone")
    assert not cloned.aliases
    for name in ("dedupe", "clone"):
        require_equal(await stio.load(tmp_path / name), tensors)
    with pytest.raises(stio.SharedTensorsError, match="'a'"):
        await stio.save(tensors, tmp_path / "error", shared="error")
    assert not (tmp_path / "error").exists()


# Directories that hold something already.


async def test_generations_in_one_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for generation, size in enumerate(["1KB", "1KB", None, "400", None, None]):
        tensors = {f"t{k}": torch.full((64,), float(generation)) for k in range(6)}
        result = await stio.save(tensors, tmp_path, max_shard_size=size)
        require_equal(await stio.load(tmp_path), tensors)
        if (tmp_path / INDEX).exists():
            require_equal(by_index(tmp_path), tensors)
        expected = {*result.files, "config.json", *([INDEX] if (tmp_path / INDEX).exists() else [])}
        assert set(files_of(tmp_path)) == expected


async def test_c117_over_the_file_that_it_was_loaded_from(tmp_path):
    path = tmp_path / "x.safetensors"
    first = {f"t{k}": ramp(300, 300, start=k) for k in range(5)}
    await stio.save(first, path)
    for memory in ("map", "lazy"):
        mapped = await stio.load(path, memory=memory)
        held = {name: tensor.clone() for name, tensor in mapped.items()}
        await stio.save({name: mapped[name] for name in reversed(mapped)}, path)
        require_equal(mapped, held)  # readers keep the old bytes
        require_equal(oracle(path), first)


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
async def test_hashes_are_those_of_the_files(tmp_path, algorithm):
    tensors = {f"t{k}": ramp(300, 300, start=k) for k in range(5)}
    result = await stio.save(tensors, tmp_path, max_shard_size="800KB", hash=algorithm, budget_bytes=4 * MIB)
    if algorithm == "sha256":
        for name, digest in result.hashes.items():
            assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    assert set(result.hashes) == set(result.files)
    require_equal(await stio.load(tmp_path, verify=True), tensors)
    await stio.save(tensors, tmp_path)
    with pytest.raises(stio.IntegrityError, match="manifest"):
        await stio.load(tmp_path, verify=True)


async def test_c102_a_file_that_was_hashed_and_damaged(tmp_path):
    path = tmp_path / "x.safetensors"
    await stio.save({"a": ramp(1000)}, path, hash="sha256")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(stio.IntegrityError, match="x.safetensors"):
        await stio.load(path, verify=True)


# Wrong calls, before anything is there.


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tensors", "keywords", "error"),
    [
        ({"a": 1}, {}, TypeError),
        ([("a", torch.ones(1))], {}, TypeError),
        ({1: torch.ones(1)}, {}, TypeError),
        ({"a": torch.ones(2).to_sparse()}, {}, (TypeError, ValueError)),
        ({"a": torch.ones(2, device="meta")}, {}, ValueError),
        ({"a": torch.ones(2, dtype=torch.complex128)}, {}, stio.UnsupportedDtypeError),
        ({"a\0b": torch.ones(2)}, {}, ValueError),
        ({"__metadata__": torch.ones(2)}, {}, ValueError),
        ({"a": torch.ones(2)}, {"metadata": {"a": 1}}, TypeError),
        ({"a": torch.ones(2)}, {"max_shard_size": "-1GB"}, ValueError),
        ({"a": torch.ones(2)}, {"max_shard_size": "lots"}, ValueError),
        ({"a": torch.ones(2)}, {"filename_pattern": "model.safetensors"}, ValueError),
        ({"a": torch.ones(2)}, {"filename_pattern": "../m{suffix}.safetensors"}, ValueError),
        ({"a": torch.ones(2)}, {"shared": "merge"}, ValueError),
        ({"a": torch.ones(2)}, {"durability": "maybe"}, ValueError),
        ({"a": torch.ones(2)}, {"hash": "md5"}, ValueError),
        ({"a": torch.ones(2)}, {"budget_bytes": -1}, ValueError),
        ({"a": torch.ones(2)}, {"budget_bytes": 0}, ValueError),
        ({"a": torch.ones(2)}, {"budget_bytes": True}, TypeError),
        ({"a": torch.ones(2)}, {"budget_bytes": "1 GBit"}, ValueError),
        ({"a": torch.ones(2)}, {"switch_interval": 0}, ValueError),
        ({"a": torch.ones(2)}, {"progress": 3}, TypeError),
        ({"a": torch.ones(2)}, {"shapes": 3}, TypeError),
    ],
    ids=str,
)
async def test_wrong_calls_leave_nothing(tmp_path, tensors, keywords, error):
    with nothing_left():
        with pytest.raises(error):
            await stio.save(tensors, tmp_path / "out", **keywords)
    assert not list(tmp_path.iterdir())


async def test_a_file_has_no_shards(tmp_path):
    with pytest.raises(ValueError, match="one file"):
        await stio.save({"a": torch.ones(1)}, tmp_path / "x.safetensors", max_shard_size="1GB")


# Tensors that are made while they are saved.


async def test_a_conversion_runs_in_one_window(tmp_path):
    source = {f"t{k}": ramp(512, 512, start=k) for k in range(8)}
    await stio.save(source, tmp_path / "source")
    alive, most = 0, 0

    def made(name, tensor):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        weakref.finalize(tensor, drop)
        return tensor

    def drop():
        nonlocal alive
        alive -= 1

    async with stio.open(tmp_path / "source", memory="copy") as checkpoint:

        async def produce(name):
            return made(name, (await checkpoint.read(name)).to(torch.bfloat16))

        lazy = {
            name: stio.LazyTensor(torch.bfloat16, (512, 512), lambda name=name: produce(name)) for name in checkpoint
        }
        await stio.save(lazy, tmp_path / "converted", max_shard_size="1MB")
    require_equal(await stio.load(tmp_path / "converted"), {name: t.to(torch.bfloat16) for name, t in source.items()})
    assert most == 1
    assert alive == 0


async def test_rows_as_they_come(tmp_path):
    whole = ramp(1000, 700)

    def rows():
        for start in range(0, 1000, 300):
            yield whole[start : start + 300]

    lazy = {"a": stio.LazyTensor(torch.float32, (1000, 700), rows), "b": torch.ones(3)}
    await stio.save(lazy, tmp_path / "x.safetensors", budget_bytes=4 * MIB)
    require_equal(oracle(tmp_path / "x.safetensors"), {"a": whole, "b": torch.ones(3)})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("produce", "error"),
    [
        (lambda: torch.ones(2, 2), ValueError),
        (lambda: torch.ones(4, 2, dtype=torch.float16), ValueError),
        (lambda: iter([torch.ones(2, 2)]), ValueError),
        (lambda: iter([torch.ones(3, 2), torch.ones(3, 2)]), ValueError),
        (lambda: "nonsense", ValueError),
        (lambda: 1 / 0, ZeroDivisionError),
    ],
)
async def test_a_producer_that_breaks_its_word(tmp_path, produce, error):
    await stio.save({"old": torch.ones(3)}, tmp_path / "x")
    before = files_of(tmp_path / "x")
    with nothing_left(), pytest.raises(error):
        await stio.save({"a": stio.LazyTensor(torch.float32, (4, 2), produce)}, tmp_path / "x")
    assert files_of(tmp_path / "x") == before


# While it runs.


async def test_progress_and_trace(tmp_path):
    tensors = {**{f"t{k}": ramp(700, 700, start=k) for k in range(8)}, "none": torch.empty(0)}
    events, trace = [], stio.Trace()
    result = await stio.save(
        tensors, tmp_path, max_shard_size="6MB", budget_bytes=4 * MIB, progress=events.append, trace=trace
    )
    assert [event.done_bytes for event in events] == sorted(event.done_bytes for event in events)
    assert events[-1].done_bytes == events[-1].total_bytes == result.total_bytes
    assert events[-1].done_tensors == events[-1].total_tensors == len(tensors)
    assert {span.name for span in trace.spans} == {"plan", "begin", "stage", "write", "sync", "commit"}
    for name in ("stage", "write"):
        assert sum(span.num_bytes for span in trace.spans if span.name == name) == result.file_bytes


@pytest.mark.matrix
@pytest.mark.parametrize("hash", [None, "sha256"])
async def test_the_engine_fills_and_writes(tmp_path, hash):
    """All but a block that has a lazy tensor, or one of another layout."""
    if not native.available():
        pytest.skip("there is no engine here")
    tensors = {f"t{k}": ramp(700, 700, start=k) for k in range(8)}
    for of_other_layout in (
        {},
        {"t": ramp(30, 700).t()},
        {"lazy": stio.LazyTensor(torch.float32, [3], lambda: ramp(3))},
    ):
        trace = stio.Trace()
        saved = {**tensors, **of_other_layout}
        await stio.save(saved, tmp_path / "x", max_shard_size="6MB", trace=trace, hash=hash)
        lanes = {name: {span.lane.rpartition("-")[0] for span in trace.spans if span.name == name} for name in STEPS}
        assert lanes["write"] == {"engine"}
        assert lanes["stage"] == ({"save", ""} & lanes["stage"] if "lazy" in saved else {"engine"})
        expected = {name: ramp(3) if name == "lazy" else tensor for name, tensor in saved.items()}
        require_equal(await stio.load(tmp_path / "x", verify=hash is not None), expected)


@pytest.mark.usefixtures("plain_executor")
async def test_without_the_engine_threads_fill_and_write(tmp_path):
    tensors, trace = {f"t{k}": ramp(700, 700, start=k) for k in range(8)}, stio.Trace()
    await stio.save(tensors, tmp_path / "x", max_shard_size="6MB", trace=trace, hash="sha256")
    assert {span.lane.rpartition("-")[0] for span in trace.spans if span.name in STEPS} <= {"save", ""}
    require_equal(await stio.load(tmp_path / "x", verify=True), tensors)


@pytest.mark.slow
async def test_a_small_budget_pipelines(tmp_path):
    """A shard is written while the next one is staged: on a busy machine not in each save."""
    tensors = {f"t{k}": ramp(1024, 1024, start=k) for k in range(12)}
    saver = stio.Saver(budget_bytes=4 * MIB)

    async def overlaps() -> bool:
        trace = stio.Trace()
        await (await saver.save(tensors, tmp_path / "x", max_shard_size="8MB", trace=trace))
        assert saver._shared.pool.peak_bytes <= 4 * MIB
        writes = [span for span in trace.spans if span.name == "write"]
        stages = [span for span in trace.spans if span.name == "stage"]
        return any(w.detail < s.detail and s.start < w.end and w.start < s.end for w in writes for s in stages)

    async with saver:
        assert any([await overlaps() for _ in range(10)])
    require_equal(await stio.load(tmp_path / "x"), tensors)


@pytest.mark.matrix
async def test_goes_on_while_the_loop_is_blocked(tmp_path):
    tensors = {f"t{k}": torch.randn(1024, 1024) for k in range(8)}
    async with stio.Saver() as saver:
        pending = await saver.save(tensors, tmp_path / "x")
        deadline = time.monotonic() + 20
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251  # the training step that blocks the loop
        assert pending.done()
        await pending


def test_without_a_loop_and_from_threads(tmp_path):
    errors = []

    def work(k):
        try:
            for generation in range(3):
                tensors = {"a": torch.full((1000,), float(k * 10 + generation))}
                stio.sync.save(tensors, tmp_path / f"{k}")
                require_equal(stio.sync.load(tmp_path / f"{k}"), tensors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_sync_warns_under_a_loop_like_load(tmp_path, monkeypatch):
    monkeypatch.setattr(stio.sync, "_warned", False)

    async def main():
        with pytest.warns(RuntimeWarning, match="blocks the running event loop"):
            stio.sync.save({"a": torch.ones(1)}, tmp_path / "x")

    asyncio.run(main())


async def test_a_result_at_a_prompt(tmp_path):
    result = await stio.save(Model(), tmp_path / "m", max_shard_size=1200, hash="sha256")
    assert repr(result).startswith(f"<SaveResult '{tmp_path}/m': {len(result.files)} files, 5.31 kB, published after ")


def test_a_result_with_a_hostile_path_stays_safe():
    result = stio.SaveResult(
        path="<b>\x1b[2J", kind="full", files=("a",), total_bytes=5, changed_bytes=5, file_bytes=6, written_bytes=6,
        aliases={}, hashes={},
        staged_seconds=0.0, written_seconds=0.1, committed_seconds=0.2,
    )  # fmt: skip
    assert len(repr(result)) < 200
    assert "\x1b" not in repr(result)
