"""CostModel: how the runs of the service change its predictions."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.bundle.manifest import Flops
from bertserve.service.engine.cost_model import CostModel


def model() -> CostModel:
    """Returns a cost model whose fixed cost is a third of the cost of a short run."""
    return CostModel(Flops(linear=2_000_000, quadratic=10_000), fixed_s=1e-3, rate=1e10)


def test_one_stall_has_little_effect() -> None:
    """One run of any length changes the predictions of all shapes by less than 5 %."""
    cost, fresh = model(), model()
    cost.observe(1, 20, 1000.0)
    for rows, length in ((1, 20), (8, 20), (1, 500)):
        assert 1 < cost.seconds(rows, length) / fresh.seconds(rows, length) < 1.05


def test_the_fixed_cost_is_learned_from_runs_in_service() -> None:
    """If the fixed cost is three times that of the warm-up, the predictions for all shapes adapt."""
    cost, true = model(), CostModel(Flops(linear=2_000_000, quadratic=10_000), fixed_s=3e-3, rate=1e10)
    for i in range(5000):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.observe(rows, length, true.seconds(rows, length))
    for rows, length in ((1, 8), (1, 80), (8, 20)):
        assert pytest.approx(true.seconds(rows, length), rel=0.02) == cost.seconds(rows, length)
    assert pytest.approx(true.fixed_s, rel=0.05) == cost.slowdown * cost.fixed_s


@given(
    st.lists(st.tuples(st.integers(1, 512), st.integers(1, 512), st.floats(min_value=0)), max_size=20),
    st.integers(1, 1000),
)
def test_predictions_stay_finite_for_any_measured_time(runs: list[tuple[int, int, float]], times: int) -> None:
    """Predictions stay positive and finite for any measured times, including zero and infinity."""
    cost = model()
    for i in range(min(times, 50 * len(runs))):
        cost.observe(*runs[i % len(runs)])
    assert all(isfinite(cost.seconds(*shape)) and cost.seconds(*shape) > 0 for shape in ((1, 1), (64, 512)))


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e13))
def test_the_fit_finds_the_fixed_cost_and_the_rate(fixed_s: float, rate: float) -> None:
    flops = Flops(linear=2e7, quadratic=9e3)
    true = CostModel(flops, fixed_s=fixed_s, rate=rate)
    fitted = CostModel(flops)
    fitted.fit([(rows, length, true.seconds(rows, length)) for rows, length in ((1, 8), (1, 32), (1, 128))])

    for rows, length in ((1, 8), (1, 512), (32, 128)):
        assert pytest.approx(true.seconds(rows, length), rel=1e-3) == fitted.seconds(rows, length)


@pytest.mark.parametrize("seconds", [(3e-3, 2e-3, 1e-3), (1e-3, 1e-3, 1e-3), (1e-9, 1e-3, 1.0), (0.0, 0.0, 0.0)])
def test_noisy_timings_give_a_plausible_cost(seconds: tuple[float, ...]) -> None:
    """The cost is positive, and a longer run never costs less."""
    cost = CostModel(Flops(linear=2e7, quadratic=9e3))
    cost.fit(zip((1, 1, 1), (8, 32, 128), seconds, strict=True))

    assert cost.fixed_s >= 0
    assert 0 < cost.seconds(1, 8) <= cost.seconds(1, 128) <= cost.seconds(2, 128)
