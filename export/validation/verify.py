"""Checks a finished bundle: its files, and for each graph its stored example, its batches, and the comparison with a reference.

The reference is the checkpoint, or with data the float32 graph. Without a checkpoint, nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertserve.export.errors import DataError, ParityError
from bertserve.export.tasks.labeled_data import Line, read_lines, read_request
from bertserve.export.validation.agreement import measure_row_errors
from bertserve.export.validation.comparison import Comparison
from bertserve.export.validation.data import Check, check_lines, check_results
from bertserve.export.validation.samples import sample_requests
from bertserve.export.validation.served_graph import Answer, ServedGraph, open_engine
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.bundle.validation_policy import describe_agreement
from bertserve.service.check import CHECK_TOLERANCE, difference
from bertserve.service.engine.sessions import why_not
from bertserve.service.errors import BertServeError, BundleError, CallerError, EngineError, plural
from bertserve.service.providers import Provider
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class VerifySpec:
    """The flags of the command; metrics have their full names, and `module` says that `checkpoint` is a trusted `FILE:FACTORY`."""

    bundle: Path
    checkpoint: str | None = None
    data: Path | None = None
    min_agreement: float | None = None
    providers: tuple[Provider, ...] | None = None
    precisions: tuple[Precision, ...] | None = None
    min_metrics: Mapping[str, float] = field(default_factory=dict)
    revision: str | None = None
    module: bool = False

    @property
    def needs_runs(self) -> bool:
        """Whether a graph that does not run here fails, because a comparison or a minimum was requested."""
        return self.checkpoint is not None or self.min_agreement is not None or bool(self.min_metrics)


@dataclass(frozen=True)
class Baseline:
    """The reference for graphs.

    Attributes:
        name: Its name in the report.
        answer: A request -> its outputs, with the result if it is a graph's.
        samples: The fixed requests to compare.
        graph: Its graph; None for the checkpoint.
        attention_error: A graph -> its largest error of an attention weight, or None.
    """

    name: str
    answer: Callable[[Any], Answer]
    samples: Sequence[Any]
    graph: ServedGraph | None = None
    attention_error: Callable[[ServedGraph], float | None] = lambda served: None


def verify(spec: VerifySpec) -> Iterator[Check]:
    """Runs the checks one by one on request; checks that depend on a failed one are left out.

    Raises:
        DataError: The data cannot be read, or a line cannot be answered.
        CheckpointError: The checkpoint cannot be loaded.
        MissingPackageError: The checkpoint is a LoRA adapter, and peft is not installed.
    """
    try:
        bundle = load_bundle(spec.bundle.resolve())
    except BertServeError as error:
        yield Check("files", False, error.message)
        return
    manifest = bundle.manifest
    lines = [] if spec.data is None else read_lines(spec.data, manifest.task, manifest)
    yield Check("files", True, f"the digests of the tokenizer and {plural(len(manifest.graphs), 'graph')} match the manifest")
    if lines:
        yield check_lines(lines, manifest.task, needed=spec.min_agreement is None and spec.checkpoint is None)
    try:
        graphs = choose_graphs(manifest, spec.providers, spec.precisions)
    except BertServeError as error:
        yield Check("graphs", False, error.message)
        return
    usable = []
    for graph in graphs:
        served = yield from _check_graph(bundle, graph, spec)
        usable += [] if served is None else [served]
    if not usable:
        return
    baseline = None
    if spec.checkpoint is not None:
        # importing torch and transformers takes seconds, and the other checks need neither
        from bertserve.export.validation.remeasure import check_checkpoint

        baseline = yield from check_checkpoint(bundle, spec)
    elif lines:
        baseline = _fp32_baseline(bundle, usable)
    yield from _compare(usable, baseline, lines, spec)


def choose_graphs(manifest: Manifest, providers: tuple[Provider, ...] | None, precisions: tuple[Precision, ...] | None) -> list[GraphSpec]:
    """Returns the requested graphs in the manifest's order; None requests all providers or precisions.

    Raises:
        BundleError: The bundle lacks a graph of a requested provider or precision; the message lists its graphs.
    """
    chosen = [
        graph
        for graph in manifest.graphs
        if (providers is None or graph.provider in providers) and (precisions is None or graph.precision in precisions)
    ]
    found = {name for graph in chosen for name in (graph.provider, graph.precision)}
    missing = [name for name in (*(providers or ()), *(precisions or ())) if name not in found]
    if missing:
        existing = ", ".join(f"{graph.provider}/{graph.precision}" for graph in manifest.graphs)
        requested = " in ".join(", ".join(names) for names in (providers, precisions) if names)
        raise BundleError(f"bundle `{manifest.name}` has no graph for {requested} (`{missing[0]}`); it has {existing}.")
    return chosen


def _check_graph(bundle: Bundle, graph: GraphSpec, spec: VerifySpec) -> Generator[Check, None, ServedGraph | None]:
    """Checks a graph against the manifest; returns it if this machine can run it.

    As at export, the CPU replaces a provider that is not available, unless it was requested by name.
    """
    yield _check_report(graph)
    missing = None if spec.providers is not None else why_not(graph.provider)
    name = f"engine {graph.provider}/{graph.precision}"
    try:
        served = _open(bundle, graph, graph.provider if missing is None else "cpu")
    except BertServeError as error:
        reason = error.message if missing is None else f"not checked: {missing} The CPU cannot run it either: {error.message}"
        yield Check(name, False if missing is None or spec.needs_runs else None, reason)
        return None
    if missing is not None:
        yield Check(name, None, f"checked on the CPU, because {graph.provider} is not available ({missing})")
    yield _check_example(served, bundle.manifest)
    yield _check_batches(served, bundle.manifest)
    return served


def _open(bundle: Bundle, graph: GraphSpec, provider: Provider) -> ServedGraph:
    manifest = bundle.manifest
    engine = open_engine(bundle.path, graph, manifest.tokenizer, provider)
    return ServedGraph(graph, engine, Tokenizer(bundle.tokenizer_path, manifest.tokenizer), manifest.task, manifest)


def _fp32_baseline(bundle: Bundle, graphs: Sequence[ServedGraph]) -> Baseline | None:
    """Returns a float32 graph as the reference: a checked one, or another one that loads; None if it is the only graph to check."""
    fp32 = next((served for served in graphs if served.graph.precision == "fp32"), None)
    others = (graph for graph in bundle.manifest.graphs if graph.precision == "fp32" and fp32 is None)
    for graph in others:
        try:
            fp32 = _open(bundle, graph, graph.provider if why_not(graph.provider) is None else "cpu")
            break
        except BertServeError:
            continue
    if fp32 is None or list(graphs) == [fp32]:
        return None
    return Baseline("the fp32 graph", fp32.answer, sample_requests(fp32.task, bundle.manifest.tokenizer, fp32.config), fp32)


def _check_report(graph: GraphSpec) -> Check:
    """Checks that the manifest has a validation report for a graph, and reports it."""
    name, report = f"validation {graph.provider}/{graph.precision}", graph.evidence
    if not report.samples:
        return Check(name, False, f"the manifest has none for {graph.file}; export the bundle again")
    error = f", its precision changes the outputs by {report.quantization_error:.3f} of their spread" if report.quantization_error else ""
    detail = f"at export on {report.provider}: worst logit error {report.worst_abs_error:.1e}, {describe_agreement(report)}{error}"
    return Check(name, True, detail, report.model_dump(mode="json"))


def _check_example(served: ServedGraph, manifest: Manifest) -> Check:
    """Runs the stored example. Its result is from one default graph, so graphs with other precisions may differ."""
    precision, name = served.graph.precision, f"example {served.name}"
    stored = min((graph for graph in manifest.graphs if graph.default), key=lambda graph: graph.provider != "cpu").precision
    tolerance = max(CHECK_TOLERANCE[precision], CHECK_TOLERANCE[stored])
    try:
        body = read_request(manifest.task, manifest.example.request)
        result = body.answer([served.answer(request).result for request in body.requests(manifest)])
    except BertServeError as error:
        return Check(name, False, error.message)
    reason = difference(manifest.example.result, result, tolerance)
    if reason is None:
        return Check(name, True, f"the stored result, scores within {tolerance}")
    if precision != stored:
        return Check(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return Check(name, False, reason)


def _check_batches(served: ServedGraph, manifest: Manifest) -> Check:
    """Compares texts in a batch with the same texts run alone, and the result with the manifest's claim."""
    name, graph = f"batches {served.name}", served.graph
    try:
        answers = [served.answer(request) for request in sample_requests(manifest.task, manifest.tokenizer, manifest)]
        encodings, rows = ([item for answer in answers for item in getattr(answer, part)] for part in ("encodings", "rows"))
        errors = measure_row_errors(served.engine, encodings, rows)
    except BertServeError as error:
        return Check(name, False, error.message)
    claim = "batch-invariant" if graph.batch_invariant else "not batch-invariant"
    return Check(
        name,
        errors.is_rounding(graph.precision) or not graph.batch_invariant,
        f"a row in a batch differs from the row alone by {errors.worst:.1e} at most; the manifest says {claim}",
        {"worst_row_error": errors.worst, "batch_invariant": graph.batch_invariant},
    )


