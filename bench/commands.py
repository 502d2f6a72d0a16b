"""From flags to measurements: one function a subcommand. Each fills the report as it goes."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.engine import benchmark
from bench.engine.bare_engine import BareEngine
from bench.errors import BenchError
from bench.experiments import aggregation, load_test
from bench.experiments import compare as compare_
from bench.experiments import concurrent_targets as concurrent_targets_
from bench.experiments import sweep as sweep_
from bench.experiments import tail_latency as tail_latency_
from bench.experiments.load_test import Session
from bench.load.generator import Plan
from bench.progress import Progress
from bench.report.report import Report
from bench.report.slo import Condition
from bench.target import info, probe
from bench.workload import bodies, mixes

_LIMIT_SHARE = 0.5  # of --seconds, for a limit that only accompanies a load


def closed(args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress) -> None:
    """One closed loop, and the engine's limit if there is a bundle."""
    made = _session(args, report, stop, progress)
    report.runs.append(made.closed(args.connections))
    report.judged = aggregation.figures(report.runs[0])
    _accompany(args, report, made)


def open_loop(
    args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress
) -> None:
    """One open loop, and the engine's limit if there is a bundle."""
    made = _session(args, report, stop, progress)
    run, _, _ = made.open_loop(args.rate)
    report.runs.append(run)
    report.judged = aggregation.figures(run)
    _accompany(args, report, made)


def sweep(args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress) -> None:
    """Open loops at rates between which the highest one lies that keeps the conditions."""
    made = _session(args, report, stop, progress)
    sweep_.sweep(made, report, conditions, connections=args.connections, steps=args.steps, most_rate=args.max_rate)
    _accompany(args, report, made)


def compare(
    args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress
) -> None:
    """Served and bare in turn."""
    made = _session(args, report, stop, progress)
    compare_.compare(made, report, connections=args.connections, rounds=args.rounds)


def together(
    args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress
) -> None:
    """Each target alone and all at once, in turn."""
    if len(args.target or ()) < 2:
        raise BenchError("together takes two --target or more, of different models.")
    made = _session(args, report, stop, progress)
    concurrent_targets_.together(made, report, connections=args.connections, rounds=args.rounds)


def tail(args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress) -> None:
    """An open loop against an ideal queue."""
    made = _session(args, report, stop, progress)
    lanes = (report.service or {}).get("limits", {}).get("lanes", args.threads)
    tail_latency_.tail(made, report, connections=args.connections, share=args.share, servers=args.servers or int(lanes), rounds=args.rounds)


def limit(args: argparse.Namespace, report: Report, conditions: Sequence[Condition], *, stop: threading.Event, progress: Progress) -> None:
    """The engine alone."""
    bare = BareEngine(args.bundle, args.bare_graph)
    mix = args.mix or mixes.DEFAULTS.get(bare.task, "short")
    work = bare.work(bodies.bodies(mix, texts=args.texts, seed=args.seed))
    engine = benchmark.Engine(bare, work, args.threads, stop, progress)
    report.engine = engine.facts() | {"mix": mix}
    report.limits.append(engine.limit(args.seconds))
    done = report.limits[0]
    rates = {"rps": done.requests_per_s, "texts_per_s": done.texts_per_s, "tokens_per_s": done.tokens_per_s}
    report.judged = {**rates, "error_rate": 0.0}  # a run that fails ends the command


COMMANDS: Mapping[str, Callable[..., None]] = {
    "closed": closed,
    "open": open_loop,
    "sweep": sweep,
    "compare": compare,
    "together": together,
    "tail": tail,
    "limit": limit,
}


def answered(report: Report) -> bool:
    """Returns whether anything was: at least one request with 200, or run of the engine."""
    loads = any(target.latency for run in report.runs for target in run.targets)
    found = report.command != "sweep" or report.figures.get("max_rate") is not None
    return (loads and found) or any(done.runs for done in report.limits)


def _session(args: argparse.Namespace, report: Report, stop: threading.Event, progress: Progress) -> Session:
    headers = _headers(args)
    given = args.target or [args.default_target]
    read = [probe.read_target(text, headers, texts=args.texts, seed=args.seed) for text in given]
    targets = [made for made, _ in read]
    report.service = info.service_info(targets[0].address, headers)
    report.models = [model for _, model in read if model]
    engine = None
    if getattr(args, "bundle", None):
        load_test.check_single(targets, f"{args.command} with --bundle")
        engine = benchmark.make_engine(args.bundle, args.bare_graph, targets[0].bodies, threads=args.threads, stop=stop, progress=progress)
        report.engine = engine.facts()
        digest = (read[0][1] or {}).get("version")
        if digest not in (None, report.engine["digest"]):
            progress.say(
                f"warning: the service runs bundle {digest}, but --bundle is {report.engine['digest']}; the ratio compares two models"
            )
    elif getattr(args, "bare_graph", None):
        raise BenchError("--bare-graph runs in place of a bundle's graph; give the bundle too, with --bundle.")
    return Session(
        targets=targets,
        headers=headers,
        models=[model for _, model in read],
        plan=Plan(args.seconds, args.warmup_s, args.timeout_s),
        stop=stop,
        progress=progress,
        engine=engine,
        most_connections=getattr(args, "max_connections", 512),
        seed=args.seed,
    )


def _accompany(args: argparse.Namespace, report: Report, made: Session) -> None:
    """Measures the engine's limit after the load, in the same run of the tool."""
    if made.engine and report.runs and not made.stop.is_set():
        done = made.engine.limit(args.seconds * _LIMIT_SHARE)
        report.runs[-1] = replace(report.runs[-1], limit=done)
        if done.texts_per_s:
            best = max(target.texts_per_s for run in report.runs for target in run.targets)
            report.figures["ratio"] = best / done.texts_per_s


def _headers(args: argparse.Namespace) -> dict[str, str]:
    """Returns the headers of every request.

    Raises:
        BenchError: One is not `NAME: VALUE`, or the key cannot be read.
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
