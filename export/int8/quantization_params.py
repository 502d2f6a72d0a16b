"""Chooses the quantization of an activation and the matrix that reads it: smoothing, scales, rounded weights, corrected bias.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) divides each channel of an activation by a smoothing factor and multiplies the row
of the matrix that reads it by the same factor: `(x / s) @ (s * weight) = x @ weight`. A larger migration strength alpha moves more of the
difficulty from the activation to the weights. Here, alpha is chosen per matrix, by its output's error on the calibration texts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from bertserve.export.int8.activations import Activations
from bertserve.export.int8.gptq import factor_hessian, output_blocks, output_scales, round_to_nearest, round_weight
from bertserve.service.tasks.decoding import Floats

SAMPLE_ROWS = 512  # rows on which scales are compared; each candidate runs on them, so fewer than twice as many are used


@dataclass(frozen=True)
class ActivationParams:
    """The quantization parameters of an activation, which is stored as `round(x / smoothing / scale) + zero_point`.

    Attributes:
        smoothing: Factors of the channels, float32 [channels]; ones for no smoothing.
        scale: Scale of the smoothed activation.
        zero_point: Zero point of the smoothed activation.
        quantized_peak: The largest quantized value of each channel on the calibration texts, with a margin, uint8 [channels].
        error: Error of the matrix's output on the calibration texts, with weights rounded to nearest: the mean square
            difference, relative to the mean square.
    """

    smoothing: Floats
    scale: np.float32
    zero_point: np.uint8
    quantized_peak: NDArray[np.uint8]
    error: float

    @property
    def is_smoothed(self) -> bool:
        """Whether channels are smoothed before they are stored."""
        return bool((self.smoothing != 1).any())

    @property
    def multiplier(self) -> Floats:
        """The inverse of the smoothing factors, float32 [channels]."""
        return (1 / self.smoothing).astype(np.float32)

    def folded(self) -> "ActivationParams":
        """Returns the same parameters for an activation that is already smoothed elsewhere."""
        return replace(self, smoothing=np.ones_like(self.smoothing))

    def dequantized(self, rows: Floats) -> Floats:
        """Returns rows after smoothing, quantization and dequantization, float32 [n, channels]."""
        approximated = _quantize(rows * self.multiplier if self.is_smoothed else rows, self.scale, self.zero_point)
        approximated -= np.float32(self.zero_point)
        approximated *= self.scale
        return approximated


@dataclass(frozen=True)
class LayerParams:
    """The quantization of an activation and the matrix that reads it. A weight is stored as `round(weight * smoothing / weight_scale)`.

    Attributes:
        input_params: The parameters of the activation.
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


