"""The predictions of a model on labeled examples, and how well their scores match the outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.calibration import Bin, Interval, Quality

BINS = 15  # of a calibration error, as in most publications
MIN_PER_BIN = 20  # predictions; with fewer, the share of correct ones in a bin is mostly noise
RESAMPLES = 300  # of the examples, for an interval; each of its ends then rests on 7 of them
SEED = 57  # of halves and resamples: any fixed number, so that a repeated command gives the same bundle
# The smallest distance of a score from 0 or 1 in a log loss; float32 has no larger number below 1.
CLOSEST = float(np.finfo(np.float32).epsneg)

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Predictions:
    """Predictions whose scores say how probably they are correct, such as the best label of each text or each entity.

    Attributes:
        scores: float64 [predictions].
        correct: bool [predictions].
        losses: The log loss of each, float64 [predictions].
        examples: The index of the example of each, int64 [predictions].
        labels: The label of each, str [predictions].
        count: Number of examples.
        missed: Number of items that no prediction has, such as entities that were not found.
    """

    scores: Values
    correct: Flags
    losses: Values
    examples: NDArray[np.int64]
    labels: NDArray[np.str_]
    count: int
    missed: int = 0


def log_losses(scores: Values, correct: Flags) -> Values:
    """Returns the log loss of scores that predictions are correct."""
    return -np.log(np.maximum(np.where(correct, scores, 1 - scores), CLOSEST))


def measure(predictions: Predictions) -> Quality:
    """Returns the quality of scores with intervals of a bootstrap over examples, whose predictions stay together.

    The ends of an interval are reflected at the value (the basic bootstrap), because resampling makes the calibration error greater.
    """
    order = np.argsort(predictions.scores, kind="stable")
    scores, correct, losses = (values[order] for values in (predictions.scores, predictions.correct.astype(float), predictions.losses))
    bins = np.array_split(np.arange(len(order)), max(1, min(BINS, len(order) // MIN_PER_BIN)))
    bin_starts, score_starts = [part[0] for part in bins], np.unique(scores, return_index=True)[1]

    def statistics(weights: Values) -> tuple[float, ...]:
        gaps = np.add.reduceat(weights * (scores - correct), bin_starts)
        good, bad = (np.add.reduceat(weights * side, score_starts) for side in (correct, 1 - correct))
        pairs = good.sum() * bad.sum()
        ordered = good @ (np.cumsum(bad) - bad / 2)  # pairs in which the correct prediction has the higher score; equal ones count half
        sums = (weights @ losses, weights @ (scores - correct) ** 2, np.abs(gaps).sum())
        return (*(float(value / weights.sum()) for value in sums), float(ordered / pairs) if pairs else np.nan)

    rng, count, examples = np.random.default_rng(SEED), predictions.count, predictions.examples[order]
    resamples = (rng.multinomial(count, np.full(count, 1 / count)).astype(float)[examples] for _ in range(RESAMPLES))
    values = np.array([statistics(np.ones(len(order))), *(statistics(weights) for weights in resamples if weights.any())])
    return Quality(
        log_loss=_interval(values[:, 0]),
        brier=_interval(values[:, 1]),
        ece=_interval(values[:, 2]),
        auroc=None if correct.min() == correct.max() else _interval(values[:, 3], most=1.0),
        bins=tuple(Bin(score=scores[part].mean().item(), correct=correct[part].mean().item(), count=len(part)) for part in bins),
    )


def _interval(values: Values, most: float = np.inf) -> Interval:
    """Returns the first value with the interval of the others."""
    value = float(values[0])
    low, high = 2 * value - np.nanquantile(values[1:], [0.975, 0.025])
    return Interval(value=value, low=float(np.clip(low, 0, value)), high=float(np.clip(high, value, most)))
