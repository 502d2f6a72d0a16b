"""The measurement of one target in one run: counts, rates and latencies, computed from its records.

Requests are counted by when they were due: those due in the measured time have latencies, and their failures are failures.
Rates count a response for the share of its time, from when it was sent until it was complete, that lies in the measured time. If responses
were counted whole when they end, the responses of a few long requests that run side by side would come in waves, and chance would decide
whether a wave falls into the measured time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertserve.bench.load.stream import OK, Record
from bertserve.bench.report.latency import Latency, latency_distribution, percentile
from bertserve.bench.target.metrics import BatchStats

_SERVER_TIMING = re.compile(rb"(\w+);dur=([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one target in one run. The field names are those of the JSON report.

    Attributes:
        target: Label of the target: its path and its mix.
        seconds: Measured time.
        requests: Requests that were due in that time.
        statuses: Number of their responses by HTTP status.
        errors: Number of those without a response, by kind of failure.
        error_rate: Share of the requests that were not answered with 200.
        rps: Requests per second that were answered with 200.
        texts_per_s: Texts per second in these requests.
        tokens_per_s: Tokens per second in these requests. The source is the encoded bodies if a bundle was given, else the service's
            metrics; None without either.
        latency: Latency of the responses with 200, from when the request was due.
        server_p50_ms: Medians of the parts in the responses' `server-timing` header.
        overhead_ms: Median latency minus the median of `inference`, if the service sends that.
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
        """Returns the figures that an objective such as `p99_ms=50` may name."""
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
    records: Sequence[Record],
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
        texts: Texts of each body.
        tokens: Tokens of each body, if known.
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


def _share_within(record: Record, start: float, end: float) -> float:
    """Returns the share of a request's time, from sent to ended, that lies between `start` and `end`: 0 to 1."""
    taken = record.ended - record.sent
    if taken <= 0:
        return float(start <= record.ended < end)
    return max(min(record.ended, end) - max(record.sent, start), 0.0) / taken


def _server_p50(records: Sequence[Record]) -> dict[str, float]:
    """Returns the median of each part of the `server-timing` headers, in milliseconds."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, milliseconds in _SERVER_TIMING.findall(record.server_timing):
            values.setdefault(name.decode(), []).append(float(milliseconds))
    return {name: percentile(sorted(given), 0.5) for name, given in values.items()}
