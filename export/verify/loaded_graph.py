"""The graphs of a bundle that are checked again, each ready to answer on what this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from export.evidence import predict
from service.backend.onnx_engine import OnnxEngine
from service.backend.sessions import why_not
from service.bundle.files import Bundle
from service.bundle.graph_spec import GraphSpec, Precision, Provider
from service.errors import BertServeError, BundleError
from service.text.tokenizer import Tokenizer


class LoadedGraph:
    """A graph of a bundle.

    Attributes:
        bundle: The bundle.
        graph: Its entry in the manifest.
        name: `provider/precision`, as the manifest has it.
        runs_on: The execution provider that runs it here.
    """

    def __init__(self, bundle: Bundle, graph: GraphSpec, runs_on: Provider) -> None:
        """Remembers what to load; `tokenizer` and `engine` load it."""
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
        return predict.answer(manifest.task, request, self.tokenizer, self.engine, manifest)

    def unusable(self) -> str | None:
        """Loads tokenizer and graph; returns why that cannot be done, or None."""
        try:
            _ = self.tokenizer, self.engine
        except BertServeError as error:
            return error.message
        return None


def choose(bundle: Bundle, providers: tuple[Provider, ...] | None, precisions: tuple[Precision, ...] | None) -> list[GraphSpec]:
    """Returns the graphs that were asked for, in the manifest's order; all where nothing was.

    Args:
        bundle: The bundle.
        providers: Made for these; None stands for any.
        precisions: Of these; None stands for any.

    Raises:
        BundleError: The bundle has none of a provider or precision; the message lists those it has.
    """
    graphs = bundle.manifest.graphs
    asked = [(provider, None) for provider in providers or ()] + [(None, precision) for precision in precisions or ()]
    for provider, precision in asked:
        if not any(provider in (None, graph.provider) and precision in (None, graph.precision) for graph in graphs):
            raise BundleError(f"bundle `{bundle.manifest.name}` has no graph for `{provider or precision}`; it has {_names(graphs)}.")
    chosen = [
        graph
        for graph in graphs
        if (providers is None or graph.provider in providers) and (precisions is None or graph.precision in precisions)
    ]
    if not chosen:
        raise BundleError(
            f"bundle `{bundle.manifest.name}` has no graph for {', '.join(providers or ())} in {', '.join(precisions or ())}; "
            f"it has {_names(graphs)}."
        )
    return chosen


def place(graph: GraphSpec, *, asked: bool) -> tuple[Provider, str | None]:
    """Returns what runs a graph here: the provider that it was made for, or as at export the CPU where that is not there; and why.

    Args:
        graph: The graph.
        asked: Whether its provider was asked for by name; then nothing takes its place.
    """
    lacking = None if asked else why_not(graph.provider)
    return (graph.provider, None) if lacking is None else ("cpu", lacking)


def reference(bundle: Bundle, chosen: list[LoadedGraph]) -> LoadedGraph | None:
    """Returns the float32 graph that others are compared with: one of the chosen ones, or another that loads; None if there is none."""
    candidates = [subject for subject in chosen if subject.graph.precision == "fp32"]
    candidates = candidates or list(_others(bundle, chosen))
    return next((subject for subject in candidates if subject.unusable() is None), None)


def _others(bundle: Bundle, chosen: list[LoadedGraph]) -> Iterator[LoadedGraph]:
    for graph in bundle.manifest.graphs:
        if graph.precision == "fp32" and not any(subject.graph == graph for subject in chosen):
            yield LoadedGraph(bundle, graph, place(graph, asked=False)[0])


def _names(graphs: tuple[GraphSpec, ...]) -> str:
    return ", ".join(f"{graph.provider}/{graph.precision}" for graph in graphs)
