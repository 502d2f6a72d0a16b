"""Logits to scores, and their order. Pure numpy, float32 throughout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Activation

Floats = NDArray[np.float32]
Row = Mapping[str, NDArray[Any]]  # one text's graph outputs by name, float32, or what its task keeps of them


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
        # exp of minus the magnitude is at most 1, whichever sign the logit has
        decay: Floats = np.exp(-np.abs(logits))
        odds: Floats = (np.where(logits >= 0, 1, decay) / (1 + decay)).astype(np.float32)
        return odds
    return logits


def best_first(scores: Floats, top_k: int | None = None) -> list[int]:
    """Returns indices of a one-dimensional array by falling score, equal ones by rising index, at most `top_k`."""
    return [int(i) for i in np.argsort(-scores, kind="stable")[:top_k]]
