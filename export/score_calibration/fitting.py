"""Fits a calibration to scores, and measures how well scores match the outcomes."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

from bertserve.export.score_calibration.scores import Outcomes, Parameters, Predictions, Scores, Values
from bertserve.service.bundle.calibration import Bin, Interval, Quality

MAX_LOG_SCALE = 3.0  # scales are from 1/20 to 20
MAX_BIAS = 10.0  # a bias of 10 is a factor of 20,000
MIN_OF_A_KIND = 20  # minimum examples with a label, and without it, for parameters of its own
MIN_FOR_MORE = 1000  # minimum examples for more than one parameter; with fewer, parameters are mostly noise
BINS = 15  # bins of a calibration error; most publications use 15
MIN_PER_BIN = 20  # predictions in a bin; with fewer, its share of correct ones is mostly noise
RESAMPLES = 300  # samples of the bootstrap; 7 of them are beyond each end of an interval
SEED = 57  # seed of the halves and the bootstrap; it is fixed, so that a repeated command gives the same bundle


def fit(outcomes: Outcomes) -> Parameters:
    """Returns the parameters with the lowest log loss: one scale for everything, or a scale and a bias per label with enough examples."""
    common = _fit(outcomes, None, MAX_LOG_SCALE)
    if not isinstance(outcomes, Scores) or outcomes.method == "temperature" or len(outcomes.scores) < MIN_FOR_MORE:
        return Parameters((common[0],))
    lines = []  # logistic regressions (Platt, 1999)
    for label, correct in zip(outcomes.labels, outcomes.correct.sum(axis=0).tolist(), strict=True):
        enough = MIN_OF_A_KIND <= correct <= len(outcomes.correct) - MIN_OF_A_KIND
        lines.append(_fit(outcomes, [label], MAX_LOG_SCALE, MAX_BIAS) if enough else common)
    scale, bias = zip(*lines, strict=True)
    return Parameters(scale, bias)


def _fit(outcomes: Outcomes, labels: Sequence[str] | None, *limits: float) -> tuple[float, float]:
    """Returns the scale and bias with the lowest log loss.

    `limits` bounds the logarithm of the scale and, if there are two, the bias; with one limit the bias is 0. Returns (1, 0) if a likelihood
    ratio test at 95 % finds no gain.
    """

    def loss(values: Values) -> float:
        scale, bias = _scale_and_bias(values)
        return float(outcomes.predictions(Parameters((scale,), (bias,)), labels).losses.sum())

    zeros = np.zeros(len(limits))
    best = optimize.minimize(loss, zeros, method="Powell", bounds=[(-limit, limit) for limit in limits])
    is_noise = loss(zeros) - best.fun < stats.chi2.isf(0.05, len(limits)) / 2
    return _scale_and_bias(zeros if is_noise else best.x)


def _scale_and_bias(values: Values) -> tuple[float, float]:
    """Returns the scale and bias of the values that `_fit` optimizes: the logarithm of the scale and, if there are two, the bias."""
    log_scale, bias = [*values.tolist(), 0.0][:2]
    return math.exp(log_scale), bias


def measure_quality(predictions: Predictions) -> Quality:
    """Returns the quality of scores with intervals of a bootstrap over examples, whose predictions stay together.

    The ends of an interval are reflected at the value (the basic bootstrap), because resampling makes the calibration error greater.
    """
    order = np.argsort(predictions.scores, kind="stable")
    scores, correct, losses = (values[order] for values in (predictions.scores, predictions.correct.astype(float), predictions.losses))
    bins = np.array_split(np.arange(len(order)), max(1, min(BINS, len(order) // MIN_PER_BIN)))
    bin_starts = [part[0] for part in bins]
    score_starts = np.unique(scores, return_index=True)[1]

    def statistics(weights: Values) -> tuple[float, ...]:
        gaps = np.add.reduceat(weights * (scores - correct), bin_starts)
        good, bad = (np.add.reduceat(weights * side, score_starts) for side in (correct, 1 - correct))
        pairs = good.sum() * bad.sum()
        ordered = good @ (np.cumsum(bad) - bad / 2)  # pairs in which the correct prediction has the higher score; equal ones count half
        sums = (weights @ losses, weights @ (scores - correct) ** 2, np.abs(gaps).sum())
        return (*(float(value / weights.sum()) for value in sums), float(ordered / pairs) if pairs else np.nan)

    rng = np.random.default_rng(SEED)
    count, examples = predictions.count, predictions.examples[order]
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
