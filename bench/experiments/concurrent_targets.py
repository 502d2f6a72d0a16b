"""Several targets, each loaded alone and all at the same time: how much of its own speed each model keeps."""

from __future__ import annotations

import statistics

from bertserve.bench.errors import BenchError
from bertserve.bench.experiments.load_test import LoadTest, median_figures
from bertserve.bench.report.measurement import Measurement
from bertserve.bench.report.report import Report


def compare_concurrent_targets(test: LoadTest, report: Report, *, connections: int, rounds: int) -> None:
    """Measures each target alone and all targets at the same time, in turn.

    `ratio` is the sum, over the targets, of the share of its own speed in tokens that each kept under the common load. A ratio of 1 means
    that all models together do as much work as one model alone.

    Args:
        test: Two targets or more, of different models.
        report: Gets the medians over the rounds.
        connections: Number of connections to each target.
        rounds: Measurements of each.

    Raises:
        BenchError: The service does not count tokens, or answered nothing.
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
        report.judged = median_figures(report.runs)
        report.figures |= {
            "ratio": statistics.median(ratios),
            "together_tokens_per_s": statistics.median(concurrent_speeds),
            "mean_alone_tokens_per_s": statistics.median(alone_speeds),
        }


def _tokens_per_s(target: Measurement) -> float:
    """Returns tokens per second.

    Raises:
        BenchError: The service does not count them, or answered nothing.
    """
    if not target.tokens_per_s:
        raise BenchError(f"{target.target}: no tokens were counted; the targets must be different models of one bertserve.")
    return target.tokens_per_s
