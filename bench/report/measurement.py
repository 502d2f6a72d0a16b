"""The metrics of a run: counts, rates and latencies of each target, and the cost of the load generator.

Requests count by the time when they were due: those due in the measured time have latencies and failures.
For rates, a response counts by the share of its time, from sending to completion, that is in the measured time. If whole
responses counted at their end, a few long concurrent requests would end in waves, and chance would decide
whether a wave is in the measured time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bertserve.bench.load.generator import LoadResult
from bertserve.bench.load.stream import OK, RequestRecord
from bertserve.bench.target import BatchStats

_CURVE_POINTS = 200

_SERVER_TIMING = re.compile(rb"(\w+);dur=([0-9.]+)")

# above these limits, the generator affects its measurements
MAX_CPU_SHARE = 0.7
MAX_LATENESS_MS = 5.0


def percentile(ascending: Sequence[float], share: float) -> float:
    """Returns the smallest value that is at least as large as this share of the values (nearest rank).

    Args:
        ascending: Sorted values, at least one.
        share: Within (0, 1].
    """
    return ascending[max(math.ceil(share * len(ascending) - 1e-9), 1) - 1]


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency distribution of answered requests, in milliseconds. The field names are those of the JSON report.

    Attributes:
        count: Number of requests.
        curve: Points `[share, milliseconds]` of the cumulative distribution, denser near a share of 1.
    """

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    curve: list[list[float]]


