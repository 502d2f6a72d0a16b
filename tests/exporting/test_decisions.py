"""Results reduced to decisions, so that lower ranks and scores do not count as disagreement; and the comparison of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.metrics import Span, result_spans
from bertserve.export.validation.agreement import equal_but_for_scores, equal_but_for_ties
from bertserve.service.bundle.manifest import Activation

ADA = {"entity_group": "PER", "score": 0.9, "word": "Ada", "start": 0, "end": 3}


@dataclass(frozen=True)
class Config:
    """A model's labels and activation."""

    labels: tuple[str, ...] = ("a", "b", "c")
    activation: Activation = "softmax"


def scored(**scores: float) -> list[dict[str, Any]]:
    """Returns a result of text classification."""
    return [{"label": label, "score": score} for label, score in scores.items()]


def token(id_: int) -> dict[str, Any]:
    """Returns a candidate of fill-mask."""
    return {"score": 0.5, "token": id_, "token_str": str(id_), "sequence": f"a {id_}"}


def span(start: int, end: int, **fields: Any) -> dict[str, Any]:
    """Returns an answer, or with `entity_group` an entity."""
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
def test_two_results_agree_where_their_choices_do(task: str, one: Any, other: Any, expected: bool) -> None:
    """The best label, answer or token counts, of entities all; of a task without choices the whole result."""
    assert expected is equal_but_for_scores(*(TASKS[task].decision(result, Config()) for result in (one, other)))


def test_of_independent_labels_those_that_are_sure_count() -> None:
    """From one half on, in any order; the best alone is not enough, and none may be sure."""
    config = Config(activation="sigmoid")

    assert frozenset({"a", "b"}) == TASKS["text-classification"].decision(scored(b=0.9, a=0.5, c=0.49), config)
    assert frozenset() == TASKS["text-classification"].decision(scored(b=0.4, a=0.3, c=0.2), config)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([ADA | {"score": 0.1}], True),
        ([ADA | {"end": 4}], False),
        ([ADA, ADA], False),
        ([], False),
        (ADA, False),
        ([{"entity": "PER"}], False),
        ([ADA | {"score": "0.5"}], False),
        ([ADA | {"score": None}], False),
        ([ADA | {"start": False}], False),
    ],
)
def test_results_are_the_same_but_for_their_scores(actual: Any, expected: bool) -> None:
    """Floats may differ, and nothing else; a result of another form is another result, no error."""
    assert expected is equal_but_for_scores([ADA], actual)


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
def test_spans_of_a_result(result: Any, expected: set[Span]) -> None:
    """Entities, tokens and answers have places; labels have none."""
    assert expected == result_spans(result)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (scored(a=0.5, b=0.3, c=0.2), True),
        (scored(b=0.5, a=0.3, c=0.2), False),
        (scored(a=0.5, c=0.3, b=0.2), False),
        (scored(a=0.5, b=0.3), False),
        (scored(a=0.5, b=0.3, d=0.2), True),
    ],
)
def test_labels_whose_scores_are_nearly_equal_may_be_in_either_order(actual: Any, expected: bool) -> None:
    """Rounding orders them either way, in the middle of a list and at its end; those that differ by more keep their order."""
    reference = scored(a=0.5, b=0.3, c=0.20005)
    assert expected is equal_but_for_ties("text-classification", reference, actual, 1e-4)
    assert equal_but_for_ties("text-classification", [scored(a=0.50004, b=0.49996)], [scored(b=0.50003, a=0.49997)], 1e-4)


def test_entities_have_their_place_and_no_order_by_score() -> None:
    """Another entity is another answer, however near the scores are."""
    assert not equal_but_for_ties("token-classification", [ADA | {"score": 0.5}], [ADA | {"end": 4, "score": 0.5}], 1e-4)
