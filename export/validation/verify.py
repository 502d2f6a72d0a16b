"""Checks a finished bundle: its files, and for each graph its stored example, its batches, and the comparison with a reference.

The reference is the checkpoint, or with data the float32 graph. Without a checkpoint, nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bertserve.export.errors import DataError, ParityError
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.metrics import Score
from bertserve.export.tasks.spec import INPUT_KEYS, Document, ExportTask, read_input
from bertserve.export.validation.comparison import Comparison, Reference, answer_sample, compare
from bertserve.export.validation.samples import sample_requests
from bertserve.export.validation.served_graph import Answer, ServedGraph, open_graph, read_body
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.validation_policy import describe_agreement, summarize_agreement
from bertserve.service.check import CHECK_TOLERANCE, difference
from bertserve.service.engine.sessions import why_not
from bertserve.service.errors import SHOWN_CHARS, BertServeError, CallerError, EngineError, plural
from bertserve.service.providers import Provider
from bertserve.service.scoring.rows import Row, read_json_lines
from bertserve.service.tasks.batch import ModelConfig
from bertserve.service.text.tokenizer import Tokenizer

_SHOWN_KEYS = 10  # maximum number of ignored keys in the report


@dataclass(frozen=True)
class VerifySpec:
    """The flags of the command; metrics have their full names, and `module` is trusted."""

    bundle: Path
    checkpoint: str | None = None
    revision: str | None = None
    module: str | None = None
    data: Path | None = None
    min_agreement: float | None = None
    min_metrics: Mapping[str, float] = field(default_factory=dict)
    providers: tuple[Provider, ...] | None = None
    validation: Path | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the reference is a checkpoint in PyTorch."""
        return self.checkpoint is not None or self.module is not None


@dataclass(frozen=True)
class Check:
    """One line of the report: whether it passed, None for a measurement without a limit, and the result as text and as data."""

    name: str
    passed: bool | None
    detail: str
    metrics: dict[str, Any] = field(default_factory=dict)


Report = Callable[[Check], None]


def verify(spec: VerifySpec, report: Report) -> None:
    """Reports each check when it is done; checks that depend on a failed one are left out.

    It raises ExportError if the data or the checkpoint cannot be read, or the task cannot answer a line.
    """
    try:
        bundle = load_bundle(spec.bundle.resolve())
    except BertServeError as error:
        report(Check("files", False, error.message))
        return
    manifest, task = bundle.manifest, TASKS[bundle.manifest.task]
    lines, ignored = ([], Counter[str]()) if spec.data is None else read_lines(spec.data, task, manifest)
    report(Check("files", True, f"the digests of the tokenizer and {plural(len(manifest.graphs), 'graph')} match the manifest"))
    if lines:
        report(_check_lines(lines, ignored, task, needed=spec.min_agreement is None and not spec.has_checkpoint))
    if missing := {*(spec.providers or ())} - {graph.provider for graph in manifest.graphs}:
        existing = ", ".join(f"{graph.provider}/{graph.precision}" for graph in manifest.graphs)
        report(Check("graphs", False, f"the bundle has no graph for {', '.join(sorted(missing))}; it has {existing}"))
        return
    chosen = [graph for graph in manifest.graphs if spec.providers is None or graph.provider in spec.providers]
    usable = [served for graph in chosen if (served := _open(bundle, graph, spec, report)) is not None]
    if not usable:
        return
    reference = _choose_reference(bundle, usable, spec, report)
    comparisons = [comparison for served in usable if (comparison := _compare_samples(served, reference, report)) is not None]
    for line in lines:
        _compare_line(comparisons, reference, line)
    for comparison in comparisons:
        if comparison.expected or comparison.error is not None:
            report(_check_parity(comparison))
        if lines and comparison.error is None:
            _check_agreement(comparison, spec.min_agreement, report)
            _check_metrics(comparison, lines, spec.min_metrics, report)


