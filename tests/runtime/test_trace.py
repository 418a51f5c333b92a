"""What loads and saves record: who worked, who waited for whom, and the picture of it."""

from __future__ import annotations

import itertools
import json
import threading
import xml.etree.ElementTree as ElementTree

import pytest
from fakes import MemoryDestination
from support import Gate, HookedRoot, needs_engine, ramp, save_sharded

import stio
from stio import sync
from stio.runtime.reports.timeline import summarize

pytestmark = pytest.mark.anyio

KIB = 1 << 10
TENSOR_BYTES = 64 * KIB


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(128, 128) for k in range(12)}, tmp_path_factory.mktemp("model"), 2)


def named(trace, name, lane=None):
    return [span for span in trace.spans if span.name == name and lane in (None, span.lane)]


async def test_a_stream_records_its_consumer(directory):
    trace = stio.Trace()
    async with stio.open(directory, memory="copy", budget_bytes=256 * KIB, trace=trace) as checkpoint:
        async for _ in checkpoint.stream():
            pass
    waits, uses = named(trace, "wait", "caller"), named(trace, "consume", "caller")
    assert sum(span.num_bytes for span in uses) == 12 * TENSOR_BYTES
    assert len(waits) == len(uses) + 1  # the last one brings the end
    in_turns = sorted([*waits, *uses], key=lambda span: span.start)
    assert [span.name for span in in_turns] == ["wait", "consume"] * len(uses) + ["wait"]
    assert all(before.end <= after.start for before, after in itertools.pairwise(in_turns))
    assert {span.detail for span in waits} == {"for the next group"}
    assert "consume " in summarize(trace.spans).sentence


def test_a_blocking_stream_too(directory):
    trace = stio.Trace()
    with sync.open(directory, memory="copy", budget_bytes=256 * KIB, trace=trace) as checkpoint:
        list(checkpoint.stream())
    assert sum(span.num_bytes for span in named(trace, "consume", "caller")) == 12 * TENSOR_BYTES


def test_a_consumer_that_lags_shows_as_readers_that_wait(directory):
    trace, gate = stio.Trace(), threading.Event()
    with sync.open(directory, memory="copy", budget_bytes=2 * TENSOR_BYTES, trace=trace) as checkpoint:
        with checkpoint.stream() as stream:
            for k, _ in enumerate(stream):
                if not k:
                    gate.wait(0.05)  # never set: the consumer works for this time
    held_back = [span for span in named(trace, "wait") if span.lane != "caller"]
    assert held_back
    assert {span.detail for span in held_back} == {"for budget"}
    assert max(span.end - span.start for span in held_back) > 0.03
    assert "threads waiting" in summarize(trace.spans).sentence


@pytest.mark.parametrize("face", ["load", "open", "load_into"])
def test_opening_is_recorded_with_its_path(directory, face):
    trace = stio.Trace()
    if face == "load":
        sync.load(directory, trace=trace)
    elif face == "open":
        with sync.open(directory, trace=trace):
            pass
    else:
        module = __import__("torch").nn.Module()
        module.layer = __import__("torch").nn.ParameterList([ramp(128, 128) for _ in range(12)])
        sync.load_into(module, directory, trace=trace)
    assert [span.detail for span in named(trace, "open")] == [str(directory)]


def test_a_place_of_ones_own_is_named_by_its_type(directory):
    trace = stio.Trace()
    sync.load(HookedRoot(directory), trace=trace)
    assert [span.detail for span in named(trace, "open")] == ["HookedRoot"]


def test_a_lazy_load_does_not_claim_to_have_read(directory):
    trace = stio.Trace()
    sync.load(directory, memory="lazy", trace=trace)
    assert not named(trace, "read") + named(trace, "populate")
    assert summarize(trace.spans).num_bytes == 0


def test_a_savers_snapshot_is_what_its_caller_waits_for(tmp_path):
    trace, gate = stio.Trace(), threading.Event()
    with sync.Saver(max_pending=2) as saver:
        first = saver.save({"a": ramp(512, 512)}, MemoryDestination(gate=gate), trace=trace)
        (wait,) = named(trace, "wait", "caller")
        assert wait.detail == "for the snapshot"
        assert all(span.end <= wait.end for span in named(trace, "stage"))
        second = saver.save({"a": ramp(512, 512)}, tmp_path / "b", trace=trace)
        gate.set()
        first.result()
        second.result()
    assert "for the save before" in {span.detail for span in named(trace, "wait", "save")}
    assert "caller waiting" in summarize(trace.spans).sentence


def test_pictures_of_a_load_and_of_a_save(directory, tmp_path):
    load, save = stio.Trace(), stio.Trace()
    tensors = sync.load(directory, memory="copy", trace=load)
    sync.save(tensors, tmp_path / "out", trace=save)
    for trace, words in ((load, ("open", "read", "tensors")), (save, ("stage", "write", "commit"))):
        trace.save_svg(tmp_path / "a.svg")
        root = ElementTree.parse(tmp_path / "a.svg").getroot()
        text = " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))
        assert all(word in text for word in words)


@needs_engine
def test_pages_that_are_read_later_are_mapped_by_the_load(directory):
    trace = stio.Trace()
    sync.load(directory, memory="lazy", trace=trace)
    assert {span.lane for span in named(trace, "map")} == {"load"}
    assert not [span for span in trace.spans if span.lane.startswith("engine")]


def test_perfetto_gets_each_span_that_overlaps_others(tmp_path):
    trace = stio.Trace(origin=0.0)
    for k in range(9):
        trace.add("copy", float(k), k + 2.5, lane="copy")  # three at once, as on a device
    trace.save_chrome(tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["copy"] * 3
    by_row = {}
    for event in events:
        if event["ph"] == "X":
            by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_row.values())) == 9
    for times in by_row.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(times)))


def test_a_trace_can_be_drawn_while_it_is_recorded(directory, tmp_path):
    trace, gate, drawn = stio.Trace(), Gate(), threading.Event()

    def load():
        sync.load(HookedRoot(directory, gate), memory="copy", trace=trace)
        drawn.set()

    thread = threading.Thread(target=load)
    thread.start()
    assert gate.reached.wait(5)
    assert named(trace, "open")
    trace.save_svg(tmp_path / "early.svg")
    gate.opened.set()
    thread.join()
    assert drawn.is_set()
    ElementTree.parse(tmp_path / "early.svg")


async def test_a_notebook_shows_the_picture(directory):
    trace = stio.Trace()
    assert repr(trace) == "<Trace: 0 spans>"
    ElementTree.fromstring(trace._repr_svg_())
    await stio.load(directory, trace=trace)
    assert repr(trace) == f"<Trace: {len(trace.spans)} spans>"
    assert "read" in trace._repr_svg_()


@pytest.mark.slow
async def test_the_picture_of_many_spans_stays_small_and_safe():
    trace, evil = stio.Trace(), "<script>\x1b[2J" * 20
    for k in range(100_000):
        trace.add(evil if k % 7 else f"kind {k % 500}", k, k + 0.5, num_bytes=1, detail=evil, lane=f"{evil}{k % 100}")
    assert repr(trace) == "<Trace: 100,000 spans>"
    picture = trace._repr_svg_()
    assert len(picture.encode()) <= 900_000
    ElementTree.fromstring(picture)
    assert "<script" not in picture
    assert "\x1b" not in picture
