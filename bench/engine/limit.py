"""What the bare loop did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engine.workload import Work


@dataclass(frozen=True, slots=True)
class Limit:
    """What the bare loop did.

    Attributes:
        threads: It ran on.
        seconds: Measured.
        runs: Of the graph.
        runs_per_s: Runs a second on all threads together.
        requests_per_s: Bodies a second that these runs amount to.
        texts_per_s: Texts a second.
        tokens_per_s: Tokens a second.
        run_ms: Mean milliseconds of one run, while the other threads run too.
        feed_s: Of each body, median seconds of each of its runs.
    """

    threads: int
    seconds: float
    runs: int
    runs_per_s: float
    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    run_ms: float
    feed_s: Sequence[Sequence[float]]


def summary(work: Work, runs: Sequence[tuple[int, int, float]], threads: int, seconds: float) -> Limit:
    """Returns the limit from `(body, part, seconds)` of each run."""
    timed: dict[tuple[int, int], list[float]] = {}
    for body, part, taken in runs:
        timed.setdefault((body, part), []).append(taken)
    mean = statistics.fmean(taken for _, _, taken in runs) if runs else 0.0
    span = seconds or 1.0
    shares = [1 / len(feeds) for feeds in work.feeds]
    return Limit(
        threads=threads,
        seconds=seconds,
        runs=len(runs),
        runs_per_s=len(runs) / span,
        requests_per_s=sum(shares[body] for body, _, _ in runs) / span,
        texts_per_s=sum(shares[body] * work.texts[body] for body, _, _ in runs) / span,
        tokens_per_s=sum(work.lengths[body][part] for body, part, _ in runs) / span,
        run_ms=mean * 1000,
        # a long mix may not get to its last text in a short time
        feed_s=[[statistics.median(timed.get((i, k), [mean])) for k in range(len(feeds))] for i, feeds in enumerate(work.feeds)],
    )
