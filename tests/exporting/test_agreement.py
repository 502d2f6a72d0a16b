"""Results reduced to decisions, which exclude scores and lower ranks, and their agreement with the decisions of a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.metrics import Span, result_spans
from bertserve.export.validation.comparison import measure_agreement, relative_errors, row_error
from bertserve.service.bundle.graph_spec import Agreement
from bertserve.service.bundle.manifest import Activation
from bertserve.service.check import difference
from bertserve.service.text.tokenizer import Encoding

ADA = {"entity_group": "PER", "score": 0.9, "word": "Ada", "start": 0, "end": 3}
ROME = {"entity_group": "LOC", "score": 0.9, "word": "Rome", "start": 9, "end": 13}


@dataclass(frozen=True)
class Config:
    """A model's labels and activation."""

    labels: tuple[str, ...] = ("a", "b")
    activation: Activation = "softmax"


SCORE, SETS = Config(("score",), "sigmoid"), Config(activation="sigmoid")


def measure(task: str, config: Config, *pairs: tuple[Any, Any]) -> Agreement:
    """Returns the agreement over pairs of an expected and an actual result."""
    return measure_agreement(TASKS[task], config, *([pair[side] for pair in pairs] for side in (0, 1)))


def scored(**scores: float) -> list[dict[str, Any]]:
    return [{"label": label, "score": score} for label, score in sorted(scores.items(), key=lambda item: -item[1])]


def token(id_: int) -> dict[str, Any]:
    return {"score": 0.5, "token": id_, "token_str": str(id_), "sequence": f"a {id_}"}


def span(start: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"answer": "x" * (end - start), "score": 0.5, "start": start, "end": end} | fields


@pytest.mark.parametrize(
    ("task", "one", "other", "expected"),
    [
        ("text-classification", scored(a=0.9, b=0.06, c=0.04), scored(a=0.8, c=0.15, b=0.05), True),
        ("text-classification", scored(a=0.5, b=0.3, c=0.2), scored(b=0.5, a=0.3, c=0.2), False),
        ("question-answering", span(1, 3), span(1, 3, score=0.1), True),
        ("question-answering", span(1, 3), span(1, 4), False),
        ("question-answering", [span(1, 3), span(5, 6)], [span(1, 3), span(7, 9)], True),
        ("fill-mask", [token(5), token(6)], [token(5), token(7)], True),
        ("fill-mask", [token(5), token(6)], [token(6), token(5)], False),
        ("fill-mask", [[token(5)], [token(6)]], [[token(5)], [token(7)]], False),
        ("token-classification", [span(1, 3, entity_group="PER")], [span(1, 3, entity_group="PER", score=0.1)], True),
        ("token-classification", [span(1, 3, entity_group="PER")], [span(1, 3, entity_group="LOC")], False),
        ("token-classification", [span(1, 3, entity_group="PER")], [], False),
        ("token-classification", [], [], True),
        ("feature-extraction", {"what": 1}, {"what": 2}, False),
    ],
)
def test_results_agree_if_their_decisions_are_equal(task: str, one: Any, other: Any, expected: bool) -> None:
    decisions = [TASKS[task].decision(result, Config(("a", "b", "c"))) for result in (one, other)]
    assert expected is (difference(*decisions, math.inf) is None)


def test_a_multi_label_decision_has_all_labels_that_score_at_least_one_half() -> None:
    """The order does not matter. The best label does not count below one half, so the set can be empty."""
    config = Config(("a", "b", "c"), "sigmoid")

    assert frozenset({"a", "b"}) == TASKS["text-classification"].decision(scored(b=0.9, a=0.5, c=0.49), config)
    assert frozenset() == TASKS["text-classification"].decision(scored(b=0.4, a=0.3, c=0.2), config)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([ADA], {(0, 3, "PER")}),
        ([{"entity": "B-PER", "start": 1, "end": 2, "score": 0.5}], {(1, 2, "B-PER")}),
        ({"answer": "Ada", "score": 0.5, "start": 4, "end": 7}, {(4, 7, "")}),
        ([[ADA], []], {(0, 3, "PER")}),
        ([{"label": "positive", "score": 0.5}], set()),
    ],
)
def test_spans_are_read_from_results_of_every_type(result: Any, expected: set[Span]) -> None:
    assert expected == result_spans(result)


# ---- agreement


def test_agreement_of_labels_is_the_share_of_equal_labels() -> None:
    found = measure(
        "text-classification", Config(), (scored(a=0.9, b=0.1), scored(a=0.6, b=0.4)), (scored(a=0.9, b=0.1), scored(a=0.4, b=0.6))
    )

    assert Agreement(measure="label", value=0.5, decisions=2) == found


