"""CostModel: what it learns from runs in service."""

from __future__ import annotations

import pytest

from service.cost import MOST_RATIO, CostModel
from service.manifest import Flops


def model() -> CostModel:
    """Returns a model with a fixed cost that is a third of a short run's."""
    return CostModel(Flops(linear=2_000_000, quadratic=10_000), fixed_s=1e-3, rate=1e10)


def test_predictions_follow_runs_that_take_longer() -> None:
    """After a few hundred runs of twice the predicted time every prediction is twice what it was, for any shape."""
    cost, fresh = model(), model()
    for i in range(600):
        rows, length = 1 + i % 3, 10 + 7 * (i % 11)
        cost.follow(rows, length, 2 * fresh.seconds(rows, length))
    assert pytest.approx(2 * fresh.seconds(5, 77), rel=0.01) == cost.seconds(5, 77)


def test_predictions_follow_runs_that_take_less_again() -> None:
    """A slow spell is forgotten."""
    cost, fresh = model(), model()
    for factor in (3, 1):
        for _ in range(600):
            cost.follow(1, 20, factor * fresh.seconds(1, 20))
    assert pytest.approx(fresh.seconds(1, 20), rel=0.01) == cost.seconds(1, 20)


def test_one_stall_hardly_counts() -> None:
    """A single run of any length moves predictions by less than one in twenty."""
    cost, fresh = model(), model()
    cost.follow(1, 20, 1000.0)
    assert pytest.approx(fresh.seconds(1, 20) * (1 + (MOST_RATIO - 1) / 64)) == cost.seconds(1, 20)
