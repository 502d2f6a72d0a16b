"""An open loop against an ideal queue."""

from __future__ import annotations

from dataclasses import replace

from bench.experiments import queue_simulation
from bench.experiments.aggregation import median, median_figures
from bench.experiments.load_test import Session
from bench.report import latency
from bench.report.report import Report


def tail(session: Session, report: Report, *, connections: int, share: float, servers: int, rounds: int) -> None:
    """Compares latencies of an open loop with those of an ideal queue that gets the same arrivals and run times.

    Args:
        session: One target, with an engine.
        report: Gets `queue_ratio`, the measured p99 over the ideal one, and both.
        connections: Of the closed loop that measures the maximum.
        share: Of the maximum that the open loop sends.
        servers: Of the ideal queue: the service's lanes.
        rounds: Of all; the report gets medians.
    """
    engine = session.require_engine()
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        full = session.closed(connections, name=f"round {i + 1} maximum, {connections} connections")
        limit = engine.limit(session.plan.seconds) if not session.stop.is_set() else None
        report.runs.append(replace(full, limit=limit))
        most = full.targets[0].rps
        if limit is None or not limit.runs or not most or session.stop.is_set():
            break
        run, load, arrivals = session.open_loop(most * share, name=f"round {i + 1} open, {most * share:.4g}/s")
        report.runs.append(run)
        jobs = queue_simulation.scaled([limit.feed_s[k % len(limit.feed_s)] for k in range(len(arrivals))], servers, most)
        ideal = queue_simulation.simulate(arrivals, jobs, servers)
        start, end = (at - load.start for at in load.measured)
        spread = latency.latency(taken * 1000 for at, taken in zip(arrivals, ideal, strict=True) if start <= at < end)
        real = run.targets[0].latency
        if spread is None or real is None:
            break
        rows.append(
            {
                "max_rps": most,
                "rate": most * share,
                "p50_ms": real.p50_ms,
                "p99_ms": real.p99_ms,
                "ideal_p50_ms": spread.p50_ms,
                "ideal_p99_ms": spread.p99_ms,
                "queue_ratio": real.p99_ms / spread.p99_ms,
            }
        )
        session.progress.say(
            f"  round {i + 1}: p99 {real.p99_ms:.2f} ms, ideal {spread.p99_ms:.2f} ms, ratio {rows[-1]['queue_ratio']:.3f}"
        )
    if rows:
        open_runs = [run for run in report.runs if run.generator.late_p99_ms is not None]
        report.judged = median_figures(open_runs)
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}
