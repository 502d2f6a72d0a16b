"""Measures on a user's data how often a graph answers as its reference does, and how often each of them is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.evidence.agreement import AgreementMeter
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.verify.dataset import Line
from bertserve.service.bundle.graph_spec import Agreement
from bertserve.service.errors import CallerError, EngineError
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
    record, results = TASKS[task], _ask(graph, lines, by_reference=False)
    if isinstance(results, Unanswered):
        return results
    expected = None if reference is None else _ask(reference, lines, by_reference=True)
    if isinstance(expected, Unanswered):
        return expected
    labeled = [i for i, line in enumerate(lines) if line.gold is not None]
    golds = [lines[i].gold for i in labeled]
    scores: dict[str, dict[str, float]] = {}
    for name, answers in (("graph", results), ("reference", expected)):
        if answers is not None and golds and record.score is not None:
            for figure, value in record.score(golds, [answers[i] for i in labeled], config).items():
                scores.setdefault(figure, {})[name] = value
    notes = record.notes(golds, [results[i] for i in labeled], config) if golds else {}
    found = Comparison(len(lines), len(labeled), scores=scores, notes=notes)
    if expected is None:
        return found
    meter, worst = AgreementMeter(task, config), None
    for pair in zip(expected, results, strict=True):
        meter.add(*pair)
    if record.measure(config) == "spearman":
        worst = max(abs(record.decision(a, config) - record.decision(b, config)) for a, b in zip(expected, results, strict=True))
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
