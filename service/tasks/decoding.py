"""Turns logits into scores and their order. Only numpy, float32."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Activation

Floats = NDArray[np.float32]
# `power` is the exponential of the logit, at most 1: a calibration with the scale s raises a score to the power s
Link = Activation | Literal["power"]


def activate(logits: Floats, activation: Activation) -> Floats:
    """Returns the scores of logits, float32 of the same shape.

    `softmax` runs over the last axis with its true maximum subtracted; `sigmoid` is per value and never overflows;
    `none` returns the logits.
    """
    logits = logits.astype(np.float32, copy=False)
    if activation == "none":
        return logits
    if activation == "softmax":
        exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True)
    # exp of the negative magnitude is at most 1 for either sign of the logit
    decay = np.exp(-np.abs(logits))
    return (np.where(logits >= 0, 1, decay) / (1 + decay)).astype(np.float32)


def apply_calibration(scores: Floats, link: Link, scale: Sequence[float], bias: Sequence[float]) -> Floats:
    """Returns calibrated scores, float32 [..., labels] like `scores`, which are of all windows together: `link` of `scale * logits + bias`.

    `scale` and `bias` contain one value, or one per label. With the link `none`, scores are logits.
    """
    logits = (np.array(scale) * to_logits(scores, link) + np.array(bias)).astype(np.float32)
    return np.exp(np.minimum(logits, 0)) if link == "power" else activate(logits, link)


def to_logits(scores: Floats, link: Link) -> NDArray[np.float64]:
    """Returns finite logits that result in these scores, float64 of the same shape: log odds for `sigmoid`, otherwise logarithms."""
    if link == "none":
        return scores.astype(np.float64)
    least = np.finfo(np.float32).tiny
    values: NDArray[np.float64] = np.maximum(scores.astype(np.float64), least)
    if link == "sigmoid":
        return np.log(values) - np.log(np.maximum(1 - values, np.finfo(np.float32).epsneg))
    return np.log(values)


def best_first(scores: Floats) -> list[int]:
    """Returns the indices of a one-dimensional array by falling score, then by rising index."""
    # not `np.argsort`, which releases the GIL: with busy threads it takes long to get it back
    return sorted(range(len(scores)), key=(-scores).tolist().__getitem__)


def best_tokens(scores: NDArray[Any], count: int, allowed_ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Returns at most `count` ids by falling score, then by id: the best of float [vocabulary], or of `allowed_ids`, ascending."""
    values = scores if allowed_ids is None else scores[allowed_ids]
    count = min(count, len(values))
    floor = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= floor)  # includes all that equal the last one, so that ties are complete
    best = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return best if allowed_ids is None else allowed_ids[best]