def _open(bundle: Bundle, graph: GraphSpec, spec: VerifySpec, report: Report) -> ServedGraph | None:
    """Checks a graph's validation report and stored example; returns the graph if this machine can run it.

    As at export, the CPU replaces a provider that is not available, unless it was requested by name.
    """
    name, validation, manifest = f"{graph.provider}/{graph.precision}", graph.validation, bundle.manifest
    if validation.samples:
        error = f", its precision changes the outputs by {validation.quantization_error:.3f} of their spread"
        detail = f"at export on {validation.provider}: worst logit error {validation.worst_abs_error:.1e}, {describe_agreement(validation)}"
        detail += error if validation.quantization_error else ""
    else:
        detail = f"the manifest has none for {graph.file}; export the bundle again"
    report(Check(f"validation {name}", validation.samples > 0, detail, validation.model_dump(mode="json")))
    missing = None if spec.providers is not None else why_not(graph.provider)
    provider = graph.provider if missing is None else "cpu"
    try:
        tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
        served = open_graph(bundle.path, graph, manifest.tokenizer, tokenizer, manifest.task, manifest, provider)
    except BertServeError as error:
        reason = error.message if missing is None else f"not checked: {missing} The CPU cannot run it either: {error.message}"
        # a comparison or a minimum that was requested needs all graphs
        needed = missing is None or spec.has_checkpoint or spec.min_agreement is not None or spec.min_metrics
        report(Check(f"engine {name}", False if needed else None, reason))
        return None
    if missing is not None:
        report(Check(f"engine {name}", None, f"checked on the CPU, because {graph.provider} is not available ({missing})"))
    report(_check_example(served, manifest))
    return served


