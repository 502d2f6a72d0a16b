"""Checks graphs on a user's data: JSONL, one request per line, with or without the correct answer.

It measures the graphs' agreement with a baseline, and scores both if the data has correct answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.spec import INPUT_KEYS, Document, read_input
from bertserve.export.validation.agreement import AgreementMeter
from bertserve.export.validation.samples import read_request
from bertserve.export.verify.graph_checks import BundleCheck, LoadedGraph, find_fp32
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import Agreement
from bertserve.service.bundle.validation_policy import MEASURES, NOT_MEASURED
from bertserve.service.errors import SHOWN_CHARS, BertServeError, CallerError, EngineError, nearest, plural
from bertserve.service.tasks.batch import ModelConfig

Answer = Callable[[Any], Any]  # a task's request -> its result
_SHOWN_KEYS = 10  # maximum number of ignored keys in the report


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


def read_dataset(path: Path, task: str, config: ModelConfig) -> list[Line]:
    """Reads JSONL: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Empty lines are skipped.

    Raises:
        DataError: The file cannot be read, or a line is invalid; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error
    documents = [(number, _parse_line(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    if not documents:
        raise DataError(f"`{path}` has no lines; give one JSON object per line, such as {json.dumps({'inputs': 'a text'})}.")
    record = TASKS[task]
    parameters = [_parameters(path, number, document) for number, document in documents]
    golds = [
        None if record.read_gold is None else _on_line(path, number, record.read_gold, document, config) for number, document in documents
    ]
    known_keys = INPUT_KEYS.union(record.gold_keys)
    return [
        Line(
            number,
            _on_line(path, number, _request, task, document, line_parameters, config),
            gold,
            tuple(key for key in document if key not in known_keys),
        )
        for (number, document), line_parameters, gold in zip(documents, record.data_parameters(parameters, golds), golds, strict=True)
    ]


def _on_line(path: Path, number: int, reader: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that reads a line; errors get the number of the line."""
    try:
        return reader(*arguments)
    except (BertServeError, ValueError) as error:
        raise DataError(f"`{path}` line {number}: {error}") from error


def _parse_line(path: Path, number: int, line: str) -> Document:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise DataError(f"`{path}` line {number} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise DataError(f"`{path}` line {number} is not a JSON object; give one such as {json.dumps({'inputs': 'a text'})}.")
    return document


def _parameters(path: Path, number: int, document: Document) -> Document:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"`{path}` line {number}: `parameters` must be an object.")
    return parameters


def _request(task: str, document: Document, parameters: Document, config: ModelConfig) -> Any:
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input per line.")
    (request,) = read_request(task, {"inputs": inputs, "parameters": parameters}).requests(config)
    return request


@dataclass(frozen=True)
class DataComparison:
    """The results of a comparison.

    Attributes:
        inputs: Number of inputs.
        labeled: Number of inputs with a correct answer.
        agreement: How closely the graph's decisions match the reference's, ignoring scores; None without a reference.
        worst_difference: Largest difference of a regression's values.
        scores: Metric -> its value for the `graph` and for the `reference`, if any.
        notes: Metric -> a remark about the graph's value, for example that there is none.
    """

    inputs: int
    labeled: int
    agreement: Agreement | None = None
    worst_difference: float | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unanswered:
    """Lines without an answer of graph or reference, because outputs are not finite or a run failed.

    Attributes:
        by_reference: Whether the reference failed.
        numbers: The lines' numbers, ascending.
        reason: The reason for the first of them.
    """

    by_reference: bool
    numbers: tuple[int, ...]
    reason: str


class Baseline:
    """The reference for graphs. It computes each request once, for any number of graphs.

    Attributes:
        name: Its name in the report.
        graph: Its graph, or None for the checkpoint.
    """

    def __init__(self, name: str, compute: Answer, graph: LoadedGraph | None = None) -> None:
        """Stores `compute`, which answers a request."""
        self.name = name
        self.graph = graph
        self._compute = compute
        self._results: dict[int, Any] = {}

    def answer(self, request: Any) -> Any:
        """Returns the result of a request; the request must outlive the baseline."""
        if id(request) not in self._results:
            self._results[id(request)] = self._compute(request)
        return self._results[id(request)]


def fp32_baseline(bundle: Bundle, graphs: list[LoadedGraph]) -> Baseline | None:
    """Returns the float32 graph as the baseline, or None if it does not exist or is the only graph to check."""
    fp32 = find_fp32(bundle, graphs)
    return None if fp32 is None or graphs == [fp32] else Baseline("the fp32 graph", fp32.answer, fp32)


def check_labels(lines: Sequence[Line], task: str, *, needed: bool) -> BundleCheck:
    """Counts the lines with a correct answer, and names ignored keys; the check fails if it is `needed` and no line has an answer."""
    gold_keys = TASKS[task].gold_keys
    labeled = sum(line.gold is not None for line in lines)
    counts = Counter(key for line in lines for key in line.ignored)
    detail = plural(len(lines), "line")
    if gold_keys:
        detail += f", {labeled} with a right answer ({' or '.join(f'`{key}`' for key in gold_keys)})"
    if counts:
        detail += "; ignored keys: " + ", ".join(_describe_key(key, count, gold_keys) for key, count in counts.most_common(_SHOWN_KEYS))
        detail += f" and {len(counts) - _SHOWN_KEYS} more" if len(counts) > _SHOWN_KEYS else ""
    passed = None
    if gold_keys and not labeled and needed:
        passed = False
        detail += "; add right answers, or give --min-agreement to compare only the graphs"
    return BundleCheck("data", passed, detail, {"inputs": len(lines), "labeled": labeled, "ignored_keys": dict(counts)})


def _describe_key(key: str, count: int, gold_keys: Sequence[str]) -> str:
    suggestion = nearest(key, gold_keys)
    hint = f", did you mean `{suggestion}`?" if suggestion else ""
    return f"`{key[:SHOWN_CHARS]}` ({plural(count, 'line')}{hint})"


def check_data(
    graphs: list[LoadedGraph],
    baseline: Baseline | None,
    lines: Sequence[Line],
    min_agreement: float | None,
    min_metrics: Mapping[str, float],
) -> Iterator[BundleCheck]:
    """Measures each graph on the data, and checks the minimum of its agreement, by the task's measure, and of its metrics, by name.

    Raises:
        DataError: The task cannot answer a line.
    """
    manifest = graphs[0].bundle.manifest
    for loaded in graphs:
        # a graph that is the baseline trivially agrees with itself
        is_baseline = baseline is not None and loaded is baseline.graph
        answer = baseline.answer if baseline is not None and is_baseline else loaded.answer
        reference = None if baseline is None or is_baseline else baseline.answer
        if baseline is not None and baseline.graph is not None and _computes_the_same(loaded, baseline.graph):
            reference = None
        result = _measure_agreement(lines, manifest.task, manifest, answer, reference)
        if isinstance(result, Unanswered):
            yield _unanswered(loaded.name, result, len(lines), None if baseline is None else baseline.name)
            continue
        if not is_baseline:
            yield _check_agreement(loaded.name, result, None if baseline is None else baseline.name, min_agreement)
        yield from _check_metrics(loaded.name, result, None if baseline is None else baseline.name, min_metrics)


def _measure_agreement(
    lines: Sequence[Line], task: str, config: ModelConfig, graph: Answer, reference: Answer | None
) -> DataComparison | Unanswered:
    """Runs every line on graph and reference, and compares their answers. If a line has no answer, nothing is compared.

    Raises:
        DataError: The task cannot answer a line.
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
            for metric, value in record.score(golds, [answers[i] for i in labeled], config).items():
                scores.setdefault(metric, {})[name] = value
    notes = record.notes(golds, [results[i] for i in labeled], config) if golds else {}
    comparison = DataComparison(len(lines), len(labeled), scores=scores, notes=notes)
    if expected is None:
        return comparison
    meter, worst = AgreementMeter(task, config), None
    for pair in zip(expected, results, strict=True):
        meter.add(*pair)
    if record.measure(config) == "spearman":
        decisions = ((record.decision(a, config), record.decision(b, config)) for a, b in zip(expected, results, strict=True))
        worst = max(abs(a - b) for pair in decisions for a, b in zip(*pair, strict=True))
    return replace(comparison, agreement=meter.agreement, worst_difference=worst)


def _ask(answer: Answer, lines: Sequence[Line], *, by_reference: bool) -> list[Any] | Unanswered:
    """Returns the answer to each line, or the lines without an answer."""
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


def _computes_the_same(first: LoadedGraph, second: LoadedGraph) -> bool:
    """Returns whether two graphs are equal by construction: TensorRT's fp16 and fp32 graphs share a file, and a CPU runs one precision."""
    return first.graph.file == second.graph.file and first.runs_on == second.runs_on == "cpu"


def _check_metrics(graph: str, result: DataComparison, baseline: str | None, floors: Mapping[str, float]) -> Iterator[BundleCheck]:
    """Reports a graph's metrics, and checks those with a minimum; a metric with a minimum that was not measured fails."""
    for metric, values in result.scores.items():
        floor = floors.get(metric)
        detail = f"{values['graph']:.4f}"
        if baseline is not None and "reference" in values:
            detail += f" ({baseline} {values['reference']:.4f})"
        detail += f" on {result.labeled} labeled inputs"
        if floor is not None:
            detail += f"; at least {floor} is required"
        if metric in result.notes:
            detail += f"; {result.notes[metric]}"
        yield BundleCheck(f"{metric} {graph}", None if floor is None else values["graph"] >= floor, detail, values)
    for metric in floors.keys() - result.scores.keys():
        reason = f"this model has {', '.join(result.scores)}" if result.scores else "no line of the data has a right answer"
        yield BundleCheck(f"{metric} {graph}", False, f"not measured, but at least {floors[metric]} is required: {reason}")


def _unanswered(graph: str, unanswered: Unanswered, inputs: int, baseline: str | None) -> BundleCheck:
    """Reports the lines without an answer of a graph or of its baseline."""
    first, *others = unanswered.numbers
    more = f", nor to {plural(len(others), 'other')} of {plural(inputs, 'input')}" if others else ""
    return BundleCheck(
        f"data {graph}",
        False,
        f"{baseline if unanswered.by_reference else graph} has no answer to line {first} of the data{more}: {unanswered.reason}",
        {"inputs": inputs, "unanswered_lines": list(unanswered.numbers), "by_reference": unanswered.by_reference},
    )


def _check_agreement(graph: str, result: DataComparison, baseline: str | None, min_agreement: float | None) -> BundleCheck:
    """Checks a graph's agreement against the minimum, if any; an agreement that was not measured fails the check."""
    name = f"agreement {graph}"
    if baseline is None or result.agreement is None:
        hint = "not compared, because the bundle has no other fp32 graph; give --checkpoint"
        return BundleCheck(name, None if min_agreement is None else False, hint, {"inputs": result.inputs})
    value = result.agreement.value
    metrics: dict[str, Any] = {"inputs": result.inputs, "labeled": result.labeled, "reference": baseline}
    metrics |= {"measure": result.agreement.measure, "agreement": value, "decisions": result.agreement.decisions}
    metrics |= {"worst": result.agreement.worst, "worst_difference": result.worst_difference}
    detail = _describe(result.agreement, result, baseline)
    if min_agreement is None:
        return BundleCheck(name, None, detail, metrics)
    return BundleCheck(name, value is not None and value >= min_agreement, f"{detail}; at least {min_agreement} is required", metrics)


def _describe(agreement: Agreement, result: DataComparison, baseline: str) -> str:
    if agreement.value is None:
        return f"not measured against {baseline} ({MEASURES[agreement.measure]}): {NOT_MEASURED[agreement.measure]}"
    if agreement.measure == "label":
        return f"answers as {baseline} on {agreement.value:.4f} of {plural(result.inputs, 'input')}"
    detail = (
        f"{MEASURES[agreement.measure]} with {baseline} is {agreement.value:.4f} on {agreement.decisions} of "
        f"{plural(result.inputs, 'input')}"
    )
    if agreement.worst is not None:
        detail += f", the worst {agreement.worst:.4f}"
    if result.worst_difference is not None:
        detail += f"; values differ by {result.worst_difference:.1e} at most"
    return detail