def choose_activation_params(weight: Floats, observed: Activations, *, smooth: bool) -> ActivationParams:
    """Returns the smoothing and scale with the smallest error of some of the matrix's outputs, on some rows of the calibration texts.

    `weight` is the matrix that reads the activation, float32 [inputs, outputs].
    """
    weight_peak = _weight_peak(weight)
    used_channels = weight_peak > 0  # rows of zeros are computed elsewhere, in float
    rows, high, low = observed.rows(SAMPLE_ROWS) * used_channels, observed.high * used_channels, observed.low * used_channels
    columns = weight[:, :: max(1, weight.shape[1] // 128)].copy()  # a sample of at least 128
    expected = rows @ columns

    def evaluate(smoothing: Floats, clip_ratio: float = 1.0, step: int = 1) -> ActivationParams:
        """Returns the parameters whose scale covers `clip_ratio` of the range, with their error on every `step`th row."""
        scale, zero_point = _scale_and_zero_point(clip_ratio * float((low / smoothing).min()), clip_ratio * float((high / smoothing).max()))
        # a margin of two steps, because during calibration the previous layers were not quantized
        quantized_peak = (np.minimum(_quantize(high / smoothing, scale, zero_point), 253) + 2).astype(np.uint8)
        params = ActivationParams(smoothing, scale, zero_point, quantized_peak, 0.0)
        smoothed = columns * smoothing[:, None]
        scales = output_scales(smoothed, quantized_peak)
        actual = params.dequantized(rows[::step]) @ (round_to_nearest(smoothed, scales) * scales)
        exact = expected[::step]
        return replace(params, error=float(np.mean((actual - exact) ** 2)) / max(float(np.mean(exact**2)), 1e-12))

    candidates = [np.ones_like(weight_peak)]
    if smooth:
        step = max(1, len(rows) // 128)
        smoothings = _smoothing_candidates(rows, np.maximum(high, -low), weight_peak)
        candidates = sorted(smoothings, key=lambda smoothing: evaluate(smoothing, step=step).error)
    best = min(map(evaluate, candidates[:3]), key=attrgetter("error"))  # the best on few rows run on all
    return min(best, *(evaluate(best.smoothing, clip_ratio) for clip_ratio in (0.9, 0.8)), key=attrgetter("error"))


def quantize_weight(weight: Floats, bias: Floats, observed: Activations, input_params: ActivationParams, *, use_gptq: bool) -> LayerParams:
    """Returns the matrix, float32 [inputs, outputs], in int8 with a corrected bias, float32 [outputs]. GPTQ takes longest."""
    rows = observed.rows(None if use_gptq else SAMPLE_ROWS) * (_weight_peak(weight) > 0)
    approximated = input_params.dequantized(rows)
    before, after = rows.mean(axis=0), approximated.mean(axis=0)
    del rows
    hessian = factor_hessian(approximated) if use_gptq else None
    quantized = np.empty(weight.shape, dtype=np.int8)
    scales, corrected = np.empty_like(bias), np.empty_like(bias)
    for block in output_blocks(weight.shape[1]):
        smoothed = weight[:, block] * input_params.smoothing[:, None]
        scales[block] = output_scales(smoothed, input_params.quantized_peak)
        quantized[:, block] = round_weight(smoothed, scales[block], input_params.quantized_peak, hessian)
        corrected[block] = bias[block] + before @ weight[:, block] - after @ (quantized[:, block] * scales[block])
    return LayerParams(input_params, quantized, scales, corrected, hessian is not None)


def _weight_peak(weight: Floats) -> Floats:
    return np.maximum(weight.max(axis=1), -weight.min(axis=1))


def _smoothing_candidates(inputs: Floats, peak: Floats, weight_peak: Floats) -> Iterator[Floats]:
    """Yields smoothing factors, float32 [channels]: none; SmoothQuant's factors with several alphas; and factors of outlying channels only.

    SmoothQuant's are `peak**alpha / weight_peak**(1 - alpha)`, with the maximum of all values, and with the 0.999 quantile, as the peak.
    An alpha of 0.5, SmoothQuant's own, shares the difficulty equally, and 1 leaves all of it to the weights, which have a scale per column,
    whereas an activation has only one. With the quantile, which is a smaller peak, only larger alphas are tried.
    """
    # minima keep the factor of a channel of nearly zeros finite
    peak = np.maximum(peak, 1e-3)
    quantile = np.maximum(np.quantile(np.abs(inputs), 0.999, axis=0), 1e-3)
    weight_peak = np.maximum(weight_peak, 1e-4)
    yield np.ones_like(peak)
    for magnitude, alphas in ((peak, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)), (quantile, (0.7, 0.8, 0.9))):
        for alpha in alphas:
            smoothing = magnitude**alpha / weight_peak ** (1 - alpha)
            yield (smoothing / np.exp(np.log(smoothing).mean())).astype(np.float32)
    for times in (1, 1.5, 2, 3):
        yield np.maximum(peak / (np.median(peak) * times), 1).astype(np.float32)


def _scale_and_zero_point(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Returns scale and zero point of uint8 for a range of values, extended to contain zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max(high - low, 1e-6) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def _quantize(x: Floats, scale: np.float32, zero_point: np.uint8) -> Floats:
    """Returns the uint8 values as floats."""
    quantized = x / scale
    np.rint(quantized, out=quantized)
    quantized += np.float32(zero_point)
    return np.clip(quantized, 0, 255, out=quantized)
