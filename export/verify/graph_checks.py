"""A graph of a finished bundle, loaded on an available provider, and its checks against the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bertserve.export.validation.agreement import measure_row_errors
from bertserve.export.validation.samples import predict, read_request, sample_requests
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.backend.sessions import why_not
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.validation_policy import describe_agreement
from bertserve.service.check import CHECK_TOLERANCE, difference
from bertserve.service.errors import BertServeError, BundleError
from bertserve.service.providers import Provider
from bertserve.service.tasks.batch import TaskModel, first_batch
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BundleCheck:
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


@dataclass(eq=False)
class LoadedGraph:
    """A graph of a bundle, run by the provider `runs_on`; `tokenizer` and `engine` load it."""

    bundle: Bundle
    graph: GraphSpec
    runs_on: Provider

    @property
    def name(self) -> str:
        """Its provider and precision, such as `cpu/int8`."""
        return f"{self.graph.provider}/{self.graph.precision}"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer."""
        return Tokenizer(self.bundle.tokenizer_path, self.bundle.manifest.tokenizer)

    @cached_property
    def engine(self) -> OnnxEngine:
        """The graph in a session.

        Raises:
            ProviderError: This machine cannot run the graph; the message says what is missing.
        """
        spec = self.bundle.manifest.tokenizer
        path = self.bundle.path / self.graph.file
        return OnnxEngine(path, self.graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider=self.runs_on)

    def answer(self, request: Any) -> Any:
        """Returns the result of a request."""
        manifest = self.bundle.manifest
        return predict(manifest.task, request, self.tokenizer, self.engine, manifest)

    def load_error(self) -> str | None:
        """Loads tokenizer and graph; returns the error, or None."""
        try:
            _ = self.tokenizer, self.engine
        except BertServeError as error:
            return error.message
        return None


def choose_graphs(bundle: Bundle, providers: tuple[Provider, ...] | None, precisions: tuple[Precision, ...] | None) -> list[GraphSpec]:
    """Returns the requested graphs in the manifest's order; None requests all providers or precisions.

    Raises:
        BundleError: The bundle has no graph for a requested provider or precision; the message lists its graphs.
    """
    graphs = bundle.manifest.graphs
    requested = [(provider, None) for provider in providers or ()] + [(None, precision) for precision in precisions or ()]
    for provider, precision in requested:
        if not any(provider in (None, graph.provider) and precision in (None, graph.precision) for graph in graphs):
            raise BundleError(f"bundle `{bundle.manifest.name}` has no graph for `{provider or precision}`; it has {list_graphs(graphs)}.")
    selection = [
        graph
        for graph in graphs
        if (providers is None or graph.provider in providers) and (precisions is None or graph.precision in precisions)
    ]
    if not selection:
        raise BundleError(
            f"bundle `{bundle.manifest.name}` has no graph for {', '.join(providers or ())} in {', '.join(precisions or ())}; "
            f"it has {list_graphs(graphs)}."
        )
    return selection


def choose_provider(graph: GraphSpec, *, requested: bool) -> tuple[Provider, str | None]:
    """Returns the provider that runs a graph here; if it is not the graph's own, also the reason.

    As at export, the CPU replaces a provider that is not available, unless it was requested by name.
    """
    provider_error = None if requested else why_not(graph.provider)
    return (graph.provider, None) if provider_error is None else ("cpu", provider_error)


def find_fp32(bundle: Bundle, graphs: list[LoadedGraph]) -> LoadedGraph | None:
    """Returns the float32 graph for comparisons: one of `graphs`, or else another one that loads; None if there is none."""
    candidates = [loaded for loaded in graphs if loaded.graph.precision == "fp32"] or [
        LoadedGraph(bundle, graph, choose_provider(graph, requested=False)[0])
        for graph in bundle.manifest.graphs
        if graph.precision == "fp32"
    ]
    return next((loaded for loaded in candidates if loaded.load_error() is None), None)


def list_graphs(graphs: tuple[GraphSpec, ...]) -> str:
    """Returns the providers and precisions of graphs, for a message."""
    return ", ".join(f"{graph.provider}/{graph.precision}" for graph in graphs)


def check_engine(loaded: LoadedGraph, error: str | None, provider_error: str | None) -> BundleCheck:
    """Reports that a graph cannot run, or that it runs on the CPU instead of its provider."""
    name = f"engine {loaded.name}"
    if provider_error is None:
        return BundleCheck(name, False, error or "")
    reason = f"{loaded.graph.provider} is not available ({provider_error})"
    if error is None:
        return BundleCheck(name, None, f"checked on the CPU, because {reason}")
    return BundleCheck(name, None, f"not checked: {reason}, and the CPU cannot run it ({error})")


def check_validation_report(loaded: LoadedGraph) -> BundleCheck:
    """Checks that the manifest has a validation report for a graph, and reports it."""
    name, graph = f"validation {loaded.name}", loaded.graph
    validation = graph.evidence
    if not validation.samples:
        return BundleCheck(name, False, f"the manifest has none for {graph.file}; export the bundle again")
    error = (
        f", its precision changes the outputs by {validation.quantization_error:.3f} of their spread"
        if validation.quantization_error
        else ""
    )
    return BundleCheck(
        name,
        True,
        f"at export on {validation.provider}: worst logit error {validation.worst_abs_error:.1e}, {describe_agreement(validation)}{error}",
        validation.model_dump(mode="json"),
    )


def check_example(loaded: LoadedGraph) -> BundleCheck:
    """Runs the stored example. Its result is from one default graph, so graphs with other precisions may differ."""
    manifest, graph = loaded.bundle.manifest, loaded.graph
    defaults = sorted((entry for entry in manifest.graphs if entry.default), key=lambda entry: entry.provider != "cpu")
    stored = defaults[0].precision
    tolerance = max(CHECK_TOLERANCE[graph.precision], CHECK_TOLERANCE[stored])
    name = f"example {loaded.name}"
    try:
        body = read_request(manifest.task, manifest.example.request)
        result = body.answer([loaded.answer(request) for request in body.requests(manifest)])
    except BertServeError as error:
        return BundleCheck(name, False, error.message)
    reason = difference(manifest.example.result, result, tolerance)
    if reason is None:
        return BundleCheck(name, True, f"the stored result, scores within {tolerance}")
    if graph.precision != stored:
        return BundleCheck(name, None, f"not the stored result, which is that of {stored}: {reason}")
    return BundleCheck(name, False, reason)


def check_batches(loaded: LoadedGraph) -> BundleCheck:
    """Compares texts in a batch with the same texts run alone, and the result with the manifest's claim."""
    name, manifest = f"batches {loaded.name}", loaded.bundle.manifest
    task = TASKS[manifest.task].run
    try:
        prompts = manifest.embedding.prompts.values() if manifest.embedding else ()
        requests = sample_requests(manifest.task, manifest.tokenizer, prompts)
        model = TaskModel(loaded.tokenizer, manifest, Budget())
        encodings = [encoding for request in requests for encoding in first_batch(task, request, model).encodings]
        errors = measure_row_errors(loaded.engine, encodings, [loaded.engine.run([encoding])[0] for encoding in encodings])
    except BertServeError as error:
        return BundleCheck(name, False, error.message)
    claim = "batch-invariant" if loaded.graph.batch_invariant else "not batch-invariant"
    return BundleCheck(
        name,
        errors.is_rounding(loaded.graph.precision) or not loaded.graph.batch_invariant,
        f"a row in a batch differs from the row alone by {errors.worst:.1e} at most; the manifest says {claim}",
        {"worst_row_error": errors.worst, "batch_invariant": loaded.graph.batch_invariant},
    )
