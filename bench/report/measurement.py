"""What one run measured: counts, rates and percentiles of a target, or of all targets together, and the generator's own cost.

Requests count by when they were due: those due in the measured time have latencies, and their failures are failures.
Rates count an answer for the share of its time, from when it was sent until it came, that lies in the measured time. Counted whole, by
when they came, the answers of a few long requests that run side by side would come in waves, and a wave is in or out by chance.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.inspection import Batches
from bench.load.client import Load
from bench.load.stream import OK, Record

_DURATION = re.compile(rb"(\w+);dur=([0-9.]+)")
_CURVE = 200  # points of a distribution that a report keeps
# beyond these the generator is part of what it measures
BUSY_SHARE = 0.7
LATE_MS = 5.0


def percentile(ascending: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed (nearest rank).

    Args:
        ascending: At least one value, sorted.
        share: Within (0, 1].
    """
    return ascending[max(math.ceil(share * len(ascending) - 1e-9), 1) - 1]


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds that answered requests took.

    Attributes:
        count: How many they are.
        curve: Percentiles for a plot: `[share, milliseconds]`, denser towards 1.
    """

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    curve: list[list[float]]


def latency(milliseconds: Iterable[float]) -> Latency | None:
    """Returns the distribution, or None of nothing."""
    ascending = sorted(milliseconds)
    if not ascending:
        return None
    # equal steps of log(1 - share): as many points between 99 % and 99.9 % as between 90 % and 99 %
    least = 1 / len(ascending)
    shares = [1 - least ** (i / _CURVE) for i in range(_CURVE)] + [1.0]
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


@dataclass(frozen=True, slots=True)
class Generator:
    """What the load generator cost and how well it kept time.

    Attributes:
        cpu_share: Of one core.
        cpu_us_per_request: Microseconds of CPU.
        lag_p99_ms: How late its own timer went off; over a few milliseconds it did not get a core when it needed one.
        late_p99_ms: How late requests were sent that an idle connection was there for; None in a closed loop.
        capped: Requests that waited because no more connections were allowed.
        connections: Most connections open at once.
        warnings: Why the figures may be the generator's rather than the service's; empty if they are not.
    """

    cpu_share: float
    cpu_us_per_request: float
    lag_p99_ms: float
    late_p99_ms: float | None
    capped: int
    connections: int
    warnings: list[str]


def generator(load: Load, *, open_loop: bool) -> Generator:
    """Returns the generator's own figures of a load."""
    start, end = load.measured
    counted = [record for records in load.records for record in records if start <= record.ended < end]
    share = load.cpu_s / max(end - start, 1e-9)
    lag = percentile(sorted(load.lags), 0.99) * 1000 if load.lags else 0.0
    sent = sorted(
        (record.sent - record.intended) * 1000 for records in load.records for record in records if start <= record.intended < end
    )
    late = percentile(sent, 0.99) if open_loop and sent else None
    warnings = []
    if share > BUSY_SHARE:
        warnings.append(f"the generator used {share:.0%} of a core; its own speed may be what was measured")
    if lag > LATE_MS:
        warnings.append(f"the generator's timer was {lag:.1f} ms late at p99: it did not get a core when it needed one; run it elsewhere")
    if late is not None and late > LATE_MS and not load.capped:
        warnings.append(f"requests were sent {late:.1f} ms late at p99, which their latencies include")
    if load.capped:
        warnings.append(f"{load.capped} requests waited for a connection, which their latencies include; raise --max-connections")
    return Generator(share, load.cpu_s / max(len(counted), 1) * 1e6, lag, late, load.capped, load.connections, warnings)
