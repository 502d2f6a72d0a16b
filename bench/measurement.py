"""The metrics of a load: counts, rates and latencies, and the lateness of the load generator.

Requests count by the time when they were due: those due in the measured time have latencies and failures.
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
    **dict.fromkeys(("rps", "texts_per_s", "ratio"), False),
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
    """The metrics of a load. The field names are those of the JSON report.

    Attributes:
        name: Description such as `closed, 16 connections`; no two loads of a command have the same.
        requests: Number of requests that were due in the measured time.
        outcomes: Number of their responses by HTTP status, and of requests without a response by kind of failure.
        error_rate: Share of the requests without status 200.
        rps: Requests per second with status 200; `texts_per_s` has their texts.
        latency: Metrics of the responses with status 200, from the time when the request was due; empty without them.
        server_p50_ms: Medians of the stages in the responses' `server-timing` header.
        overhead_ms: Median latency minus the median of `inference`, if the service sends it.
        was_late: Whether the generator was late: the load differs from the intended one, and latencies are not those of the service.
        warnings: Reasons why the metrics may describe the generator instead of the service.
    """

    name: str
    open_loop: bool
    seconds: float
    requests: int
    outcomes: dict[str, int]
    error_rate: float
    rps: float
    texts_per_s: float
    latency: dict[str, float]
    server_p50_ms: dict[str, float]
    overhead_ms: float | None
    was_late: bool
    warnings: list[str]

    @property
    def offered_rate(self) -> float:
        """The requests per second that were due in the measured time; in a closed loop, the service's speed decides them."""
        return self.requests / self.seconds

    def objective_values(self) -> dict[str, float | None]:
        """Returns the metrics that objectives can name."""
        return {name: getattr(self, name, self.latency.get(name)) for name in METRICS}


def worst_metrics(loads: Sequence[LoadMetrics]) -> dict[str, float | None]:
    """Returns the worst value of each metric of several loads."""
    columns: dict[str, list[Any]] = {name: [load.objective_values()[name] for load in loads] for name in METRICS}
    return {name: None if None in values else (max if METRICS[name] else min)(values) for name, values in columns.items()}


def summarize(name: str, load: Load, *, open_loop: bool) -> LoadMetrics:
    """Returns the metrics of a load under this name."""
    start, end = load.measured
    seconds = max(end - start, 1e-9)
    due = [record for record in load.records if start <= record.intended < end]
    answered = [record for record in due if record.outcome == OK]
    requests, texts = 0.0, 0.0  # answered in the measured time
    for record in load.records:
        if record.outcome == OK and (within_s := min(record.ended, end) - max(record.sent, start)) > 0:
            share = within_s / (record.ended - record.sent)
            requests += share
            texts += share * load.target.bodies[record.body_index].texts
    latency = latency_metrics([1000 * (record.ended - record.intended) for record in answered])
    server_p50 = _server_p50(answered)
    lag_ms = 1000 * float(np.quantile(load.timer_lags_s or [0.0], 0.99, method="inverted_cdf"))
    warnings = []
    if lag_ms > MAX_LATENESS_MS:
        warnings.append(f"the generator was {lag_ms:.1f} ms late at p99, and a sweep counts that as a miss; run it on another machine")
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
        error_rate=1 - len(answered) / len(due) if due else 0.0,
        rps=requests / seconds,
        texts_per_s=texts / seconds,
        latency=latency,
        server_p50_ms=server_p50,
        overhead_ms=latency["p50_ms"] - server_p50["inference"] if latency and "inference" in server_p50 else None,
        was_late=lag_ms > MAX_LATENESS_MS,
        warnings=warnings,
    )


def _server_p50(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns the median of each stage of the `server-timing` headers, in milliseconds."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, milliseconds in _SERVER_TIMING.findall(record.server_timing):
            values.setdefault(name.decode(), []).append(float(milliseconds))
    return {name: median_low(times) for name, times in values.items()}
