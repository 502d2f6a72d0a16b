"""Thresholds keep their guarantee: over many draws of examples from a known distribution, the error exceeds the aim in at most 5 %."""

import re
from contextlib import suppress

import numpy as np
import pytest
from scipy import stats

from bertserve.export.errors import ExportError
from bertserve.export.flags import Aim
from bertserve.export.score_calibration.scores import Predictions
from bertserve.export.score_calibration.thresholds import choose_threshold
from bertserve.service.bundle.calibration import Threshold

AIMS = [Aim("precision", 0.9), Aim("max-error", 0.3), Aim("recall", 0.9)]


def draw(rng: np.random.Generator, count: int) -> Predictions:
    """Returns predictions that are correct with the probability `score ** 1.5`, so that the scores are too high."""
    scores = rng.beta(3, 1, count)
    correct = rng.random(count) < scores**1.5
    return Predictions(scores, correct, np.zeros(count), np.arange(count), np.full(count, "x"), count)


def true_error(aim: Aim, threshold: float) -> float:
    """Returns the error at a threshold; scores have the density 3 s^2, so correct ones have 3 s^3.5, the integral of which is s^4.5 / 1.5."""
    if aim.counts_missed:
        return threshold**4.5
    return 1 - (1 - threshold**4.5) / 1.5 / (1 - threshold**3)


def exceeded(aim: Aim, draws: int, count: int, seed: int) -> tuple[int, int]:
    """Returns how many of these draws of two halves have a greater error than the aim, and how many have a threshold."""
    rng = np.random.default_rng(seed)
    thresholds = list[Threshold]()
    for _ in range(draws):
        with suppress(ExportError):  # no threshold reaches the aim
            thresholds.append(choose_threshold(aim, "cpu/int8", draw(rng, count), draw(rng, count)))
    errors = [true_error(aim, threshold.threshold) for threshold in thresholds]
    return sum(error > aim.max_error for error in errors), len(errors)


@pytest.mark.parametrize("aim", AIMS, ids=str)
def test_the_guaranteed_error_is_exceeded_in_at_most_5_percent_of_1000_draws(aim: Aim) -> None:
    errors, reached = exceeded(aim, 1000, 400, seed=1)

    assert stats.binom.isf(0.001, 1000, 0.05) >= errors  # 1,000 draws of a probability of exactly 5 % give more in one of 1,000 runs
    assert reached > 200  # otherwise it would prove little


@pytest.mark.full_grid
@pytest.mark.parametrize("count", [100, 300, 1000, 3000])
@pytest.mark.parametrize("aim", [*AIMS, Aim("precision", 0.8), Aim("recall", 0.5), Aim("coverage", 0.95)], ids=str)
def test_the_guarantee_holds_for_other_aims_and_numbers_of_examples(aim: Aim, count: int) -> None:
    draws = 4000
    assert stats.binom.isf(0.001, draws, 0.05) >= exceeded(aim, draws, count, seed=count)[0]


def test_a_perfect_model_decides_everything() -> None:
    scores = np.linspace(0.5, 1, 300)
    perfect = Predictions(scores, np.ones(300, dtype=bool), np.zeros(300), np.arange(300), np.full(300, "x"), 300)
    threshold = choose_threshold(Aim("precision", 0.98), "cpu/int8", perfect, perfect)

    assert (threshold.threshold, threshold.decided, threshold.error, threshold.examples) == (0.0, 1.0, 0.0, 300)


def test_a_missed_aim_says_how_many_examples_it_needs() -> None:
    """One half of the predictions has no errors, so a precision of 0.99 needs 299 of them, and 50 are given."""
    scores = np.repeat([0.9, 0.2], 50)
    few = Predictions(scores, scores > 0.5, np.zeros(100), np.arange(100), np.full(100, "x"), 100)
    with pytest.raises(ExportError, match=r" 50\.0% .* 0\.00% ") as caught:
        choose_threshold(Aim("precision", 0.99), "cpu/int8", few, few)
    more = int(re.findall(r"or (\d+) to --test-data", str(caught.value))[0])

    assert 299 < (100 + more) / 2 + 50 < 400


def test_more_examples_do_not_help_a_model_with_errors_at_every_score() -> None:
    scores = np.tile(np.linspace(0.1, 0.9, 10), 40)
    guesses = Predictions(scores, np.arange(400) % 20 < 10, np.zeros(400), np.arange(400), np.full(400, "x"), 400)
    with pytest.raises(ExportError, match=r" 50\.00% ") as caught:
        choose_threshold(Aim("precision", 0.95), "cpu/int8", guesses, guesses)
    assert not re.search("(add|give) .*examples", str(caught.value), re.IGNORECASE)