def _check_example(served: ServedGraph, manifest: Manifest) -> Check:
    """Runs the stored example. Its result is from one default graph, so graphs with other precisions may differ."""
    precision, name = served.graph.precision, f"example {served.name}"
    stored = min((graph for graph in manifest.graphs if graph.default), key=lambda graph: graph.provider != "cpu").precision
    tolerance = max(CHECK_TOLERANCE[precision], CHECK_TOLERANCE[stored])
    try:
        reason = difference(manifest.example.result, served.answer_body(manifest.example.request), tolerance)
    except BertServeError as error:
        return Check(name, False, error.message)
    if reason is None:
        return Check(name, True, f"the stored result, scores within {tolerance}")
    if precision != stored:
        return Check(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return Check(name, False, reason)


def _choose_reference(bundle: Bundle, graphs: Sequence[ServedGraph], spec: VerifySpec, report: Report) -> Reference:
    """Returns the checkpoint, or for data the float32 graph unless it is the only graph; a reference without a name is none."""
    manifest = bundle.manifest
    if spec.has_checkpoint:
        # importing torch and transformers takes seconds, and the other checks need neither
        from bertserve.export.validation.pytorch import compare_settings, load_checkpoint_of, sample_reference

        checkpoint = load_checkpoint_of(manifest, spec)
        expected, actual = manifest.source.weights_sha256, checkpoint.origin.weights_sha256
        detail = f"sha256 over its weights is {actual[:12]}…, the manifest says {expected[:12]}…"
        report(Check("checkpoint", expected == actual, detail, {"weights_sha256": actual}))
        reason = compare_settings(manifest, checkpoint)
        detail = f"in the checkpoint {reason}" if reason else "labels, activation, embedding and tokenizer are those of the checkpoint"
        report(Check("settings", reason is None, detail))
        return sample_reference(checkpoint)
    samples = sample_requests(manifest.task, manifest.tokenizer, manifest)
    fp32 = next((served for served in graphs if served.graph.precision == "fp32"), None)
    if fp32 is None or len(graphs) == 1 or spec.data is None:
        return Reference("", samples, [None] * len(samples), len(samples))
    # a CPU runs one precision, so TensorRT's graphs, which share a file, have the same answers
    own = [served for served in graphs if served is fp32 or (served.graph.file == fp32.graph.file and served.provider == "cpu")]
    answers = [answer_sample(fp32, request) for request in samples]
    return Reference("the fp32 graph", samples, answers, len(samples), answer=fp32.answer, own=own)


def _compare_samples(served: ServedGraph, reference: Reference, report: Report) -> Comparison | None:
    """Compares a graph with the reference on samples, and samples in a batch with the same samples run alone."""
    name, graph = f"batches {served.name}", served.graph
    try:
        comparison = compare(served, reference)
    except (BertServeError, ParityError) as error:
        report(Check(name, False, str(error)))
        return None
    worst, claim = comparison.worst_row_error, "batch-invariant" if graph.batch_invariant else "not batch-invariant"
    detail = f"a row in a batch differs from the row alone by {worst:.1e} at most; the manifest says {claim}"
    metrics = {"worst_row_error": worst, "batch_invariant": graph.batch_invariant}
    report(Check(name, comparison.batch_invariant or not graph.batch_invariant, detail, metrics))
    return comparison


def _compare_line(comparisons: Sequence[Comparison], reference: Reference, line: Line) -> None:
    """Adds a line of the data to the comparisons of all graphs, with one answer of the reference."""
    where = f"line {line.number} of the data"
    expected: Answer | None = None
    for comparison in comparisons:
        if comparison.error is not None:
            continue
        failing = reference.name
        try:
            expected = expected or reference.answer(line.request)
            failing = comparison.served.name
            actual = expected if expected is not None and comparison.is_own else comparison.served.answer(line.request)
            comparison.add(line.request, actual, expected)
        except CallerError as error:
            raise DataError(f"{where} cannot be answered: {error}") from error
        except (EngineError, ParityError) as error:
            comparison.error = f"{failing} has no answer to {where}: {error}"


def _check_parity(comparison: Comparison) -> Check:
    """Checks the bounds of the graph's precision, which are those of the export."""
    served, name = comparison.served, f"parity {comparison.served.name}"
    if comparison.error is not None:
        return Check(name, False, comparison.error)
    try:
        comparison.check()
    except ParityError as error:
        return Check(name, False, str(error))
    updates, old = comparison.measured(), served.graph.validation
    new = old.model_copy(update=updates)
    attention = "" if new.attention_error is None else f", worst error of an attention weight {new.attention_error:.1e}"
    detail = (
        f"worst logit error {new.worst_abs_error:.1e} against {comparison.reference.name} (at export {old.worst_abs_error:.1e}), "
        f"{describe_agreement(new)}, longest row {new.longest} of {served.tokenizer.max_length} tokens{attention}"
    )
    return Check(name, True, detail, new.model_dump(mode="json", include=set(updates)))


def _check_lines(lines: Sequence[Line], ignored: Counter[str], task: ExportTask, *, needed: bool) -> Check:
    """Counts the lines with a correct answer, and names ignored keys; the check fails if it is `needed` and no line has an answer."""
    labeled = sum(line.gold is not None for line in lines)
    is_missing = bool(task.gold_keys) and not labeled and needed
    detail = plural(len(lines), "line")
    if task.gold_keys:
        detail += f", {labeled} with a right answer ({' or '.join(f'`{key}`' for key in task.gold_keys)})"
    if ignored:
        keys = [f"`{key[:SHOWN_CHARS]}` ({plural(count, 'line')})" for key, count in ignored.most_common(_SHOWN_KEYS)]
        detail += f"; ignored keys: {', '.join(keys)}"
    if is_missing:
        detail += "; add right answers, or give --min-agreement to compare only the graphs"
    return Check("data", False if is_missing else None, detail, {"inputs": len(lines), "labeled": labeled, "ignored_keys": dict(ignored)})


def _check_agreement(comparison: Comparison, minimum: float | None, report: Report) -> None:
    """Reports a graph's agreement with the reference on the data; what was not measured fails a minimum."""
    served, reference = comparison.served, comparison.reference
    name, metrics = f"agreement {served.name}", {"inputs": len(comparison.results) - reference.fixed}
    if comparison.expected:
        agreement = comparison.agreement(reference.fixed)
        passed, required = _reach(agreement.value, minimum)
        worst = "" if agreement.worst is None else f", the worst {agreement.worst:.4f}"
        detail = f"against {reference.name}: {summarize_agreement(agreement)}{worst}{required}"
        metrics |= {"reference": reference.name, "agreement": agreement.value} | agreement.model_dump(exclude={"value"})
        report(Check(name, passed, detail, metrics))
    elif not reference.name or served.graph.precision != "fp32":
        passed, required = _reach(None, minimum)
        detail = f"not compared, because there is no other fp32 graph to compare with; give --checkpoint{required}"
        report(Check(name, passed, detail, metrics))


def _check_metrics(comparison: Comparison, lines: Sequence[Line], minimums: Mapping[str, float], report: Report) -> None:
    """Reports a graph's metrics by the correct answers; what was not measured fails a minimum."""
    served, reference = comparison.served, comparison.reference
    golds = [line.gold for line in lines if line.gold is not None]

    def score(results: Sequence[Any]) -> Mapping[str, Score]:
        if not golds or not results:
            return {}
        labeled = [result for line, result in zip(lines, results[reference.fixed :], strict=True) if line.gold is not None]
        return served.task.score(golds, labeled, served.config)

    scores, expected = score(comparison.results), score(comparison.expected)
    for metric, (value, remark) in scores.items():
        passed, required = _reach(value, minimums.get(metric))
        metrics = {"graph": value} | ({"reference": expected[metric].value} if expected else {})
        compared = f" ({reference.name} {expected[metric].value:.4f})" if expected else ""
        detail = f"{value:.4f}{compared} on {len(golds)} labeled inputs{required}" + (f"; {remark}" if remark else "")
        report(Check(f"{metric} {served.name}", passed, detail, metrics))
    for metric in minimums.keys() - scores.keys():
        reason = f"this model has {', '.join(scores)}" if scores else "no line of the data has a right answer"
        passed, required = _reach(None, minimums[metric])
        report(Check(f"{metric} {served.name}", passed, f"not measured: {reason}{required}"))


def _reach(value: float | None, minimum: float | None) -> tuple[bool | None, str]:
    """Returns whether a value reaches a minimum, None if there is no minimum, and the minimum as text."""
    return (None, "") if minimum is None else (value is not None and value >= minimum, f"; at least {minimum} is required")


class Line(NamedTuple):
    """The number of a line of the data, from 1; its request; the correct answer as read by the task, or None."""

    number: int
    request: Any
    gold: Any


def read_lines(path: Path, task: ExportTask, config: ModelConfig) -> tuple[list[Line], Counter[str]]:
    """Reads JSON Lines: `{"inputs": ..., "parameters"?: ...}` as for the service, or the fields of one input, with the correct answer.

    Returns:
        The lines that are not empty, and the keys that are neither an input nor a correct answer of the task.

    Raises:
        DataError: The file cannot be read, or a line is invalid; the message has its number.
    """

    def on_line(row: Row, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            if row.error is not None:
                raise row.error
            return read(*arguments)
        except (BertServeError, ValueError) as error:
            raise DataError(f"`{path}` line {row.line}: {error}") from error

    try:
        rows = list(read_json_lines(path, ()))
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error}.") from error
    if not rows:
        raise DataError(f'`{path}` has no lines; give one JSON object per line, such as {{"inputs": "a text"}}.')
    own = [on_line(row, _parameters, row.values) for row in rows]
    golds = [on_line(row, task.read_gold, row.values, config) for row in rows]
    requests = [
        on_line(row, _request, task, row.values, parameters, config)
        for row, parameters in zip(rows, task.data_parameters(own, golds), strict=True)
    ]
    lines = [Line(row.line or 0, request, gold) for row, request, gold in zip(rows, requests, golds, strict=True)]
    return lines, Counter(key for row in rows for key in row.values if key not in {*INPUT_KEYS, *task.gold_keys})


def _parameters(document: Document) -> Document:
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError("`parameters` must be an object.")
    return parameters


def _request(task: ExportTask, document: Document, parameters: Document, config: ModelConfig) -> Any:
    inputs = read_input(document)
    if isinstance(inputs, list):
        raise ValueError("`inputs` is a list; give one input per line.")
    [request] = read_body(task, {"inputs": inputs, "parameters": parameters}).requests(config)
    return request
