"""Weights as int8: one scale per column, rounding errors made up for by later rows. Pure numpy.

The error feedback is that of optimal brain surgeon as used by GPTQ (Frantar et al. 2022, arXiv:2210.17323): rows are rounded in
turn, and what a row's rounding did to the outputs is taken out by changing the rows not yet rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MAX_INT8 = 127
MAX_INT16 = 2**15 - 1
_DAMPING = 0.01
_BLOCK = 128


def column_scales(weight: Floats, peak: NDArray[np.uint8]) -> Floats:
    """Returns each column's scale, wide enough that no CPU saturates on values like those of calibration.

    Without VNNI, x86 multiplies u8 by s8 and adds *pairs* of products in 16 bits, saturating. A column whose largest pair could
    leave that range gets a larger scale. A text whose values go beyond what calibration saw can still saturate a sum here and there.

    Args:
        weight: float32 [rows, columns].
        peak: The largest quantized activation that meets each row, uint8 [rows].
    """
    scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny) / MAX_INT8
    # a step of slack for each row of the pair: rounding may go up
    room = MAX_INT16 - 2 * 255
    widened: Floats = (scales * np.maximum(_largest_pair(weight / scales, peak) / room, 1)).astype(np.float32)
    return widened


def _largest_pair(steps: Floats, peak: NDArray[np.uint8]) -> Floats:
    """Returns the largest magnitude that a pair of products can have in each column, [columns]."""
    products = steps * peak[:, None].astype(np.float32)
    if len(products) % 2:
        products = np.concatenate([products, np.zeros_like(products[:1])])
    pairs = products.reshape(len(products) // 2, 2, -1)
    up, down = (np.maximum(sign * pairs, 0).sum(axis=1).max(axis=0) for sign in (1, -1))
    largest: Floats = np.maximum(up, down)
    return largest


def to_nearest(weight: Floats, scales: Floats) -> NDArray[np.int8]:
    """Returns each weight's nearest step, int8 of the same shape."""
    steps: NDArray[np.int8] = np.clip(np.rint(weight / scales), -MAX_INT8, MAX_INT8).astype(np.int8)
    return steps


def with_feedback(weight: Floats, scales: Floats, inputs: Floats, peak: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Returns steps that keep `inputs @ weight` rather than each weight, and saturate no more than those would.

    Args:
        weight: float32 [rows, columns].
        scales: float32 [columns].
        inputs: A sample of what the matrix is multiplied with, float32 [n, rows].
        peak: As for `column_scales`.

    Returns:
        int8 [rows, columns]; the nearest steps where the sample is too small to say more.
    """
    count = len(weight)
    if len(inputs) < 2 * count:
        return to_nearest(weight, scales)
    hessian = inputs.T.astype(np.float64) @ inputs.astype(np.float64)
    hessian[np.diag_indices(count)] += max(_DAMPING * hessian.diagonal().mean(), 1e-12)  # inputs may all be zero
    # rows that matter most first, while there are many left to make up for them
    order = np.argsort(-hessian.diagonal(), kind="stable")
    factor = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T.astype(np.float32)
    left = weight[order].astype(np.float32)
    steps = np.empty(weight.shape, dtype=np.int8)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        errors = np.empty((end - start, weight.shape[1]), dtype=np.float32)
        for i in range(start, end):
            rounded = to_nearest(left[i], scales)
            steps[order[i]] = rounded
            errors[i - start] = (left[i] - rounded * scales) / factor[i, i]
            left[i + 1 : end] -= np.outer(factor[i, i + 1 : end], errors[i - start])
        left[end:] -= factor[start:end, end:].T @ errors
    return np.where(_largest_pair(steps.astype(np.float32), peak) > MAX_INT16, to_nearest(weight, scales), steps)