def _compare(graphs: Sequence[ServedGraph], baseline: Baseline | None, lines: Sequence[Line], spec: VerifySpec) -> Iterator[Check]:
    """Compares each graph with the baseline on samples and data, and measures it on right answers.

    Raises:
        DataError: The task cannot answer a line.
    """
    comparisons = [Comparison(served) for served in graphs]
    for request in baseline.samples if baseline else ():
        _add(comparisons, baseline, request, "a sample", fixed=True)
    for line in lines:
        try:
            _add(comparisons, baseline, line.request, f"line {line.number} of the data", fixed=False)
        except CallerError as error:
            raise DataError(f"line {line.number} of the data cannot be answered: {error}") from error
    for comparison in comparisons:
        served = comparison.served
        if comparison.error is not None:
            yield Check(f"parity {served.name}", False, comparison.error)
            continue
        if baseline is not None and _differs(served, baseline):
            yield _check_parity(comparison, baseline)
        if lines:
            yield from check_results(comparison, lines, None if baseline is None else baseline.name, spec.min_agreement, spec.min_metrics)


def _add(comparisons: Sequence[Comparison], baseline: Baseline | None, request: Any, where: str, *, fixed: bool) -> None:
    """Adds a request to the comparisons of all graphs, with one answer of the baseline."""
    reference = None
    if baseline is not None:
        try:
            reference = baseline.answer(request)
        except EngineError as error:
            for comparison in comparisons:
                comparison.error = comparison.error or f"{baseline.name} has no answer to {where}: {error.message}"
    for comparison in comparisons:
        served = comparison.served
        if comparison.error is not None:
            continue
        try:
            answer = reference if reference and baseline and baseline.graph is served else served.answer(request)
            expected = reference if baseline and _differs(served, baseline) else None
            comparison.add(request, answer, expected, fixed=fixed)
        except EngineError as error:
            comparison.error = f"{served.name} has no answer to {where}: {error.message}"
        except ParityError as error:
            comparison.error = str(error)


def _differs(served: ServedGraph, baseline: Baseline) -> bool:
    """Returns whether a graph can differ from the baseline: a CPU runs one precision, so TensorRT's graphs, which share a file, cannot."""
    if baseline.graph is None:
        return True
    return baseline.graph is not served and (baseline.graph.graph.file != served.graph.file or why_not(served.graph.provider) is None)


def _check_parity(comparison: Comparison, baseline: Baseline) -> Check:
    """Checks the bounds of the graph's precision, which are those of the export."""
    served = comparison.served
    old, name = served.graph.evidence, f"parity {served.name}"
    try:
        comparison.check()
        updates = comparison.measured() | {"attention_error": baseline.attention_error(served)}
    except (BertServeError, ParityError) as error:
        return Check(name, False, str(error))
    report = old.model_copy(update=updates)
    detail = (
        f"worst logit error {report.worst_abs_error:.1e} against {baseline.name} (at export {old.worst_abs_error:.1e}), "
        f"{describe_agreement(report)}, longest row {report.longest} of {served.tokenizer.max_length} tokens"
    )
    if report.attention_error is not None:
        detail += f", worst error of an attention weight {report.attention_error:.1e}"
    return Check(name, True, detail, report.model_dump(mode="json", include=set(updates)))
