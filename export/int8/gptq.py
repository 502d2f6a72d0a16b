"""Weights as int8 with one scale per column, rounded by GPTQ. Pure numpy.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds the rows of a matrix one after the other, and changes the rows that are not yet
rounded so that they make up for what each rounding did to the outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MAX_INT8 = 127
MAX_INT16 = 2**15 - 1
_DAMPING = 0.01
_BLOCK_SIZE = 128


def column_scales(weight: Floats, peak: NDArray[np.uint8]) -> Floats:
    """Returns each column's scale, wide enough that no CPU saturates on values like those of calibration.

    Without VNNI, x86 multiplies u8 by s8 and adds *pairs* of products in 16 bits, saturating. A column whose largest pair could
    leave that range gets a larger scale. A text whose values go beyond what calibration saw can still saturate a sum here and there.

    Args:
        weight: float32 [rows, columns].
        peak: The largest quantized activation that meets each row, uint8 [rows].

    Returns:
        float32 [columns].
    """
    scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny) / MAX_INT8
    # one step of slack for each row of the pair: rounding may go up
    limit = MAX_INT16 - 2 * 255
    widened: Floats = (scales * np.maximum(_largest_pair(weight / scales, peak) / limit, 1)).astype(np.float32)
    return widened


def _largest_pair(quantized: Floats, peak: NDArray[np.uint8]) -> Floats:
    """Returns the largest magnitude that the sum of a pair of products can have in each column, float32 [columns]."""
    products = quantized * peak[:, None].astype(np.float32)
    if len(products) % 2:
        products = np.concatenate([products, np.zeros_like(products[:1])])
    pairs = products.reshape(len(products) // 2, 2, -1)
    positive, negative = (np.maximum(sign * pairs, 0).sum(axis=1).max(axis=0) for sign in (1, -1))
    largest: Floats = np.maximum(positive, negative)
    return largest


def round_to_nearest(weight: Floats, scales: Floats) -> NDArray[np.int8]:
    """Returns `weight / scales` rounded to the nearest integer, int8 of the same shape."""
    quantized: NDArray[np.int8] = np.clip(np.rint(weight / scales), -MAX_INT8, MAX_INT8).astype(np.int8)
    return quantized


def round_gptq(weight: Floats, scales: Floats, inputs: Floats, peak: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Returns the matrix rounded so that `inputs @ weight` changes least; it saturates no more than one rounded to nearest.

    Args:
        weight: float32 [rows, columns].
        scales: float32 [columns].
        inputs: A sample of what the matrix is multiplied with, float32 [n, rows].
        peak: As for `column_scales`.

    Returns:
        int8 [rows, columns]; rounded to nearest where the sample is too small to say more.
    """
    rows = len(weight)
    if len(inputs) < 2 * rows:
        return round_to_nearest(weight, scales)
    hessian = inputs.T.astype(np.float64) @ inputs.astype(np.float64)
    hessian[np.diag_indices(rows)] += max(_DAMPING * hessian.diagonal().mean(), 1e-12)  # inputs may all be zero
    # rows that matter most first ("act order"), while there are many left to make up for them
    order = np.argsort(-hessian.diagonal(), kind="stable")
    # the upper Cholesky factor of the inverse Hessian
    factor = np.linalg.cholesky(np.linalg.inv(hessian[np.ix_(order, order)])).T.astype(np.float32)
    updated = weight[order].astype(np.float32)
    quantized = np.empty(weight.shape, dtype=np.int8)
    for start in range(0, rows, _BLOCK_SIZE):
        end = min(start + _BLOCK_SIZE, rows)
        errors = np.empty((end - start, weight.shape[1]), dtype=np.float32)
        for i in range(start, end):
            row = round_to_nearest(updated[i], scales)
            quantized[order[i]] = row
            errors[i - start] = (updated[i] - row * scales) / factor[i, i]
            updated[i + 1 : end] -= np.outer(factor[i, i + 1 : end], errors[i - start])
        updated[end:] -= factor[start:end, end:].T @ errors
    return np.where(_largest_pair(quantized.astype(np.float32), peak) > MAX_INT16, round_to_nearest(weight, scales), quantized)
