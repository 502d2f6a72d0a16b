"""The metrics of a load: counts, rates and latencies, and the lateness of the load generator.

Requests count by the time when they were due: requests that were due in the measured time have latencies and failures.
For rates, a response counts by the share of its time, from sending to completion, that is in the measured time. If whole
responses counted at their end, a few long concurrent requests would end in waves, and chance would decide
whether a wave is in the measured time.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import numpy as np

from bertserve.bench.generator import Load, RequestRecord
from bertserve.bench.target import OK

MAX_LATENESS_MS = 5.0  # above it, the generator affects its measurements
# metric -> whether an objective is an upper bound (True) or a lower bound (False)
METRICS: Mapping[str, bool] = {
    **dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p999_ms", "mean_ms", "max_ms", "overhead_ms", "error_rate"), True),
    **dict.fromkeys(("rps", "texts_per_s", "tokens_per_s", "ratio"), False),
}
# metric -> the share of the requests that took at most as long
SHARES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
_SERVER_TIMING = re.compile(rb"(\w+);dur=([0-9.]+)")


def latency_metrics(milliseconds: Sequence[float]) -> dict[str, float]:
    """Returns the mean and the percentiles (nearest rank) of latencies; nothing without latencies."""
    if not milliseconds:
        return {}
    percentiles = np.quantile(milliseconds, list(SHARES.values()), method="inverted_cdf").tolist()
    return {"mean_ms": fmean(milliseconds), **dict(zip(SHARES, percentiles, strict=True))}


@dataclass(slots=True)
class LoadMetrics:
    """The metrics of a load. The JSON report uses the same field names.

    Attributes:
        name: Description such as `closed, 16 connections`; no two loads of a command have the same.
        requests: Number of requests that were due in the measured time.
        outcomes: Number of their responses by HTTP status, and of requests without a response by kind of failure.
        error_rate: Share of the requests without status 200.
        rps: Requests per second with status 200; `texts_per_s` counts their texts, and `tokens_per_s` their tokens.
        batches: The batches of the whole load (`runs`), their `mean_rows`, and the `padding_share` of their tokens. It is empty and
            `tokens_per_s` None if the service does not show them.
        latency: Metrics of the responses with status 200, from the time when the request was due; empty without them.
        server_p50_ms: Medians of the stages in the responses' `server-timing` header.
        overhead_ms: Median latency minus the median of `inference`, if the service sends it.
        cpu_share: Share of a core that the generator used.
        late_p99_ms: Delay of the generator's timer at p99, in milliseconds.
        warnings: Signs that the metrics describe the generator instead of the service.
    """

    name: str
    open_loop: bool
    seconds: float
    requests: int
    outcomes: dict[str, int]
    error_rate: float
    rps: float
    texts_per_s: float
    tokens_per_s: float | None
    batches: dict[str, float]
    latency: dict[str, float]
    server_p50_ms: dict[str, float]
    overhead_ms: float | None
    cpu_share: float
    late_p99_ms: float
    warnings: list[str]

    @property
    def offered_rate(self) -> float:
        """The requests per second that were due in the measured time; in a closed loop, the service's speed decides them."""
        return self.requests / self.seconds

    def objective_values(self) -> dict[str, float | None]:
        """Returns the metrics that objectives can name."""
        return {name: getattr(self, name, self.latency.get(name)) for name in METRICS}


def were_late(loads: Sequence[LoadMetrics]) -> bool:
    """Returns whether the generator was late in a load, which therefore differs from the intended one."""
    return any(load.late_p99_ms > MAX_LATENESS_MS for load in loads)


def worst_metrics(loads: Sequence[LoadMetrics]) -> dict[str, float | None]:
    """Returns the worst value of each metric of several loads."""
    columns: dict[str, list[Any]] = {name: [load.objective_values()[name] for load in loads] for name in METRICS}
    return {name: None if None in values else (max if METRICS[name] else min)(values) for name, values in columns.items()}


def summarize(name: str, load: Load, totals: Mapping[str, float], *, open_loop: bool) -> LoadMetrics:
    """Returns the metrics of a load under this name; `totals` count the service's runs, empty if it shows none."""
    start, end = load.measured
    seconds = max(end - start, 1e-9)
    due = [record for record in load.records if start <= record.intended < end]
    answered_due = [record for record in due if record.outcome == OK]
    answered = [record for record in load.records if record.outcome == OK]
    shares = [max(min(record.ended, end) - max(record.sent, start), 0.0) / (record.ended - record.sent) for record in answered]
    texts = sum(share * load.target.bodies[record.body_index].texts for share, record in zip(shares, answered, strict=True))
    latency = latency_metrics([1000 * (record.ended - record.intended) for record in answered_due])
    server_p50 = _server_p50(answered_due)
    batches, tokens_per_s = dict[str, float](), None
    runs, tokens, padding = (totals.get(name, 0) for name in ("bertserve_batch_rows_count", "real", "padded"))
    if answered and runs and tokens:
        batches = {"runs": runs, "mean_rows": totals["bertserve_batch_rows_sum"] / runs, "padding_share": padding / (tokens + padding)}
        tokens_per_s = tokens / len(answered) * sum(shares) / seconds
    late_p99_ms = 1000 * float(np.quantile(load.timer_lags_s or [0.0], 0.99, method="inverted_cdf"))
    warnings = []
    if late_p99_ms > MAX_LATENESS_MS:
        warnings.append(f"the generator was {late_p99_ms:.1f} ms late at p99, so latencies are not those of the service; run it elsewhere")
    if load.cpu_s > 0.7 * seconds:
        warnings.append(f"the generator used {load.cpu_s / seconds:.0%} of a core, so its own speed may be the limit")
    if load.capped:
        warnings.append(f"{load.capped} requests waited for a connection, which their latencies include; raise --max-connections")
    return LoadMetrics(
        name=name,
        open_loop=open_loop,
        seconds=seconds,
        requests=len(due),
        outcomes=dict(sorted(Counter(str(record.outcome) for record in due).items())),
        error_rate=1 - len(answered_due) / len(due) if due else 0.0,
        rps=sum(shares) / seconds,
        texts_per_s=texts / seconds,
        tokens_per_s=tokens_per_s,
        batches=batches,
        latency=latency,
        server_p50_ms=server_p50,
        overhead_ms=latency["p50_ms"] - server_p50["inference"] if latency and "inference" in server_p50 else None,
        cpu_share=load.cpu_s / seconds,
        late_p99_ms=late_p99_ms,
        warnings=warnings,
    )


def _server_p50(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns the median of each stage of the `server-timing` headers, in milliseconds."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, milliseconds in _SERVER_TIMING.findall(record.server_timing):
            values.setdefault(name.decode(), []).append(float(milliseconds))
    return {name: median_low(times) for name, times in values.items()}
