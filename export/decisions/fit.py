"""Fits the parameters of a calibration."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_LOG_SCALE = 3.0  # scales from 1/20 to 20 are tried
MIN_GAIN = 1.92  # nats: a likelihood ratio test of one parameter at 95 %
MAX_BIAS = 10.0  # a factor of 20,000


def minimize(loss: Callable[[float], float], limit: float, min_gain: float = MIN_GAIN) -> float:
    """Returns where a loss in nats is lowest, from -limit to limit; 0 if the gain is less, so that noise changes no scores.

    The loss must have one minimum there. The search goes downhill in steps, which it halves at the bottom.
    """
    best, lowest, step = 0.0, loss(0.0), limit / 2
    start = lowest
    while step > 1e-3:
        value, argument = min((loss(argument), argument) for argument in (best - step, best + step) if abs(argument) <= limit)
        if value < lowest:
            best, lowest = argument, value
        else:
            step /= 2
    return best if start - lowest > min_gain else 0.0


def fit_scale(loss: Callable[[float], float]) -> float:
    """Returns the scale with the lowest loss; 1 if the data does not show that another one is better."""
    return math.exp(minimize(lambda logarithm: loss(math.exp(logarithm)), MAX_LOG_SCALE))


def fit_bias(loss: Callable[[float], float]) -> float:
    """Returns the bias with the lowest loss; 0 if the data does not show that another one is better."""
    return minimize(loss, MAX_BIAS)


def fit_line(loss: Callable[[float, float], float]) -> tuple[float, float]:
    """Returns the scale and the bias with the lowest loss, as logistic regression does (Platt, 1999)."""
    scale = fit_scale(lambda scale: loss(scale, minimize(lambda bias: loss(scale, bias), MAX_BIAS, min_gain=0.0)))
    return scale, fit_bias(lambda bias: loss(scale, bias))
