"""Chooses how an activation and the matrix that reads it are quantized: smoothing, scales, rounded weights, corrected bias.

SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) divides each channel of an activation by a smoothing factor and multiplies the row
of the matrix that reads it by the same: `(x / s) @ (s * weight) = x @ weight`. With a larger migration strength alpha more of the
difficulty moves from the activation to the weights. Here alpha is chosen per matrix, by the error of its output on the calibration
texts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.calibration import Activations
from export.graph.linear import Linear
from export.int8 import gptq
from export.progress import track

SAMPLE_ROWS = 3072
PEAK_MARGIN = 2  # quantization steps that an activation may go beyond calibration before a sum can saturate
CLIP_RATIOS = (1.0, 0.9, 0.8)  # of the calibrated range, what uint8 covers; what is beyond is clipped

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QuantParams:
    """How one activation and the matrix that reads it are quantized.

    An activation is stored as `round(x * multiplier / scale) + zero_point`, a weight as `round(weight / multiplier / weight_scale)`.

    Attributes:
        multiplier: The inverse of the smoothing factors, float32 [inputs]; None where nothing is smoothed.
        scale: Of the activation.
        zero_point: Of the activation.
        weight: int8 [inputs, outputs].
        weight_scale: float32 [outputs].
        bias: With the correction of the mean error that quantization makes, float32 [outputs].
    """

    multiplier: Floats | None
    scale: np.float32
    zero_point: np.uint8
    weight: NDArray[np.int8]
    weight_scale: Floats
    bias: Floats


def choose_params(
    linears: Mapping[str, Linear],
    activations: Mapping[str, Activations],
    *,
    use_gptq: bool,
    unsmoothed: Collection[str] = (),
) -> dict[str, QuantParams]:
    """Returns how each linear layer is quantized, by the tensor that it reads.

    Layers that share a matrix, and so their activations, share the parameters too.

    Args:
        linears: The linear layers of the float32 graph, by the tensor that they read.
        activations: What these tensors were on the calibration texts.
        use_gptq: Whether weights are rounded by GPTQ, which takes longest, or to nearest.
        unsmoothed: Tensors whose channels are not smoothed.
    """
    params: dict[str, QuantParams] = {}
    first: dict[tuple[ir.Value, bytes], str] = {}
    step = "round by GPTQ" if use_gptq else "choose scales"
    for x, layer in track(linears.items(), step, unit="matrices"):
        weight, bias = layer.arrays()
        same = first.setdefault((layer.weight, bias.tobytes()), x)
        params[x] = (
            params[same]
            if same in params
            else _choose_layer_params(weight, bias, activations[x], use_gptq=use_gptq, smooth=x not in unsmoothed)
        )
    return params


def _choose_layer_params(weight: Floats, bias: Floats, activations: Activations, *, use_gptq: bool, smooth: bool) -> QuantParams:
    """Returns the parameters that put the least error on the matrix's output for the calibration texts."""
    used = np.abs(weight).max(axis=1) > 0  # rows of zeros are computed elsewhere, in float
    all_inputs, high, low = (value * used.astype(np.float32) for value in (activations.rows, activations.high, activations.low))
    inputs = all_inputs[:: max(1, len(all_inputs) // SAMPLE_ROWS)]
    expected = inputs @ weight
    weight_peak = np.abs(weight).max(axis=1)

    def error(smoothing: Floats, clip_ratio: float) -> float:
        smoothed = weight * smoothing[:, None]
        scale, zero_point = _scale_and_zero_point(clip_ratio * float((low / smoothing).min()), clip_ratio * float((high / smoothing).max()))
        scales = gptq.column_scales(smoothed, _quantized_peak(high / smoothing, scale, zero_point))
        actual = _fake_quantize(inputs / smoothing, scale, zero_point) @ (gptq.round_to_nearest(smoothed, scales) * scales)
        return float(np.mean((actual - expected) ** 2))

    candidates = _smoothing_candidates(inputs, np.maximum(high, -low), weight_peak) if smooth else [np.ones_like(weight_peak)]
    smoothing = min(candidates, key=lambda smoothing: error(smoothing, 1.0))
    clip_ratio = min(CLIP_RATIOS, key=lambda clip_ratio: error(smoothing, clip_ratio))
    scale, zero_point = _scale_and_zero_point(clip_ratio * float((low / smoothing).min()), clip_ratio * float((high / smoothing).max()))
    smoothed, peak = weight * smoothing[:, None], _quantized_peak(high / smoothing, scale, zero_point)
    scales = gptq.column_scales(smoothed, peak)
    stored = _fake_quantize(all_inputs / smoothing, scale, zero_point)
    quantized = gptq.round_gptq(smoothed, scales, stored, peak) if use_gptq else gptq.round_to_nearest(smoothed, scales)
    correction = all_inputs.mean(axis=0) @ weight - stored.mean(axis=0) @ (quantized * scales)
    multiplier = None if (smoothing == 1).all() else np.where(used, 1 / smoothing, 0).astype(np.float32)
    return QuantParams(multiplier, scale, zero_point, quantized, scales, (bias + correction).astype(np.float32))


def _smoothing_candidates(inputs: Floats, peak: Floats, weight_peak: Floats) -> Iterator[Floats]:
    """Yields smoothing factors, float32 [channels]: none; SmoothQuant's by several alphas; and of the outlying channels alone.

    SmoothQuant's are `peak**alpha / weight_peak**(1 - alpha)`, by the peak of all values and by that of all but one in a thousand.
    """
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
    """Returns scale and zero point of uint8 for values of this range, widened to contain zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max(high - low, 1e-6) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def _quantize(x: Floats, scale: np.float32, zero_point: np.uint8) -> NDArray[np.uint8]:
    quantized: NDArray[np.uint8] = np.clip(np.rint(x / scale) + np.float32(zero_point), 0, 255).astype(np.uint8)
    return quantized


def _quantized_peak(high: Floats, scale: np.float32, zero_point: np.uint8) -> NDArray[np.uint8]:
    """Returns the largest quantized value of each channel, uint8 [channels], with a margin.

    During calibration the layers before were not yet quantized, so that a value may go a little beyond what was seen.
    """
    peak: NDArray[np.uint8] = np.minimum(_quantize(high, scale, zero_point), 255 - PEAK_MARGIN) + np.uint8(PEAK_MARGIN)
    return peak


def _fake_quantize(x: Floats, scale: np.float32, zero_point: np.uint8) -> Floats:
    """Returns what is left of values after they are quantized and dequantized."""
    return (_quantize(x, scale, zero_point).astype(np.float32) - np.float32(zero_point)) * scale
