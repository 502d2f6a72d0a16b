"""The figures of the load generator itself: its CPU time and its lateness, which show whether a load can be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from bertserve.bench.load.generator import LoadResult
from bertserve.bench.report.latency import percentile

# above these the generator is part of what it measures
MAX_CPU_SHARE = 0.7
MAX_LATENESS_MS = 5.0


@dataclass(frozen=True, slots=True)
class GeneratorStats:
    """What the load generator cost, and how well it kept time. The field names are those of the JSON report.

    Attributes:
        cpu_share: Share of one core that it used, 0 to 1.
        cpu_us_per_request: CPU time per request in microseconds.
        lag_p99_ms: 99th percentile of how late its timer expired; above a few milliseconds it did not get a core when it needed one.
        late_p99_ms: 99th percentile of the time from when a request was due until it was sent; None in a closed loop.
        capped: Requests that waited because no more connections were allowed.
        connections: Most connections open at once.
        warnings: Reasons why the figures may be the generator's rather than the service's.
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
        """Whether the generator itself did not keep time: the load was another one than was meant, and its latencies are not the service's."""
        late = self.late_p99_ms or 0.0
        return self.lag_p99_ms > MAX_LATENESS_MS or (late > MAX_LATENESS_MS and not self.capped)


def generator_stats(load: LoadResult, *, open_loop: bool) -> GeneratorStats:
    """Returns the generator's own figures of a load."""
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
