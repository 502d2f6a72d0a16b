"""Each target alone and all at once, in turn."""

from __future__ import annotations

import statistics

from bench.errors import BenchError
from bench.experiments.aggregation import median_figures
from bench.experiments.load_test import Session
from bench.report.measurement import Measurement
from bench.report.report import Report


def together(session: Session, report: Report, *, connections: int, rounds: int) -> None:
    """Measures each target alone and all at once, in turn; `ratio` is the sum of the shares of its own speed that each kept.

    1 means that together they do as much as one model alone, in tokens.

    Args:
        session: Two targets or more, of different models.
        report: Gets the medians.
        connections: To each target.
        rounds: Of all.
    """
    count = len(session.targets)
    ratios, sums, alone_sums = [], [], []
    for i in range(rounds):
        alone = []
        for k in range(count):
            if not session.stop.is_set():
                alone.append(session.closed(connections, only=k, name=f"round {i + 1} alone {session.targets[k].label}"))
                report.runs.append(alone[-1])
        if session.stop.is_set():
            break
        both = session.closed(connections, name=f"round {i + 1} together")
        report.runs.append(both)
        speeds = [_tokens(run.targets[0]) for run in alone]
        shares = [_tokens(target) / speed for target, speed in zip(both.targets, speeds, strict=True)]
        ratios.append(sum(shares))
        sums.append(sum(map(_tokens, both.targets)))
        alone_sums.append(statistics.fmean(speeds))
        session.progress.say(f"  round {i + 1}: shares {', '.join(f'{share:.3f}' for share in shares)}, sum {ratios[-1]:.3f}")
    if ratios:
        report.judged = median_figures(report.runs)
        report.figures |= {
            "ratio": statistics.median(ratios),
            "together_tokens_per_s": statistics.median(sums),
            "mean_alone_tokens_per_s": statistics.median(alone_sums),
        }


def _tokens(target: Measurement) -> float:
    """Returns tokens a second.

    Raises:
        BenchError: The service does not count them, or answered nothing.
    """
    if not target.tokens_per_s:
        raise BenchError(f"{target.target}: no tokens were counted; the targets must be different models of one bertserve.")
    return target.tokens_per_s
