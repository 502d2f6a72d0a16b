"""Tracer: exports OpenTelemetry spans of requests and batches by OTLP over HTTP. It is the only module that uses OpenTelemetry, an extra.

Other settings than the address are standard variables: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_PROPAGATORS, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS and others of the exporter. A process that forks creates its tracer after the fork.
"""

from __future__ import annotations

import logging
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
from bertserve.service.tracing.trace import Trace

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

PATH = "/v1/traces"
CLOSE_S = 2.0  # maximum wait for the last spans at the end
# Their warnings quote headers of callers. The exporter's errors have other loggers.
QUOTING_LOGGERS = ("opentelemetry.baggage", "opentelemetry.propagators", "opentelemetry.trace")


class Tracer:
    """Starts and ends the spans of one process."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Creates a tracer with a thread that exports finished spans; errors of the exporter are logged, and the spans are lost."""
        described = Resource.create({"service.name": "bertserve", "service.version": __version__, "service.instance.id": str(uuid.uuid4())})
        resource = described.merge(OTELResourceDetector().detect())  # the variables take precedence
        processor = BatchSpanProcessor(exporter)
        self._requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # a batch is recorded if one of its requests is, and these are already sampled
        self._batches = TracerProvider(resource=resource, shutdown_on_exit=False, sampler=ALWAYS_ON)
        for provider in (self._requests, self._batches):
            provider.add_span_processor(processor)
        self._request_spans = self._requests.get_tracer("bertserve", __version__)
        self._batch_spans = self._batches.get_tracer("bertserve", __version__)
        self._propagator = get_global_textmap()
        # Not `baggage`, which the service does not use: it would be split in quadratic time, before the caller's key is checked.
        self._fields = {name.lower().encode(): name for name in self._propagator.fields if name.lower() != "baggage"}
        for logger in QUOTING_LOGGERS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    @classmethod
    def to(cls, endpoint: str) -> Tracer | None:
        """Returns a tracer that sends to a collector, by its base address or its address for traces; None if OTEL_SDK_DISABLED is set."""
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        address = endpoint.rstrip("/")
        return cls(OTLPSpanExporter(endpoint=address if address.endswith(PATH) else address + PATH))

    def begin(self, headers: Iterable[tuple[bytes, bytes]], start: float) -> Trace:
        """Starts the span of a request, in the caller's trace if its headers name a valid one, otherwise in a new trace.

        Names of headers are in lower case; `start` is in seconds of `time.perf_counter`.
        """
        carrier: dict[str, str] = {}
        for key, value in headers:
            if (field := self._fields.get(key)) is not None:
                text = value.decode("latin-1")
                # a repeated header is joined with a comma, which is valid for `tracestate`, and as W3C requires invalid for `traceparent`
                carrier[field] = f"{carrier[field]},{text}" if field in carrier else text
        context = self._propagator.extract(carrier, Context()) if carrier else Context()
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        span = self._request_spans.start_span("request", context, SpanKind.SERVER, start_time=_ns(start, epoch_ns))
        span_context = span.get_span_context()
        trace_id, span_id = f"{span_context.trace_id:032x}", f"{span_context.span_id:016x}"
        return Trace(
            self, span, trace_id, span_id, f"00-{trace_id}-{span_id}-{span_context.trace_flags:02x}", span.is_recording(), epoch_ns
        )

    def end(self, trace: Trace, end: float, *, name: str, attributes: Attributes, failed: bool) -> None:
        """Ends the span of a request at `end`, in seconds of `time.perf_counter`, and creates the spans of its stages."""
        span = trace.span
        if trace.recorded:
            context = otel.set_span_in_context(span, Context())
            for stage in (*trace.waits(end), *trace.stages):
                links = () if stage.batch is None else (Link(stage.batch),)
                part = self._request_spans.start_span(stage.name, context, links=links, start_time=_ns(stage.start, trace.epoch_ns))
                part.end(_ns(stage.end, trace.epoch_ns))
            span.update_name(name)
            span.set_attributes(attributes)
            if failed:
                span.set_status(StatusCode.ERROR)
        span.end(_ns(end, trace.epoch_ns))

    def batch(
        self, traces: Sequence[Trace], name: str, start: float, end: float, *, attributes: Attributes, error: str | None = None
    ) -> None:
        """Creates the span of a run, with links to the recorded requests in it, at least one, and adds the run to their traces.

        `start` and `end` are in seconds of `time.perf_counter`; `error` is the kind of error, if the run failed.
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
            trace.note("run", start, end, batch=span.get_span_context())

    def close(self) -> None:
        """Exports finished spans with a short timeout, so that an unresponsive collector does not delay the end of the process."""
        closing = threading.Thread(target=self._requests.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _ns(seconds: float, epoch_ns: int) -> int:
    return epoch_ns + int(seconds * 1e9)
