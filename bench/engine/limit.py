"""The engine limit as figures: runs, texts and tokens per second of the bare loop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EncodedBodies:
    """The runs of the graph that some bodies need.

    Attributes:
        feeds: For each body, the inputs of its runs: one run for each text, or one for each window of a long text.
        lengths: For each body, the length of each run in tokens, including special tokens.
        texts: For each body, its number of texts.
    """

    feeds: Sequence[Sequence[Feed]]
    lengths: Sequence[Sequence[int]]
    texts: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each body, including special tokens."""
        return [sum(lengths) for lengths in self.lengths]


@dataclass(frozen=True, slots=True)
class EngineLimit:
    """The figures of one bare loop. The field names are those of the JSON report.

    Attributes:
        threads: Number of threads that ran the graph.
        seconds: Measured time.
        runs: Runs of the graph.
        runs_per_s: Runs per second on all threads together.
        requests_per_s: Bodies per second that these runs amount to.
        texts_per_s: Texts per second.
        tokens_per_s: Tokens per second.
        run_ms: Mean time of one run in milliseconds, while the other threads run too.
        feed_s: For each body, the median time of each of its runs in seconds.
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


def summarize_runs(encoded: EncodedBodies, runs: Sequence[tuple[int, int, float]], threads: int, seconds: float) -> EngineLimit:
    """Returns the figures of a bare loop.

    Args:
        encoded: The bodies that were run.
        runs: For each run, `(index of the body, index of the run in the body, seconds)`.
        threads: Number of threads that ran the graph.
        seconds: Measured time.
    """
    times: dict[tuple[int, int], list[float]] = {}
    for body, part, taken in runs:
        times.setdefault((body, part), []).append(taken)
    mean = statistics.fmean(taken for _, _, taken in runs) if runs else 0.0
    span = seconds or 1.0
    shares = [1 / len(feeds) for feeds in encoded.feeds]  # of a body in each of its runs
    return EngineLimit(
        threads=threads,
        seconds=seconds,
        runs=len(runs),
        runs_per_s=len(runs) / span,
        requests_per_s=sum(shares[body] for body, _, _ in runs) / span,
        texts_per_s=sum(shares[body] * encoded.texts[body] for body, _, _ in runs) / span,
        tokens_per_s=sum(encoded.lengths[body][part] for body, part, _ in runs) / span,
        run_ms=mean * 1000,
        # a short loop may not reach the last text of a mix; the mean stands in for it
        feed_s=[[statistics.median(times.get((i, k), [mean])) for k in range(len(feeds))] for i, feeds in enumerate(encoded.feeds)],
    )
