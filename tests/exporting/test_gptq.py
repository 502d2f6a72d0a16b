"""Weights to int8: scales that no CPU saturates with, rounding to nearest, and rounding by GPTQ."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bertserve.export.int8.gptq import MAX_INT8, MAX_INT16, Gptq, column_scales, round_to_nearest

pytestmark = pytest.mark.torch

Floats = NDArray[np.float32]


def random_weight(seed: int, rows: int, columns: int, outliers: float = 0.0) -> Floats:
    """Returns weights spread as trained ones are, some of them much larger when asked."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, columns))
    return (weight * np.where(rng.random(weight.shape) < outliers, 8, 1)).astype(np.float32)


def random_peak(seed: int, rows: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).choice(np.array([0, 3, 128, 200, 254, 255], dtype=np.uint8), rows)


def largest_sums(quantized: NDArray[np.int8], peak: NDArray[np.uint8]) -> list[int]:
    """Returns, by brute force, the largest magnitude of two adjacent products that activations up to `peak` can add up to.

    The extremes are at the corners: each activation of a pair is zero or its peak.
    """
    found = []
    for column in quantized.astype(int).T:
        products = [0 if i == len(peak) else weight * int(top) for i, (weight, top) in enumerate(zip(column, peak, strict=True))]
        pairs = zip(products[::2], [*products[1::2], 0][: len(products[::2])], strict=True)
        found.append(max(abs(sum(part)) for a, b in pairs for part in ((a, b), (a, 0), (0, b))))
    return found


def correlated_inputs(seed: int, count: int, rows: int) -> Floats:
    """Returns a sample of inputs that a few hidden causes explain, as those of a trained layer."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, 8)) @ rng.normal(size=(8, rows)) + 0.1 * rng.normal(size=(count, rows))).astype(np.float32)


def round_gptq(weight: Floats, scales: Floats, inputs: Floats, peak: NDArray[np.uint8]) -> NDArray[np.int8]:
    return Gptq(inputs).round(weight, scales, peak)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("outliers", [0.0, 0.3, 1.0])
def test_no_pair_of_products_leaves_16_bits(rows: int, outliers: float) -> None:
    """With the column's scale weights rounded to nearest never add up to more than int16 holds, whatever activations meet them.

    With scales of the largest weight alone, of 64 rows some would.
    """
    for seed in range(20):
        weight, peak = random_weight(seed, rows, 24, outliers), random_peak(seed, rows)
        assert max(largest_sums(round_to_nearest(weight, column_scales(weight, peak)), peak)) <= MAX_INT16
    unwidened = np.abs(weight).max(axis=0) / MAX_INT8
    assert rows < 64 or max(largest_sums(round_to_nearest(weight, unwidened), peak)) > MAX_INT16


def test_two_largest_weights_of_one_pair_are_room_enough() -> None:
    """The worst case, both of a pair at the end of int8 and both activations at the end of uint8, of either sign."""
    for sign in (1, -1):
        weight = np.full((2, 1), sign, dtype=np.float32)
        peak = np.full(2, 255, dtype=np.uint8)
        [largest] = largest_sums(round_to_nearest(weight, column_scales(weight, peak)), peak)
        assert 0.97 * MAX_INT16 < largest <= MAX_INT16


def test_a_column_without_danger_keeps_the_finest_steps() -> None:
    """Where activations are small, or a pair's signs differ, the largest weight is 127 steps, as without widening."""
    weight = np.array([[1.0, 1.0], [-1.0, 0.5]], dtype=np.float32)
    small, large = np.full(2, 100, dtype=np.uint8), np.full(2, 250, dtype=np.uint8)

    assert pytest.approx([1 / MAX_INT8, 1 / MAX_INT8]) == column_scales(weight, small).tolist()
    assert pytest.approx(1 / MAX_INT8) == column_scales(weight, large)[0]
    assert column_scales(weight, large)[1] > 1 / MAX_INT8


def test_the_order_of_rows_makes_the_pairs() -> None:
    """Rows 0 and 1 are a pair, 1 and 2 are not; the last of an odd number stands alone."""
    peak = np.full(4, 250, dtype=np.uint8)
    apart = np.array([[1.0], [0.0], [1.0], [0.0]], dtype=np.float32)
    together = np.array([[0.0], [0.0], [1.0], [1.0]], dtype=np.float32)

    assert pytest.approx(1 / MAX_INT8) == column_scales(apart, peak)[0]
    assert pytest.approx(1 / MAX_INT8) == column_scales(together[:3], peak[:3])[0]
    assert column_scales(together, peak)[0] > 1 / MAX_INT8


def test_a_column_of_zeros_has_a_finite_scale() -> None:
    weight = np.zeros((4, 2), dtype=np.float32)
    scales = column_scales(weight, np.full(4, 255, dtype=np.uint8))

    assert np.isfinite(scales).all()
    assert not round_to_nearest(weight, scales).any()


def test_the_nearest_step_is_off_by_half_a_step_at_most() -> None:
    """Every weight is within half its column's scale of what is stored."""
    weight, peak = random_weight(1, 33, 16, 0.1), random_peak(1, 33)
    scales = column_scales(weight, peak)
    quantized = round_to_nearest(weight, scales)

    assert np.int8 == quantized.dtype
    assert (np.abs(weight - quantized * scales) <= scales * (0.5 + 1e-4)).all()


