"""The commands: loads and raw loops, metrics computed from several of them, and reports.

Values that are compared are measured in turn in one process, so that a slow machine affects all of them. After Ctrl-C, a
command ends after its current measurement, with the metrics so far.
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bertserve.bench.generator import Load, poisson_arrivals, send_loads
from bertserve.bench.measurement import LoadMetrics, summarize, were_late, worst_metrics
from bertserve.bench.raw_loop import RawLoop
from bertserve.bench.report import BenchReport, Objective, html_page, parse_objectives, summary_lines
from bertserve.bench.target import Target, fetch_info, probe_target, read_run_totals
from bertserve.service.errors import StartError
from bertserve.service.messages import install_command, plural


@dataclass(frozen=True, slots=True)
class LoadRunner:
    """Runs loads on one or more targets at once, with the `flags` of a command. `report` gets each load, and Ctrl-C sets `stop`."""

    targets: Sequence[Target]
    report: BenchReport
    stop: threading.Event
    flags: argparse.Namespace

    def log(self, line: str) -> None:
        """Prints a line about the progress, unless `--quiet` is set."""
        if not self.flags.quiet:
            print(line, file=sys.stderr)

    def run_closed_loop(self, name: str = "closed") -> list[LoadMetrics]:
        """Runs a closed loop on each target."""
        return self._run(f"{name}, {plural(self.flags.connections, 'connection')}", self.flags.connections)

    def run_open_loop(self, rate: float, *remarks: str) -> list[LoadMetrics]:
        """Runs open loops with Poisson arrivals at equal parts of a rate. Names end with the remarks. A confirmation uses new arrivals."""
        flags, count = self.flags, len(self.targets)
        first_seed, seconds = flags.seed + count * ("confirmation" in remarks), flags.warmup_s + flags.seconds
        arrivals = [poisson_arrivals(rate / count, seconds, seed=first_seed + i) for i in range(count)]
        return self._run(", ".join((f"open, {rate:.4g}/s", *remarks)), flags.max_connections, arrivals)

    def _run(self, name: str, connections: int, arrivals: Sequence[Sequence[float]] = ()) -> list[LoadMetrics]:
        flags = self.flags
        self.log(f"{name}, {flags.seconds:g} s")
        durations = {"seconds": flags.seconds, "warmup_s": flags.warmup_s, "timeout_s": flags.timeout_s}
        loads = [Load(target, connections, **durations) for target in self.targets]
        before = [read_run_totals(target) for target in self.targets]
        send_loads(loads, self.stop, arrivals, self.log)
        models = [model["name"] for model in self.report.models]
        for load, text, earlier in zip(loads, flags.target, before, strict=True):
            # the totals of a model do not say which of its targets caused them
            totals = {} if len(set(models)) < len(models) else read_run_totals(load.target) - earlier
            full_name = f"{name}, {text}" if len(loads) > 1 else name
            self.report.loads.append(summarize(full_name, load, totals, open_loop=bool(arrivals)))
        return self.report.loads[-len(loads) :]


def run_command(args: argparse.Namespace, stop: threading.Event) -> int:
    """Runs the subcommand `args.command`; after an error it reports the measurements so far. Returns the exit code.

    Raises:
        StartError: A flag, the content of a file or an address is wrong.
        OSError: A report cannot be written.
    """
    objectives = parse_objectives(args.slo or (["p99_ms=50"] if args.command == "sweep" else []))
    if args.command != "compare" and any(objective.metric == "ratio" for objective in objectives):
        raise StartError("only `compare` measures `ratio`; remove it from --slo.")
    if args.html and find_spec("matplotlib") is None:  # known before the load
        raise StartError(f"the HTML report needs matplotlib: {install_command('bench')}; --json needs nothing.")
    # a header's value can be a key
    report = BenchReport(args.command, vars(args) | {"header": [name for name, _ in args.header]}, objectives)
    try:
        _measure(args, report, stop)
    finally:
        report.interrupted = stop.is_set()
        if report.loads:
            _write(report, args.json, args.html)
    if report.interrupted:
        return 130
    if report.results.get("unmeasured_rate"):
        return 4
    return 0 if report.answered_loads and not report.is_missed else 1


def _measure(args: argparse.Namespace, report: BenchReport, stop: threading.Event) -> None:
    headers = dict(args.header)
    if args.api_key_file:
        try:
            key = args.api_key_file.read_text(encoding="latin-1").strip()  # as in HTTP; it decodes any byte
        except OSError as error:
            raise StartError(f"--api-key-file `{args.api_key_file}` cannot be read: {error.strerror}.") from error
        headers["Authorization"] = f"Bearer {key}"
    targets = [probe_target(text, headers, texts=args.texts, seed=args.seed) for text in args.target]
    report.models = [target.model for target in targets if target.model is not None]
    report.service = fetch_info(targets[0].address, "/info", headers)
    runner = LoadRunner(targets, report, stop, args)
    if args.command == "sweep":
        sweep_rates(runner, steps=args.steps, max_rate=args.max_rate)
        return
    if args.command == "closed":
        runner.run_closed_loop()
    elif args.command == "open":
        runner.run_open_loop(args.rate)
    else:
        if targets[0].model is None:
            print(f"warning: {targets[0].address.geturl()} does not say what it serves; --bundle may be another model", file=sys.stderr)
        raw_loop = RawLoop(args.bundle, args.raw_graph, served=targets[0].model)
        threads = args.threads or (report.service or {}).get("limits", {}).get("threads", 2)  # other servers do not say it
        report.raw_loop = raw_loop.description | {"threads": threads}
        compare_with_raw_loop(runner, raw_loop, threads=threads, rounds=args.rounds)
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


def compare_with_raw_loop(runner: LoadRunner, raw_loop: RawLoop, *, threads: int, rounds: int) -> None:
    """Measures the service in a closed loop and the raw loop, in turn. After each round, the report gets the medians so far."""
    rounds_done = list[tuple[float, float]]()
    feeds, seconds = raw_loop.encode(runner.targets[0].bodies), runner.flags.seconds
    for i in range(1, rounds + 1):
        served = sum(load.texts_per_s for load in runner.run_closed_loop(f"round {i}"))
        runner.log(f"round {i}, raw loop, {plural(threads, 'thread')}, {seconds:g} s")
        raw = raw_loop.measure(feeds, threads=threads, seconds=seconds, stop=runner.stop)
        if runner.stop.is_set():
            break
        rounds_done.append((served, raw))
        runner.report.results = _medians(rounds_done)
        runner.log(f"  {served:.1f} and {raw:.1f} texts/s, ratio {served / raw:.3f}")


def _medians(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the medians over rounds, which are texts per second of the service and of the raw loop, and the extreme ratios."""
    ratios = [served / raw for served, raw in rounds]
    served, raw = map(statistics.median, zip(*rounds, strict=True))
    middle = {"served_texts_per_s": served, "raw_texts_per_s": raw, "ratio": statistics.median(ratios)}
    return middle | {"ratio_lowest": min(ratios), "ratio_highest": max(ratios)}


