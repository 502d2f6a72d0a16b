"""What results come down to, so that lower ranks and scores do not count as disagreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from export.evidence.decisions import choice
from export.evidence.metrics import same
from service.bundle.manifest import Activation


@dataclass(frozen=True)
class Head:
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
        ("another", {"what": 1}, {"what": 2}, False),
    ],
)
def test_two_results_agree_where_their_choices_do(task: str, one: Any, other: Any, expected: bool) -> None:
    """The best label, answer or token counts, of entities all; of a task that is not known the whole result."""
    assert expected is same(choice(task, one, Head()), choice(task, other, Head()))


def test_of_independent_labels_those_that_are_sure_count() -> None:
    """From one half on, in any order; the best alone is not enough, and none may be sure."""
    head = Head(activation="sigmoid")

    assert frozenset({"a", "b"}) == choice("text-classification", scored(b=0.9, a=0.5, c=0.49), head)
    assert frozenset() == choice("text-classification", scored(b=0.4, a=0.3, c=0.2), head)
