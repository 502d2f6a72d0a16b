"""The commands: loads and raw loops, metrics computed from several of them, and reports.

Values that are compared are measured in turn in one process, so that a slow machine affects all of them. After Ctrl-C, a
command ends after its current measurement, with the metrics so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from bertserve.bench import BenchError
from bertserve.bench.generator import Load, poisson_arrivals
from bertserve.bench.measurement import METRICS, LoadMetrics, summarize, worst_metrics
from bertserve.bench.raw_loop import RawLoop
from bertserve.bench.report import BenchReport, html_page, parse_objectives, summary_lines
from bertserve.bench.target import Target, fetch_info, probe_target
from bertserve.service.errors import install_command, plural

_log = partial(print, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class LoadRunner:
    """Runs loads: a target, and the flags of a command. `report` gets each load, and Ctrl-C sets `stop`."""

    target: Target
    args: argparse.Namespace
    report: BenchReport
    stop: threading.Event

    def run_closed_loop(self, name: str = "closed") -> LoadMetrics:
        """Runs a closed loop."""
        return self._run(f"{name}, {plural(self.args.connections, 'connection')}", self.args.connections)

    def run_open_loop(self, rate: float, *, confirmation: bool = False) -> LoadMetrics:
        """Runs an open loop with Poisson arrivals at a rate per second; a confirmation has other arrival times."""
        arrivals = poisson_arrivals(rate, self.args.warmup_s + self.args.seconds, seed=self.args.seed + confirmation)
        return self._run(f"open, {rate:.4g}/s{', confirmation' if confirmation else ''}", self.args.max_connections, arrivals)

    def _run(self, name: str, connections: int, arrivals: Sequence[float] | None = None) -> LoadMetrics:
        args = self.args
        _log(f"{name}, {args.seconds:g} s")
        load = Load(self.target, connections, seconds=args.seconds, warmup_s=args.warmup_s, timeout_s=args.timeout_s)
        load.run(self.stop, arrivals)
        self.report.loads.append(summarize(name, load, open_loop=arrivals is not None))
        return self.report.loads[-1]


def run_command(args: argparse.Namespace, stop: threading.Event) -> int:
    """Runs the subcommand `args.command`; after an error it reports the measurements so far. Returns the exit code.

    Raises:
        BenchError: A flag, the content of a file or an address is wrong.
        OSError: A report cannot be written.
    """
    objectives = parse_objectives(args.slo or (["p99_ms=50"] if args.command == "sweep" else []))
    if args.command != "compare" and any(objective.metric == "ratio" for objective in objectives):
        raise BenchError("only `compare` measures `ratio`; remove it from --slo.")
    if args.html and find_spec("matplotlib") is None:  # known before the load
        raise BenchError(f"the HTML report needs matplotlib: {install_command('bench')}; --json needs nothing.")
    # a header's value may be a key
    report = BenchReport(args.command, vars(args) | {"header": [name for name, _ in args.header]}, objectives)
    try:
        _measure(args, report, stop)
    finally:
        report.interrupted = stop.is_set()
        if report.loads:
            _write(report, args.json, args.html)
    if report.interrupted:
        return 130
    return 0 if report.has_results and not report.is_missed else 1


def _measure(args: argparse.Namespace, report: BenchReport, stop: threading.Event) -> None:
    headers = dict(args.header)
    if args.api_key_file:
        try:
            key = args.api_key_file.read_text(encoding="latin-1").strip()  # as in HTTP; it decodes any byte
        except OSError as error:
            raise BenchError(f"--api-key-file `{args.api_key_file}` cannot be read: {error.strerror}.") from error
        headers["Authorization"] = f"Bearer {key}"
    target, report.model = probe_target(args.target, headers, texts=args.texts, seed=args.seed)
    report.service = fetch_info(target.address, "/info", headers)
    runner = LoadRunner(target, args, report, stop)
    if args.command == "sweep":
        sweep(runner, steps=args.steps, max_rate=args.max_rate)
        return
    if args.command == "closed":
        runner.run_closed_loop()
    elif args.command == "open":
        runner.run_open_loop(args.rate)
    else:
        compare(runner)
    report.metrics = worst_metrics(report.loads)


def _write(report: BenchReport, json_file: Path | None, html_file: Path | None) -> None:
    """Prints the summary, and writes the reports."""
    document = json.dumps(report.document(), indent=1)
    to_stdout = json_file == Path("-")
    print(document if to_stdout else "\n".join(summary_lines(report)), flush=True)
    if json_file and not to_stdout:
        json_file.write_text(document, encoding="utf-8")
    if html_file:
        html_file.write_text(html_page(report), encoding="utf-8")


def compare(runner: LoadRunner) -> None:
    """Measures the service in a closed loop and the raw ONNX Runtime loop, in turn.

    The report gets the median over the rounds of the `ratio` of their speeds in texts, and its lowest and highest value.

    Raises:
        BenchError: The bundle is not the one that is served.
        BertServeError: The bundle is broken.
    """
    args, report = runner.args, runner.report
    if report.model is None:
        _log(f"warning: {runner.target.address.url} does not say what it serves, so --bundle may be another model")
    raw_loop = RawLoop(args.bundle, args.raw_graph, served=report.model)
    threads = args.threads or (report.service or {}).get("limits", {}).get("threads", 2)  # other servers do not say how many they have
    report.raw_loop = raw_loop.description | {"threads": threads}
    feeds = raw_loop.encode(runner.target.bodies)
    speeds = list[tuple[float, float]]()
    for i in range(1, args.rounds + 1):
        served = runner.run_closed_loop(f"round {i}")
        _log(f"round {i}, raw loop, {plural(threads, 'thread')}, {args.seconds:g} s")
        texts_per_s = raw_loop.run_loop(feeds, threads=threads, seconds=args.seconds, stop=runner.stop)
        if runner.stop.is_set():
            break
        speeds.append((served.texts_per_s, texts_per_s))
        _log(f"  {served.texts_per_s:.1f} and {texts_per_s:.1f} texts/s, ratio {served.texts_per_s / texts_per_s:.3f}")
    if speeds:
        ratios = [served / raw for served, raw in speeds]
        report.results |= {
            "served_texts_per_s": statistics.median(served for served, _ in speeds),
            "raw_texts_per_s": statistics.median(raw for _, raw in speeds),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
        }


def sweep(runner: LoadRunner, *, steps: int, max_rate: float | None) -> None:
    """Finds the highest rate of an open loop at which the objectives are met in two loads, with at most `steps` rates.

    The report gets `max_rate` and its worse metrics, and `lowest_rate_not_held`; None if there is none. Objectives on rates are ignored.
    The first rate is the upper bound `max_rate`, or slightly above the throughput of a closed loop.

    Raises:
        BenchError: No request of the closed loop was answered.
    """
    report = runner.report
    rate = max_rate or 1.1 * runner.run_closed_loop().rps
    if runner.stop.is_set():
        return
    if not rate:
        raise BenchError("no request of the closed loop was answered, so there is no rate to start with; check the service.")
    report.results |= {"max_rate": None, "lowest_rate_not_held": None}
    low, high = 0.0, None  # the highest rate that held, and the lowest that did not
    for _ in range(steps):
        loads = [runner.run_open_loop(rate)]
        if not runner.stop.is_set() and _holds(runner, loads[0]):
            loads.append(runner.run_open_loop(rate, confirmation=True))
        if runner.stop.is_set():
            break
        holds = _holds(runner, loads[-1])
        _log(f"  {rate:.4g}/s {'holds' if holds else 'does not hold'}")
        if holds:
            report.results["max_rate"] = low = rate
            report.metrics = worst_metrics(loads)
        else:
            report.results["lowest_rate_not_held"] = high = rate
        if low == max_rate:
            break
        # twice the rate while all hold, because a closed loop with few connections may not reach the capacity
        rate = 2 * low if high is None else (low + high) / 2


def _holds(runner: LoadRunner, metrics: LoadMetrics) -> bool:
    """Returns whether a load meets the objectives. If the generator was late, it differs from the intended load, and does not."""
    objectives = [objective for objective in runner.report.objectives if METRICS[objective.metric]]
    return not metrics.was_late and all(objective.is_met(metrics.objective_values()[objective.metric]) for objective in objectives)
