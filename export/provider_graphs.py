"""Measures the graphs of each provider as they are created, and keeps the graphs that agree with the checkpoint.

A graph that cannot be created, loaded or matched with the checkpoint does not stop the others; the manifest has the reason. A provider's
float32 graph is an exception: its other graphs are created from it, and without it their wider limits could hide an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def measure_graphs(
    artifacts: Mapping[Provider, Iterable[Artifact]],
    precisions: Mapping[Provider, Sequence[Precision]],
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    reference: Reference,
    *,
    default_must_agree: bool,
) -> tuple[list[GraphSpec], list[OmittedGraph]]:
    """Measures the graphs of all providers, and removes the files of graphs that are not kept.

    Args:
        artifacts: The graphs of each provider, created by iteration; float32 first.
        precisions: The precisions to keep; the last one of each provider is its default graph.
        folder: The bundle's folder.
        checkpoint: The checkpoint of the graphs.
        tokenizer: The bundle's tokenizer.
        reference: The checkpoint's own outputs.
        default_must_agree: Whether float32 becomes the default if another graph has too low agreement with the checkpoint.

    Returns:
        The graphs that passed, and the graphs that failed with the reasons.

    Raises:
        ExportError: The CPU's float32 graph failed, or the float32 graphs of all providers.
        OSError: A file cannot be written.
    """
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    failure: Exception | None = None
    for provider, provider_artifacts in artifacts.items():
        measured: list[GraphSpec] = []
        kept = list(precisions[provider])
        try:
            # fp32 is measured even if it is not kept; otherwise int8's wide limits could hide an error of the trace
            for artifact in provider_artifacts:
                with stage("parity", f"{artifact.provider}/{artifact.precision}"):
                    onnx_files.finalize(artifact.path)
                    entry = without_validation_report(artifact, checkpoint, default=False)
                    # the engine gets no name, because the next graph needs its memory
                    measured.append(measure_graph(folder, entry, checkpoint, tokenizer, reference)[0])
        except Exception as error:  # optimizers and onnxruntime have no common base class of errors
            # all graphs are created from the trace, and the CPU's float32 graph shows whether it is right
            if isinstance(error, OSError) or (provider == "cpu" and not measured):
                raise
            failure = error
            missing = [precision for precision in kept if precision not in {graph.precision for graph in measured}]
            missing = missing[:1] if measured else missing
            omitted += [_omitted(provider, precision, error) for precision in missing]
            kept = [precision for precision in kept if precision not in missing] or ["fp32"]
        by_precision = {graph.precision: graph for graph in measured if graph.precision in kept}
        default = kept[-1]
        if default_must_agree and "fp32" in by_precision and is_low(by_precision[default]):
            default = "fp32"
        _remove_others(folder, provider, by_precision.values())
        graphs += [graph.model_copy(update={"default": precision == default}) for precision, graph in by_precision.items()]
    if not graphs:
        assert failure is not None, "there is at least one provider"
        raise failure
    return graphs, omitted


def _omitted(provider: Provider, precision: Precision, error: Exception) -> OmittedGraph:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reason = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {first}"
    return OmittedGraph(provider=provider, precision=precision, reason=reason)


def _remove_others(folder: Path, provider: Provider, graphs: Iterable[GraphSpec]) -> None:
    """Removes a provider's files that belong to none of the graphs, including parts of failed graphs."""
    file_names = {file.file for graph in graphs for file in graph.files}
    for path in folder.glob(f"model.{provider}.*"):
        if path.name not in file_names:
            path.unlink()


def answer_example(graph: GraphSpec, folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Example:
    """Returns a request body and the graph's answer to it, in the format of the HTTP API; the graph runs on the provider of its measurements."""
    engine = open_engine(folder, graph, checkpoint.tokenizer_spec, graph.evidence.provider)
    example = TASKS[checkpoint.task].example(checkpoint.tokenizer_spec)
    body = read_request(checkpoint.task, example)
    (request,) = body.requests(checkpoint)
    result = ServedGraph(graph, engine, tokenizer, checkpoint.task, checkpoint).answer(request).result
    return Example(request=example, result=body.answer([result]))
