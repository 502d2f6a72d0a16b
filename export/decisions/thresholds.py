"""Chooses thresholds whose error is at most a target, with 95 % confidence. Only numpy.

The method is fixed sequence testing (Angelopoulos and others, "Learn then Test", 2021, section 2.3). The examples that fitted the calibration
also fix a sequence of thresholds. The other examples test them in this order by the exact binomial probability of so few errors, if their
share were the target. The sequence ends at the first probability above 5 %, and the threshold before is chosen. A false choice needs a false
result of the first test whose threshold is too weak, so all tests together have the error of one. Recall and coverage count correct items
below the threshold: the training-conditional guarantee of split conformal prediction (Vovk, 2012).
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertserve.export.decisions.predictions import Predictions, Values
from bertserve.service.bundle.decision import AimName, Threshold

MAX_P = 0.05  # 1 - the confidence
CANDIDATES = 200  # thresholds that are tried; neighbors then decide only about 0.5 % more
_DEVIATIONS = 1.645  # standard errors of a normal distribution to its 95 % quantile


class Aim(NamedTuple):
    """A flag `--aim`: `precision=0.98`, or `LABEL:precision=0.98` for a label."""

    name: AimName
    target: float
    label: str | None = None

    def __str__(self) -> str:
        return f"{f'{self.label}:' if self.label is not None else ''}{self.name}={self.target:g}"

    @property
    def counts_missed(self) -> bool:
        """Whether an error is a correct item below the threshold; otherwise it is a wrong prediction from the threshold on."""
        return self.name in ("recall", "coverage")

    @property
    def error(self) -> float:
        """The largest share of errors."""
        return self.target if self.name == "max-error" else round(1 - self.target, 9)


class Miss(NamedTuple):
    """The threshold that comes closest to an aim.

    Attributes:
        error: Its measured share of errors.
        decided: Its share of decided predictions.
        more: About how many more examples that judge would reach the aim; None if the measured error is too high.
    """

    error: float
    decided: float
    more: int | None


def choose(aim: Aim, fitted: Predictions, judged: Predictions) -> Threshold | Miss:
    """Returns the threshold that decides most, or the one that comes closest to the aim if none reaches it.

    `fitted` are predictions on the examples of the calibration, `judged` those on the others; both have correct ones.
    """
    quantiles = np.quantile(fitted.scores[fitted.correct], np.arange(CANDIDATES) / CANDIDATES, method="lower")
    candidates = np.unique(np.append(quantiles, 0.0))
    if not aim.counts_missed:
        candidates = candidates[::-1]  # errors become more frequent along the sequence
    start = _closest(aim, *_errors(aim, fitted, candidates))
    errors, counts = _errors(aim, judged, candidates)
    tests = (tail(*pair, aim.error) <= MAX_P for pair in zip(errors[start:].tolist(), counts[start:].tolist(), strict=True))
    passed = sum(takewhile(bool, tests))
    chosen = start + passed - 1 if passed else _closest(aim, errors, counts)
    error, count = float(errors[chosen] / max(counts[chosen], 1)), int(counts[chosen])
    above = judged.scores >= candidates[chosen]
    if aim.name == "coverage":  # examples whose label set has one label
        above = np.bincount(judged.examples[above], minlength=judged.count) == 1
    decided = float(above.mean())
    if not passed:
        # how many examples make the distance to the aim as large as `_DEVIATIONS` standard errors
        needed = aim.error * (1 - aim.error) * (_DEVIATIONS / (aim.error - error)) ** 2 if error < aim.error else math.inf
        more = math.ceil(max(needed / max(count, 1) - 1, 0.1) * judged.count) if needed < math.inf else None
        return Miss(error, decided, more)
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
    correct_below, missed = np.searchsorted(correct, thresholds), len(predictions.missed)
    if aim.counts_missed:
        return missed + correct_below, np.full(len(thresholds), missed + len(correct))
    wrong_above = len(wrong) - np.searchsorted(wrong, thresholds)
    return wrong_above, wrong_above + len(correct) - correct_below


def _closest(aim: Aim, errors: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """Returns the index of the share of errors that is farthest below the aim, or the least above it, in standard errors."""
    distances = (aim.error * counts - errors) / np.sqrt(np.maximum(counts, 1))
    return int(np.where(counts > 0, distances, -np.inf).argmax())


def tail(errors: int, count: int, share: float) -> float:
    """Returns the binomial probability of at most so many errors, if each of `count` is an error with the probability `share`."""
    if errors >= count:
        return 1.0
    numbers = np.arange(1, errors + 1)
    ratios = np.log((count + 1 - numbers) / numbers * (share / (1 - share)))  # of the probabilities of neighboring numbers of errors
    return float(np.exp(count * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(ratios)])).sum())
