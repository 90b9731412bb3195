"""Trace context: in from HTTP, over the bus as `traceparent`, out to wherever OTEL_TRACES_EXPORTER says.

Spans always have ids, so that events and logs carry a trace id even where nothing is exported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

EXPORTERS = ("none", "console", "otlp")

_propagator = TraceContextTextMapPropagator()


def check_exporter(name: str) -> str:
    """Return `name` if it is an exporter we know.

    Raises:
        ValueError: It is not, or its package is not installed.
    """
    if name not in EXPORTERS:
        raise ValueError(f"not one of {', '.join(EXPORTERS)}")
    if name == "otlp":
        _otlp()
    return name


def configure(component: str, instance: str, exporter: str) -> None:
    """Install the tracer provider of this process; `exporter` is one of `EXPORTERS`."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"lorelay-{component}", "service.instance.id": instance})
    )
    if exporter == "console":
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    elif exporter == "otlp":
        provider.add_span_processor(BatchSpanProcessor(_otlp()))
    trace.set_tracer_provider(provider)


@contextlib.contextmanager
def span(name: str, traceparent: str = "", **attributes: str | float | bool) -> Iterator[trace.Span]:
    """Run a block in a span, a child of `traceparent` if there is one, else of the current span."""
    context = _propagator.extract({"traceparent": traceparent}) if traceparent else None
    with trace.get_tracer("lorelay").start_as_current_span(name, context=context, attributes=attributes) as current:
        yield current


def traceparent() -> str:
    """Return the current span's W3C trace context, or an empty string."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """Return the current trace's id in hex, or an empty string."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def _otlp() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - only if asked for
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ValueError("install opentelemetry-exporter-otlp-proto-http to export with it") from error
    exporter: SpanExporter = OTLPSpanExporter()
    return exporter
