"""Chooses thresholds whose error is at most a target, with 95 % confidence.

The method is fixed sequence testing (Angelopoulos and others, "Learn then Test", 2021, section 2.3). The examples that fitted the
calibration also fix a sequence of thresholds. Each threshold is then tested on the other examples, in this order. Its p-value is the
binomial probability of at most this many errors if the true share equaled the target. The sequence ends at the first p-value above 5 %, and
the threshold before is chosen. A wrong threshold is chosen only if the first test of a too weak threshold errs, so all tests together have
the error probability of one. Recall and coverage count correct items below the threshold: the training-conditional guarantee of split
conformal prediction (Vovk, 2012).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bertserve.export.aim import Aim
from bertserve.export.errors import DataError, ExportError
from bertserve.export.score_calibration.predictions import Predictions, Values
from bertserve.service.bundle.calibration import Threshold

MAX_P = 0.05  # 1 - the confidence
CANDIDATES = 200  # thresholds that are tried; neighbors then decide only about 0.5 % more
_DEVIATIONS = 1.645  # standard errors of a normal distribution to its 95 % quantile


def choose(aim: Aim, graph: str, fitted: Predictions, tested: Predictions) -> Threshold:
    """Returns the threshold of a graph that decides most.

    `fitted` are predictions on the examples that fitted the calibration, `tested` those on the test examples.

    Raises:
        DataError: One of them has no correct predictions.
        ExportError: No threshold reaches the aim.
    """
    if not (fitted.correct.any() and tested.correct.any()):
        raise DataError(f"`{aim}`: {graph} finds no correct `{aim.label}` in a half of the examples; give more examples with this label.")
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
            f"no threshold of {graph} reaches `{aim}`: the closest decides {decided:.1%} with {error:.2%} errors, and the aim is "
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
