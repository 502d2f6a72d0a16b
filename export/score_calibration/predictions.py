"""The predictions of a model on labeled examples, how well their scores match the outcomes, and thresholds of the scores.

A threshold has an error of at most a target, with 95 % confidence. The method is fixed sequence testing (Angelopoulos and others, "Learn
then Test", 2021, section 2.3). The examples that fitted the calibration also fix a sequence of thresholds. Each threshold is then tested
on the other examples, in this order. Its p-value is the binomial probability of at most this many errors if the true share equaled the
target. The sequence ends at the first p-value above 5 %, and the threshold before is chosen. A wrong threshold is chosen only if the first
test of a threshold that is too weak errs. So all tests together have the 5 % error probability of a single test. Recall and coverage count
correct items below the threshold: the training-conditional guarantee of split conformal prediction (Vovk, 2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bertserve.export.errors import ExportError, UsageError
from bertserve.export.flags import Aim
from bertserve.service.bundle.calibration import Bin, Interval, Quality, Threshold

BINS = 15  # bins of a calibration error; most publications use 15
MIN_PER_BIN = 20  # predictions in a bin; with fewer, its share of correct ones is mostly noise
RESAMPLES = 300  # samples of the bootstrap; 7 of them are beyond each end of an interval
SEED = 57  # seed of the halves and the bootstrap; it is fixed, so that a repeated command gives the same bundle
# The smallest distance of a score from 0 or 1 in a log loss; float32 has no larger number below 1.
CLOSEST = float(np.finfo(np.float32).epsneg)
MAX_P = 0.05  # maximum p-value: 1 - the confidence
CANDIDATES = 200  # thresholds to try; each decides only about 0.5 % more than its neighbor
_DEVIATIONS = 1.645  # the 95 % quantile of the standard normal distribution

Values = NDArray[np.float64]
Booleans = NDArray[np.bool_]


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
    correct: Booleans
    losses: Values
    examples: NDArray[np.int64]
    labels: NDArray[np.str_]
    count: int
    missed: int = 0


def log_losses(scores: Values, correct: Booleans) -> Values:
    """Returns the log loss of scores that predictions are correct."""
    return -np.log(np.maximum(np.where(correct, scores, 1 - scores), CLOSEST))


def measure_quality(predictions: Predictions) -> Quality:
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


def choose_threshold(aim: Aim, graph_name: str, fitted: Predictions, tested: Predictions) -> Threshold:
    """Returns the threshold of a graph that decides most.

    `fitted` are predictions on the examples that fitted the calibration, `tested` those on the test examples.

    Raises:
        UsageError: One of them has no correct predictions.
        ExportError: No threshold reaches the aim.
    """
    if not (fitted.correct.any() and tested.correct.any()):
        raise UsageError(
            f"`{aim}`: {graph_name} finds no correct `{aim.label}` in a half of the examples; give more examples with this label."
        )
    quantiles = np.quantile(fitted.scores[fitted.correct], np.arange(CANDIDATES) / CANDIDATES, method="lower")
    candidates = np.unique(np.append(quantiles, 0.0))
    if not aim.counts_missed:
        candidates = candidates[::-1]  # errors become more frequent along the sequence
    start = _closest(aim, *_errors(aim, fitted, candidates))
    errors, counts = _errors(aim, tested, candidates)
    failures = np.flatnonzero(stats.binom.cdf(errors[start:], counts[start:], aim.max_error) > MAX_P)
    passed = int(failures[0]) if len(failures) else len(candidates) - start
    chosen = start + passed - 1 if passed else _closest(aim, errors, counts)
    error, count = float(errors[chosen] / max(counts[chosen], 1)), int(counts[chosen])
    above = tested.scores >= candidates[chosen]
    if aim.name == "coverage":  # examples whose label set has one label
        above = np.bincount(tested.examples[above], minlength=tested.count) == 1
    decided = float(above.mean())
    if not passed:
        advice = "every threshold has more errors than the aim allows, so more examples do not help; choose an easier aim"
        if error < aim.max_error:
            # so many that the distance to the aim is as large as `_DEVIATIONS` standard errors
            total = aim.max_error * (1 - aim.max_error) * (_DEVIATIONS / (aim.max_error - error)) ** 2
            more = math.ceil(max(total / max(count, 1) - 1, 0.1) * tested.count)
            advice = (
                f"add about {2 * more} lines to --data (half of them are for the test), or {more} to --test-data, or choose an easier aim"
            )
        raise ExportError(
            f"no threshold of {graph_name} reaches `{aim}`: the closest decides {decided:.1%} with {error:.2%} errors, and the aim is "
            f"{aim.max_error:.2%}; {advice}."
        )
    return Threshold(
        label=aim.label,
        aim=aim.name,
        target=aim.target,
        threshold=float(candidates[chosen]),
        decided=decided,
        error=error,
        examples=count,
    )


def _errors(aim: Aim, predictions: Predictions, thresholds: Values) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the number of errors at each threshold, and what they are a share of."""
    correct, wrong = (np.sort(predictions.scores[side]) for side in (predictions.correct, ~predictions.correct))
    correct_below = np.searchsorted(correct, thresholds)
    if aim.counts_missed:
        return predictions.missed + correct_below, np.full(len(thresholds), predictions.missed + len(correct))
    wrong_above = len(wrong) - np.searchsorted(wrong, thresholds)
    return wrong_above, wrong_above + len(correct) - correct_below


def _closest(aim: Aim, errors: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """Returns the index of the candidate with the best distance from the aim, in standard errors; positive is below it."""
    distances = (aim.max_error * counts - errors) / np.sqrt(np.maximum(counts, 1))
    return int(np.where(counts > 0, distances, -np.inf).argmax())
