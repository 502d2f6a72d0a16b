"""Measures on a user's data: how often a graph answers as its reference does, and how often either is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from export.errors import DataError
from export.evidence import decisions
from export.evidence.metrics import answer_f1, exact_match, pearson, same, span_f1, spans, widened
from export.verify.dataset import Line
from service.errors import CallerError
from service.tasks import embed
from service.tasks.encoded import ModelConfig

Answer = Callable[[Any], Any]  # a task's request to its result


@dataclass(frozen=True)
class Measured:
    """What was found.

    Attributes:
        inputs: Number of inputs.
        labeled: How many of them have a right answer.
        agreement: Share of inputs on which graph and reference choose the same, scores aside; None without a reference and
            for regression and embeddings, which choose nothing.
        span_agreement: F1 of the graph's spans against the reference's, where there are spans.
        worst_difference: Largest difference of a regression's values, or of an embedding's vectors 1 - cosine.
        scores: Figure -> its value for the `graph`, and the `reference` where there is one.
    """

    inputs: int
    labeled: int
    agreement: float | None = None
    span_agreement: float | None = None
    worst_difference: float | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


def measure(lines: Sequence[Line], task: str, head: ModelConfig, graph: Answer, reference: Answer | None) -> Measured:
    """Asks graph and reference every line and compares.

    Args:
        lines: The data.
        task: Hugging Face name of the task.
        head: The model's labels and activation.
        graph: Answers with the graph under test.
        reference: Answers with what it is compared with.

    Raises:
        DataError: A line cannot be answered.
    """
    got = [_asked(graph, line) for line in lines]
    right = None if reference is None else [_asked(reference, line) for line in lines]
    golden = [i for i, line in enumerate(lines) if line.gold is not None]
    golds = [lines[i].gold for i in golden]
    scores: dict[str, dict[str, float]] = {}
    for name, results in (("graph", got), ("reference", right)):
        if results is not None and golds and task in SCORES:
            for figure, value in SCORES[task](golds, [results[i] for i in golden], head).items():
                scores.setdefault(figure, {})[name] = value
    found = Measured(len(lines), len(golden), scores=scores)
    if right is None:
        return found
    if decisions.is_regression(task, head):
        return replace(found, worst_difference=max(abs(decisions.value(a) - decisions.value(b)) for a, b in zip(right, got, strict=True)))
    if task == embed.TASK:
        return replace(found, worst_difference=max(decisions.angle(a, b) for a, b in zip(right, got, strict=True)))
    agree = sum(same(decisions.choice(task, a, head), decisions.choice(task, b, head)) for a, b in zip(right, got, strict=True))
    places = [spans(a) for a in right], [spans(b) for b in got]
    return replace(found, agreement=agree / len(lines), span_agreement=span_f1(*places) if any(places[0] + places[1]) else None)


def _asked(answer: Answer, line: Line) -> Any:
    try:
        return answer(line.request)
    except CallerError as error:
        raise DataError(f"line {line.number} of the data cannot be answered: {error}") from error


def _score_labels(golds: Sequence[Any], results: Sequence[Any], head: ModelConfig) -> dict[str, float]:
    if len(head.labels) == 1:
        values = [decisions.value(result) for result in results]
        errors = [abs(value - gold) for value, gold in zip(values, golds, strict=True)]
        return {"Pearson correlation": pearson(golds, values), "mean absolute error": sum(errors) / len(errors)}
    return {"accuracy": _mean([decisions.labels(result, head) == gold for gold, result in zip(golds, results, strict=True)])}


def _score_entities(golds: Sequence[Any], results: Sequence[Any], head: ModelConfig) -> dict[str, float]:
    found = [widened(spans(result), gold.words) for gold, result in zip(golds, results, strict=True)]
    return {"entity F1": span_f1([gold.spans for gold in golds], found)}


def _score_answers(golds: Sequence[Any], results: Sequence[Any], head: ModelConfig) -> dict[str, float]:
    pairs = [(decisions.best_answer(result)["answer"], gold) for gold, result in zip(golds, results, strict=True)]
    return {
        "exact match": _mean([exact_match(answer, gold) for answer, gold in pairs]),
        "F1": _mean([answer_f1(answer, gold) for answer, gold in pairs]),
    }


def _score_masks(golds: Sequence[Any], results: Sequence[Any], head: ModelConfig) -> dict[str, float]:
    right = []
    for gold, result in zip(golds, results, strict=True):
        best = [candidates[0]["token_str"] for candidates in decisions.masks(result)]
        if len(best) != len(gold):
            raise DataError(f"a text has {len(best)} masks and {len(gold)} words as its `target`; give one for each mask.")
        right += [token.strip().casefold() == word.strip().casefold() for token, word in zip(best, gold, strict=True)]
    return {"top-1": _mean(right)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


SCORES: dict[str, Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, float]]] = {
    "text-classification": _score_labels,
    "token-classification": _score_entities,
    "question-answering": _score_answers,
    "fill-mask": _score_masks,
}
