"""The measurements of the subcommands: loads and engine loops, and metrics computed from several of them.

Values that are compared are measured in turn in one process, so that a slow machine affects all of them. After Ctrl-C, an
experiment ends after its current measurement, with the metrics so far.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import replace

from bertserve.bench.engine import EngineThroughput
from bertserve.bench.errors import BenchError
from bertserve.bench.load_test import RATES, LoadTest, median, median_metrics, run_metrics
from bertserve.bench.report.measurement import Measurement, latency_distribution
from bertserve.bench.report.report import BenchReport, ReportRun
from bertserve.bench.report.slo import Objective
from bertserve.service.errors import plural

_HEADROOM = 1.1  # first rate of the search, relative to the throughput of the closed loop
_GROWTH = 2.0  # next rate while all rates hold, because a closed loop with few connections may not reach the capacity


def compare(test: LoadTest, report: BenchReport, *, connections: int, rounds: int) -> None:
    """Measures the service in a closed loop and the raw ONNX Runtime loop, in turn.

    Args:
        test: One target, with an engine benchmark.
        report: Gets the medians over the rounds: `ratio` of the speeds in texts, `ratio_tokens` of the speeds in tokens, and for a
            single connection `request_ratio`, the median latency of a request relative to the time of the raw ONNX Runtime loop for it.
        connections: Number of connections of the closed loop.
        rounds: Number of measurements of each.
    """
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        run, limit = _run_both(test, report, connections, f"round {i + 1} served, {plural(connections, 'connection')}")
        if limit is None or not limit.runs:
            break
        served = run.targets[0]
        ratio = served.texts_per_s / limit.texts_per_s
        row: dict[str, float | None] = {
            "served_texts_per_s": served.texts_per_s,
            "bare_texts_per_s": limit.texts_per_s,
            "ratio": ratio,
            "ratio_tokens": (served.tokens_per_s or 0.0) / limit.tokens_per_s,
        }
        if connections == 1 and served.latency:  # with more connections, a request also waits for others
            row |= {
                "served_request_ms": served.latency.p50_ms,
                "bare_request_ms": 1000 / limit.requests_per_s,
                "request_ratio": served.latency.p50_ms * limit.requests_per_s / 1000,
            }
        rows.append(row)
        test.progress.log(f"  round {i + 1}: served {served.texts_per_s:.1f} texts/s, bare {limit.texts_per_s:.1f}, ratio {ratio:.3f}")
    if rows:
        report.judged = median_metrics(report.runs)
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}


def _run_both(test: LoadTest, report: BenchReport, connections: int, name: str) -> tuple[ReportRun, EngineThroughput | None]:
    """Returns a closed loop and, unless interrupted, the engine throughput after it; the report gets both."""
    assert test.engine is not None, "the command line requires --bundle"
    run = test.run_closed_loop(connections, name=name)
    limit = None if test.stop.is_set() else test.engine.measure_throughput(test.durations.seconds)
    report.runs.append(replace(run, limit=limit))
    return run, limit


def compare_concurrent_targets(test: LoadTest, report: BenchReport, *, connections: int, rounds: int) -> None:
    """Measures each target alone and all targets at the same time, in turn.

    `ratio` is the sum over targets of their speeds in tokens under the common load, each relative to the speed alone. A ratio of 1 means
    that all models together do as much work as a single model.

    Args:
        test: Two or more targets with different models.
        report: Gets the medians over the rounds.
        connections: Number of connections to each target.
        rounds: Number of measurements of each.

    Raises:
        BenchError: The service does not count tokens, or did not answer.
    """
    ratios, concurrent_speeds, alone_speeds = [], [], []
    for i in range(rounds):
        alone = []
        for k, target in enumerate(test.targets):
            if not test.stop.is_set():
                alone.append(test.run_closed_loop(connections, only=k, name=f"round {i + 1} alone {target.label}"))
                report.runs.append(alone[-1])
        if test.stop.is_set():
            break
        concurrent = test.run_closed_loop(connections, name=f"round {i + 1} together")
        report.runs.append(concurrent)
        speeds = [_tokens_per_s(run.targets[0]) for run in alone]
        shares = [_tokens_per_s(target) / speed for target, speed in zip(concurrent.targets, speeds, strict=True)]
        ratios.append(sum(shares))
        concurrent_speeds.append(sum(map(_tokens_per_s, concurrent.targets)))
        alone_speeds.append(statistics.fmean(speeds))
        test.progress.log(f"  round {i + 1}: shares {', '.join(f'{share:.3f}' for share in shares)}, sum {ratios[-1]:.3f}")
    if ratios:
        report.judged = median_metrics(report.runs)
        report.figures |= {
            "ratio": statistics.median(ratios),
            "together_tokens_per_s": statistics.median(concurrent_speeds),
            "mean_alone_tokens_per_s": statistics.median(alone_speeds),
        }


def _tokens_per_s(target: Measurement) -> float:
    """Returns tokens per second.

    Raises:
        BenchError: The service does not count them, or did not answer.
    """
    if not target.tokens_per_s:
        raise BenchError(f"{target.target}: no tokens were counted; the targets must be different models of one bertserve.")
    return target.tokens_per_s


def compare_tail_latency(test: LoadTest, report: BenchReport, *, connections: int, share: float, servers: int, rounds: int) -> None:
    """Measures the latencies of an open loop, and simulates an ideal queue with the same arrivals and run times.

    Each round has a closed loop for the maximum throughput, a raw ONNX Runtime loop for run times, and the open loop.

    Args:
        test: One target, with an engine benchmark.
        report: Gets the medians over the rounds: the measured p99, the simulated one, and their ratio `queue_ratio`.
        connections: Number of connections of the closed loop.
        share: Rate of the open loop, relative to the maximum throughput.
        servers: Number of servers of the ideal queue, which are the service's threads.
        rounds: Number of measurements.
    """
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        full, limit = _run_both(test, report, connections, f"round {i + 1} maximum, {plural(connections, 'connection')}")
        max_rps = full.targets[0].rps
        if limit is None or not limit.runs or not max_rps or test.stop.is_set():
            break
        run, load, arrivals = test.run_open_loop(max_rps * share, name=f"round {i + 1} open, {max_rps * share:.4g}/s")
        report.runs.append(run)
        run_times = [limit.feed_s[k % len(limit.feed_s)] for k in range(len(arrivals))]
        simulated = simulate_queue(arrivals, scale_to_capacity(run_times, servers, max_rps), servers)
        start, end = (at - load.start for at in load.measured)
        ideal = latency_distribution(latency * 1000 for at, latency in zip(arrivals, simulated, strict=True) if start <= at < end)
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
        report.judged = median_metrics(open_runs)
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}


def simulate_queue(arrivals: Sequence[float], requests: Sequence[Sequence[float]], servers: int) -> list[float]:
    """Returns each request's latency in seconds, from its arrival to the end of its last part.

    Args:
        arrivals: Arrival times in seconds, ascending.
        requests: For each request, the run times of its parts in seconds; a part runs on the first free server.
        servers: Number of parts that run concurrently.
    """
    free = [0.0] * servers
    latencies = []
    for arrival, parts in zip(arrivals, requests, strict=True):
        last_end = arrival
        for part in parts:
            end = max(arrival, free[0]) + part
            heapq.heapreplace(free, end)
            last_end = max(last_end, end)
        latencies.append(last_end - arrival)
    return latencies


def scale_to_capacity(requests: Sequence[Sequence[float]], servers: int, capacity: float) -> list[list[float]]:
    """Returns the requests with all run times multiplied by the factor that gives the queue a capacity.

    Args:
        requests: For each request, the run times of its parts in seconds; not all zero.
        servers: Number of parts that run concurrently. The capacity of the queue is `servers` divided by the mean time of a request.
        capacity: Capacity of the queue in requests per second.
    """
    factor = servers * len(requests) / (capacity * sum(map(sum, requests)))
    return [[part * factor for part in parts] for parts in requests]


def sweep(
    test: LoadTest, report: BenchReport, objectives: Sequence[Objective], *, connections: int, steps: int, max_rate: float | None
) -> None:
    """Finds the highest rate of an open loop at which all objectives are met, with at most `steps` rates.

    If the generator was late, the load differs from the intended one. It is repeated once, and if that is late too, the step is
    inconclusive: the search continues below its rate, and never reports it.

    Args:
        test: The load test.
        report: Gets `max_rate`, None if no rate was low enough, whether it is only a lower bound, the metrics of the run at this rate, and
            the inconclusive steps.
        objectives: Objectives on latencies and errors; those on rates are ignored.
        connections: Number of connections of the closed loop that determines the first rate.
        steps: Number of rates.
        max_rate: Upper bound of the search in requests per second, which is then the first rate.

    Raises:
        BenchError: No request of the closed loop was answered.
    """
    low, high = 0.0, None  # the highest rate that held, and the lowest that did not hold or was inconclusive
    rate = max_rate or _first_rate(test, report, connections)
    report.figures["max_rate"] = None
    for _ in range(steps):
        if test.stop.is_set():
            break
        run = _load_in_time(test, report, rate)
        if test.stop.is_set():
            break
        if run.generator.was_late:
            test.progress.log(f"  {rate:.4g}/s: the generator was late, twice: inconclusive")
            report.inconclusive.append(run.name)
            high = rate
        else:
            metrics = run_metrics(run)
            met = all(objective.is_met(metrics.get(objective.metric)) for objective in objectives if objective.metric not in RATES)
            test.progress.log(f"  {rate:.4g}/s: p99 {metrics['p99_ms'] or 0:.1f} ms: {'holds' if met else 'does not hold'}")
            if met:
                low = report.figures["max_rate"] = rate
                report.judged = metrics
            else:
                high = rate
        if low == max_rate:
            break
        rate = low * _GROWTH if high is None else (low + high) / 2
    report.is_lower_bound = low > 0 and high is None


def _first_rate(test: LoadTest, report: BenchReport, connections: int) -> float:
    """Returns the default first rate: slightly above the throughput of a closed loop."""
    run = test.run_closed_loop(connections)
    report.runs.append(run)
    rate = (run_metrics(run)["rps"] or 0.0) * _HEADROOM
    if not rate:
        raise BenchError("no request of the closed loop was answered, so there is no rate to start with; check the service.")
    return rate


def _load_in_time(test: LoadTest, report: BenchReport, rate: float) -> ReportRun:
    """Returns the run at a rate; if the generator was late, it returns a second try."""
    run, _, _ = test.run_open_loop(rate)
    report.runs.append(run)
    if run.generator.was_late and not test.stop.is_set():
        test.progress.log(f"  {rate:.4g}/s: the generator was late; once more")
        run, _, _ = test.run_open_loop(rate)
        report.runs.append(run)
    return run
