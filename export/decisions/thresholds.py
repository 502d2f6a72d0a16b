"""Chooses thresholds whose error is at most a target, with 95 % confidence. Only numpy.

The method is fixed sequence testing, as in Angelopoulos, Bates, Candès, Jordan and Lei, "Learn then Test: Calibrating Predictive Algorithms
to Achieve Risk Control" (2021), section 2.3. The examples that fitted the calibration also fix a sequence of thresholds. The other
examples test them in this order, each with the exact binomial test behind Clopper and Pearson's bound: the probability of so few errors, if
their share were the target. The sequence ends at the first threshold with a probability above 5 %, and the one before is chosen. A false
choice needs a false result of the first test whose threshold is too weak, so all tests together have the error of one.

The test needs independent examples from the texts that the service will see. Recall and coverage count correct items below the threshold, so
that they are the training-conditional guarantee of split conformal prediction (Vovk, 2012).
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from bertserve.export.decisions.predictions import Indices, Predictions, Values
from bertserve.service.bundle.decision import AimName, Threshold

CONFIDENCE = 0.95
CANDIDATES = 200
_DEVIATIONS = 1.645  # standard errors of a normal distribution to its 95 % quantile


class Goal(NamedTuple):
    """A flag `--aim`: `precision=0.98`, or `LABEL:precision=0.98` for a label."""

    aim: AimName
    target: float
    label: str | None = None

    def __str__(self) -> str:
        return f"{f'{self.label}:' if self.label is not None else ''}{self.aim}={self.target:g}"

    @property
    def counts_correct_items(self) -> bool:
        """Whether an error is a correct item below the threshold; otherwise it is a wrong prediction from the threshold on."""
        return self.aim in ("recall", "coverage")

    @property
    def error(self) -> float:
        """The largest share of errors."""
        return self.target if self.aim == "max-error" else round(1 - self.target, 9)


class Miss(NamedTuple):
    """The threshold that comes closest to a goal.

    Attributes:
        error: Its measured share of errors.
        bound: The upper bound of this share at 95 %, without a correction for the choice.
        decided: Its share of decided predictions.
        more: About how many times as many examples would reach the goal; None if the measured error of all thresholds is too high.
    """

    error: float
    bound: float
    decided: float
    more: float | None


def choose(goal: Goal, fitted: Predictions, judged: Predictions) -> Threshold | Miss:
    """Returns the threshold that decides most, or the one that comes closest to the goal if none reaches it.

    `fitted` are predictions on the examples of the calibration, `judged` those on the others.
    """
    candidates = _candidates(goal, fitted)
    sequence = candidates[int(np.argmax(_margins(*_errors(goal, fitted, candidates), goal.error))) :]
    errors, counts = _errors(goal, judged, sequence)
    tests = (tail(*pair, goal.error) <= 1 - CONFIDENCE for pair in zip(errors.tolist(), counts.tolist(), strict=True))
    chosen = sum(takewhile(bool, tests)) - 1
    if chosen < 0:
        return _closest(goal, judged, candidates)
    return Threshold(
        label=goal.label,
        aim=goal.aim,
        target=goal.target,
        threshold=float(sequence[chosen]),
        decided=_decided(goal, judged, sequence[chosen]),
        error=float(errors[chosen] / counts[chosen]),
        examples=int(counts[chosen]),
    )


def _candidates(goal: Goal, fitted: Predictions) -> Values:
    """Returns thresholds at equal shares of the scores, from the one with the fewest errors on: falling ones, or rising ones for recall."""
    scores = np.sort(fitted.scores[fitted.right] if goal.counts_correct_items else fitted.scores)
    quantiles = scores[np.arange(CANDIDATES) * len(scores) // CANDIDATES] if len(scores) else scores
    thresholds = np.unique(np.concatenate([[0.0], quantiles]))
    return thresholds if goal.counts_correct_items else thresholds[::-1]


def _errors(goal: Goal, predictions: Predictions, thresholds: Values) -> tuple[Indices, Indices]:
    """Returns the number of errors at each threshold, and what they are a share of."""
    right, wrong = (np.sort(predictions.scores[side]) for side in (predictions.right, ~predictions.right))
    right_below = np.searchsorted(right, thresholds)
    if goal.counts_correct_items:
        return predictions.missed + right_below, np.full(len(thresholds), predictions.missed + len(right))
    wrong_above = len(wrong) - np.searchsorted(wrong, thresholds)
    return wrong_above, wrong_above + len(right) - right_below


def _decided(goal: Goal, predictions: Predictions, threshold: float) -> float:
    """Returns the share of predictions from a threshold on; for coverage, the share of examples whose label set has one label."""
    above = predictions.scores >= threshold
    if goal.aim == "coverage":
        return float(np.mean(np.bincount(predictions.examples[above], minlength=predictions.count) == 1))
    return float(np.mean(above))


def _closest(goal: Goal, judged: Predictions, candidates: Values) -> Miss:
    errors, counts = _errors(goal, judged, candidates)
    best = int(np.argmax(_margins(errors, counts, goal.error)))
    shares = errors / np.maximum(counts, 1)
    # how many examples make the distance to the aim as large as `_DEVIATIONS` standard errors
    needed = goal.error * (1 - goal.error) * (_DEVIATIONS / np.where(shares < goal.error, goal.error - shares, np.nan)) ** 2
    times = (needed / np.maximum(counts, 1))[(shares < goal.error) & (counts > 0)]
    bound = upper_bound(int(errors[best]), int(counts[best]))
    return Miss(float(shares[best]), bound, _decided(goal, judged, candidates[best]), times.min().item() if len(times) else None)


def _margins(errors: Indices, counts: Indices, target: float) -> Values:
    """Returns how far the share of errors is below the target, in standard errors; minus infinity for no count."""
    deviations = (target * counts - errors) / np.sqrt(target * (1 - target) * np.maximum(counts, 1))
    return np.where(counts > 0, deviations, -np.inf)


def upper_bound(errors: int, count: int) -> float:
    """Returns Clopper and Pearson's one-sided upper bound of a share at 95 %."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(errors, count, middle) > 1 - CONFIDENCE else (low, middle)
    return high


def tail(errors: int, count: int, share: float) -> float:
    """Returns the binomial probability of at most so many errors, if each of `count` is an error with the probability `share`."""
    if errors >= count:
        return 1.0
    numbers = np.arange(1, errors + 1)
    ratios = np.log((count + 1 - numbers) / numbers * (share / (1 - share)))  # of the probabilities of neighboring numbers of errors
    return float(np.exp(count * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(ratios)])).sum())
