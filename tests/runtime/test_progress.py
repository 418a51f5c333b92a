"""What an operation says of itself: progress events, bars, traces, warnings."""

from __future__ import annotations

import itertools
import json
import threading
import warnings

import pytest
import torch
from support import nothing_left, oracle, ramp, require_equal, save_file, save_sharded
from torch import nn
from tqdm import tqdm

import stio
from stio import sync

pytestmark = pytest.mark.anyio

KIB = 1 << 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    tensors = {f"layer.{k}": ramp(64, 64 + k) for k in range(12)} | {"empty": torch.empty(0, 3)}
    return save_sharded(tensors, tmp_path_factory.mktemp("model"), 3)


def require_progress(events, tensors):
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert events
    for event in events:
        assert (event.total_bytes, event.total_tensors) == (total_bytes, len(tensors))
        assert 0 <= event.done_bytes <= total_bytes
    for before, after in itertools.pairwise(events):
        assert before.done_bytes <= after.done_bytes
        assert before.done_tensors <= after.done_tensors
        assert before.seconds <= after.seconds
    assert (events[-1].done_bytes, events[-1].done_tensors) == (total_bytes, len(tensors))


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["auto", "map", "lazy", "copy"])
async def test_progress_of_every_face(directory, memory):
    expected, events = oracle(directory), []
    keywords = {"memory": memory, "budget_bytes": 64 * KIB, "progress": events.append}
    await stio.load(directory, **keywords)
    require_progress(events, expected)
    events.clear()
    async with stio.open(directory, **keywords) as checkpoint:
        assert [name async for name, _ in checkpoint.stream()]
        require_progress(events, expected)
        events.clear()
        await checkpoint.load(["layer.1", "layer.2"])
        require_progress(events, {name: expected[name] for name in ["layer.1", "layer.2"]})
        events.clear()
        await checkpoint.read("layer.3", slice(0, 2))
        require_progress(events, {"layer.3": expected["layer.3"][:2]})
    module = nn.Module()
    module.layer = nn.ParameterList([torch.zeros(64, 64 + k) for k in range(12)])
    events.clear()
    await stio.load_into(module, directory, strict=False, **keywords)
    del expected["empty"]
    require_progress(events, expected)


async def test_progress_is_one_call_at_a_time(directory):
    inside, lock = [], threading.Lock()

    def progress(event):
        assert lock.acquire(blocking=False)
        inside.append(event)
        lock.release()

    for _ in range(5):
        await stio.load(directory, memory="copy", budget_bytes=64 * KIB, progress=progress)
    assert inside


async def test_progress_of_nothing(directory, tmp_path):
    events = []
    assert await stio.load(save_file({}, tmp_path / "x.safetensors"), progress=events.append) == {}
    assert await stio.load(directory, names=[], progress=events.append) == {}
    assert all(event.done_bytes == event.total_bytes == 0 for event in events)


class Bar(tqdm):
    made: list[Bar] = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made.append(self)
        self.closed = False

    def close(self):
        super().close()
        self.closed = True


async def test_a_tqdm_class(directory, capsys):
    Bar.made.clear()
    total = sum(tensor.nbytes for tensor in oracle(directory).values())
    await stio.load(directory, memory="copy", budget_bytes=64 * KIB, progress=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.n, bar.unit, bar.closed) == (total, total, "B", True)
    assert "100%" in capsys.readouterr().err
    async with stio.open(directory, progress=Bar) as checkpoint:  # a bar for each operation
        await checkpoint.load("layer.1")
        await checkpoint.load("layer.2")
    assert [bar.closed for bar in Bar.made] == [True] * 3


async def test_progress_true_draws_a_bar(directory, capsys):
    require_equal(await stio.load(directory, progress=True), oracle(directory))
    assert "100%" in capsys.readouterr().err
    await stio.load(directory, progress=False)
    assert capsys.readouterr().err == ""


def test_progress_true_without_tqdm(zygote, directory):
    found = zygote.run(
        """
        import sys
        sys.modules["tqdm"] = sys.modules["tqdm.auto"] = None
        from stio import sync
        sync.load(sys.argv[1])
        try:
            sync.load(sys.argv[1], progress=True)
        except ImportError as error:
            print(error)
        """,
        directory,
    )
    assert "pip install 'stio-torch[cli]'" in found.stdout, found.stderr


@pytest.mark.parametrize("memory", ["map", "copy"])
async def test_trace(directory, tmp_path, memory):
    trace = stio.Trace()
    await stio.load(directory, memory=memory, trace=trace)
    names = {span.name for span in trace.spans}
    assert {"map": "populate", "copy": "read"}[memory] in names
    assert "tensors" in names
    assert all(0 <= span.start <= span.end for span in trace.spans)
    total = sum(tensor.nbytes for tensor in oracle(directory).values())
    assert sum(span.num_bytes for span in trace.spans if span.name == "tensors") == total
    trace.save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = [(event["name"], lanes[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert sorted(drawn) == sorted((s.name, s.lane, s.start * 1e6, (s.end - s.start) * 1e6) for s in trace.spans)


async def test_trace_of_a_stream_and_of_several_operations(directory):
    trace = stio.Trace()
    async with stio.open(directory, memory="copy", trace=trace) as checkpoint:
        async for _ in checkpoint.stream():
            pass
        count = len(trace.spans)
        assert count
        await checkpoint.read("layer.1")
        assert len(trace.spans) > count


def test_empty_trace(tmp_path):
    stio.Trace().save_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == {"traceEvents": []}


# The blocking face warns where it blocks a loop.


async def test_sync_under_a_loop_warns_once(directory, monkeypatch):
    monkeypatch.setattr(sync, "_warned", False)
    with pytest.warns(RuntimeWarning, match="blocks the running event loop") as caught:
        sync.load(directory)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync.load(directory)
    monkeypatch.setattr(sync, "_warned", False)
    with pytest.warns(RuntimeWarning) as caught, sync.open(directory):
        pass
    assert caught[0].filename == __file__


async def test_sync_in_a_notebook_does_not_warn(directory, monkeypatch):
    monkeypatch.setattr(sync, "_warned", False)
    monkeypatch.setitem(__import__("sys").modules, "ipykernel", object())
    sync.load(directory)


def test_sync_without_a_loop_does_not_warn(directory, monkeypatch):
    monkeypatch.setattr(sync, "_warned", False)
    with nothing_left():
        require_equal(sync.load(directory), oracle(directory))


def test_sync_in_threads(directory):
    found, expected = [], oracle(directory)

    def work():
        with sync.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            found.append(checkpoint.load())
            found.append(dict(checkpoint.stream()))
        found.append(sync.load(directory))

    with nothing_left():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 12
    for tensors in found:
        require_equal(tensors, expected)


# The switch interval.


async def test_switch_interval_is_restored(directory):
    import sys

    before, seen = sys.getswitchinterval(), []
    await stio.load(directory, switch_interval=0.0005, progress=lambda _: seen.append(sys.getswitchinterval()))
    assert seen
    assert all(value == pytest.approx(0.0005) for value in seen)
    assert sys.getswitchinterval() == before
    async with stio.open(directory, switch_interval=0.0005, memory="copy", budget_bytes=64 * KIB) as checkpoint:
        async for _ in checkpoint.stream():
            break
        assert sys.getswitchinterval() in (before, pytest.approx(0.0005))
    assert sys.getswitchinterval() == before
