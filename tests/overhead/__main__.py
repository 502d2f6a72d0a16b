"""Measures the cost of layers between callers and the model, and checks thresholds: `python -m overhead`.

Exit codes: 0 all thresholds were met, 1 a threshold was missed or a request failed, 2 a process did not start.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bertserve.bench.errors import BenchError
from bertserve.bench.load.generator import Durations
from bertserve.bench.progress import BenchProgress
from overhead.comparison import CANDIDATES, THRESHOLDS, Comparison, Load

_TIMEOUT_S = 30


def main() -> int:
    """Runs the comparison; returns the exit code."""
    args = _parser().parse_args()
    candidates = [candidate for candidate in CANDIDATES if candidate.name in args.candidates]
    loads = [Load(workload, connections) for workload in args.workloads for connections in args.connections]
    durations = Durations(args.seconds, args.warmup_s, _TIMEOUT_S)
    progress = BenchProgress()
    comparison = Comparison(candidates, loads, durations, models=args.models, threads=args.threads, progress=progress)
    try:
        for i in range(args.rounds):
            progress.log(f"round {i + 1} of {args.rounds}")
            comparison.run_round()
    except BenchError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    for line in _table(comparison, [candidate.name for candidate in candidates], loads):
        print(line)
    print()
    failed = sum(result.failed for results in comparison.results.values() for result in results)
    print(f"failed requests: {failed}")
    return int(not _judge(comparison, loads) or failed > 0)


def _parser() -> argparse.ArgumentParser:
    names = [candidate.name for candidate in CANDIDATES]
    parser = argparse.ArgumentParser(
        prog="python -m overhead",
        description="Measure the cost of layers between callers and the model: candidates in turn on this machine, with the same loads.",
        epilog="candidates: " + "; ".join(f"{candidate.name}, {candidate.description}" for candidate in CANDIDATES),
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of bundles (default: models)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2, help="threads per candidate, in total (default: one per core)")
    parser.add_argument("--candidates", nargs="+", choices=names, default=names, metavar="NAME", help="candidates (default: all)")
    parser.add_argument("--workloads", nargs="+", default=["short", "long"], metavar="WORKLOAD", help="workloads (default: short long)")
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 16], metavar="N", help="total connections (default: 1 16)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all candidates (default: 5)")
    parser.add_argument("--seconds", type=float, default=5, help="duration of each load (default: 5)")
    parser.add_argument("--warmup-s", type=float, default=1, help="warm-up before each load (default: 1)")
    return parser


def _table(comparison: Comparison, names: list[str], loads: list[Load]) -> list[str]:
    """Returns the lines of a Markdown table: medians over the rounds, and the ratio to the first candidate in the same round."""
    lines = [
        "| texts | connections | candidate | requests/s | share | p50 ms | p99 ms | CPU ms | generator |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in loads:
        for name in names:
            figures = [comparison.median(name, load, metric) for metric in ("rps", "p50_ms", "p99_ms", "cpu_ms", "generator_share")]
            if (share := comparison.ratio(name, names[0], load)) is not None:
                rps, p50, p99, cpu, generator = (metric or 0.0 for metric in figures)
                lines.append(
                    f"| {load.workload} | {load.connections} | {name} | {rps:.1f} | {share:.3f} | {p50:.2f} | {p99:.2f} | {cpu:.2f} | {generator:.2f} |"
                )
    return lines


def _judge(comparison: Comparison, loads: list[Load]) -> bool:
    """Prints each threshold with its measured value, and returns whether all are met."""
    met = True
    for threshold in THRESHOLDS:
        for load in loads:
            ratio = comparison.ratio(threshold.candidate, threshold.of, load)
            if load.connections == threshold.connections and ratio is not None:
                met &= ratio >= threshold.least
                verdict = "met" if ratio >= threshold.least else "missed"
                print(
                    f"{threshold.candidate} of {threshold.of}, {load.workload} texts, {load.connections} connections: {ratio:.3f}, {verdict} ({threshold.least})"
                )
    return met


if __name__ == "__main__":
    sys.exit(main())
