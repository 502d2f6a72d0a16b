"""Turns logits into scores and their order. Only numpy, float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Activation

Floats = NDArray[np.float32]


def activate(logits: Floats, activation: Activation) -> Floats:
    """Returns the scores of logits, float32 of the same shape.

    `softmax` runs over the last axis with its true maximum subtracted; `sigmoid` is per value and never overflows;
    `none` returns the logits.
    """
    logits = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        exponentials: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return shares
    if activation == "sigmoid":
        # exp of the negative magnitude is at most 1 for either sign of the logit
        decay: Floats = np.exp(-np.abs(logits))
        odds: Floats = (np.where(logits >= 0, 1, decay) / (1 + decay)).astype(np.float32)
        return odds
    return logits


def best_first(scores: Floats, top_k: int | None = None) -> list[int]:
    """Returns the indices of a one-dimensional array by falling score, then by rising index; at most `top_k`."""
    # not `np.argsort`, which releases the GIL: with busy threads it takes long to get it back
    return sorted(range(len(scores)), key=(-scores).tolist().__getitem__)[:top_k]


def best_tokens(scores: NDArray[Any], count: int, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Returns the best `count` ids of a vocabulary by falling score, then by id.

    Args:
        scores: float [vocabulary].
        count: Maximum number of ids.
        among: The ids to choose from, ascending; None for all.
    """
    values = scores if among is None else scores[among]
    count = min(count, len(values))
    floor = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= floor)  # with all that equal the last one, so that ties are complete
    best = candidates[np.argsort(-values[candidates], kind="stable")][:count]
    return best if among is None else among[best]
