"""What one run measured: counts, rates and percentiles of a target, or of all targets together, and the generator's own cost.

Requests count by when they were due: those due in the measured time have latencies, and their failures are failures.
Rates count an answer for the share of its time, from when it was sent until it came, that lies in the measured time. Counted whole, by
when they came, the answers of a few long requests that run side by side would come in waves, and a wave is in or out by chance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.load.record import OK, Record
from bench.report.latency import Latency, latency, percentile
from bench.target.metrics import Batches

_DURATION = re.compile(rb"(\w+);dur=([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one target's requests of a run came to.

    Attributes:
        target: Its path and mix.
        seconds: Measured.
        requests: Due in that time.
        statuses: Answers to them by HTTP status.
        errors: Those without an answer, by kind.
        error_rate: Share of the requests that were not answered 200.
        rps: Requests answered 200 a second.
        texts_per_s: Texts in them a second.
        tokens_per_s: Tokens in them a second, where known: counted with `--bundle`, else from the service's metrics.
        latency: Of answers with 200, from when the request was due.
        server_p50_ms: Medians of the parts in the answers' `server-timing` header.
        overhead_ms: Median latency less the median of `inference`, where the service sends that.
        batches: The model's runs, where the service has metrics.
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
    batches: Batches | None

    def figures(self) -> Mapping[str, float | None]:
        """Returns what a target such as `p99_ms=50` may name."""
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
    batches: Batches | None = None,
) -> Measurement:
    """Returns the measurement of a target's records.

    Args:
        target: Its label.
        records: All of them, those of the warm-up too.
        measured: From when to when they count.
        texts: Of each body.
        tokens: Of each body, where known.
        batches: Of the whole load, where known.
    """
    start, end = measured
    seconds = max(end - start, 1e-9)
    due = [record for record in records if start <= record.intended < end]
    good = [record for record in due if record.outcome == OK]
    done = [(record.item, share) for record in records if record.outcome == OK and (share := _share(record, start, end))]
    outcomes = Counter(str(record.outcome) for record in due)
    spread = latency((record.ended - record.intended) * 1000 for record in good)
    parts = _server_p50(good)
    answered = sum(1 for record in records if record.outcome == OK)
    answers = sum(share for _, share in done)
    if tokens is not None:
        tokens_per_s: float | None = sum(tokens[item] * share for item, share in done) / seconds
    else:
        tokens_per_s = batches.real_tokens / answered * answers / seconds if batches and answered else None
    return Measurement(
        target=target,
        seconds=seconds,
        requests=len(due),
        statuses={outcome: count for outcome, count in sorted(outcomes.items()) if outcome.isdigit()},
        errors={outcome: count for outcome, count in sorted(outcomes.items()) if not outcome.isdigit()},
        error_rate=1 - len(good) / len(due) if due else 0.0,
        rps=answers / seconds,
        texts_per_s=sum(texts[item] * share for item, share in done) / seconds,
        tokens_per_s=tokens_per_s,
        latency=spread,
        server_p50_ms=parts,
        overhead_ms=spread.p50_ms - parts["inference"] if spread and "inference" in parts else None,
        batches=batches,
    )


def _share(record: Record, start: float, end: float) -> float:
    """Returns how much of a request's time lies between `start` and `end`, 0 to 1."""
    taken = record.ended - record.sent
    if taken <= 0:
        return float(start <= record.ended < end)
    return max(min(record.ended, end) - max(record.sent, start), 0.0) / taken


def _server_p50(records: Sequence[Record]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for record in records:
        for name, milliseconds in _DURATION.findall(record.timing):
            values.setdefault(name.decode(), []).append(float(milliseconds))
    return {name: percentile(sorted(given), 0.5) for name, given in values.items()}
