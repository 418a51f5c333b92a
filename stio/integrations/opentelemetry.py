"""Exports traces as OpenTelemetry spans, below the current span: the work of stio in a request or a training step.

    with recording("load the model") as trace:
        tensors = await stio.load("model/", trace=trace)

It needs `opentelemetry-api` only; the SDK of the application decides where the spans go. The spans are made after the
work, with its real times, so they do not slow down a load. If a trace has more spans than `max_spans`, the spans of one
lane and one kind of work become one span. An exporter would drop spans that do not fit into its queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stio import Trace
from stio.errors import install_command, printable
from stio.runtime.reports import Span, covered_seconds, summarize, usable

try:
    from opentelemetry import trace as otel
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise ImportError(f"spans of OpenTelemetry are made with opentelemetry-api: {install_command('otel')}") from error

__all__ = ["export_trace", "recording"]

_MAX_SPANS = 512
"""One batch of the exporter in the SDK. Its queue holds 2,048 spans, and the application makes spans too."""


@contextmanager
def recording(
    name: str,
    *,
    tracer: otel.Tracer | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    max_spans: int = _MAX_SPANS,
) -> Iterator[Trace]:
    """Yield a trace for `trace=`. At the end of the block its records become spans, below a span of this name.

    That span is current inside the block, and records an exception that leaves the block.

    Args:
        name: Name of the span.
        tracer: Makes the spans; by default the tracer `stio` of the global provider.
        attributes: Additional attributes of the span.
        max_spans: See `export_trace`.
    """
    tracer = tracer or otel.get_tracer("stio")
    with tracer.start_as_current_span(name, attributes=attributes) as span:
        trace = Trace()
        try:
            yield trace
        finally:
            if span.is_recording():
                summary = summarize(tuple(trace.spans))
                span.set_attributes({"stio.num_bytes": summary.num_bytes, "stio.summary": summary.sentence})
                export_trace(trace, tracer=tracer, max_spans=max_spans)


def export_trace(trace: Trace, *, tracer: otel.Tracer | None = None, max_spans: int = _MAX_SPANS) -> int:
    """Make OpenTelemetry spans from a finished trace, as children of the current span.

    Args:
        trace: Recorded in this process, or in another one since the machine started: they share its clock.
        tracer: Makes the spans; by default the tracer `stio` of the global provider.
        max_spans: With more spans, those of one lane and name become one, with their number and times as attributes.

    Returns:
        Number of the spans made.

    Raises:
        ValueError: `max_spans` is not positive.
    """
    if max_spans < 1:
        raise ValueError(f"max_spans must be positive, not {max_spans}")
    tracer = tracer or otel.get_tracer("stio")
    zero = (
        time.time_ns() - time.perf_counter_ns() + round(trace.origin * 1e9)
    )  # start of the trace, in nanoseconds since 1970
    ordered = usable(tuple(trace.spans))
    groups: dict[object, list[Span]] = {}
    for number, span in enumerate(ordered):
        groups.setdefault(number if len(ordered) <= max_spans else (span.lane, span.name), []).append(span)
    for group in groups.values():
        start, end = group[0].start, max(span.end for span in group)
        attributes: dict[str, AttributeValue] = {
            "stio.lane": printable(group[0].lane),
            "stio.num_bytes": sum(span.num_bytes for span in group),
        }
        if len(group) > 1:
            attributes |= {"stio.num_spans": len(group), "stio.covered_seconds": covered_seconds(group)}
        elif group[0].detail:
            attributes["stio.detail"] = printable(group[0].detail)
        made = tracer.start_span(
            f"stio.{printable(group[0].name)}", start_time=zero + round(start * 1e9), attributes=attributes
        )
        made.end(end_time=zero + round(end * 1e9))
    return len(groups)