def latency_distribution(milliseconds: Iterable[float]) -> Latency | None:
    """Returns the distribution, or None if there are no values."""
    ascending = sorted(milliseconds)
    if not ascending:
        return None
    # equal steps of log(1 - share): as many points between 99 % and 99.9 % as between 90 % and 99 %
    least = 1 / len(ascending)
    shares = [1 - least ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS)] + [1.0]
    p50, p90, p99, p999 = (percentile(ascending, share) for share in (0.5, 0.9, 0.99, 0.999))
    return Latency(
        count=len(ascending),
        mean_ms=math.fsum(ascending) / len(ascending),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=ascending[-1],
        curve=[[share, percentile(ascending, share)] for share in shares],
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """The metrics of a target in a run. The field names are those of the JSON report.

    Attributes:
        target: Label of the target: its path and its workload.
        seconds: Measured time.
        requests: Number of requests that were due in this time.
        statuses: Number of their responses by HTTP status.
        errors: Number of requests without a response, by kind of failure.
        error_rate: Share of the requests without status 200.
        rps: Requests per second with status 200.
        texts_per_s: Texts per second in these requests.
        tokens_per_s: Tokens per second in these requests, from the encoded bodies if a bundle was given, otherwise from the service's
            metrics; None without either.
        latency: Latency of the responses with status 200, from the time when the request was due.
        server_p50_ms: Medians of the stages in the responses' `server-timing` header.
        overhead_ms: Median latency minus the median of `inference`, if the service sends it.
        batches: Runs of the model, if the service has metrics.
    """

    target: str
    seconds: float
    requests: int
    statuses: dict[str, int]
    errors: dict[str, int]
    error_rate: float
    rps: float
    texts_per_s: float
    tokens_per_s: float | None
    latency: Latency | None
    server_p50_ms: dict[str, float]
    overhead_ms: float | None
    batches: BatchStats | None

    def figures(self) -> Mapping[str, float | None]:
        """Returns the metrics that an objective such as `p99_ms=50` can name."""
        names = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
        return {name: getattr(self.latency, name) if self.latency else None for name in names} | {
            "overhead_ms": self.overhead_ms,
            "error_rate": self.error_rate,
            "rps": self.rps,
            "texts_per_s": self.texts_per_s,
            "tokens_per_s": self.tokens_per_s,
        }


def measure(
    target: str,
    records: Sequence[RequestRecord],
    measured: tuple[float, float],
    *,
    texts: Sequence[int],
    tokens: Sequence[int] | None = None,
    batches: BatchStats | None = None,
) -> Measurement:
    """Returns the measurement of a target's records.

    Args:
        target: Label of the target.
        records: All its records, including those of the warm-up.
        measured: Start and end of the measured time, on the clock of the records.
        texts: Number of texts of each body.
        tokens: Number of tokens of each body, if known.
        batches: Runs of the model over the whole load, if known.
    """
    start, end = measured
    seconds = max(end - start, 1e-9)
    due = [record for record in records if start <= record.intended < end]
    answered_due = [record for record in due if record.outcome == OK]
    answered = [record for record in records if record.outcome == OK]
    shares = [(record.body_index, share) for record in answered if (share := _share_within(record, start, end))]
    outcomes = Counter(str(record.outcome) for record in due)
    latency = latency_distribution((record.ended - record.intended) * 1000 for record in answered_due)
    server_p50 = _server_p50(answered_due)
    responses = sum(share for _, share in shares)
    if tokens is not None:
        tokens_per_s: float | None = sum(tokens[body_index] * share for body_index, share in shares) / seconds
    else:
        tokens_per_s = batches.real_tokens / len(answered) * responses / seconds if batches and answered else None
    return Measurement(
        target=target,
        seconds=seconds,
        requests=len(due),
        statuses={outcome: count for outcome, count in sorted(outcomes.items()) if outcome.isdigit()},
        errors={outcome: count for outcome, count in sorted(outcomes.items()) if not outcome.isdigit()},
        error_rate=1 - len(answered_due) / len(due) if due else 0.0,
        rps=responses / seconds,
        texts_per_s=sum(texts[body_index] * share for body_index, share in shares) / seconds,
        tokens_per_s=tokens_per_s,
        latency=latency,
        server_p50_ms=server_p50,
        overhead_ms=latency.p50_ms - server_p50["inference"] if latency and "inference" in server_p50 else None,
        batches=batches,
    )


def _share_within(record: RequestRecord, start: float, end: float) -> float:
    """Returns the share of a request's time, from sending to its end, that is between `start` and `end`: 0 to 1."""
    duration = record.ended - record.sent
    if duration <= 0:
        return float(start <= record.ended < end)
    return max(min(record.ended, end) - max(record.sent, start), 0.0) / duration


def _server_p50(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns the median of each stage of the `server-timing` headers, in milliseconds."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, milliseconds in _SERVER_TIMING.findall(record.server_timing):
            values.setdefault(name.decode(), []).append(float(milliseconds))
    return {name: percentile(sorted(times), 0.5) for name, times in values.items()}


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """The cost of the load generator, and its delays. The field names are those of the JSON report.

    Attributes:
        cpu_share: Share of a core that it used, 0 to 1.
        cpu_us_per_request: CPU time per request in microseconds.
        lag_p99_ms: 99th percentile of its timer's delay; above a few milliseconds, no core was free when it needed one.
        late_p99_ms: 99th percentile of the delay of sending a request; None in a closed loop.
        capped: Number of requests that waited because of the maximum number of connections.
        connections: Maximum number of open connections.
        warnings: Reasons why the metrics may describe the generator instead of the service.
    """

    cpu_share: float
    cpu_us_per_request: float
    lag_p99_ms: float
    late_p99_ms: float | None
    capped: int
    connections: int
    warnings: list[str]

    @property
    def was_late(self) -> bool:
        """Whether the generator was late: the load differs from the intended one, and latencies are not those of the service."""
        late = self.late_p99_ms or 0.0
        return self.lag_p99_ms > MAX_LATENESS_MS or (late > MAX_LATENESS_MS and not self.capped)


def generator_stats(load: LoadResult, *, open_loop: bool) -> GeneratorStats:
    """Returns the generator's own metrics of a load."""
    start, end = load.measured
    all_records = [record for records in load.records for record in records]
    ended = sum(1 for record in all_records if start <= record.ended < end)
    cpu_share = load.cpu_s / max(end - start, 1e-9)
    lag = percentile(sorted(load.timer_lags_s), 0.99) * 1000 if load.timer_lags_s else 0.0
    lateness = sorted((record.sent - record.intended) * 1000 for record in all_records if start <= record.intended < end)
    late = percentile(lateness, 0.99) if open_loop and lateness else None
    warnings = []
    if cpu_share > MAX_CPU_SHARE:
        warnings.append(f"the generator used {cpu_share:.0%} of a core; its own speed may be what was measured")
    if lag > MAX_LATENESS_MS:
        warnings.append(f"the generator's timer was {lag:.1f} ms late at p99: it did not get a core when it needed one; run it elsewhere")
    if late is not None and late > MAX_LATENESS_MS and not load.capped:
        warnings.append(f"requests were sent {late:.1f} ms late at p99, which their latencies include")
    if load.capped:
        warnings.append(f"{load.capped} requests waited for a connection, which their latencies include; raise --max-connections")
    return GeneratorStats(cpu_share, load.cpu_s / max(ended, 1) * 1e6, lag, late, load.capped, load.peak_connections, warnings)
