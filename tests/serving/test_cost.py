"""CostModel: what it learns from runs in service."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.backend.cost import MOST_RATIO, CostModel
from bertserve.service.bundle.manifest import Flops


def model() -> CostModel:
    """Returns a model with a fixed cost that is a third of a short run's."""
    return CostModel(Flops(linear=2_000_000, quadratic=10_000), fixed_s=1e-3, rate=1e10)


def test_predictions_follow_runs_that_take_longer() -> None:
    """After a few hundred runs of twice the predicted time every prediction is twice what it was, for any shape."""
    cost, fresh = model(), model()
    for i in range(600):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.observe(rows, length, 2 * fresh.seconds(rows, length))
    assert pytest.approx(2 * fresh.seconds(5, 77), rel=0.01) == cost.seconds(5, 77)


def test_predictions_follow_runs_that_take_less_again() -> None:
    cost, fresh = model(), model()
    for factor in (3, 1):
        for _ in range(600):
            cost.observe(1, 20, factor * fresh.seconds(1, 20))
    assert pytest.approx(fresh.seconds(1, 20), rel=0.01) == cost.seconds(1, 20)


def test_one_stall_hardly_counts() -> None:
    """A single run of any length moves predictions by less than one in twenty, and leaves the proportion alone."""
    cost, fresh = model(), model()
    cost.observe(1, 20, 1000.0)
    for rows, length in ((1, 20), (8, 20), (1, 500)):
        assert pytest.approx(fresh.seconds(rows, length) * (1 + (MOST_RATIO - 1) / 64)) == cost.seconds(rows, length)


def test_the_fixed_cost_is_learned_from_runs_in_service() -> None:
    """Where the fixed cost of a run is three times that of the warm-up, the prediction of any shape adapts."""
    cost, true = model(), CostModel(Flops(linear=2_000_000, quadratic=10_000), fixed_s=3e-3, rate=1e10)
    for i in range(5000):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.observe(rows, length, true.seconds(rows, length))
    for rows, length in ((1, 8), (1, 80), (8, 20)):
        assert pytest.approx(true.seconds(rows, length), rel=0.02) == cost.seconds(rows, length)
    assert pytest.approx(true.fixed_s, rel=0.05) == cost.slowdown * cost.fixed_s


def test_runs_of_one_shape_leave_the_proportion_alone() -> None:
    """They say how fast the machine is, and not what of it is the fixed cost."""
    cost, fresh = model(), model()
    for _ in range(5000):
        cost.observe(2, 40, 1.5 * fresh.seconds(2, 40))
    for rows, length in ((1, 8), (1, 400)):
        assert pytest.approx(1.5 * fresh.seconds(rows, length), rel=0.02) == cost.seconds(rows, length)


def test_what_others_take_of_a_core_is_no_fixed_cost() -> None:
    """Waits for a core lengthen what is predicted, and leave alone who shares a run."""
    cost, fresh = model(), model()
    for i in range(5000):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.observe(rows, length, fresh.seconds(rows, length) + 5e-3, busy_s=fresh.seconds(rows, length))
    assert cost.slowdown > 1.3
    assert pytest.approx(fresh.fixed_s * fresh.rate, rel=0.02) == cost.fixed_s * cost.rate


def test_where_longer_runs_take_no_longer_all_is_fixed() -> None:
    """No traffic, however odd, makes a longer run cheaper; runs of any length are predicted as long as they were on average."""
    cost = model()
    for i in range(5000):
        length = 10 + 7 * (i % 11)
        cost.observe(1, length, 0.02 - length * 1e-5)
    assert 0.018 < cost.seconds(1, 8) < cost.seconds(1, 80) < 0.022


def test_a_warm_up_of_one_shape_is_predicted_as_long_as_it_was() -> None:
    """A shape plan may have a single shape: it says how long a run takes, and nothing of the proportion."""
    cost = model()
    proportion = cost.fixed_s * cost.rate
    cost.fit([(4, 128, 0.5)])
    assert pytest.approx(0.5) == cost.seconds(4, 128)
    assert pytest.approx(proportion) == cost.fixed_s * cost.rate


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    """A run that took no time by its clock, as the first one or after others, leaves every prediction as it was."""
    cost, fresh = model(), model()
    cost.observe(1, 20, 0.0)
    cost.observe(1, 20, 0.0, busy_s=0.0)
    assert fresh.seconds(3, 50) == cost.seconds(3, 50)


@given(
    st.lists(st.tuples(st.integers(1, 512), st.integers(1, 512), st.floats(min_value=0), st.none() | st.floats(min_value=0)), max_size=20),
    st.integers(1, 1000),
)
def test_no_clock_breaks_a_prediction(runs: list[tuple[int, int, float, float | None]], times: int) -> None:
    """Whatever runs seem to take, none or for ever, predictions stay positive and finite, and nothing raises."""
    cost = model()
    for i in range(min(times, 50 * len(runs))):
        cost.observe(*runs[i % len(runs)])
    assert all(isfinite(cost.seconds(*shape)) and cost.seconds(*shape) > 0 for shape in ((1, 1), (64, 512)))


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_warm_up_that_took_no_time_can_be_fitted(seconds: float) -> None:
    cost = model()
    cost.fit([(1, 8, seconds), (1, 128, seconds)])
    cost.observe(1, 8, 1e-3)
    assert cost.seconds(1, 8) > 0
