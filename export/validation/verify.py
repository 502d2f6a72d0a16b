"""Checks a finished bundle: its files, and for each graph its stored example, its batches, and the comparison with a reference.

The reference is the checkpoint, or with data the float32 graph. Without a checkpoint, nothing here needs torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertserve.export.errors import ExportError, UsageError
from bertserve.export.input_fields import INPUT_KEYS
from bertserve.export.tasks import EXPORT_TASKS
from bertserve.export.validation.comparison import Comparison, Reference, predict_sample
from bertserve.export.validation.labeled_data import LabeledRow, read_data
from bertserve.export.validation.served_graph import ModelAnswer, ServedGraph, model_sample_inputs, open_graph
from bertserve.service.bundle.example import difference, example_precision, example_tolerance
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.validation_policy import describe_agreement, summarize_agreement
from bertserve.service.engine.sessions import unavailable_reason
from bertserve.service.errors import BertServeError, CallerError, EngineError
from bertserve.service.messages import SHOWN_CHARS, did_you_mean, plural
from bertserve.service.providers import Provider
from bertserve.service.text.tokenizer import Tokenizer

_STATUS = {True: "ok", False: "FAILED", None: "-"}


@dataclass(frozen=True)
class VerifyOptions:
    """The flags of the command; metrics have their full names. With `module`, the checkpoint is a trusted `FILE:FACTORY`."""

    bundle_folder: Path
    checkpoint: str | None = None
    revision: str | None = None
    module: bool = False
    data: Path | None = None
    min_agreement: float | None = None
    min_metrics: Mapping[str, float] = field(default_factory=dict)
    providers: tuple[Provider, ...] | None = None
    precisions: tuple[Precision, ...] | None = None
    update: bool = False
    int8_validation: Path | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The checks of a bundle in their order, as JSON values. They are printed when they are done, unless the whole report is JSON."""

    as_json: bool
    checks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, passed: bool | None, detail: str, metrics: Mapping[str, Any] | None = None) -> None:
        """Adds a check with its result as text and as data; `passed` is None for a measurement without a minimum."""
        self.checks.append({"name": name, "passed": passed, "detail": detail, "metrics": dict(metrics or {})})
        if not self.as_json:
            print(f"{_STATUS[passed]:<8}{name:<24} {detail}", flush=True)

    def add_value(
        self, name: str, value: float | None, minimum: float | None, detail: str, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Adds a measured value, which must reach the minimum, if any; None was not measured, and reaches no minimum."""
        passed = None if minimum is None else value is not None and value >= minimum
        self.add(name, passed, detail if minimum is None else f"{detail}; at least {minimum} is required", metrics)

    @contextmanager
    def record_failure(self, name: str) -> Iterator[None]:
        """Adds a failed check for an error of the block."""
        try:
            yield
        except (BertServeError, ExportError, OSError) as error:
            self.add(name, False, str(error))

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check["passed"] is not False for check in self.checks)


def verify(options: VerifyOptions, report: VerifyReport) -> None:
    """Adds each check to the report; checks that depend on a failed one are left out.

    Raises:
        ExportError: The data or the checkpoint cannot be used, or the task cannot answer a line.
        OSError: A file of the checkpoint cannot be read.
    """
    try:
        bundle = load_bundle(options.bundle_folder.resolve())
        tokenizer = Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer)
    except BertServeError as error:
        report.add("files", False, error.message)
        return
    graphs = bundle.manifest.graphs
    report.add("files", True, f"the digests of the tokenizer and {plural(len(graphs), 'graph')} match the manifest")
    rows = [] if options.data is None else _read_data(options.data, options, bundle.manifest, report)
    chosen_graphs = [graph for graph in graphs if options.providers is None or graph.provider in options.providers]
    chosen_graphs = [graph for graph in chosen_graphs if options.precisions is None or graph.precision in options.precisions]
    chosen_names = {name for graph in chosen_graphs for name in (graph.provider, graph.precision)}
    if missing := {*(options.providers or ()), *(options.precisions or ())} - chosen_names:
        existing = ", ".join(graph.name for graph in graphs)
        report.add("graphs", False, f"the bundle has no such graph for {', '.join(sorted(missing))}; it has {existing}")
        return
    usable_graphs = [served for graph in chosen_graphs if (served := _open(bundle, graph, tokenizer, options, report)) is not None]
    if not usable_graphs:
        report.add("graphs", False, "no graph can run on this machine")
        return
    if options.checkpoint is None:
        reference = _choose_reference(bundle, tokenizer, usable_graphs, on_data=bool(rows))
        _compare(usable_graphs, reference, rows, options, report)
        return
    # importing torch and transformers takes seconds, and the other checks need neither
    from bertserve.export.validation.checkpoint_check import load_bundle_checkpoint, update
    from bertserve.export.validation.reference import sample_reference

    checkpoint = load_bundle_checkpoint(bundle.manifest, options, report)
    _compare(usable_graphs, sample_reference(checkpoint), rows, options, report)
    if options.update and report.passed:
        with report.record_failure("update"):
            update(bundle, checkpoint, tokenizer, options.int8_validation)
            report.add("update", True, "updated the validation reports and flops of the manifest, and the card")


def _compare(
    graphs: Sequence[ServedGraph], reference: Reference, rows: Sequence[LabeledRow], options: VerifyOptions, report: VerifyReport
) -> None:
    """Compares graphs with a reference on samples, and on each line of the data."""
    comparisons = [comparison for served in graphs if (comparison := _compare_samples(served, reference, report)) is not None]
    failures_by_line = {row.line: _compare_row(comparisons, reference, row) for row in rows}
    for comparison in comparisons:
        if reasons := {line: failures[comparison] for line, failures in failures_by_line.items() if comparison in failures}:
            others = f" {plural(len(reasons) - 1, 'other line')} failed too." if len(reasons) > 1 else ""
            metrics = {"inputs": len(rows), "unanswered_lines": [*reasons]}
            report.add(f"parity {comparison.served.graph.name}", False, next(iter(reasons.values())) + others, metrics)
            continue
        if comparison.expected:
            _check_parity(comparison, report)
        if rows:
            _check_agreement(comparison, len(rows), options, report)
            _check_metrics(comparison, rows, options, report)


def _open(bundle: Bundle, graph: GraphSpec, tokenizer: Tokenizer, options: VerifyOptions, report: VerifyReport) -> ServedGraph | None:
    """Checks a graph's validation report and stored example; returns the graph if this machine can run it.

    As at export, the CPU replaces a provider that is not available, unless it was requested by name.
    """
    name, validation, manifest = graph.name, graph.validation, bundle.manifest
    detail = f"at export on {validation.provider}: worst output error {validation.worst_abs_error:.1e}, {describe_agreement(validation)}"
    if validation.quantization_error:
        detail += f", its precision changes the outputs by {validation.quantization_error:.3f} of their standard deviation"
    report.add(f"validation {name}", validation.samples > 0, detail, validation.model_dump(mode="json"))
    missing = None if options.providers is not None else unavailable_reason(graph.provider)
    try:
        served = open_graph(bundle.path, graph, tokenizer, manifest, graph.provider if missing is None else "cpu")
    except BertServeError as error:
        reason = error.message if missing is None else f"not checked: {missing} The CPU cannot run it either: {error.message}"
        # a comparison or a minimum that was requested needs all graphs
        needed = missing is None or options.checkpoint is not None or options.min_agreement is not None or options.min_metrics
        report.add(f"engine {name}", False if needed else None, reason)
        return None
    if missing is not None:
        report.add(f"engine {name}", None, f"checked on the CPU, because {graph.provider} is not available ({missing})")
    _check_example(served, manifest, report)
    return served


def _check_example(served: ServedGraph, manifest: Manifest, report: VerifyReport) -> None:
    """Runs the stored example. Its result is from one default graph, so graphs with other precisions can differ."""
    name, stored = f"example {served.graph.name}", example_precision(manifest.graphs)
    tolerance = example_tolerance(served.graph, manifest.graphs)
    with report.record_failure(name):
        reason = difference(manifest.example.result, served.predict_body(manifest.example.request), tolerance)
        if reason is None:
            report.add(name, True, f"the stored result, scores within {tolerance}")
        elif served.graph.precision != stored:
            report.add(name, None, f"differs from the stored result of the {stored} graph: {reason}")
        else:
            report.add(name, False, reason)


def _choose_reference(bundle: Bundle, tokenizer: Tokenizer, graphs: Sequence[ServedGraph], *, on_data: bool) -> Reference:
    """Returns the float32 graph for data, unless it is the only checked graph; otherwise a reference without answers."""
    samples = model_sample_inputs(bundle.manifest)
    fp32 = _find_fp32(bundle, tokenizer, graphs) if on_data else None
    if fp32 is None or list(graphs) == [fp32]:
        return Reference("", samples, [None] * len(samples), len(samples))
    # a CPU runs one precision, so TensorRT's graphs, which share a file, have the same answers
    equal_graphs = [served for served in graphs if served is fp32 or (served.graph.file == fp32.graph.file and served.provider == "cpu")]
    predictions = [predict_sample(fp32, input_) for input_ in samples]
    return Reference("the fp32 graph", samples, predictions, len(samples), predict=fp32.predict, graphs=equal_graphs)


def _find_fp32(bundle: Bundle, tokenizer: Tokenizer, graphs: Sequence[ServedGraph]) -> ServedGraph | None:
    """Returns the float32 graph among the checked ones, otherwise the first of the bundle that this machine can run."""
    if checked := [served for served in graphs if served.graph.precision == "fp32"]:
        return checked[0]
    for graph in bundle.manifest.graphs:
        if graph.precision == "fp32":
            with suppress(BertServeError):
                return open_graph(bundle.path, graph, tokenizer, bundle.manifest)
    return None


def _compare_samples(served: ServedGraph, reference: Reference, report: VerifyReport) -> Comparison | None:
    """Compares a graph with the reference on samples, and samples in a batch with the same samples one by one."""
    name, graph = f"batches {served.graph.name}", served.graph
    with report.record_failure(name):
        comparison = Comparison(served, reference)
        worst = comparison.worst_batch_error
        claim = "batch-invariant" if graph.batch_invariant else "not batch-invariant"
        detail = f"a row in a batch differs from the row alone by {worst:.1e} at most; the manifest says {claim}"
        metrics = {"worst_batch_error": worst, "batch_invariant": graph.batch_invariant}
        report.add(name, comparison.batch_invariant or not graph.batch_invariant, detail, metrics)
        return comparison
    return None


def _compare_row(comparisons: Sequence[Comparison], reference: Reference, row: LabeledRow) -> dict[Comparison, str]:
    """Adds a line of the data to all comparisons, with one answer of the reference; returns the reason of each comparison without one."""
    where, failures = f"line {row.line} of the data", dict[Comparison, str]()
    expected: ModelAnswer | None = None
    for comparison in comparisons:
        failing = reference.name
        try:
            expected = expected or reference.predict(row.input)
            failing = comparison.served.graph.name
            actual = expected if comparison.is_reference and expected is not None else comparison.served.predict(row.input)
            comparison.add(row.input, actual, expected)
        except CallerError as error:
            raise UsageError(f"{where} cannot be answered: {error}") from error
        except (EngineError, ExportError) as error:
            failures[comparison] = f"{failing} has no answer to {where}: {error}"
    return failures


def _check_parity(comparison: Comparison, report: VerifyReport) -> None:
    served, name = comparison.served, f"parity {comparison.served.graph.name}"
    with report.record_failure(name):
        comparison.check()
        updates, old = comparison.measured(), served.graph.validation
        new = old.model_copy(update=updates)
        detail = (
            f"worst output error {new.worst_abs_error:.1e} against {comparison.reference.name} (at export {old.worst_abs_error:.1e}), "
            f"{describe_agreement(new)}, longest row {new.longest} of {served.tokenizer.spec.max_length} tokens"
        )
        if new.attention_error is not None:
            detail += f", worst error of an attention weight {new.attention_error:.1e}"
        report.add(name, True, detail, new.model_dump(mode="json", include=set(updates)))


def _check_agreement(comparison: Comparison, inputs: int, options: VerifyOptions, report: VerifyReport) -> None:
    """Reports a graph's agreement with the reference on the data."""
    served, reference = comparison.served, comparison.reference
    name, metrics = f"agreement {served.graph.name}", dict[str, Any](inputs=inputs)
    if comparison.expected:
        agreement = comparison.agreement(reference.fixed_count)
        worst = "" if agreement.worst is None else f", the worst {agreement.worst:.4f}"
        detail = f"against {reference.name}: {summarize_agreement(agreement)}{worst}"
        metrics |= {"reference": reference.name, "agreement": agreement.value} | agreement.model_dump(exclude={"value"})
        if agreement.measure == "spearman":
            metrics["worst_difference"] = comparison.worst_difference(reference.fixed_count)
            detail += f"; values differ by {metrics['worst_difference']:.1e} at most"
        report.add_value(name, agreement.value, options.min_agreement, detail, metrics)
    elif not reference.name or served.graph.precision != "fp32":
        detail = "not compared, because there is no other fp32 graph to compare with; give --checkpoint"
        report.add_value(name, None, options.min_agreement, detail, metrics)


def _check_metrics(comparison: Comparison, rows: Sequence[LabeledRow], options: VerifyOptions, report: VerifyReport) -> None:
    """Reports the metrics of a graph and of the reference by the correct answers in the data."""
    served, reference = comparison.served, comparison.reference
    labeled = [(i, row.gold) for i, row in enumerate(rows, reference.fixed_count) if row.gold is not None]
    golds = [gold for _, gold in labeled]
    actual, expected = (
        served.task.compute_metrics(golds, [results[i] for i, _ in labeled], served.config) if labeled and results else {}
        for results in (comparison.results, comparison.expected)
    )
    raw = "raw scores of " if served.graph.calibration is not None else ""
    for metric, (value, remark) in actual.items():
        values, compared = {"graph": value}, ""
        if expected:
            values["reference"] = expected[metric][0]
            compared = f" ({reference.name} {values['reference']:.4f})"
        detail = f"{value:.4f}{compared} on {raw}{len(labeled)} labeled inputs" + (f"; {remark}" if remark else "")
        report.add_value(f"{metric} {served.graph.name}", value, options.min_metrics.get(metric), detail, values)
    reason = f"this model has {', '.join(actual)}" if actual else "no line of the data has a correct answer"
    for metric, minimum in options.min_metrics.items():
        if metric not in actual:
            report.add_value(f"{metric} {served.graph.name}", None, minimum, f"not measured: {reason}")


def _read_data(path: Path, options: VerifyOptions, manifest: Manifest, report: VerifyReport) -> list[LabeledRow]:
    """Reads the data, as `read_data` does, and reports the numbers of its lines and of the correct answers, and the keys without a meaning.

    The number of lines with a correct answer must not be 0 if only metrics are measured.
    """
    task = EXPORT_TASKS[manifest.task]
    rows = read_data(path, manifest)
    labeled = sum(row.gold is not None for row in rows)
    detail, passed = plural(len(rows), "line"), None
    if task.gold_keys:
        detail += f", {labeled} with a correct answer ({' or '.join(f'`{key}`' for key in task.gold_keys)})"
    ignored = Counter(key for row in rows for key in row.values if key not in {*INPUT_KEYS, *task.gold_keys})
    if ignored:
        hints = {key: f", {hint}" for key in ignored if labeled < len(rows) and (hint := did_you_mean(key, task.gold_keys))}
        keys = [f"`{key[:SHOWN_CHARS]}` ({plural(count, 'line')}{hints.get(key, '')})" for key, count in ignored.most_common(10)]
        detail += f"; ignored keys: {', '.join(keys)}"
    if task.gold_keys and not labeled and options.min_agreement is None and options.checkpoint is None:
        detail, passed = f"{detail}; add correct answers, or give --min-agreement to compare only the graphs", False
    report.add("data", passed, detail, {"inputs": len(rows), "labeled": labeled, "ignored_keys": dict(ignored)})
    return rows
