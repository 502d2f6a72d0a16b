"""Trace: what a request that is traced did, and when. A record that stages fill as they go; spans are made of it afterwards.

The tracer that makes them needs OpenTelemetry, an extra, and is imported only where traces are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from bertserve.service.errors import SettingsError, install_command

if TYPE_CHECKING:
    from bertserve.service.tracing.tracer import Tracer

# Stages that a trace keeps per name. A document of many windows can have hundreds of runs and of slices of decoding: then the first ones and the
# last one are kept.
MAX_STAGES = 128

StageName = Literal["queue", "tokenize", "run", "decode"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request.

    Attributes:
        name: Which.
        start: Seconds, by `time.perf_counter`.
        end: And its end.
        batch: Id of the batch in which it ran, or None if it is not a run.
    """

    name: StageName
    start: float
    end: float
    batch: Any = None


@dataclass(slots=True, eq=False)
class Trace:
    """A request, or a line of a stream of them.

    Attributes:
        tracer: Who began it, and makes its spans.
        span: What the tracer knows it by.
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        traceparent: Both, in the form of the header.
        recorded: Whether anybody will see it; else only its ids matter, and nothing need be noted.
        epoch_ns: Nanoseconds from 1970 to the zero of `time.perf_counter`.
        stages: Its parts in the order in which they ended, but for its waits.
        puts: When it was put into the queue, each time.
    """

    tracer: Tracer
    span: Any
    trace_id: str
    span_id: str
    traceparent: str
    recorded: bool
    epoch_ns: int
    stages: list[Stage] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)
    _counts: Counter[StageName] = field(default_factory=Counter)

    def note(self, name: StageName, start: float, end: float, *, waits: bool) -> None:
        """Notes a part of it that has ended, and no run.

        Args:
            name: Which.
            start: Seconds, by `time.perf_counter`.
            end: The same.
            waits: Whether it waits in the queue from then on.
        """
        self.add(Stage(name, start, end))
        if waits:
            self.put(end)

    def put(self, now: float) -> None:
        """Notes that it waits in the queue from now on."""
        if len(self.puts) == MAX_STAGES:
            self.puts.pop()
        self.puts.append(now)

    def add(self, stage: Stage) -> None:
        """Notes a part of it that has ended. Called from threads."""
        self._counts[stage.name] += 1
        if self._counts[stage.name] > MAX_STAGES:
            del self.stages[max(place for place, kept in enumerate(self.stages) if kept.name == stage.name)]
        self.stages.append(stage)

    def waits(self, end: float) -> Iterator[Stage]:
        """Yields its waits: each from when it was put into the queue until the last of what was put then has started.

        Args:
            end: When the request ended, and with it a wait in which nothing started.
        """
        for put, following in zip(self.puts, [*self.puts, end][1:], strict=True):
            started = [stage for stage in self.stages if put <= stage.start < following]
            # decoding follows a run without a wait; only a slice without a run has waited
            starts = [stage.start for stage in started if stage.name != "decode"] or [stage.start for stage in started]
            yield Stage("queue", put, max(starts, default=following))


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
    """Returns a tracer that sends to a collector, if there is one; a process that forks calls this afterwards.

    Raises:
        SettingsError: OpenTelemetry is not installed.
    """
    return None if endpoint is None else tracer_class().to(endpoint)
