"""Calibration: known parameters are recovered, and measures of quality equal scikit-learn's."""

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics

from bertserve.export.score_calibration.fitting import fit, measure_quality
from bertserve.export.score_calibration.scores import RAW, Predictions, Scores, log_losses
from bertserve.service.tasks.decoding import activate, apply_calibration


@pytest.fixture(name="rng")
def seeded_generator() -> np.random.Generator:
    return np.random.default_rng(0)


def softmax_labels(rng: np.random.Generator, count: int, temperature: float, labels: int = 3) -> Scores:
    """Returns scores of a model that is too sure by a factor: labels are drawn from the softmax of its logits divided by it."""
    logits = rng.normal(0, 4, (count, labels)).astype(np.float32)
    gold = [rng.choice(labels, p=chances / chances.sum()) for chances in activate(logits / temperature, "softmax").astype(float)]
    return Scores("temperature", tuple("abcdef"[:labels]), activate(logits, "softmax"), np.eye(labels, dtype=bool)[gold])


def sigmoid_labels(rng: np.random.Generator, count: int, scale: NDArray[np.float64], bias: NDArray[np.float64]) -> Scores:
    logits = rng.normal(0, 2, (count, len(scale))).astype(np.float32)
    truth = rng.random(logits.shape) < 1 / (1 + np.exp(-(scale * logits + bias)))
    return Scores("per-label", tuple("abcdef"[: len(scale)]), activate(logits, "sigmoid"), truth)


@pytest.mark.parametrize("temperature", [0.7, 1.5, 3.0])
@pytest.mark.parametrize("labels", [2, 3])
def test_a_known_temperature_is_recovered(rng: np.random.Generator, temperature: float, labels: int) -> None:
    parameters = fit(softmax_labels(rng, 4000, temperature, labels))
    tested = softmax_labels(rng, 4000, temperature, labels)
    before, after = (measure_quality(tested.predictions(values)) for values in (RAW, parameters))

    assert 1 / parameters[0][0] == pytest.approx(temperature, rel=0.1)
    assert after.log_loss.value < before.log_loss.value
    assert after.ece.value < min(0.03, before.ece.value)
    assert before.auroc is not None
    assert after.auroc is not None


def test_calibrated_scores_stay_unchanged(rng: np.random.Generator) -> None:
    """Otherwise noise would change them, and a half of all calibrations would be refused as worse."""
    assert sum(fit(softmax_labels(rng, 300, 1.0)) == RAW for _ in range(10)) >= 8


def test_each_label_has_its_own_scale_and_bias_if_there_are_enough_examples(rng: np.random.Generator) -> None:
    scale, bias = np.array([0.5, 1.5]), np.array([1.0, -2.0])
    many, few = (fit(sigmoid_labels(rng, count, scale, bias)) for count in (6000, 900))

    assert many[0] == pytest.approx(scale, rel=0.15)
    assert many[1] == pytest.approx(bias, abs=0.25)
    assert (len(few[0]), few[1]) == (1, (0.0,))


def test_a_rare_label_has_no_parameters_of_its_own(rng: np.random.Generator) -> None:
    labels = sigmoid_labels(rng, 3000, np.array([0.5, 0.5]), np.array([1.0, -12.0]))
    _, bias = fit(labels)

    assert labels.correct[:, 1].sum() < 20
    assert bias[1] == 0.0
    assert bias[0] != 0.0


def test_answers_and_no_answer_are_calibrated_separately(rng: np.random.Generator) -> None:
    scores = rng.beta(2, 1, (4000, 2)).astype(np.float32)
    truth = rng.random(scores.shape) < np.minimum(scores ** [0.5, 0.5] * [1, np.exp(-1)], 1)
    many, few = (fit(Scores("answers", ("answer", "no answer"), scores[:count], truth[:count])) for count in (4000, 900))

    assert tuple(map(list, many)) == ([pytest.approx(0.5, rel=0.1)] * 2, [pytest.approx(bias, abs=0.1) for bias in (0, -1)])
    assert (len(few[0]), few[1]) == (1, (0.0,))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_calibrated_scores_keep_their_order(rng: np.random.Generator, activation: str) -> None:
    """Scores near 0 and 1 stay finite, and a scale of 1 changes nothing."""
    scores = activate(np.concatenate([rng.normal(0, 5, (50, 3)), [[200.0] * 3]]).astype(np.float32), activation)  # type: ignore[arg-type]
    calibrated = apply_calibration(scores, activation, (0.4,), (0.0,))  # type: ignore[arg-type]

    assert np.isfinite(calibrated).all()
    assert (np.diff(np.take_along_axis(calibrated, scores.argsort(axis=1), axis=1)) >= 0).all()
    assert apply_calibration(scores, activation, (1.0,), (0.0,)) == pytest.approx(scores, rel=1e-5)  # type: ignore[arg-type]


def test_qualities_are_those_of_scikit_learn(rng: np.random.Generator) -> None:
    scores = np.round(rng.random(500), 2)  # with ties
    correct = rng.random(500) < scores
    quality = measure_quality(Predictions(scores, correct, log_losses(scores, correct), np.arange(500), np.full(500, "x"), 500))

    assert quality.log_loss.value == pytest.approx(metrics.log_loss(correct, np.clip(scores, 1e-7, 1 - 1e-7)), rel=1e-3)
    assert quality.brier.value == pytest.approx(metrics.brier_score_loss(correct, scores))
    assert quality.auroc is not None
    assert quality.auroc.value == pytest.approx(metrics.roc_auc_score(correct, scores))
    assert sum(part.count for part in quality.bins) == 500
    assert quality.ece.value == pytest.approx(sum(abs(part.score - part.correct) * part.count for part in quality.bins) / 500)
    for interval in (quality.log_loss, quality.brier, quality.ece, quality.auroc):
        assert interval.low <= interval.value <= interval.high


def test_predictions_of_an_example_stay_together_in_the_bootstrap(rng: np.random.Generator) -> None:
    """Ten copies of each prediction say no more than one, so the interval is as wide."""
    scores = rng.random(200)
    correct = rng.random(200) < scores
    widths = []
    for copies in (1, 10):
        examples = np.repeat(np.arange(200), copies)
        copied, outcome = scores[examples], correct[examples]
        brier = measure_quality(Predictions(copied, outcome, log_losses(copied, outcome), examples, np.full(len(examples), "x"), 200)).brier
        widths.append(brier.high - brier.low)

    assert widths[1] == pytest.approx(widths[0], rel=0.2)
