"""A graph of a finished bundle, loaded on a provider that this machine has, the choice of both, and a check of it: a line of the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bertserve.export.evidence.predict import predict
from bertserve.service.backend.onnx_engine import OnnxEngine
from bertserve.service.backend.sessions import why_not
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.errors import BertServeError, BundleError
from bertserve.service.providers import Provider
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was checked.
        passed: Whether it is as it should be; None for what was measured and has no bound.
        detail: What was found.
        figures: The same for machines.
    """

    name: str
    passed: bool | None
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class LoadedGraph:
    """A graph of a bundle.

    Attributes:
        bundle: The bundle.
        graph: Its entry in the manifest.
        name: Its provider and precision, such as `cpu/int8`.
        runs_on: The execution provider that runs it here.
    """

    def __init__(self, bundle: Bundle, graph: GraphSpec, runs_on: Provider) -> None:
        """Stores what to load; `tokenizer` and `engine` load it."""
        self.bundle = bundle
        self.graph = graph
        self.name = f"{graph.provider}/{graph.precision}"
        self.runs_on = runs_on

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer."""
        return Tokenizer(self.bundle.tokenizer_path, self.bundle.manifest.tokenizer)

    @cached_property
    def engine(self) -> OnnxEngine:
        """The graph in a session.

        Raises:
            ProviderError: This machine cannot run it; the message says what is missing.
        """
        spec = self.bundle.manifest.tokenizer
        path = self.bundle.path / self.graph.file
        return OnnxEngine(path, self.graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider=self.runs_on)

    def answer(self, request: Any) -> Any:
        """Returns the result of a request."""
        manifest = self.bundle.manifest
        return predict(manifest.task, request, self.tokenizer, self.engine, manifest)

    def load_error(self) -> str | None:
        """Loads tokenizer and graph; returns why they cannot be loaded, or None."""
        try:
            _ = self.tokenizer, self.engine
        except BertServeError as error:
            return error.message
        return None


def choose_graphs(bundle: Bundle, providers: tuple[Provider, ...] | None, precisions: tuple[Precision, ...] | None) -> list[GraphSpec]:
    """Returns the requested graphs in the manifest's order.

    Args:
        bundle: The bundle.
        providers: Graphs for these providers; None for any.
        precisions: Graphs of these precisions; None for any.

    Raises:
        BundleError: The bundle has no graph of a requested provider or precision; the message lists those that it has.
    """
    graphs = bundle.manifest.graphs
    requested = [(provider, None) for provider in providers or ()] + [(None, precision) for precision in precisions or ()]
    for provider, precision in requested:
        if not any(provider in (None, graph.provider) and precision in (None, graph.precision) for graph in graphs):
            raise BundleError(f"bundle `{bundle.manifest.name}` has no graph for `{provider or precision}`; it has {_list_graphs(graphs)}.")
    chosen = [
        graph
        for graph in graphs
        if (providers is None or graph.provider in providers) and (precisions is None or graph.precision in precisions)
    ]
    if not chosen:
        raise BundleError(
            f"bundle `{bundle.manifest.name}` has no graph for {', '.join(providers or ())} in {', '.join(precisions or ())}; "
            f"it has {_list_graphs(graphs)}."
        )
    return chosen


def choose_provider(graph: GraphSpec, *, requested: bool) -> tuple[Provider, str | None]:
    """Returns the provider that runs a graph here, and why it is not the graph's own if it is not.

    As at export, the CPU takes the place of a provider that this machine does not have.

    Args:
        graph: The graph.
        requested: Whether its provider was requested by name; then nothing takes its place.
    """
    missing = None if requested else why_not(graph.provider)
    return (graph.provider, None) if missing is None else ("cpu", missing)


def find_fp32(bundle: Bundle, chosen: list[LoadedGraph]) -> LoadedGraph | None:
    """Returns the float32 graph that others are compared with: a chosen one, or else another that loads; None if there is none."""
    candidates = [loaded for loaded in chosen if loaded.graph.precision == "fp32"]
    candidates = candidates or list(_other_fp32(bundle, chosen))
    return next((loaded for loaded in candidates if loaded.load_error() is None), None)


def _other_fp32(bundle: Bundle, chosen: list[LoadedGraph]) -> Iterator[LoadedGraph]:
    for graph in bundle.manifest.graphs:
        if graph.precision == "fp32" and not any(loaded.graph == graph for loaded in chosen):
            yield LoadedGraph(bundle, graph, choose_provider(graph, requested=False)[0])


def _list_graphs(graphs: tuple[GraphSpec, ...]) -> str:
    return ", ".join(f"{graph.provider}/{graph.precision}" for graph in graphs)
