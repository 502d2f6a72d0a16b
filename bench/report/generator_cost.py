"""What the load generator cost and how well it kept time."""

from __future__ import annotations

from dataclasses import dataclass

from bench.load.generator import Load
from bench.report.latency import percentile

# beyond these the generator is part of what it measures
BUSY_SHARE = 0.7
LATE_MS = 5.0


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
