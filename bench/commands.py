"""Runs the subcommands that measure: builds a load test from flags, and fills the report."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from dataclasses import replace

from bertserve.bench import bodies, flags, workloads
from bertserve.bench.engine import EngineBenchmark, OnnxLoop
from bertserve.bench.errors import BenchError
from bertserve.bench.experiments import compare, compare_concurrent_targets, compare_tail_latency, sweep
from bertserve.bench.load.generator import Durations
from bertserve.bench.load_test import LoadTest, run_metrics
from bertserve.bench.progress import BenchProgress
from bertserve.bench.report.report import BenchReport
from bertserve.bench.report.slo import Objective
from bertserve.bench.target import fetch_json, probe_target

_ENGINE_THROUGHPUT_SHARE = 0.5  # of --seconds, for an engine throughput that accompanies a load


def run(
    args: argparse.Namespace, report: BenchReport, objectives: Sequence[Objective], *, stop: threading.Event, progress: BenchProgress
) -> None:
    """Runs the subcommand `args.command`, which must be one that measures.

    The report gets each result at once. The objectives are for a sweep. If `stop` is set, by Ctrl-C, the command ends early with the
    results so far.

    Raises:
        BenchError: A flag, a file or an address is wrong.
    """
    if args.command == "engine-limit":
        _measure_engine_throughput(args, report, stop, progress)
        return
    if args.command == "concurrent-targets" and len(args.target or ()) < 2:
        raise BenchError("concurrent-targets needs at least two --target, with different models.")
    test = _build_load_test(args, report, stop, progress)
    match args.command:
        case "closed":
            report.runs.append(test.run_closed_loop(args.connections))
            report.judged = run_metrics(report.runs[0])
        case "open":
            report.runs.append(test.run_open_loop(args.rate)[0])
            report.judged = run_metrics(report.runs[0])
        case "sweep":
            sweep(test, report, objectives, connections=args.connections, steps=args.steps, max_rate=args.max_rate)
        case "compare":
            compare(test, report, connections=args.connections, rounds=args.rounds)
        case "concurrent-targets":
            compare_concurrent_targets(test, report, connections=args.connections, rounds=args.rounds)
        case "tail-latency":
            threads = (report.service or {}).get("limits", {}).get("threads", args.threads)
            servers = args.servers or int(threads)
            compare_tail_latency(test, report, connections=args.connections, share=args.share, servers=servers, rounds=args.rounds)
    if args.command in ("closed", "open", "sweep"):
        _add_engine_throughput(args, report, test)


def has_results(report: BenchReport) -> bool:
    """Returns whether the report has at least one request with status 200, or one run of the engine.

    A sweep also needs a rate that met the objectives.
    """
    answered = any(target.latency for run in report.runs for target in run.targets)
    has_rate = report.command != "sweep" or report.figures.get("max_rate") is not None
    return (answered and has_rate) or any(limit.runs for limit in report.limits)


def _measure_engine_throughput(args: argparse.Namespace, report: BenchReport, stop: threading.Event, progress: BenchProgress) -> None:
    engine = OnnxLoop(args.bundle, args.bare_graph)
    workload = args.workload or bodies.default_workload(engine.task)
    encoded = engine.encode(bodies.build_bodies(workload, texts=args.texts, seed=args.seed, mask=engine.mask or workloads.MASK))
    benchmark = EngineBenchmark(engine, encoded, args.threads, stop, progress)
    report.engine = benchmark.describe() | {"workload": workload}
    limit = benchmark.measure_throughput(args.seconds)
    report.limits.append(limit)
    rates = {"rps": limit.requests_per_s, "texts_per_s": limit.texts_per_s, "tokens_per_s": limit.tokens_per_s}
    report.judged = {**rates, "error_rate": 0.0}  # a failed run ends the command


def _build_load_test(args: argparse.Namespace, report: BenchReport, stop: threading.Event, progress: BenchProgress) -> LoadTest:
    """Probes the targets and loads the bundle of the engine benchmark.

    Raises:
        BenchError: A target, a header or the bundle is wrong.
    """
    headers = _request_headers(args)
    probes = [probe_target(text, headers, texts=args.texts, seed=args.seed) for text in args.target or [flags.DEFAULT_URL]]
    targets = [target for target, _ in probes]
    report.service = fetch_json(targets[0].address, "/info", headers)
    report.models = [model for _, model in probes if model]
    engine = None
    if getattr(args, "bundle", None):
        if len(targets) != 1:
            raise BenchError(f"{args.command} with --bundle takes one --target, not {len(targets)}.")
        bare = OnnxLoop(args.bundle, args.bare_graph)
        engine = EngineBenchmark(bare, bare.encode(targets[0].bodies), args.threads, stop, progress)
        report.engine = engine.describe()
        served, digest = (probes[0][1] or {}).get("version"), report.engine["digest"]
        if served not in (None, digest):
            progress.log(f"warning: the service runs bundle {served}, but --bundle is {digest}; the ratio compares two models")
    elif getattr(args, "bare_graph", None):
        raise BenchError("--bare-graph replaces the graph of a bundle; give the bundle with --bundle.")
    return LoadTest(
        targets=targets,
        headers=headers,
        models=[model for _, model in probes],
        durations=Durations(args.seconds, args.warmup_s, args.timeout_s),
        stop=stop,
        progress=progress,
        engine=engine,
        max_connections=getattr(args, "max_connections", 512),
        seed=args.seed,
    )


def _add_engine_throughput(args: argparse.Namespace, report: BenchReport, test: LoadTest) -> None:
    """Measures the engine throughput after the load, if there is a bundle, and adds it to the last run."""
    if test.engine and report.runs and not test.stop.is_set():
        limit = test.engine.measure_throughput(args.seconds * _ENGINE_THROUGHPUT_SHARE)
        report.runs[-1] = replace(report.runs[-1], limit=limit)
        if limit.texts_per_s:
            best = max(target.texts_per_s for run in report.runs for target in run.targets)
            report.figures["ratio"] = best / limit.texts_per_s


def _request_headers(args: argparse.Namespace) -> dict[str, str]:
    """Returns the headers of every request.

    Raises:
        BenchError: A header is not `NAME: VALUE`, or the key file cannot be read.
    """
    headers = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or not header.isprintable():
            raise BenchError(f"`{name}` is not a header; give --header 'NAME: VALUE'.")
        headers[name.strip()] = value.strip()
    if args.api_key_file:
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(
                f"--api-key-file `{args.api_key_file}` cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}."
            ) from error
        headers["Authorization"] = f"Bearer {key}"
    return headers
