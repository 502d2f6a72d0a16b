"""Checks a finished bundle: its files, and for each graph its stored example, its batches, and the comparison with a reference.

The reference is the checkpoint, or with data the float32 graph. Without a checkpoint, nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bertserve.export.errors import DataError, ParityError
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.validation.agreement import measure_row_errors
from bertserve.export.validation.comparison import Comparison, Reference, compare
from bertserve.export.validation.data import Check, Line, check_agreement, check_lines, check_metrics, read_lines
from bertserve.export.validation.samples import sample_requests
from bertserve.export.validation.served_graph import ServedGraph, open_graph
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


def verify(spec: VerifySpec) -> Iterator[Check]:
    """Runs the checks one by one on request; checks that depend on a failed one are left out.

    Raises:
        DataError: The data cannot be read, or a line cannot be answered.
        CheckpointError: The checkpoint cannot be loaded.
        MissingPackageError: The checkpoint is a LoRA adapter, and peft is not installed.
        ParityError: PyTorch cannot run the samples.
    """
    try:
        bundle = load_bundle(spec.bundle.resolve())
    except BertServeError as error:
        yield Check("files", False, error.message)
        return
    manifest = bundle.manifest
    task = TASKS[manifest.task]
    lines = [] if spec.data is None else read_lines(spec.data, task, manifest)
    yield Check("files", True, f"the digests of the tokenizer and {plural(len(manifest.graphs), 'graph')} match the manifest")
    if lines:
        yield check_lines(lines, task, needed=spec.min_agreement is None and spec.checkpoint is None)
    try:
        graphs = choose_graphs(manifest, spec.providers, spec.precisions)
    except BundleError as error:
        yield Check("graphs", False, error.message)
        return
    usable: list[ServedGraph] = []
    for graph in graphs:
        usable += yield from _open(bundle, graph, spec)
    if not usable:
        return
    reference = yield from _choose_reference(bundle, usable, spec)
    comparisons: list[Comparison] = []
    for served in usable:
        comparisons += yield from _compare_samples(served, reference)
    for line in lines:
        try:
            _compare_line(comparisons, reference, line)
        except CallerError as error:
            raise DataError(f"line {line.number} of the data cannot be answered: {error}") from error
    for comparison in comparisons:
        yield from _check_comparison(comparison, reference, lines, spec)


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


def _open(bundle: Bundle, graph: GraphSpec, spec: VerifySpec) -> Generator[Check, None, list[ServedGraph]]:
    """Checks a graph's validation report and stored example; returns the graph if this machine can run it.

    As at export, the CPU replaces a provider that is not available, unless it was requested by name.
    """
    yield _check_report(graph)
    missing = None if spec.providers is not None else why_not(graph.provider)
    name = f"engine {graph.provider}/{graph.precision}"
    try:
        served = _serve(bundle, graph, graph.provider if missing is None else "cpu")
    except BertServeError as error:
        reason = error.message if missing is None else f"not checked: {missing} The CPU cannot run it either: {error.message}"
        yield Check(name, False if missing is None or spec.needs_runs else None, reason)
        return []
    if missing is not None:
        yield Check(name, None, f"checked on the CPU, because {graph.provider} is not available ({missing})")
    yield _check_example(served, bundle.manifest)
    return [served]


def _serve(bundle: Bundle, graph: GraphSpec, provider: Provider) -> ServedGraph:
    manifest = bundle.manifest
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    return open_graph(bundle.path, graph, manifest.tokenizer, tokenizer, manifest.task, manifest, provider)


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
        reason = difference(manifest.example.result, served.answer_body(manifest.example.request), tolerance)
    except BertServeError as error:
        return Check(name, False, error.message)
    if reason is None:
        return Check(name, True, f"the stored result, scores within {tolerance}")
    if precision != stored:
        return Check(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return Check(name, False, reason)


def _choose_reference(bundle: Bundle, graphs: Sequence[ServedGraph], spec: VerifySpec) -> Generator[Check, None, Reference]:
    """Returns the checkpoint, or for data a float32 graph: a checked one, or another one that loads.

    There is no reference if this graph is the only one to check.
    """
    if spec.checkpoint is not None:
        # importing torch and transformers takes seconds, and the other checks need neither
        from bertserve.export.validation.pytorch import check_checkpoint

        return (yield from check_checkpoint(bundle, spec))
    manifest = bundle.manifest
    samples = sample_requests(manifest.task, manifest.tokenizer, manifest)
    nothing = Reference("", samples, [None] * len(samples), len(samples))
    fp32 = None if spec.data is None else next((served for served in graphs if served.graph.precision == "fp32"), None)
    for graph in manifest.graphs if spec.data is not None and fp32 is None else ():
        if graph.precision == "fp32" and fp32 is None:
            with suppress(BertServeError):
                fp32 = _serve(bundle, graph, graph.provider if why_not(graph.provider) is None else "cpu")
    if fp32 is None or list(graphs) == [fp32]:
        return nothing
    try:
        answers = [fp32.answer(request) for request in samples]
    except EngineError as error:
        yield Check("reference", False, f"the fp32 graph has no answer to a sample: {error.message}")
        return nothing
    # a CPU runs one precision, so TensorRT's graphs, which share a file, have the same answers
    same = [served for served in graphs if served.graph.file == fp32.graph.file and why_not(served.graph.provider) is not None]
    return Reference("the fp32 graph", samples, answers, len(samples), answer=fp32.answer, own=[fp32, *same])


def _compare_samples(served: ServedGraph, reference: Reference) -> Generator[Check, None, list[Comparison]]:
    """Compares a graph with the reference on samples, and samples in a batch with the same samples run alone."""
    name, graph = f"batches {served.name}", served.graph
    try:
        comparison = compare(served, reference)
        errors = measure_row_errors(served.engine, comparison.encodings, comparison.rows)
    except (BertServeError, ParityError) as error:
        yield Check(name, False, str(error))
        return []
    claim = "batch-invariant" if graph.batch_invariant else "not batch-invariant"
    yield Check(
        name,
        errors.is_rounding(graph.precision) or not graph.batch_invariant,
        f"a row in a batch differs from the row alone by {errors.worst:.1e} at most; the manifest says {claim}",
        {"worst_row_error": errors.worst, "batch_invariant": graph.batch_invariant},
    )
    return [comparison]


def _compare_line(comparisons: Sequence[Comparison], reference: Reference, line: Line) -> None:
    """Adds a line of the data to the comparisons of all graphs, with one answer of the reference.

    Raises:
        CallerError: The task cannot answer the line.
    """
    where, request = f"line {line.number} of the data", line.request
    active = [comparison for comparison in comparisons if comparison.error is None]
    try:
        expected = reference.answer(request)
    except EngineError as error:
        for comparison in active:
            comparison.error = f"{reference.name} has no answer to {where}: {error.message}"
        return
    for comparison in active:
        served = comparison.served
        try:
            if expected is not None and served in reference.own:
                comparison.add(request, expected, None, fixed=False)
            else:
                comparison.add(request, served.answer(request), expected, fixed=False)
        except EngineError as error:
            comparison.error = f"{served.name} has no answer to {where}: {error.message}"
        except ParityError as error:
            comparison.error = str(error)


def _check_comparison(comparison: Comparison, reference: Reference, lines: Sequence[Line], spec: VerifySpec) -> Iterator[Check]:
    """Checks the bounds of the graph's precision, which are those of the export, and reports its results for data."""
    if comparison.error is not None:
        yield Check(f"parity {comparison.served.name}", False, comparison.error)
        return
    if reference.name and comparison.served not in reference.own:
        yield _check_parity(comparison, reference)
    if lines:
        yield from check_agreement(comparison, reference.name, spec.min_agreement)
        yield from check_metrics(comparison, lines, reference.name, spec.min_metrics)


def _check_parity(comparison: Comparison, reference: Reference) -> Check:
    served = comparison.served
    old, name = served.graph.evidence, f"parity {served.name}"
    try:
        comparison.check()
        updates = comparison.measured() | {"attention_error": reference.attention_error(served)}
    except (BertServeError, ParityError) as error:
        return Check(name, False, str(error))
    report = old.model_copy(update=updates)
    detail = (
        f"worst logit error {report.worst_abs_error:.1e} against {reference.name} (at export {old.worst_abs_error:.1e}), "
        f"{describe_agreement(report)}, longest row {report.longest} of {served.tokenizer.max_length} tokens"
    )
    if report.attention_error is not None:
        detail += f", worst error of an attention weight {report.attention_error:.1e}"
    return Check(name, True, detail, report.model_dump(mode="json", include=set(updates)))
