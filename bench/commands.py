"""The commands that measure: loads and raw loops, and metrics computed from several of them.

Values that are compared are measured in turn in one process, so that a slow machine affects all of them. After Ctrl-C, a
command ends after its current measurement, with the metrics so far.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bertserve.bench import BenchError
from bertserve.bench.generator import Durations, poisson_arrivals, run_load
from bertserve.bench.measurement import Run, summarize, worst_metrics
from bertserve.bench.objectives import METRICS, Objective
from bertserve.bench.raw_loop import RawLoop
from bertserve.bench.report import BenchReport
from bertserve.bench.target import Target, fetch_info, probe_target
from bertserve.service.errors import plural

_log = partial(print, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class LoadTest:
    """A target and the settings of its loads. `report` gets each load, and Ctrl-C sets `stop`."""

    target: Target
    durations: Durations
    max_connections: int
    seed: int
    report: BenchReport
    stop: threading.Event

    def run_closed_loop(self, connections: int, name: str = "closed") -> Run:
        """Runs a closed loop with this many connections."""
        return self._run(f"{name}, {plural(connections, 'connection')}", connections, None)

    def run_open_loop(self, rate: float, *, confirmation: bool = False) -> Run:
        """Runs an open loop with Poisson arrivals at a rate per second; a confirmation has other arrival times."""
        arrivals = poisson_arrivals(rate, self.durations.warmup_s + self.durations.seconds, seed=self.seed + confirmation)
        return self._run(f"open, {rate:.4g}/s{', confirmation' if confirmation else ''}", self.max_connections, arrivals)

    def _run(self, name: str, connections: int, arrivals: Sequence[float] | None) -> Run:
        _log(f"{name}, {self.durations.seconds:g} s")
        load = run_load(self.target, self.durations, connections=connections, arrivals=arrivals, stop=self.stop)
        run = summarize(name, self.target, load, open_loop=arrivals is not None)
        self.report.runs.append(run)
        for warning in run.warnings:
            _log(f"  warning: {warning}")
        return run


def measure(args: argparse.Namespace, report: BenchReport, stop: threading.Event) -> None:
    """Runs the subcommand `args.command`. The report gets each result immediately.

    Raises:
        BenchError: A flag, a file or an address is wrong.
    """
    headers = dict(args.header)
    if args.api_key_file:
        try:
            headers["Authorization"] = f"Bearer {args.api_key_file.read_text(encoding='utf-8').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"--api-key-file `{args.api_key_file}` cannot be read: {error}.") from error
    target, report.model = probe_target(args.target, headers, texts=args.texts, seed=args.seed)
    report.service = fetch_info(target.address, "/info", headers)
    durations = Durations(args.seconds, args.warmup_s, args.timeout_s)
    test = LoadTest(target, durations, getattr(args, "max_connections", 0), args.seed, report, stop)
    match args.command:
        case "closed":
            report.metrics = test.run_closed_loop(args.connections).metrics()
        case "open":
            report.metrics = test.run_open_loop(args.rate).metrics()
        case "sweep":
            sweep(test, connections=args.connections, max_rates=args.steps, max_rate=args.max_rate)
        case "compare":
            compare(args, test)


def compare(args: argparse.Namespace, test: LoadTest) -> None:
    """Measures the service in a closed loop and the raw ONNX Runtime loop, in turn.

    The report gets the median over the rounds of the `ratio` of their speeds in texts, and its lowest and highest value.

    Raises:
        BenchError: The bundle is broken or not the one that is served.
    """
    if test.report.model is None:
        _log(f"warning: {test.target.address.url} does not say what it serves, so --bundle may be another model")
    raw_loop = RawLoop(args.bundle, args.raw_graph, served=test.report.model)
    threads = args.threads or (test.report.service or {}).get("limits", {}).get("threads", 2)  # other servers do not say how many they have
    test.report.raw_loop = raw_loop.description | {"threads": threads}
    runs = raw_loop.encode(test.target.bodies)
    served, raw = [], []
    for i in range(1, args.rounds + 1):
        run = test.run_closed_loop(args.connections, f"round {i}")
        if not test.stop.is_set():
            _log(f"round {i}, raw loop, {plural(threads, 'thread')}, {args.seconds:g} s")
            texts_per_s = raw_loop.run_loop(runs, threads=threads, seconds=args.seconds, stop=test.stop)
        if test.stop.is_set():
            break
        served.append(run.texts_per_s)
        raw.append(texts_per_s)
        _log(f"  {served[-1]:.1f} and {raw[-1]:.1f} texts/s, ratio {served[-1] / raw[-1]:.3f}")
    if served:
        ratios = [mine / its for mine, its in zip(served, raw, strict=True)]
        test.report.metrics = worst_metrics(test.report.runs)
        test.report.results |= {
            "served_texts_per_s": statistics.median(served),
            "raw_texts_per_s": statistics.median(raw),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
        }


def sweep(test: LoadTest, *, connections: int, max_rates: int, max_rate: float | None) -> None:
    """Finds the highest rate of an open loop at which the objectives are met in two loads, with at most `max_rates` rates.

    The report gets `max_rate` and `lowest_rate_not_held`, None if there is none. Objectives on rates are ignored. The first rate is the
    upper bound `max_rate` in requests per second, or slightly above the throughput of a closed loop with `connections`.

    Raises:
        BenchError: No request of the closed loop was answered.
    """
    report = test.report
    limits = [objective for objective in report.objectives if METRICS[objective.metric]]
    rate = max_rate or (test.run_closed_loop(connections).metrics()["rps"] or 0.0) * 1.1
    if not rate:
        raise BenchError("no request of the closed loop was answered, so there is no rate to start with; check the service.")
    report.results |= {"max_rate": None, "lowest_rate_not_held": None}
    low, high = 0.0, None  # the highest rate that held, and the lowest that did not
    for _ in range(max_rates):
        holds = _holds(test, limits, rate)
        if test.stop.is_set():
            break
        if holds:
            low = rate
        else:
            report.results["lowest_rate_not_held"] = high = rate
        if low == max_rate:
            break
        # twice the rate while all hold, because a closed loop with few connections may not reach the capacity
        rate = 2 * low if high is None else (low + high) / 2


def _holds(test: LoadTest, limits: Sequence[Objective], rate: float) -> bool:
    """Runs a load at a rate, and if it meets the limits, a second one with other arrivals; returns whether both meet them.

    The report gets the rate and the worse metrics if they do. A load does not meet them if the generator was late: it differs from the
    intended one.
    """
    report, runs = test.report, []
    for confirmation in (False, True):
        run = test.run_open_loop(rate, confirmation=confirmation)
        metrics = run.metrics()
        met = not run.was_late and not test.stop.is_set() and all(limit.is_met(metrics[limit.metric]) for limit in limits)
        _log(f"  p99 {metrics['p99_ms'] or 0:.1f} ms: {'holds' if met else 'does not hold'}")
        if not met:
            return False
        runs.append(run)
    report.metrics = worst_metrics(runs)
    report.results["max_rate"] = rate
    return True
