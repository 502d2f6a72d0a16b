"""Tracer: OpenTelemetry's spans of requests and batches, sent by OTLP over HTTP. The one module that knows OpenTelemetry, which is an extra.

Settings other than the address are the standard variables: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_PROPAGATORS, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS and the others of the exporter. A process that forks makes its tracer afterwards.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import get_global_textmap
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanKind, StatusCode

from bertserve.service import __version__
from bertserve.service.tracing.trace import Stage, Trace

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

PATH = "/v1/traces"
CLOSE_S = 2.0  # that an end waits for the last spans


class Tracer:
    """Begins and ends the spans of one process."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Creates a tracer, with a thread that sends.

        Args:
            exporter: Takes spans that have ended. What it fails at is logged, and its spans are lost.
        """
        described = Resource.create({"service.name": "bertserve", "service.version": __version__, "service.instance.id": str(uuid.uuid4())})
        resource = described.merge(OTELResourceDetector().detect())  # what the variables say goes over ours
        processor = BatchSpanProcessor(exporter)
        self._requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # a batch is recorded where one of its requests is, which were chosen already
        self._batches = TracerProvider(resource=resource, shutdown_on_exit=False, sampler=ALWAYS_ON)
        for provider in (self._requests, self._batches):
            provider.add_span_processor(processor)
        self._request_spans = self._requests.get_tracer("bertserve", __version__)
        self._batch_spans = self._batches.get_tracer("bertserve", __version__)
        self._propagator = get_global_textmap()
        self._fields = {name.lower().encode(): name for name in self._propagator.fields}

    @classmethod
    def to(cls, endpoint: str) -> Tracer | None:
        """Returns a tracer that sends to a collector; None where OTEL_SDK_DISABLED says that nothing should.

        Args:
            endpoint: Its base address, as OTEL_EXPORTER_OTLP_ENDPOINT has it, or that of the traces.
        """
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        address = endpoint.rstrip("/")
        return cls(OTLPSpanExporter(endpoint=address if address.endswith(PATH) else address + PATH))

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]], attributes: Attributes, start: float) -> Trace:
        """Begins the span of a request: within the caller's trace, if its headers name one as they should, else in a new one.

        Args:
            name: Of the span.
            headers: The request's, names in lower case.
            attributes: What is known by now; the sampler may look at it.
            start: Seconds, by `time.perf_counter`.
        """
        carrier: dict[str, str] = {}
        for key, value in headers:
            if (field := self._fields.get(key)) is not None:
                text = value.decode("latin-1")
                # two of a header are one with a comma: right for `tracestate`, and no `traceparent`, as W3C wants it
                carrier[field] = f"{carrier[field]},{text}" if field in carrier else text
        context = self._propagator.extract(carrier, Context()) if carrier else Context()
        return self._begin(name, context, SpanKind.SERVER, attributes, start)

    def begin_within(self, trace: Trace, name: str, start: float) -> Trace:
        """Begins a part of a request that is traced like one itself."""
        return self._begin(name, otel.set_span_in_context(trace.span, Context()), SpanKind.INTERNAL, {}, start)

    def _begin(self, name: str, context: Context, kind: SpanKind, attributes: Attributes, start: float) -> Trace:
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        span = self._request_spans.start_span(name, context, kind, dict(attributes), start_time=_ns(start, epoch_ns))
        known = span.get_span_context()
        trace_id, span_id = f"{known.trace_id:032x}", f"{known.span_id:016x}"
        return Trace(self, span, trace_id, span_id, f"00-{trace_id}-{span_id}-{known.trace_flags:02x}", span.is_recording(), epoch_ns)

    def end(self, trace: Trace, end: float, *, name: str | None = None, attributes: Attributes, failed: bool) -> None:
        """Ends the span of a request, and makes those of its stages.

        Args:
            trace: What `begin` returned.
            end: Seconds, by `time.perf_counter`.
            name: The span's name, where more is known now.
            attributes: More attributes.
            failed: Whether the service is to blame.
        """
        span = trace.span
        if trace.recorded:
            context = otel.set_span_in_context(span, Context())
            for stage in (*trace.waits(end), *trace.stages):
                links = () if stage.batch is None else (Link(stage.batch),)
                part = self._request_spans.start_span(stage.name, context, links=links, start_time=_ns(stage.start, trace.epoch_ns))
                part.end(_ns(stage.end, trace.epoch_ns))
            if name is not None:
                span.update_name(name)
            span.set_attributes(attributes)
            if failed:
                span.set_status(StatusCode.ERROR)
        span.end(_ns(end, trace.epoch_ns))

    def batch(
        self, traces: Sequence[Trace], name: str, start: float, end: float, *, attributes: Attributes, error: str | None = None
    ) -> None:
        """Makes the span of a run of a graph, which links the requests that ran in it, and tells these of it.

        Args:
            traces: Of those of its requests that are recorded, at least one.
            name: Of the span.
            start: Seconds, by `time.perf_counter`.
            end: And its end.
            attributes: Of the run.
            error: What kind of error it ended with, if it did.
        """
        epoch_ns = traces[0].epoch_ns
        links = [Link(trace.span.get_span_context()) for trace in traces]
        span = self._batch_spans.start_span(name, Context(), links=links, start_time=_ns(start, epoch_ns))
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(_ns(end, epoch_ns))
        for trace in traces:
            trace.add(Stage("run", start, end, span.get_span_context()))

    def close(self) -> None:
        """Sends what has ended, for a moment at most: a collector that does not answer keeps no process from ending."""
        closing = threading.Thread(target=self._requests.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _ns(seconds: float, epoch_ns: int) -> int:
    return epoch_ns + int(seconds * 1e9)
