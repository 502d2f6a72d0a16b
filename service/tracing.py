"""Exports OpenTelemetry spans of requests and batches by OTLP over HTTP. OpenTelemetry is an extra, so it is imported only for traces.

Other settings than the address are standard variables: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
OTEL_PROPAGATORS, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS and others of the exporter. A process that forks creates its tracer after the fork.
"""

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from bertserve.service import __version__
from bertserve.service.errors import SettingsError
from bertserve.service.messages import install_command

try:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.propagate import get_global_textmap
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode
except ImportError as error:
    raise SettingsError(
        f"--otlp-endpoint needs OpenTelemetry, which is not installed: `{install_command('otel')}`, or leave the setting out."
    ) from error

Attributes: TypeAlias = Mapping[str, str | int | float | bool]

PATH = "/v1/traces"
# Their warnings quote headers of callers. The exporter's errors have other loggers.
QUOTING_LOGGERS = ("opentelemetry.baggage", "opentelemetry.propagators", "opentelemetry.trace")


class Tracer:
    """Starts the spans of one process. All times are in seconds of `time.perf_counter`."""

    def __init__(self, endpoint: str) -> None:
        """Creates a tracer with a thread that exports finished spans; errors of the exporter are logged, and the spans are lost.

        `endpoint` is the base address of a collector, or its address for traces.
        """
        service = Resource.create({"service.name": "bertserve", "service.version": __version__, "service.instance.id": str(uuid.uuid4())})
        resource = service.merge(OTELResourceDetector().detect())  # the variables take precedence
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(PATH) + PATH))
        self._requests = TracerProvider(resource=resource, shutdown_on_exit=False)
        # a batch is recorded if one of its requests is, and these are already sampled
        self._batches = TracerProvider(resource=resource, shutdown_on_exit=False, sampler=ALWAYS_ON)
        for provider in (self._requests, self._batches):
            provider.add_span_processor(processor)
        self.spans = self._requests.get_tracer("bertserve", __version__)
        self._batch_spans = self._batches.get_tracer("bertserve", __version__)
        self._propagator = get_global_textmap()
        # Not `baggage`, which the service does not use: it would be split in quadratic time, before the caller's key is checked.
        self._fields = {name.lower().encode(): name for name in self._propagator.fields if name.lower() != "baggage"}
        for logger in QUOTING_LOGGERS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    def start_request_span(self, headers: Iterable[tuple[bytes, bytes]], start: float) -> "RequestSpan":
        """Starts the span of a request, in the caller's trace if its headers name a valid one, otherwise in a new trace.

        Names of headers are in lower case.
        """
        carrier: dict[str, str] = {}
        for key, value in headers:
            if (field := self._fields.get(key)) is not None:
                text = value.decode("latin-1")
                # a repeated header is joined with a comma, which is valid for `tracestate`, and as W3C requires invalid for `traceparent`
                carrier[field] = f"{carrier[field]},{text}" if field in carrier else text
        context = self._propagator.extract(carrier, Context()) if carrier else Context()
        return RequestSpan(self, context, start)

    def record_batch(
        self, traces: Sequence["RequestSpan"], name: str, start: float, end: float, *, attributes: Attributes, error: str | None = None
    ) -> None:
        """Creates the span of a run, with links to the recorded requests in it, at least one, and adds the run to their traces.

        `error` is the kind of error, if the run failed.
        """
        to_ns = traces[0].to_ns
        links = [Link(trace.span.get_span_context()) for trace in traces]
        span = self._batch_spans.start_span(name, Context(), links=links, start_time=to_ns(start))
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(to_ns(end))
        for trace in traces:
            trace.add_stage("run", start, end, links=[Link(span.get_span_context())])

    def close(self) -> None:
        """Exports finished spans with a short timeout, so that an unresponsive collector does not delay the end of the process."""
        thread = threading.Thread(target=self._requests.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(timeout=2)


class RequestSpan:
    """The span of a request, or of a line of a stream, with a child for each of its stages.

    Attributes:
        trace_id: 32 hexadecimal digits; `span_id` has 16.
        traceparent: Both ids in the format of the header.
        is_recording: Whether it is exported; otherwise only its ids are used, and stages must not be added.
    """

    def __init__(self, tracer: Tracer, context: Context, start: float, kind: SpanKind = SpanKind.SERVER) -> None:
        """Starts the span of a request in the trace of a context, or in a new one."""
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.tracer = tracer
        self.span: Span = tracer.spans.start_span("request", context, kind, start_time=self.to_ns(start))
        ids = self.span.get_span_context()
        self.trace_id, self.span_id = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-{ids.trace_flags:02x}"
        self.is_recording = self.span.is_recording()
        self._context = otel.set_span_in_context(self.span, Context())

    def to_ns(self, seconds: float) -> int:
        """Returns a time in nanoseconds since 1970."""
        return self._epoch_ns + int(seconds * 1e9)

    def start_line(self, start: float) -> "RequestSpan":
        """Starts the span of a line of this request."""
        return RequestSpan(self.tracer, self._context, start, SpanKind.INTERNAL)

    def add_stage(self, name: Literal["tokenize", "run", "decode"], start: float, end: float, *, links: Sequence[Link] = ()) -> None:
        """Adds a stage that has ended. Called from several threads."""
        self.tracer.spans.start_span(name, self._context, links=links, start_time=self.to_ns(start)).end(self.to_ns(end))

    def end(self, end: float, *, name: str, attributes: Attributes, failed: bool) -> None:
        """Ends the span."""
        self.span.update_name(name)
        self.span.set_attributes(attributes)
        if failed:
            self.span.set_status(StatusCode.ERROR)
        self.span.end(self.to_ns(end))
