"""Fits the parameters of a calibration. Only numpy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bertserve.export.decisions.predictions import Values

LOWEST, HIGHEST = 1 / 20, 20.0  # scales that are tried
ENOUGH_GAIN = 1.92  # nats: a likelihood ratio test of one parameter at 95 %
LEAST_OF_A_KIND = 20  # correct and other examples of a label that has its own parameters
LARGEST_LOGIT = 30.0  # in a fit; logits of float32 scores reach 87, and one wrong example there would outweigh all others


def fit_scale(loss: Callable[[float], float]) -> float:
    """Returns the scale with the lowest loss, in nats over all examples; 1 if the data is no evidence for another one."""
    scale = math.exp(_minimum(lambda x: loss(math.exp(x)), math.log(LOWEST), math.log(HIGHEST)))
    return scale if loss(1.0) - loss(scale) > ENOUGH_GAIN else 1.0


def fit_bias(loss: Callable[[float], float]) -> float:
    """Returns the bias with the lowest loss; 0 if the data is no evidence for another one."""
    bias = _minimum(loss, -10.0, 10.0)
    return bias if loss(0.0) - loss(bias) > ENOUGH_GAIN else 0.0


def _minimum(loss: Callable[[float], float], low: float, high: float) -> float:
    """Returns the argument with the lowest loss in an interval, in which the loss has one minimum, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    loss_a, loss_b = loss(a), loss(b)
    while high - low > 1e-3:
        if loss_a <= loss_b:
            high, b, loss_b = b, a, loss_a
            a = high - ratio * (high - low)
            loss_a = loss(a)
        else:
            low, a, loss_a = a, b, loss_b
            b = low + ratio * (high - low)
            loss_b = loss(b)
    return (low + high) / 2


def fit_line(logits: Values, right: NDArray[np.bool_], scale: float) -> tuple[float, float]:
    """Returns scale and bias of a label by logistic regression (Platt, 1999), or `scale` and 0 without enough examples of both kinds.

    Args:
        logits: float64 [examples].
        right: Whether the label is correct, bool [examples].
        scale: The scale that fits all labels together.
    """
    if min(right.sum(), (~right).sum()) < LEAST_OF_A_KIND:
        return scale, 0.0
    columns = np.stack([np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT), np.ones(len(logits))], axis=1)
    weights = np.array([scale, 0.0])
    for _ in range(50):  # Newton's method
        chances = 1 / (1 + np.exp(-np.clip(columns @ weights, -LARGEST_LOGIT, LARGEST_LOGIT)))
        curvature = columns.T @ (columns * (chances * (1 - chances) + 1e-6)[:, None])
        weights -= np.linalg.solve(curvature, columns.T @ (chances - right))
    fitted_scale, bias = weights.tolist()
    return (fitted_scale, bias) if LOWEST <= fitted_scale <= HIGHEST else (scale, 0.0)
