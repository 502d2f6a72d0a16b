"""Rounds the matrix of a linear layer to int8 by GPTQ, with one scale per column, and corrects its bias.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds the rows of a matrix one after the other, and changes the remaining rows so that
they compensate the effect of each rounding on the outputs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertserve.export.int8.activations import Activations
from bertserve.export.int8.scales import (
    MAX_INT8,
    MAX_INT16,
    SAMPLE_ROWS,
    ActivationParams,
    blocks,
    largest_pair,
    output_scales,
    round_to_nearest,
)
from bertserve.service.tasks.decoding import Floats

FactoredHessian = tuple[NDArray[np.int64], torch.Tensor]  # the order in which rows are rounded, and the factor of the inverse in it


@dataclass(frozen=True)
class LayerParams:
    """The quantization of an activation and the matrix that reads it. A weight is stored as `round(weight * smoothing / weight_scale)`.

    Attributes:
        weight: The weights, int8 [inputs, outputs].
        weight_scale: Scales of the columns, float32 [outputs].
        bias: The bias, corrected by the mean error of quantization, float32 [outputs].
        by_gptq: Whether the weights were rounded by GPTQ instead of to nearest.
    """

    input_params: ActivationParams
    weight: NDArray[np.int8]
    weight_scale: Floats
    bias: Floats
    by_gptq: bool


def quantize_weight(weight: Floats, bias: Floats, observed: Activations, input_params: ActivationParams, *, use_gptq: bool) -> LayerParams:
    """Returns the matrix, float32 [inputs, outputs], in int8 with a corrected bias, float32 [outputs]. GPTQ takes longest."""
    rows = observed.rows(None if use_gptq else SAMPLE_ROWS) * weight.any(axis=1)  # rows of zeros are computed elsewhere, in float
    approximated = input_params.dequantized(rows)
    before, after = rows.mean(axis=0), approximated.mean(axis=0)
    del rows
    hessian = factor_hessian(approximated) if use_gptq else None
    quantized = np.empty(weight.shape, dtype=np.int8)
    scales, corrected = np.empty_like(bias), np.empty_like(bias)
    for block in blocks(weight.shape[1]):
        smoothed = weight[:, block] * input_params.smoothing[:, None]
        scales[block] = output_scales(smoothed, input_params.quantized_peak)
        quantized[:, block] = round_weight(smoothed, scales[block], input_params.quantized_peak, hessian)
        corrected[block] = bias[block] + before @ weight[:, block] - after @ (quantized[:, block] * scales[block])
    return LayerParams(input_params, quantized, scales, corrected, hessian is not None)


def factor_hessian(activations: Floats) -> FactoredHessian | None:
    """Returns the factored Hessian of a sample of a matrix's inputs, float32 [n, inputs].

    None with fewer rows than inputs, which is too little information.
    """
    inputs = activations.shape[1]
    if len(activations) < inputs:
        return None
    hessian = activations.T @ activations
    # dampened by a hundredth of the mean, so that it can be inverted; the activations can all be zero
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
    return np.where(largest_pair(quantized.astype(np.float32), quantized_peak) > MAX_INT16, round_to_nearest(weight, scales), quantized)


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
