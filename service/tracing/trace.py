"""Trace: the stages of a traced request with their times. Stages add records to it; spans are created from it at the end.

The tracer, which creates the spans, needs OpenTelemetry, an extra. It is imported only if tracing is enabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bertserve.service.errors import SettingsError, install_command

if TYPE_CHECKING:
    from bertserve.service.tracing.tracer import Tracer

# Stages and waits that a trace keeps: the first ones and the last one. A document with many windows can have hundreds of runs.
MAX_STAGES = 512

StageName = Literal["queue", "tokenize", "run", "decode"]


class TraceStage(NamedTuple):
    """A part of a request, with its times in seconds of `time.perf_counter`; `batch` is the id of its batch if it is a run."""

    name: StageName
    start: float
    end: float
    batch: Any = None


@dataclass(slots=True, eq=False)
class Trace:
    """A request.

    Attributes:
        tracer: The tracer that started it and creates its spans.
        span: The tracer's span object.
        trace_id: 32 hexadecimal digits; `span_id` has 16.
        traceparent: Both ids in the format of the header.
        recorded: Whether it is exported; otherwise only its ids are used, and stages need not be added.
        epoch_ns: Nanoseconds from 1970 to the zero of `time.perf_counter`.
        stages: Its stages in the order in which they ended, without waits.
        puts: The times at which it was put into the queue.
    """

    tracer: Tracer
    span: Any
    trace_id: str
    span_id: str
    traceparent: str
    recorded: bool
    epoch_ns: int
    stages: list[TraceStage] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)

    def note(self, name: StageName, start: float, end: float, *, batch: Any = None, waits: bool = False) -> None:
        """Adds a stage that has ended; `waits` is whether the request waits in the queue afterwards. Called from several threads."""
        _append(self.stages, TraceStage(name, start, end, batch))
        if waits:
            self.put(end)

    def put(self, now: float) -> None:
        """Records that the request waits in the queue from now on."""
        _append(self.puts, now)

    def waits(self, end: float) -> Iterator[TraceStage]:
        """Yields the waits in the queue: each from a put until the start of its last item, or until the request's end without a start."""
        for queued_at, next_queued_at in zip(self.puts, [*self.puts, end][1:], strict=True):
            started = [stage for stage in self.stages if queued_at <= stage.start < next_queued_at]
            # decoding follows a run without a wait; only a decoding slice without a run has waited
            starts = [stage.start for stage in started if stage.name != "decode"] or [stage.start for stage in started]
            yield TraceStage("queue", queued_at, max(starts, default=next_queued_at))


def _append(values: list[Any], value: Any) -> None:
    """Appends a value, which replaces the last one if the list is full."""
    if len(values) == MAX_STAGES:
        values.pop()
    values.append(value)


def tracer_class() -> type[Tracer]:
    """Returns the class of tracers.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    try:
        from bertserve.service.tracing.tracer import Tracer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SettingsError(
            f"--otlp-endpoint needs OpenTelemetry, which is not installed: `{install_command('otel')}`, or leave the setting out."
        ) from error
    return Tracer


def tracer_to(endpoint: str | None) -> Tracer | None:
    """Returns a tracer that sends to a collector; None without an endpoint. A process that forks must call this after the fork.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    return None if endpoint is None else tracer_class().to(endpoint)
