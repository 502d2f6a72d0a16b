"""Rounds weights to int8 with one scale per column by GPTQ.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds the rows of a matrix one after the other, and changes the remaining rows so that
they compensate the effect of each rounding on the outputs.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.service.tasks.decoding import Floats

MAX_INT8 = 127
MAX_INT16 = 2**15 - 1
FactoredHessian = tuple[NDArray[np.int64], torch.Tensor]  # the order in which rows are rounded, and the factor of the inverse in it


def output_blocks(outputs: int, size: int = 4096) -> Iterator[slice]:
    """Yields the outputs of a matrix, its columns, in blocks; temporaries for all outputs of a large vocabulary would need gigabytes."""
    return (slice(start, min(start + size, outputs)) for start in range(0, outputs, size))


def output_scales(weight: Floats, quantized_peak: NDArray[np.uint8]) -> Floats:
    """Returns each output's scale, float32 [outputs], large enough that no CPU saturates on values like the calibration values.

    Without VNNI, x86 multiplies u8 by s8 and adds *pairs* of products in 16 bits, saturating. A column whose largest pair could
    get beyond this range gets a larger scale. A text with values beyond those of calibration can still saturate some sums.
    `quantized_peak` is the largest quantized activation of each input, a row of the matrix, uint8 [inputs].
    """
    scales = np.maximum(np.abs(weight).max(axis=0), np.finfo(np.float32).tiny) / MAX_INT8
    # one step of margin per row of the pair, because rounding may go up
    limit = MAX_INT16 - 2 * 255
    return (scales * np.maximum(_largest_pair(weight, quantized_peak) / scales / limit, 1)).astype(np.float32)


def _largest_pair(weight: Floats, quantized_peak: NDArray[np.uint8]) -> Floats:
    """Returns the largest magnitude of a sum of a pair of products in each column, float32 [outputs]."""
    products = weight * quantized_peak[:, None].astype(np.float32)
    if len(products) % 2:
        products = np.concatenate([products, np.zeros_like(products[:1])])
    even, odd = products[::2], products[1::2]
    positive = np.maximum(even, 0) + np.maximum(odd, 0)
    negative = np.minimum(even, 0) + np.minimum(odd, 0)
    return np.maximum(positive.max(axis=0), -negative.min(axis=0))


def round_to_nearest(weight: Floats, scales: Floats) -> NDArray[np.int8]:
    """Returns `weight / scales` rounded to the nearest integer, int8 of the same shape."""
    return np.clip(np.rint(weight / scales), -MAX_INT8, MAX_INT8).astype(np.int8)


def factor_hessian(activations: Floats) -> FactoredHessian | None:
    """Returns the factored Hessian of a sample of a matrix's inputs, float32 [n, inputs].

    None with fewer rows than inputs, which is too little information.
    """
    inputs = activations.shape[1]
    if len(activations) < inputs:
        return None
    hessian = activations.T @ activations
    # dampened by a hundredth of the mean, so that it can be inverted; the activations may all be zero
    hessian[np.diag_indices(inputs)] += max(0.01 * float(hessian.diagonal().mean()), 1e-12)
    # the most important rows first ("act order"), while many rows are left to compensate
    order = np.argsort(-hessian.diagonal(), kind="stable")
    return order, _inverse_factor(hessian[np.ix_(order, order)])


def round_weight(weight: Floats, scales: Floats, quantized_peak: NDArray[np.uint8], hessian: FactoredHessian | None) -> NDArray[np.int8]:
    """Returns the matrix rounded so that `activations @ weight` changes least, int8 [inputs, outputs]; to nearest without a Hessian.

    It saturates no more than a matrix that is rounded to nearest.
    """
    if hessian is None:
        return round_to_nearest(weight, scales)
    order, factor = hessian
    quantized = np.empty(weight.shape, dtype=np.int8)
    quantized[order] = _round_rows(torch.from_numpy(weight[order]), torch.from_numpy(scales), factor)
    return np.where(_largest_pair(quantized.astype(np.float32), quantized_peak) > MAX_INT16, round_to_nearest(weight, scales), quantized)


def _round_rows(updated: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> NDArray[np.int8]:
    """Returns the rows rounded in order, int8 [inputs, outputs]; changes `updated`, float32 [inputs, outputs]."""
    rows, quantized = len(updated), torch.empty_like(updated)
    for start in range(0, rows, 32):  # the effect of a block on all later rows is added in one product
        end = min(start + 32, rows)
        errors = torch.empty_like(updated[start:end])
        for i in range(start, end):
            torch.div(updated[i], scales, out=quantized[i]).round_().clamp_(-MAX_INT8, MAX_INT8)
            torch.addcmul(updated[i], quantized[i], scales, value=-1, out=errors[i - start]).div_(factor[i, i])
            updated[i + 1 : end].addr_(factor[i, i + 1 : end], errors[i - start], alpha=-1)
        updated[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return quantized.to(torch.int8).numpy()


def _inverse_factor(hessian: Floats) -> torch.Tensor:
    """Returns the upper triangular R with `R.T @ R = inverse(hessian)`, float32 [inputs, inputs].

    With the rows in reverse order, `hessian = U @ U.T` for an upper triangular U, whose inverse is R.
    """
    backwards = torch.from_numpy(np.ascontiguousarray(hessian[::-1, ::-1]))
    lower, failed = torch.linalg.cholesky_ex(backwards)
    if failed:  # channels with very different sizes need more digits
        lower = torch.linalg.cholesky(backwards.double())
    # solving from the right takes half as long as from the left
    inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=False, left=False)
    return inverse.flip(0, 1).float().contiguous()
