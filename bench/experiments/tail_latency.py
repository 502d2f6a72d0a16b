"""The tail latency of an open loop, compared with that of an ideal queue under the same arrivals."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from bertserve.bench.experiments.load_test import LoadTest, median, median_figures
from bertserve.bench.report.latency import latency_distribution
from bertserve.bench.report.report import Report


def compare_tail_latency(test: LoadTest, report: Report, *, connections: int, share: float, servers: int, rounds: int) -> None:
    """Measures the latencies of an open loop, and simulates those of an ideal queue with the same arrivals and run times.

    Each round has a closed loop for the maximum, a bare loop for the run times, and the open loop.

    Args:
        test: One target, with an engine benchmark.
        report: Gets the medians over the rounds: `queue_ratio`, the measured p99 over the simulated one, and both.
        connections: Number of connections of the closed loop.
        share: Rate of the open loop as a share of the maximum.
        servers: Number of servers of the ideal queue: the service's lanes.
        rounds: Number of measurements.
    """
    engine = test.require_engine()
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        full = test.run_closed_loop(connections, name=f"round {i + 1} maximum, {connections} connections")
        limit = engine.measure_limit(test.durations.seconds) if not test.stop.is_set() else None
        report.runs.append(replace(full, limit=limit))
        max_rps = full.targets[0].rps
        if limit is None or not limit.runs or not max_rps or test.stop.is_set():
            break
        run, load, arrivals = test.run_open_loop(max_rps * share, name=f"round {i + 1} open, {max_rps * share:.4g}/s")
        report.runs.append(run)
        run_times = [limit.feed_s[k % len(limit.feed_s)] for k in range(len(arrivals))]
        simulated = simulate_queue(arrivals, scale_to_capacity(run_times, servers, max_rps), servers)
        start, end = (at - load.start for at in load.measured)
        ideal = latency_distribution(taken * 1000 for at, taken in zip(arrivals, simulated, strict=True) if start <= at < end)
        real = run.targets[0].latency
        if ideal is None or real is None:
            break
        ratio = real.p99_ms / ideal.p99_ms
        rows.append(
            {
                "max_rps": max_rps,
                "rate": max_rps * share,
                "p50_ms": real.p50_ms,
                "p99_ms": real.p99_ms,
                "ideal_p50_ms": ideal.p50_ms,
                "ideal_p99_ms": ideal.p99_ms,
                "queue_ratio": ratio,
            }
        )
        test.progress.log(f"  round {i + 1}: p99 {real.p99_ms:.2f} ms, ideal {ideal.p99_ms:.2f} ms, ratio {ratio:.3f}")
    if rows:
        open_runs = [run for run in report.runs if run.generator.late_p99_ms is not None]
        report.judged = median_figures(open_runs)
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}


def simulate_queue(arrivals: Sequence[float], jobs: Sequence[Sequence[float]], servers: int) -> list[float]:
    """Returns each job's latency in seconds, from its arrival to the end of its last part.

    Args:
        arrivals: Arrival times in seconds, ascending.
        jobs: For each job, the run times of its parts in seconds; a part runs on the server that is free first.
        servers: Number of parts that run at the same time.
    """
    free = [0.0] * servers
    latencies = []
    for arrival, parts in zip(arrivals, jobs, strict=True):
        done = arrival
        for part in parts:
            end = max(arrival, free[0]) + part
            heapq.heapreplace(free, end)
            done = max(done, end)
        latencies.append(done - arrival)
    return latencies


def scale_to_capacity(jobs: Sequence[Sequence[float]], servers: int, capacity: float) -> list[list[float]]:
    """Returns the jobs with all run times multiplied by one factor, so that the queue has the given capacity.

    Args:
        jobs: For each job, the run times of its parts in seconds; not all zero.
        servers: Number of parts that run at the same time. The capacity of the queue is `servers` over the mean time of a job.
        capacity: Jobs per second that the queue shall be able to do.
    """
    factor = servers * len(jobs) / (capacity * sum(map(sum, jobs)))
    return [[part * factor for part in parts] for parts in jobs]
