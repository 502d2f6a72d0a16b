"""Measures the graphs of each provider as they are created, and keeps the graphs that agree with the checkpoint.

A graph that cannot be created, loaded or matched with the checkpoint does not stop the others; the manifest has the reason. A provider's
float32 graph is an exception: its other graphs are created from it, and without it their wider limits could hide an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertserve.export.artifact import Artifact
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import ExportError
from bertserve.export.graph import onnx_files
from bertserve.export.progress import stage
from bertserve.export.tasks.catalog import TASKS
from bertserve.export.tasks.labeled_data import read_request
from bertserve.export.validation.measure import measure_graph, without_validation_report
from bertserve.export.validation.reference import Reference
from bertserve.export.validation.served_graph import ServedGraph, open_engine
from bertserve.service.bundle.graph_spec import GraphSpec, Precision
from bertserve.service.bundle.manifest import Example, OmittedGraph
from bertserve.service.bundle.validation_policy import is_low
from bertserve.service.providers import Provider
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GraphComparison:
    """The bundle's folder, and the reference for its graphs."""

    folder: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    reference: Reference


@dataclass(frozen=True)
class BundleGraphs:
    """The graphs of a bundle, as in the manifest.

    Attributes:
        graphs: The graphs that passed.
        omitted: The graphs that failed, with the reasons.
        example: The stored example, answered by the default graph of the first provider.
    """

    graphs: Sequence[GraphSpec]
    omitted: Sequence[OmittedGraph]
    example: Example


@dataclass(frozen=True)
class _ProviderGraphs:
    """A provider's graphs, the default one ready to run, and the missing graphs."""

    graphs: Sequence[GraphSpec]
    default: ServedGraph
    omitted: Sequence[OmittedGraph] = ()


def measure_graphs(
    artifacts: Mapping[Provider, Iterable[Artifact]],
    precisions: Mapping[Provider, Sequence[Precision]],
    comparison: GraphComparison,
    *,
    default_must_agree: bool,
) -> BundleGraphs:
    """Measures the graphs of all providers, and removes the files of graphs that are not kept.

    Args:
        artifacts: The graphs of each provider, created by iteration; float32 first.
        precisions: The precisions to keep; the last one of each provider is its default graph.
        comparison: The reference for the graphs.
        default_must_agree: Whether a provider's float32 graph becomes its default if another graph has too low agreement with the
            checkpoint.

    Raises:
        ExportError: The CPU's float32 graph failed, or the float32 graphs of all providers.
        OSError: A file cannot be written.
    """
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    example: Example | None = None
    failure: Exception | None = None
    for provider, provider_artifacts in artifacts.items():
        try:
            result = _measure(provider_artifacts, provider, precisions[provider], comparison)
        except Exception as error:
            # all graphs are created from the trace, and the CPU's float32 graph shows whether it is right
            if provider == "cpu" or isinstance(error, OSError):
                raise
            failure = error
            omitted += (_omitted(provider, precision, error) for precision in precisions[provider])
            _remove_others(comparison.folder, provider, ())
            continue
        if default_must_agree and (better := _better_default(result.graphs)) is not None:
            result = _with_default(result.graphs, better, comparison, result.omitted)
        graphs += result.graphs
        omitted += result.omitted
        example = example or answer_example(comparison.checkpoint, result.default)
    if example is None:
        assert failure is not None, "there is at least one provider"
        raise failure
    return BundleGraphs(graphs, omitted, example)


def _measure(
    artifacts: Iterable[Artifact], provider: Provider, precisions: Sequence[Precision], comparison: GraphComparison
) -> _ProviderGraphs:
    """Measures a provider's graphs as they are created.

    Raises:
        Exception: Its float32 graph failed.
        OSError: A file cannot be written.
    """
    graphs: list[GraphSpec] = []
    default, omitted = None, []
    try:
        # fp32 is measured even if it is not kept; otherwise int8's wide limits could hide an error of the trace
        for artifact in artifacts:
            is_default = artifact.precision == precisions[-1]
            with stage("parity", f"{artifact.provider}/{artifact.precision}"):
                onnx_files.finalize(artifact.path)
                entry = without_validation_report(artifact, comparison.checkpoint, default=is_default)
                graph, served = measure_graph(comparison.folder, entry, comparison.checkpoint, comparison.tokenizer, comparison.reference)
            graphs.append(graph)
            default = served if is_default else default
            del served  # the next graph needs its memory
    except Exception as error:  # optimizers and onnxruntime have no common base class of errors
        if not graphs or isinstance(error, OSError):
            raise
        failed_precision = next(precision for precision in precisions if precision not in {graph.precision for graph in graphs})
        omitted = [_omitted(provider, failed_precision, error)]
        precisions = [precision for precision in precisions if precision != failed_precision] or ["fp32"]
    graphs = [graph for graph in graphs if graph.precision in precisions]
    _remove_others(comparison.folder, provider, graphs)
    if omitted:
        return _with_default(graphs, graphs[-1], comparison, omitted)
    assert default is not None
    return _ProviderGraphs(graphs, default)


def _omitted(provider: Provider, precision: Precision, error: Exception) -> OmittedGraph:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reason = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {first}"
    return OmittedGraph(provider=provider, precision=precision, reason=reason)


def _remove_others(folder: Path, provider: Provider, graphs: Sequence[GraphSpec]) -> None:
    """Removes a provider's files that belong to none of the graphs, including parts of failed graphs."""
    file_names = {file.file for graph in graphs for file in graph.files}
    for path in folder.glob(f"model.{provider}.*"):
        if path.name not in file_names:
            path.unlink()


def _with_default(
    graphs: Sequence[GraphSpec], default: GraphSpec, comparison: GraphComparison, omitted: Sequence[OmittedGraph]
) -> _ProviderGraphs:
    """Returns the same graphs with another default; the session of that graph opens on the provider of its measurements."""
    checkpoint = comparison.checkpoint
    engine = open_engine(comparison.folder, default, checkpoint.tokenizer_spec, default.evidence.provider)
    served = ServedGraph(default, engine, comparison.tokenizer, checkpoint.task, checkpoint)
    return _ProviderGraphs([graph.model_copy(update={"default": graph is default}) for graph in graphs], served, omitted)


def _better_default(graphs: Sequence[GraphSpec]) -> GraphSpec | None:
    """Returns a provider's float32 graph if its default graph has low agreement with the checkpoint, otherwise None."""
    default = next(graph for graph in graphs if graph.default)
    return next((graph for graph in graphs if graph.precision == "fp32"), None) if is_low(default) else None


def answer_example(checkpoint: Checkpoint, served: ServedGraph) -> Example:
    """Returns a request body and the graph's answer to it, in the format of the HTTP API."""
    example = TASKS[checkpoint.task].example(checkpoint.tokenizer_spec)
    body = read_request(checkpoint.task, example)
    (request,) = body.requests(checkpoint)
    return Example(request=example, result=body.answer([served.answer(request).result]))
