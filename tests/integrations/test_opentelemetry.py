"""Traces as OpenTelemetry spans, seen by the real SDK's exporter in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support import oracle, ramp, require_equal, run_python, save_sharded

import stio
from stio import sync
from stio.integrations.opentelemetry import export_trace, recording


class Telemetry:
    """A provider of its own, and what it exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.provider.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded({f"layer.{k}": ramp(64, 64) for k in range(6)}, tmp_path_factory.mktemp("model"), 2)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_load_becomes_children_of_the_current_span(telemetry: Telemetry, directory: Path) -> None:
    trace = stio.Trace()
    before = time.time_ns()
    with telemetry.tracer.start_as_current_span("request") as request:
        sync.load(directory, memory="copy", trace=trace)
        assert export_trace(trace, tracer=telemetry.tracer) == len(trace.spans)
    after = time.time_ns()
    *children, parent = telemetry.spans()
    assert parent.name == "request"
    assert {child.name for child in children} >= {"stio.open", "stio.plan", "stio.read", "stio.tensors"}
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == request.get_span_context().span_id
        assert child.context.trace_id == request.get_span_context().trace_id
        assert child.start_time is not None
        assert child.end_time is not None
        assert before - 5e6 <= child.start_time <= child.end_time <= after + 5e6  # the clocks may be turned meanwhile
    (opened,) = [child for child in children if child.name == "stio.open"]
    assert attributes(opened) == {"stio.lane": "load", "stio.detail": str(directory), "stio.num_bytes": 0}
    reads = [attributes(child) for child in children if child.name == "stio.read"]
    num_bytes = sum(int(str(read["stio.num_bytes"])) for read in reads)
    assert num_bytes == sum(span.num_bytes for span in trace.spans if span.name == "read") >= 6 * 64 * 64 * 4


def test_swaps_of_a_pool_become_spans(telemetry: Telemetry, directory: Path) -> None:
    trace = stio.Trace()
    with sync.ModelPool(device="cpu", device_bytes="100kB", trace=trace) as pool:
        for name in ("chat", "code"):
            pool.add(name, directory)
            with pool.use(name):
                pass
    assert export_trace(trace, tracer=telemetry.tracer) == len(trace.spans)
    found = [(span.name, attributes(span).get("stio.detail")) for span in telemetry.spans()]
    assert [one for one in found if one[0] in ("stio.swap", "stio.evict")] == [
        ("stio.swap", "chat"),
        ("stio.evict", "chat"),
        ("stio.swap", "code"),
    ]


def test_times_and_durations_are_those_of_the_trace(telemetry: Telemetry) -> None:
    trace = stio.Trace()
    trace.add("read", trace.origin + 1.0, trace.origin + 1.5, num_bytes=5, lane="read-1")
    trace.add("tensors", trace.origin + 2.0, trace.origin + 2.0, lane="read-1")
    export_trace(trace, tracer=telemetry.tracer)
    read, tensors = telemetry.spans()
    assert read.start_time is not None
    assert read.end_time is not None
    assert tensors.start_time is not None
    assert read.end_time - read.start_time == pytest.approx(5e8, abs=1000)
    assert tensors.start_time - read.start_time == pytest.approx(1e9, abs=1000)
    now = time.time_ns() + 1e9 - (time.perf_counter() - trace.origin) * 1e9
    assert read.start_time == pytest.approx(now, abs=5e7)


def test_recording(telemetry: Telemetry, directory: Path) -> None:
    with recording("load the model", tracer=telemetry.tracer, attributes={"model": "tiny"}) as trace:
        require_equal(sync.load(directory, memory="copy", trace=trace), oracle(directory))
        assert otel.get_current_span().is_recording()
    *children, parent = telemetry.spans()
    assert len(children) == len(trace.spans)
    assert parent.name == "load the model"
    found = attributes(parent)
    num_bytes = sum(span.num_bytes for span in trace.spans if span.name == "read")
    assert (found["model"], found["stio.num_bytes"]) == ("tiny", num_bytes)
    assert "; read " in str(found["stio.summary"])
    assert parent.start_time is not None
    assert parent.end_time is not None
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == parent.context.span_id
        assert child.start_time is not None
        assert child.start_time >= parent.start_time - 5e6