def test_steps_beyond_int8_are_its_ends() -> None:
    """A weight that its scale cannot hold stays at 127 steps and does not wrap around; -128 is not used."""
    assert [[127], [-127]] == round_to_nearest(np.array([[1e3], [-1e3]], dtype=np.float32), np.ones(1, dtype=np.float32)).tolist()


@pytest.mark.parametrize("rows", [32, 200])  # less and more than a block
def test_gptq_gives_less_error_on_correlated_inputs(rows: int) -> None:
    weight = random_weight(2, rows, 48)
    inputs = correlated_inputs(3, 6 * rows, rows)
    sample, other = inputs[::2], inputs[1::2]
    peak = np.full(rows, 255, dtype=np.uint8)
    scales = column_scales(weight, peak) * 8  # coarse steps, as of few bits, show the difference best
    nearest, by_gptq = round_to_nearest(weight, scales), round_gptq(weight, scales, sample, peak)

    for x in (sample, other):
        errors = [float(np.mean((x @ (quantized * scales) - x @ weight) ** 2)) for quantized in (nearest, by_gptq)]
        assert errors[1] < 0.25 * errors[0]


def test_blocks_change_nothing_but_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors reach the rows of later blocks as they reach those of their own; weights differ by float rounding at most."""
    weight, inputs, peak = random_weight(7, 96, 48), correlated_inputs(7, 400, 96), np.full(96, 255, dtype=np.uint8)
    scales = column_scales(weight, peak)
    whole = round_gptq(weight, scales, inputs, peak)
    monkeypatch.setattr("bertserve.export.int8.gptq._BLOCK_SIZE", 20)
    in_blocks = round_gptq(weight, scales, inputs, peak)

    assert np.mean(whole != in_blocks) < 0.01


def test_gptq_needs_an_input_for_each_row() -> None:
    """A sample too small to tell what moves together is rounded to nearest; one input more changes the result."""
    weight, inputs, peak = random_weight(4, 32, 8), correlated_inputs(4, 32, 32), np.full(32, 255, dtype=np.uint8)
    scales = column_scales(weight, peak)
    nearest = round_to_nearest(weight, scales)

    np.testing.assert_array_equal(nearest, round_gptq(weight, scales, inputs[:31], peak))
    assert (nearest != round_gptq(weight, scales, inputs, peak)).any()


@pytest.mark.parametrize(
    ("inputs", "peak"),
    [
        pytest.param(np.eye(16, dtype=np.float32).repeat(4, 0), 255, id="without correlation"),  # no row can make up for another
        pytest.param(np.zeros((64, 16), dtype=np.float32), 0, id="zeros"),  # as after a head that training left at zero
    ],
)
def test_inputs_that_say_nothing_are_rounded_to_nearest(inputs: Floats, peak: int) -> None:
    weight, peaks = random_weight(5, 16, 8), np.full(16, peak, dtype=np.uint8)
    scales = column_scales(weight, peaks)

    np.testing.assert_array_equal(round_to_nearest(weight, scales), round_gptq(weight, scales, inputs, peaks))


@pytest.mark.parametrize("rows", [32, 33])
def test_gptq_saturates_no_pair(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that GPTQ, which moves weights by more than a step, would take out of 16 bits is rounded to nearest."""
    weight = np.random.default_rng(6).uniform(0.9, 1, size=(rows, 200)).astype(np.float32)
    peak, inputs = np.full(rows, 255, dtype=np.uint8), correlated_inputs(6, 4 * rows, rows)
    scales = column_scales(weight, peak) * np.float32(0.985)  # without the slack that makes such columns rare
    quantized, nearest = round_gptq(weight, scales, inputs, peak), round_to_nearest(weight, scales)
    with monkeypatch.context() as patch:
        patch.setattr("bertserve.export.int8.gptq.MAX_INT16", 2**31)
        careless = round_gptq(weight, scales, inputs, peak)
    saturated = np.array(largest_sums(careless, peak)) > MAX_INT16

    assert 0 < saturated.sum() < 200
    np.testing.assert_array_equal(np.where(saturated, nearest, careless), quantized)
    assert (nearest[:, saturated] != careless[:, saturated]).any()


@pytest.mark.parametrize("rows", [32, 33])
def test_no_pair_leaves_16_bits_after_gptq(rows: int) -> None:
    changed = 0
    for seed in range(10):
        weight, peak = random_weight(seed, rows, 64, 0.1), random_peak(seed + 100, rows)
        scales = column_scales(weight, peak)
        quantized = round_gptq(weight, scales, correlated_inputs(seed, 4 * rows, rows), peak)
        assert max(largest_sums(quantized, peak)) <= MAX_INT16
        changed += int((quantized != round_to_nearest(weight, scales)).any(axis=0).sum())
    assert changed > 10 * 64 / 2


def test_inputs_that_float32_cannot_invert_are_rounded_too() -> None:
    """Channels of very unlike sizes that move together leave a Hessian without a factor in float32; more digits have one."""
    weight = random_weight(9, 64, 16)
    inputs = np.outer(np.random.default_rng(9).normal(size=256), np.geomspace(1, 1e6, 64)).astype(np.float32)
    peak = np.full(64, 255, dtype=np.uint8)
    scales = column_scales(weight, peak)
    quantized = round_gptq(weight, scales, inputs, peak)

    assert (
        np.abs(inputs @ (quantized * scales - weight)).max() <= np.abs(inputs @ (round_to_nearest(weight, scales) * scales - weight)).max()
    )