def test_agreement_of_vectors_is_their_cosine() -> None:
    """The share of equal labels would be 1 for any vectors, because vectors have no labels. For token vectors, the worst token counts."""
    found = measure(
        "feature-extraction", Config(()), ([1.0, 0.0], [2.0, 0.0]), ([1.0, 0.0], [0.0, 1.0]), ([[1.0, 0.0]] * 2, [[1.0, 0.0], [0.6, 0.8]])
    )

    assert ("cosine", 3) == (found.measure, found.decisions)
    assert (pytest.approx((1 + 0 + 0.6) / 3), pytest.approx(0.0)) == (found.value, found.worst)


def test_agreement_of_single_scores_is_their_rank_correlation() -> None:
    """The share of equal best labels would be 1 even for a reversed order, because there is only one label."""
    scores = (0.1, 0.5, 0.9)
    same = measure("text-classification", SCORE, *((scored(score=value), scored(score=value / 2)) for value in scores))
    reversed_ = measure("text-classification", SCORE, *((scored(score=value), scored(score=1 - value)) for value in scores))
    constant = measure("text-classification", SCORE, *((scored(score=value), scored(score=0.5)) for value in scores))

    assert ("spearman", 3) == (same.measure, same.decisions)
    assert (1.0, -1.0, 0.0) == pytest.approx((same.value, reversed_.value, constant.value))


def test_agreement_of_several_values_is_that_of_the_worst_value() -> None:
    """The label with the largest value is not compared because it can be the same for all texts."""
    values = Config(("a", "b", "c"), "none")
    pairs = [(scored(a=9.0, b=value, c=1.0), scored(a=9.0 + value, b=2 * value, c=1.0)) for value in (0.1, 0.5, 0.9)]
    reversed_ = [(expected, scored(a=9.0, b=1 - expected[2]["score"], c=1.0)) for expected, _ in pairs]
    lower = [(scored(a=x, b=x, c=1.0), scored(a=x, b=y, c=1.0)) for x, y in zip((0.1, 0.2, 0.3), (0.1, 0.3, 0.2), strict=True)]

    assert 1.0 == pytest.approx(measure("text-classification", values, *pairs).value)
    assert -1.0 == pytest.approx(measure("text-classification", values, *reversed_).value)
    assert 0.5 == pytest.approx(measure("text-classification", values, *lower).value)
    with pytest.raises(ValueError, match="`label`"):
        TASKS["text-classification"].read_gold({"label": "a"}, values)


def test_scores_that_differ_by_rounding_have_equal_ranks() -> None:
    """Scores near 1 differ from PyTorch's in the seventh digit, which would change their order."""
    expected, actual = (0.9999999, 0.9999998, 1.0, 0.2), (0.9999998, 1.0, 0.9999999, 0.2)
    found = measure("text-classification", SCORE, *((scored(score=a), scored(score=b)) for a, b in zip(expected, actual, strict=True)))

    assert pytest.approx(1.0) == found.value


def test_agreement_of_label_sets_is_their_f1() -> None:
    none, one, both = scored(a=0.1, b=0.1), scored(a=0.9, b=0.1), scored(a=0.9, b=0.9)
    found = measure("text-classification", SETS, (none, none), (one, both), (none, one), (both, both))

    assert Agreement(measure="set_f1", value=0.75, decisions=3) == found


def test_agreement_of_taggers_is_the_f1_of_their_spans() -> None:
    found = measure("token-classification", Config(), ([], []), ([ADA, ROME], [ADA]), ([], [ROME]))

    assert Agreement(measure="span_f1", value=0.5, decisions=2) == found


@pytest.mark.parametrize(
    ("task", "config", "result", "expected"),
    [
        ("token-classification", Config(), [], "span_f1"),
        ("text-classification", SETS, scored(a=0.1, b=0.2), "set_f1"),
        ("text-classification", SCORE, scored(score=0.5), "spearman"),
    ],
)
def test_results_without_a_decision_have_no_agreement(task: str, config: Config, result: Any, expected: str) -> None:
    """Results without entities, without labels, or with one score for all texts are equal, but do not count as agreement."""
    assert Agreement(measure=expected, value=None, decisions=0) == measure(task, config, *[(result, result)] * 18)


def test_a_nan_error_is_not_ignored() -> None:
    """The largest error is NaN if any error is NaN; Python's `max` could ignore it."""
    expected = {name: np.float32([1, 2, 3]) for name in ("start", "end")}
    actual = expected | {"end": np.float32([1, 2, np.nan])}

    assert all(np.isnan(relative_errors([row_error(None, Encoding(np.arange(3), np.zeros(3)), expected, actual)])))
