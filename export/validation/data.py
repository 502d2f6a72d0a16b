"""A user's data: JSON Lines, one request per line, with or without the correct answer; and the checks of a graph's results for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.tasks.metrics import Score
from bertserve.export.tasks.spec import INPUT_KEYS, Document, ExportTask, read_input
from bertserve.export.validation.comparison import Comparison
from bertserve.export.validation.served_graph import read_body
from bertserve.service.bundle.validation_policy import summarize_agreement
from bertserve.service.errors import SHOWN_CHARS, BertServeError, nearest, plural
from bertserve.service.tasks.batch import ModelConfig

_SHOWN_KEYS = 10  # maximum number of ignored keys in the report


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: Name of the check.
        passed: Whether it passed; None for a measurement without a limit.
        detail: The result as text.
        metrics: The result as data.
    """

    name: str
    passed: bool | None
    detail: str
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of the data.

    Attributes:
        number: Its number in the file, from 1.
        request: A request of the service's task.
        gold: The correct answer as read by the task, or None.
        ignored: Keys of the line that are neither an input nor a correct answer of the task.
    """

    number: int
    request: Any
    gold: Any
    ignored: tuple[str, ...] = ()


def read_lines(path: Path, task: ExportTask, config: ModelConfig) -> list[Line]:
    """Reads JSONL: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Empty lines are skipped.

    Raises:
        DataError: The file cannot be read, or a line is invalid; the message has its number.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")  # a text may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error

    def on_line(number: int, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except (BertServeError, ValueError) as error:
            raise DataError(f"`{path}` line {number}: {error}") from error

    documents = {number: on_line(number, _read_document, text) for number, text in enumerate(texts, start=1) if text.strip()}
    if not documents:
        raise DataError(f"`{path}` has no lines; give one JSON object per line, such as {json.dumps({'inputs': 'a text'})}.")
    golds = [on_line(number, task.read_gold, document, config) if task.read_gold else None for number, document in documents.items()]
    parameters = task.data_parameters([document.get("parameters") or {} for document in documents.values()], golds)
    known_keys = INPUT_KEYS.union(task.gold_keys)
    return [
        Line(number, on_line(number, _request, task, document, own, config), gold, tuple(key for key in document if key not in known_keys))
        for (number, document), gold, own in zip(documents.items(), golds, parameters, strict=True)
    ]


def _read_document(text: str) -> Document:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}; give one JSON object per line, not CSV.") from error
    if not isinstance(document, dict):
        raise ValueError(f"it is not a JSON object; give one such as {json.dumps({'inputs': 'a text'})}.")
    if not isinstance(document.get("parameters") or {}, dict):
        raise ValueError("`parameters` must be an object.")
    return document


def _request(task: ExportTask, document: Document, parameters: Document, config: ModelConfig) -> Any:
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input per line.")
    [request] = read_body(task, {"inputs": inputs, "parameters": parameters}).requests(config)
    return request


def check_lines(lines: Sequence[Line], task: ExportTask, *, needed: bool) -> Check:
    """Counts the lines with a correct answer, and names ignored keys; the check fails if it is `needed` and no line has an answer."""
    labeled = sum(line.gold is not None for line in lines)
    ignored = Counter(key for line in lines for key in line.ignored)
    is_missing = bool(task.gold_keys) and not labeled and needed
    detail = plural(len(lines), "line")
    if task.gold_keys:
        detail += f", {labeled} with a right answer ({' or '.join(f'`{key}`' for key in task.gold_keys)})"
    if ignored:
        detail += "; ignored keys: " + ", ".join(_describe_key(key, count, task) for key, count in ignored.most_common(_SHOWN_KEYS))
        detail += f" and {len(ignored) - _SHOWN_KEYS} more" if len(ignored) > _SHOWN_KEYS else ""
    if is_missing:
        detail += "; add right answers, or give --min-agreement to compare only the graphs"
    metrics = {"inputs": len(lines), "labeled": labeled, "ignored_keys": dict(ignored)}
    return Check("data", False if is_missing else None, detail, metrics)


def _describe_key(key: str, count: int, task: ExportTask) -> str:
    suggestion = nearest(key, task.gold_keys)
    hint = f", did you mean `{suggestion}`?" if suggestion else ""
    return f"`{key[:SHOWN_CHARS]}` ({plural(count, 'line')}{hint})"


def check_agreement(comparison: Comparison, reference: str, minimum: float | None) -> Iterator[Check]:
    """Reports a graph's agreement with the reference on the data, with its minimum; what was not measured fails a minimum."""
    served, inputs = comparison.served, {"inputs": len(comparison.results)}
    required = "" if minimum is None else f"; at least {minimum} is required"
    if comparison.expected:
        agreement = comparison.agreement(on_texts=True)
        passed = None if minimum is None else agreement.value is not None and agreement.value >= minimum
        worst = "" if agreement.worst is None else f", the worst {agreement.worst:.4f}"
        detail = f"against {reference}: {summarize_agreement(agreement)}{worst}{required}"
        metrics = inputs | {"reference": reference, "agreement": agreement.value} | agreement.model_dump(exclude={"value"})
        yield Check(f"agreement {served.name}", passed, detail, metrics)
    elif not reference or served.graph.precision != "fp32":
        detail = f"not compared, because the bundle has no other fp32 graph; give --checkpoint{required}"
        yield Check(f"agreement {served.name}", None if minimum is None else False, detail, inputs)


def check_metrics(comparison: Comparison, lines: Sequence[Line], reference: str, minimums: Mapping[str, float]) -> Iterator[Check]:
    """Reports a graph's metrics by the correct answers, with their minimums; what was not measured fails a minimum."""
    served, golds = comparison.served, [line.gold for line in lines if line.gold is not None]

    def score(results: Sequence[Any]) -> Mapping[str, Score]:
        if not golds or not results or served.task.score is None:
            return {}
        labeled = [result for line, result in zip(lines, results, strict=True) if line.gold is not None]
        return served.task.score(golds, labeled, served.config)

    scores, expected = score(comparison.results), score(comparison.expected)
    for metric, (value, remark) in scores.items():
        minimum, metrics = minimums.get(metric), {"graph": value}
        detail = f"{value:.4f}"
        if metric in expected:
            metrics["reference"] = expected[metric].value
            detail += f" ({reference} {expected[metric].value:.4f})"
        detail += f" on {len(golds)} labeled inputs" + ("" if minimum is None else f"; at least {minimum} is required")
        detail += f"; {remark}" if remark else ""
        yield Check(f"{metric} {served.name}", None if minimum is None else value >= minimum, detail, metrics)
    for metric in minimums.keys() - scores.keys():
        reason = f"this model has {', '.join(scores)}" if scores else "no line of the data has a right answer"
        yield Check(f"{metric} {served.name}", False, f"not measured, but at least {minimums[metric]} is required: {reason}")
