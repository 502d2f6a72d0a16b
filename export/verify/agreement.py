"""Measures on a user's data how often a graph answers as its reference does, and how often each of them is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.evidence.agreement import AgreementMeter
from bertserve.export.evidence.decisions import best_answer, is_regression, mask_candidates, regression_value, result_spans
from bertserve.export.evidence.metrics import answer_f1, exact_match, span_f1, widen_to_words
from bertserve.export.verify.dataset import Line
from bertserve.export.verify.figures import ENTITY_F1, EXACT_MATCH, F1, TOP_1
from bertserve.export.verify.label_scores import score_labels, score_notes
from bertserve.service.bundle.graph_spec import Agreement
from bertserve.service.errors import CallerError, EngineError
from bertserve.service.tasks import classify, ner
from bertserve.service.tasks.batch import ModelConfig

Answer = Callable[[Any], Any]  # a task's request to its result


@dataclass(frozen=True)
class Comparison:
    """What was measured.

    Attributes:
        inputs: Number of inputs.
        labeled: Number of inputs with a right answer.
        agreement: How closely the graph decides as the reference, whatever the scores; None without a reference.
        worst_difference: Largest difference of a regression's values.
        scores: Figure -> its value for the `graph`, and for the `reference` if there is one.
        notes: Figure -> what a reader must know of the graph's value, such as that there is none.
    """

    inputs: int
    labeled: int
    agreement: Agreement | None = None
    worst_difference: float | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unanswered:
    """Lines to which graph or reference have no answer: outputs that are not finite, or a run that fails.

    Attributes:
        by_reference: Whether it was the reference.
        numbers: The lines' numbers, ascending.
        reason: Why the first of them has none.
    """

    by_reference: bool
    numbers: tuple[int, ...]
    reason: str


def measure_agreement(
    lines: Sequence[Line], task: str, config: ModelConfig, graph: Answer, reference: Answer | None
) -> Comparison | Unanswered:
    """Asks graph and reference every line, and compares their answers. If a line has none, nothing is compared.

    Args:
        lines: The data.
        task: Hugging Face name of the task.
        config: The model's labels and activation.
        graph: Answers a request with the graph under test.
        reference: Answers a request with what the graph is compared with, or None.

    Raises:
        DataError: A line is no request that the task can answer.
    """
    results = _ask(graph, lines, by_reference=False)
    if isinstance(results, Unanswered):
        return results
    expected = None if reference is None else _ask(reference, lines, by_reference=True)
    if isinstance(expected, Unanswered):
        return expected
    labeled = [i for i, line in enumerate(lines) if line.gold is not None]
    golds = [lines[i].gold for i in labeled]
    scores: dict[str, dict[str, float]] = {}
    for name, answers in (("graph", results), ("reference", expected)):
        if answers is not None and golds and task in SCORES:
            for figure, value in SCORES[task](golds, [answers[i] for i in labeled], config).items():
                scores.setdefault(figure, {})[name] = value
    notes = _notes(task, golds, [results[i] for i in labeled], config) if golds else {}
    found = Comparison(len(lines), len(labeled), scores=scores, notes=notes)
    if expected is None:
        return found
    meter, worst = AgreementMeter(task, config), None
    for pair in zip(expected, results, strict=True):
        meter.add(*pair)
    if is_regression(task, config):
        worst = max(abs(regression_value(a) - regression_value(b)) for a, b in zip(expected, results, strict=True))
    return replace(found, agreement=meter.agreement, worst_difference=worst)


def _ask(answer: Answer, lines: Sequence[Line], *, by_reference: bool) -> list[Any] | Unanswered:
    """Returns the answer to each line, or those lines to which there is none."""
    results, failures = [], []
    for line in lines:
        try:
            results.append(answer(line.request))
        except CallerError as error:
            raise DataError(f"line {line.number} of the data cannot be answered: {error}") from error
        except EngineError as error:
            failures.append((line.number, error.message))
    if failures:
        return Unanswered(by_reference, tuple(number for number, _ in failures), failures[0][1])
    return results


def _notes(task: str, golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, str]:
    """Returns what a reader must know of a graph's figures, by figure; the arguments are those of `SCORES`."""
    if task == classify.TASK:
        return score_notes(golds, results, config)
    if task == ner.TASK and not any(gold.spans for gold in golds) and not any(map(result_spans, results)):
        return {ENTITY_F1: "no input has an entity, and none was found; 0 stands for it"}
    return {}


def _score_entities(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    found = [widen_to_words(result_spans(result), gold.words) for gold, result in zip(golds, results, strict=True)]
    return {ENTITY_F1: span_f1([gold.spans for gold in golds], found)}


def _score_answers(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    pairs = [(best_answer(result)["answer"], gold) for gold, result in zip(golds, results, strict=True)]
    return {
        EXACT_MATCH: _mean([exact_match(answer, gold) for answer, gold in pairs]),
        F1: _mean([answer_f1(answer, gold) for answer, gold in pairs]),
    }


def _score_masks(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    right = []
    for gold, result in zip(golds, results, strict=True):
        best = [candidates[0]["token_str"] for candidates in mask_candidates(result)]
        if len(best) != len(gold):
            raise DataError(f"a text has {len(best)} masks and {len(gold)} words as its `target`; give one for each mask.")
        right += [token.strip().casefold() == word.strip().casefold() for token, word in zip(best, gold, strict=True)]
    return {TOP_1: _mean(right)}


def _score_choices(golds: Sequence[Any], results: Sequence[Any], config: ModelConfig) -> dict[str, float]:
    return {"accuracy": _mean([result[0]["index"] == gold for gold, result in zip(golds, results, strict=True)])}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


SCORES: dict[str, Callable[[Sequence[Any], Sequence[Any], ModelConfig], dict[str, float]]] = {
    "text-classification": score_labels,
    "token-classification": _score_entities,
    "question-answering": _score_answers,
    "fill-mask": _score_masks,
    "multiple-choice": _score_choices,
}
