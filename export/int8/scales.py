"""Chooses all scales of int8: one per activation, with smoothing and a zero point; one per column of a matrix; one per row of a table.

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
from bertserve.service.tasks.decoding import Floats

MAX_INT8 = 127
MAX_INT16 = 2**15 - 1
SAMPLE_ROWS = 512  # rows on which scales are compared; each candidate runs on them, so fewer than twice as many are used


@dataclass(frozen=True)
class ActivationParams:
    """The quantization parameters of an activation, which is stored as `round(x / smoothing / scale) + zero_point`.

    Attributes:
        smoothing: Factors of the channels, float32 [channels]; ones for no smoothing.
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


def choose_activation_params(weight: Floats, observed: Activations, *, smooth: bool) -> ActivationParams:
    """Returns the smoothing and scale with the smallest error of some of the matrix's outputs, on some rows of the calibration texts.

    `weight` is the matrix that reads the activation, float32 [inputs, outputs].
    """
    weight_peak = np.maximum(weight.max(axis=1), -weight.min(axis=1))
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


def output_scales(weight: Floats, quantized_peak: NDArray[np.uint8]) -> Floats:
    """Returns each output's scale, float32 [outputs], large enough that no CPU saturates on values like the calibration values.

    Without VNNI, x86 multiplies u8 by s8 and adds *pairs* of products in 16 bits, saturating. A column whose largest pair could
    get beyond this range gets a larger scale. A text with values beyond the calibration can still saturate some sums.
    `quantized_peak` is the largest quantized activation of each input, a row of the matrix, uint8 [inputs].
    """
    scales = _finest_scales(weight, axis=0)
    # one step of margin per row of the pair, because rounding can go up
    limit = MAX_INT16 - 2 * 255
    return (scales * np.maximum(largest_pair(weight, quantized_peak) / scales / limit, 1)).astype(np.float32)


def largest_pair(weight: Floats, quantized_peak: NDArray[np.uint8]) -> Floats:
    """Returns the largest magnitude of a sum of a pair of products in each column, float32 [outputs]."""
    products = weight * quantized_peak[:, None].astype(np.float32)
    if len(products) % 2:
        products = np.concatenate([products, np.zeros_like(products[:1])])
    even, odd = products[::2], products[1::2]
    positive = np.maximum(even, 0) + np.maximum(odd, 0)
    negative = np.minimum(even, 0) + np.minimum(odd, 0)
    return np.maximum(positive.max(axis=0), -negative.min(axis=0))


def quantize_table(table: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Returns a table of embeddings, float32 [rows, width], in int8, and its scales, float32 [rows, 1]."""
    quantized, scales = np.empty(table.shape, dtype=np.int8), np.empty((len(table), 1), dtype=np.float32)
    for block in blocks(len(table)):
        scales[block, 0] = _finest_scales(table[block], axis=1)
        quantized[block] = round_to_nearest(table[block], scales[block])
    return quantized, scales


def _finest_scales(values: Floats, axis: int) -> Floats:
    """Returns the scales at which the largest magnitudes along an axis are `MAX_INT8`, float32."""
    return np.maximum(np.abs(values).max(axis=axis), np.finfo(np.float32).tiny) / MAX_INT8


def round_to_nearest(weight: Floats, scales: Floats) -> NDArray[np.int8]:
    """Returns `weight / scales` rounded to the nearest integer, int8 of the same shape."""
    return np.clip(np.rint(weight / scales), -MAX_INT8, MAX_INT8).astype(np.int8)


def blocks(count: int, size: int = 4096) -> Iterator[slice]:
    """Yields columns of a matrix or rows of a table in blocks; temporaries for all of a large vocabulary would need gigabytes."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