def test_an_error_is_recorded_and_passed_on(telemetry: Telemetry, tmp_path: Path) -> None:
    with pytest.raises(stio.CheckpointNotFoundError):
        with recording("load", tracer=telemetry.tracer) as trace:
            sync.load(tmp_path / "nothing", trace=trace)
    *children, parent = telemetry.spans()
    assert [child.name for child in children] == ["stio.open"]
    assert parent.status.status_code is StatusCode.ERROR
    assert [event.name for event in parent.events] == ["exception"]


@pytest.mark.anyio
async def test_in_tasks_each_has_its_own(telemetry: Telemetry, directory: Path) -> None:
    import anyio

    async def load(name: str) -> None:
        with recording(name, tracer=telemetry.tracer) as trace:
            await stio.load(directory, trace=trace)

    async with anyio.create_task_group() as group:
        group.start_soon(load, "one")
        group.start_soon(load, "two")
    spans = telemetry.spans()
    parents = {span.name: span.context.span_id for span in spans if not span.name.startswith("stio.")}
    for name in ("one", "two"):
        mine = {span.name for span in spans if span.parent and span.parent.span_id == parents[name]}
        assert {"stio.open", "stio.plan", "stio.tensors"} <= mine


def test_many_spans_become_one_for_each_lane_and_kind(telemetry: Telemetry) -> None:
    trace = stio.Trace(origin=0.0)
    for k in range(300):
        for lane in ("read-1", "read-2"):
            trace.add("read", k * 1.0, k + 0.5, num_bytes=10, detail="CopiedPath", lane=lane)
            trace.add("tensors", k + 0.5, k + 0.6, lane=lane)
    assert export_trace(trace, tracer=telemetry.tracer) == 4
    spans = {(span.name, attributes(span)["stio.lane"]): span for span in telemetry.spans()}
    assert len(spans) == 4
    read = spans["stio.read", "read-1"]
    assert attributes(read) == {
        "stio.lane": "read-1",
        "stio.num_bytes": 3000,
        "stio.num_spans": 300,
        "stio.covered_seconds": pytest.approx(150),
    }
    assert read.start_time is not None
    assert read.end_time is not None
    assert read.end_time - read.start_time == pytest.approx(299.5e9, abs=1000)
    telemetry.exporter.clear()
    assert export_trace(trace, tracer=telemetry.tracer, max_spans=1200) == 1200
    assert len(telemetry.spans()) == 1200


def test_hostile_names_are_printable(telemetry: Telemetry) -> None:
    trace = stio.Trace(origin=0.0)
    trace.add("\ud800\n", 0.0, 1.0, detail="\x1b[31m", lane="\x00")
    export_trace(trace, tracer=telemetry.tracer)
    (span,) = telemetry.spans()
    texts = [span.name, *map(str, attributes(span).values())]
    assert all(text.isprintable() for text in texts)
    assert [text.encode() for text in texts]


def test_an_empty_trace_makes_nothing(telemetry: Telemetry) -> None:
    assert export_trace(stio.Trace(), tracer=telemetry.tracer) == 0
    assert telemetry.spans() == []


@pytest.mark.parametrize("max_spans", [0, -1])
def test_max_spans_must_be_positive(max_spans: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, not {max_spans}"):
        export_trace(stio.Trace(), max_spans=max_spans)


@pytest.mark.slow
def test_without_an_sdk_nothing_is_made_and_nothing_fails(directory: Path, torch_zygote: Any) -> None:
    found = run_python(
        """
        import sys
        from stio import sync
        from stio.integrations.opentelemetry import export_trace, recording
        assert "opentelemetry.sdk" not in sys.modules
        with recording("load") as trace:
            sync.load(sys.argv[1], trace=trace)
        assert trace.spans
        export_trace(trace)
        """,
        directory,
        python=torch_zygote.python,
    )
    assert found.returncode == 0, found.stderr


def test_the_error_names_the_extra(torch_zygote: Any) -> None:
    found = torch_zygote.run(
        """
        import sys
        sys.modules["opentelemetry"] = None
        try:
            import stio.integrations.opentelemetry
        except ImportError as error:
            print(error)
        """
    )
    assert "opentelemetry-api: pip install 'stio-torch[otel]'" in found.stdout, found.stderr