def sweep_rates(runner: LoadRunner, *, steps: int, max_rate: float | None) -> None:
    """Finds the highest rate of an open loop at which the objectives are met in two loads, with at most `steps` rates.

    The report gets the highest rate that held with its worse metrics, the lowest that did not, and the lowest at which the generator was
    late twice, in requests per second; None if there is none. Objectives on rates are ignored. The first rate is the upper bound
    `max_rate`, or slightly above the throughput of a closed loop. Rates that cannot be measured are bounds too.

    Raises:
        StartError: No request of the closed loop was answered.
    """
    report = runner.report
    results: dict[str, float | None] = {"max_rate": None, "lowest_rate_not_held": None, "unmeasured_rate": None}
    report.results = results
    rate = max_rate or 1.1 * sum(load.rps for load in runner.run_closed_loop())
    if runner.stop.is_set():
        return
    if not rate:
        raise StartError("no request of the closed loop was answered, so there is no rate to start with; check the service.")
    above: float | None = None
    for _ in range(steps):
        loads = _run_on_time(runner, rate)
        if not runner.stop.is_set() and not were_late(loads) and _hold(loads, report.limits):
            loads += _run_on_time(runner, rate, "confirmation")
        if runner.stop.is_set():
            break
        if were_late(loads):
            results["unmeasured_rate"] = above = rate
        elif _hold(loads, report.limits):
            results["max_rate"], report.metrics = rate, worst_metrics(loads)
            if rate == max_rate:
                break
        else:
            results["lowest_rate_not_held"] = above = rate
        # twice the rate while all hold, because a closed loop with few connections does not always reach the capacity
        held = results["max_rate"] or 0.0
        rate = 2 * held if above is None else (held + above) / 2


def _hold(loads: Sequence[LoadMetrics], limits: Sequence[Objective]) -> bool:
    """Returns whether all loads meet the limits."""
    return all(limit.is_met(worst_metrics(loads)[limit.metric]) for limit in limits)


def _run_on_time(runner: LoadRunner, rate: float, *remarks: str) -> list[LoadMetrics]:
    """Runs open loops, and once more if the generator was late."""
    loads = runner.run_open_loop(rate, *remarks)
    if were_late(loads) and not runner.stop.is_set():
        loads = runner.run_open_loop(rate, *remarks, "second try")
    return loads
