"""Chooses how a tensor and the matrix that reads it are quantized: scales, multipliers of channels, rounded weights, corrected bias."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from export.calibration import Activations
from export.graph.ir import Graph
from export.graph.linear import weight_and_bias
from export.int8 import gptq

SAMPLE_ROWS = 3072
DRIFT = 2  # steps that an activation may go beyond calibration before a sum can saturate

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QuantParams:
    """How one tensor and the matrix that reads it are quantized.

    `x` is stored as `round(x * multiplier / scale) + zero`, a weight as `round(weight / multiplier / weight_scale)`.
    """

    multiplier: Floats | None
    scale: np.float32
    zero: np.uint8
    weight: NDArray[np.int8]
    weight_scale: Floats
    bias: Floats


def choose(
    graph: Graph, products: Mapping[str, NodeProto], seen: Mapping[str, Activations], *, feedback: bool, plain: Collection[str] = ()
) -> dict[str, QuantParams]:
    """Returns how each tensor is quantized; those that share a matrix, and so what was seen, share that too.

    Args:
        graph: The float32 graph.
        products: Its products by the tensor that they read.
        seen: What these tensors were on the calibration texts.
        feedback: Whether rounding errors are fed back, which takes longest.
        plain: Tensors whose channels are not multiplied.
    """
    fits: dict[str, QuantParams] = {}
    first: dict[tuple[str, bytes], str] = {}
    for x, product in products.items():
        _, bias = weight_and_bias(graph, product)
        same = first.setdefault((product.input[1], bias.tobytes()), x)
        fits[x] = fits[same] if same in fits else _fit(graph, product, seen[x], feedback=feedback, plain=x in plain)
    return fits


def _fit(graph: Graph, product: NodeProto, seen: Activations, *, feedback: bool, plain: bool = False) -> QuantParams:
    """Returns the scales that put the least error on what the matrix gives out for the calibration texts; all 1 if `plain`."""
    weight, bias = weight_and_bias(graph, product)
    used = np.abs(weight).max(axis=1) > 0  # rows of zeros are computed elsewhere, in float
    all_rows, high, low = (value * used.astype(np.float32) for value in (seen.rows, seen.high, seen.low))
    rows = all_rows[:: max(1, len(all_rows) // SAMPLE_ROWS)]
    expected = rows @ weight
    wide = np.abs(weight).max(axis=1)

    def error(spread: Floats, share: float) -> float:
        scaled = weight * spread[:, None]
        scale, zero = _range(share * float((low / spread).min()), share * float((high / spread).max()))
        scales = gptq.column_scales(scaled, _peak(high / spread, scale, zero))
        actual = _values(rows / spread, scale, zero) @ (gptq.to_nearest(scaled, scales) * scales)
        return float(np.mean((actual - expected) ** 2))

    spreads = [np.ones_like(wide)] if plain else _spreads(rows, np.maximum(high, -low), wide)
    spread = min(spreads, key=lambda spread: error(spread, 1.0))
    share = min((1.0, 0.9, 0.8), key=lambda share: error(spread, share))
    scale, zero = _range(share * float((low / spread).min()), share * float((high / spread).max()))
    scaled, peak = weight * spread[:, None], _peak(high / spread, scale, zero)
    scales = gptq.column_scales(scaled, peak)
    stored = _values(all_rows / spread, scale, zero)
    steps = gptq.with_feedback(scaled, scales, stored, peak) if feedback else gptq.to_nearest(scaled, scales)
    shift = all_rows.mean(axis=0) @ weight - stored.mean(axis=0) @ (steps * scales)
    multiplier = np.where(used, 1 / spread, 0).astype(np.float32)
    return QuantParams(None if (spread == 1).all() else multiplier, scale, zero, steps, scales, (bias + shift).astype(np.float32))


def _spreads(rows: Floats, peak: Floats, weight_peak: Floats) -> Iterator[Floats]:
    """Yields what channels may be divided by: from nothing to their whole size, of all values or of all but one in a thousand."""
    peak = np.maximum(peak, 1e-3)
    common = np.maximum(np.quantile(np.abs(rows), 0.999, axis=0), 1e-3)
    weight_peak = np.maximum(weight_peak, 1e-4)
    yield np.ones_like(peak)
    for size, powers in ((peak, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)), (common, (0.7, 0.8, 0.9))):
        for power in powers:
            spread = size**power / weight_peak ** (1 - power)
            yield (spread / np.exp(np.log(spread).mean())).astype(np.float32)
    for times in (1, 1.5, 2, 3):
        yield np.maximum(peak / (np.median(peak) * times), 1).astype(np.float32)


def _range(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Returns scale and zero point of uint8 for values of this range, which zero is always in."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max(high - low, 1e-6) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def _steps(x: Floats, scale: np.float32, zero: np.uint8) -> NDArray[np.uint8]:
    steps: NDArray[np.uint8] = np.clip(np.rint(x / scale) + np.float32(zero), 0, 255).astype(np.uint8)
    return steps


def _peak(high: Floats, scale: np.float32, zero: np.uint8) -> NDArray[np.uint8]:
    """Returns the largest step of each channel: that of calibration, whose matrices before this one were not yet quantized, and more."""
    peak: NDArray[np.uint8] = np.minimum(_steps(high, scale, zero), 255 - DRIFT) + np.uint8(DRIFT)
    return peak


def _values(x: Floats, scale: np.float32, zero: np.uint8) -> Floats:
    """Returns what is left of values after quantization."""
    return (_steps(x, scale, zero).astype(np.float32) - np.float32(zero)) * scale
