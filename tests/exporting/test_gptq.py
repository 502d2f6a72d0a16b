"""Rounding of weights to int8: scales without saturation on any CPU, rounding to nearest, and GPTQ."""

import numpy as np
import pytest
from numpy.typing import NDArray

from bertserve.export.int8.gptq import factor_hessian, round_weight
from bertserve.export.int8.scales import MAX_INT8, MAX_INT16, output_scales, round_to_nearest

pytestmark = pytest.mark.torch

Floats = NDArray[np.float32]


def random_weight(seed: int, rows: int, columns: int, outliers: float = 0.0) -> Floats:
    """Returns normally distributed weights; the share `outliers` of them is 8 times as large."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, columns))
    return (weight * np.where(rng.random(weight.shape) < outliers, 8, 1)).astype(np.float32)


def random_peak(seed: int, rows: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).choice(np.array([0, 3, 128, 200, 254, 255], dtype=np.uint8), rows)


def largest_sums(quantized: NDArray[np.int8], peak: NDArray[np.uint8]) -> list[int]:
    """Returns, by brute force, each column's largest magnitude of two added adjacent products, for activations up to `peak`.

    The sum is extreme if each activation of the pair is zero or its peak.
    """
    sums = []
    for column in quantized.astype(int).T:
        products = [0 if i == len(peak) else weight * int(top) for i, (weight, top) in enumerate(zip(column, peak, strict=True))]
        pairs = zip(products[::2], [*products[1::2], 0][: len(products[::2])], strict=True)
        sums.append(max(abs(sum(part)) for a, b in pairs for part in ((a, b), (a, 0), (0, b))))
    return sums


def correlated_inputs(seed: int, count: int, rows: int) -> Floats:
    """Returns correlated inputs with a few latent factors, as in a trained layer."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, 8)) @ rng.normal(size=(8, rows)) + 0.1 * rng.normal(size=(count, rows))).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
@pytest.mark.parametrize("outliers", [0.0, 0.3])
def test_no_pair_of_products_exceeds_16_bits(rows: int, outliers: float) -> None:
    """With the column scales, sums for weights rounded to nearest stay within int16 for all activations up to the peak."""
    for seed in range(20):
        weight, peak = random_weight(seed, rows, 24, outliers), random_peak(seed, rows)
        assert max(largest_sums(round_to_nearest(weight, output_scales(weight, peak)), peak)) <= MAX_INT16


def test_scales_from_only_the_largest_weight_would_exceed_16_bits() -> None:
    weight, peak = random_weight(19, 64, 24, 0.0), random_peak(19, 64)
    assert max(largest_sums(round_to_nearest(weight, np.abs(weight).max(axis=0) / MAX_INT8), peak)) > MAX_INT16


def test_a_column_that_cannot_saturate_keeps_the_finest_steps() -> None:
    """If activations are small, or if a pair's signs differ, the largest weight is 127 steps."""
    weight = np.array([[1.0, 1.0], [-1.0, 0.5]], dtype=np.float32)
    small, large = np.full(2, 100, dtype=np.uint8), np.full(2, 250, dtype=np.uint8)

    assert output_scales(weight, small).tolist() == pytest.approx([1 / MAX_INT8, 1 / MAX_INT8])
    assert output_scales(weight, large)[0] == pytest.approx(1 / MAX_INT8)
    assert output_scales(weight, large)[1] > 1 / MAX_INT8


def test_a_column_of_zeros_has_a_finite_scale() -> None:
    weight = np.zeros((4, 2), dtype=np.float32)
    scales = output_scales(weight, np.full(4, 255, dtype=np.uint8))

    assert np.isfinite(scales).all()
    assert not round_to_nearest(weight, scales).any()


@pytest.mark.parametrize("rows", [32, 200])  # one block, and several blocks
def test_gptq_gives_less_error_on_correlated_inputs(rows: int) -> None:
    weight = random_weight(2, rows, 48)
    inputs = correlated_inputs(3, 6 * rows, rows)
    sample, other = inputs[::2], inputs[1::2]
    peak = np.full(rows, 255, dtype=np.uint8)
    scales = output_scales(weight, peak) * 8  # coarse steps, as with few bits, show the difference best
    nearest, by_gptq = round_to_nearest(weight, scales), round_weight(weight, scales, peak, factor_hessian(sample))

    for x in (sample, other):
        errors = [float(np.mean((x @ (quantized * scales) - x @ weight) ** 2)) for quantized in (nearest, by_gptq)]
        assert errors[1] < 0.25 * errors[0]


def test_gptq_needs_as_many_inputs_as_rows() -> None:
    """With fewer inputs than rows, weights are rounded to nearest. One more input changes the result."""
    weight, inputs, peak = random_weight(4, 32, 8), correlated_inputs(4, 32, 32), np.full(32, 255, dtype=np.uint8)
    scales = output_scales(weight, peak)
    nearest = round_to_nearest(weight, scales)

    np.testing.assert_array_equal(nearest, round_weight(weight, scales, peak, factor_hessian(inputs[:31])))
    assert (nearest != round_weight(weight, scales, peak, factor_hessian(inputs))).any()


@pytest.mark.parametrize(
    ("inputs", "peak"),
    [
        pytest.param(np.eye(16, dtype=np.float32).repeat(4, 0), 255, id="without correlation"),  # no row can compensate for another
        pytest.param(np.zeros((64, 16), dtype=np.float32), 0, id="zeros"),  # like the outputs of a head that training left at zero
    ],
)
def test_inputs_without_correlation_lead_to_rounding_to_nearest(inputs: Floats, peak: int) -> None:
    weight, peaks = random_weight(5, 16, 8), np.full(16, peak, dtype=np.uint8)
    scales = output_scales(weight, peaks)

    np.testing.assert_array_equal(round_to_nearest(weight, scales), round_weight(weight, scales, peaks, factor_hessian(inputs)))


@pytest.mark.parametrize("rows", [32, 33])
def test_no_pair_exceeds_16_bits_after_gptq(rows: int) -> None:
    columns = 0
    for seed in range(10):
        weight, peak = random_weight(seed, rows, 64, 0.1), random_peak(seed + 100, rows)
        scales = output_scales(weight, peak)
        quantized = round_weight(weight, scales, peak, factor_hessian(correlated_inputs(seed, 4 * rows, rows)))
        assert max(largest_sums(quantized, peak)) <= MAX_INT16
        columns += int((quantized != round_to_nearest(weight, scales)).any(axis=0).sum())
    assert columns > 10 * 64 / 2


def test_gptq_works_if_float32_cannot_factor_the_hessian() -> None:
    """Correlated channels of very different sizes have a Hessian that can only be factored in float64."""
    weight = random_weight(9, 64, 16)
    inputs = np.outer(np.random.default_rng(9).normal(size=256), np.geomspace(1, 1e6, 64)).astype(np.float32)
    peak = np.full(64, 255, dtype=np.uint8)
    scales = output_scales(weight, peak)
    by_gptq, nearest = round_weight(weight, scales, peak, factor_hessian(inputs)), round_to_nearest(weight, scales)
    errors = [np.abs(inputs @ (quantized * scales - weight)).max() for quantized in (by_gptq, nearest)]

    assert errors[0] <= errors[1]
