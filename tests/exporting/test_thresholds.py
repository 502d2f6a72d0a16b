"""Thresholds keep their promise: over many draws of examples from a known distribution, the error exceeds the aim in at most 5 %."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bertserve.export.decisions.predictions import Predictions
from bertserve.export.decisions.thresholds import Goal, Miss, choose, tail, upper_bound

GOALS = [Goal("precision", 0.9), Goal("max-error", 0.3), Goal("recall", 0.9)]


def draw(rng: np.random.Generator, count: int) -> Predictions:
    """Returns predictions that are right with the probability `score ** 1.5`, so that the scores are too high."""
    scores = rng.beta(3, 1, count)
    right = rng.random(count) < scores**1.5
    return Predictions(scores, right, np.zeros(count), np.arange(count), ["x"] * count, count)


def true_error(goal: Goal, threshold: float) -> float:
    """Returns the error at a threshold; scores have the density 3 s^2, so right ones have 3 s^3.5, the integral of which is s^4.5 / 1.5."""
    if goal.counts_correct_items:
        return threshold**4.5
    return 1 - (1 - threshold**4.5) / 1.5 / (1 - threshold**3)


def exceeded(goal: Goal, draws: int, count: int, seed: int) -> tuple[int, int]:
    """Returns how many of these draws of two halves have a greater error than the goal, and how many have a threshold."""
    rng = np.random.default_rng(seed)
    results = [choose(goal, draw(rng, count), draw(rng, count)) for _ in range(draws)]
    errors = [true_error(goal, result.threshold) for result in results if not isinstance(result, Miss)]
    return sum(error > goal.error for error in errors), len(errors)


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_the_promised_error_is_exceeded_in_at_most_5_percent_of_1000_draws(goal: Goal) -> None:
    wrong, reached = exceeded(goal, 1000, 400, seed=1)

    assert 50 >= wrong
    assert reached > 200  # otherwise it would prove little


@pytest.mark.full_grid
@pytest.mark.parametrize("count", [100, 300, 1000, 3000])
@pytest.mark.parametrize("goal", [*GOALS, Goal("precision", 0.8), Goal("recall", 0.5), Goal("coverage", 0.95)], ids=str)
def test_the_promise_holds_for_other_aims_and_numbers_of_examples(goal: Goal, count: int) -> None:
    draws = 4000
    assert stats.binom.isf(0.001, draws, 0.05) >= exceeded(goal, draws, count, seed=count)[0]


def test_a_perfect_model_decides_everything() -> None:
    scores = np.linspace(0.5, 1, 300)
    perfect = Predictions(scores, np.ones(300, dtype=bool), np.zeros(300), np.arange(300), ["x"] * 300, 300)
    threshold = choose(Goal("precision", 0.98), perfect, perfect)

    assert not isinstance(threshold, Miss)
    assert (0.0, 1.0, 0.0, 300) == (threshold.threshold, threshold.decided, threshold.error, threshold.examples)


def test_a_missed_aim_says_how_many_examples_it_needs() -> None:
    """One half of the predictions has no errors, so a precision of 0.99 needs 299 of them, and 50 are given."""
    scores = np.repeat([0.9, 0.2], 50)
    few = Predictions(scores, scores > 0.5, np.zeros(100), np.arange(100), ["x"] * 100, 100)
    miss = choose(Goal("precision", 0.99), few, few)

    assert isinstance(miss, Miss)
    assert (0.0, 0.5) == (miss.error, miss.decided)
    assert pytest.approx(stats.beta.ppf(0.95, 1, 50), abs=1e-5) == miss.bound
    assert miss.more is not None
    assert 4 < miss.more < 8


def test_more_examples_do_not_help_a_model_with_errors_at_every_score() -> None:
    scores = np.tile(np.linspace(0.1, 0.9, 10), 40)
    guesses = Predictions(scores, np.arange(400) % 20 < 10, np.zeros(400), np.arange(400), ["x"] * 400, 400)
    miss = choose(Goal("precision", 0.95), guesses, guesses)

    assert isinstance(miss, Miss)
    assert (0.5, None) == (pytest.approx(miss.error), miss.more)


@pytest.mark.parametrize(("errors", "count"), [(0, 1), (0, 300), (3, 40), (40, 41), (900, 100_000)])
def test_bounds_are_those_of_clopper_and_pearson(errors: int, count: int) -> None:
    assert pytest.approx(stats.beta.ppf(0.95, errors + 1, count - errors), abs=1e-5) == upper_bound(errors, count)
    for share in (0.001, 0.02, 0.5, 0.95):
        assert pytest.approx(stats.binom.cdf(errors, count, share), abs=1e-9) == tail(errors, count, share)
