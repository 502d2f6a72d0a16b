"""Turns a checkpoint into a bundle: runs the stages in their order, in a temporary folder beside the output."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers

import service
from export import calibration, trace
from export.artifact import Artifact
from export.bundle.example import answer_example
from export.bundle.package import package_bundle, refuse_existing
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.load import load_checkpoint
from export.cpu import build as cpu
from export.errors import CheckpointError, ParityError
from export.evidence.measure import measure_graph
from export.evidence.reference import Reference, sample_reference
from export.gpu import build as gpu
from export.graph import onnx_files
from export.precisions import choose_precisions
from export.progress import Progress, stage
from export.workspace import workspace
from service.backend.onnx_engine import OnnxEngine
from service.bundle.files import TOKENIZER_FILE, digest
from service.bundle.graph_spec import GraphSpec, Precision, Provider
from service.bundle.manifest import NAME_PATTERN, Example, Figure, Flops, Layers, Manifest, Source, TokenizerSpec
from service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ExportSpec:
    """What to export, as the flags say.

    Attributes:
        source: A local checkpoint folder or a hub id.
        output: The models folder.
        name: Name of the bundle; the source's own when None.
        task: A Hugging Face task name or `auto`.
        precisions: Precisions to make graphs in; the last of each provider is its default graph. None for all.
        providers: Providers to make graphs for; a graph of the first one answers the stored example.
        revision: Hub revision.
        overwrite: Whether an existing bundle is replaced.
        figures: Measured task figures for manifest and card.
        calibration: Texts to choose the int8 scales on, one a line.
        max_int8_error: How far int8 may move the outputs on these texts, as a share of their spread.
        layers: Outputs of an embedding model's graphs: the last layer, or also the last four side by side.
    """

    source: str
    output: Path
    name: str | None = None
    task: str = "auto"
    precisions: Sequence[Precision] | None = None
    providers: Sequence[Provider] = ("cpu",)
    revision: str | None = None
    overwrite: bool = False
    figures: Sequence[Figure] = field(default=())
    calibration: Path = calibration.BUILT_IN
    max_int8_error: float = 0.1
    layers: Layers = "last"


def export(spec: ExportSpec, progress: Progress) -> tuple[Path, Manifest]:
    """Turns a checkpoint into a bundle.

    Args:
        spec: What to export.
        progress: Called with a line for each finished stage.

    Returns:
        The bundle's folder and its manifest.

    Raises:
        ExportError: A stage failed; nothing is left behind.
    """
    name = spec.name or (Path(spec.source).resolve() if Path(spec.source).is_dir() else Path(spec.source)).name
    if not re.fullmatch(NAME_PATTERN, name):
        raise CheckpointError(f"`{name}` cannot name a bundle: it does not match {NAME_PATTERN}; give another with --name.")
    target = spec.output / name
    refuse_existing(target, overwrite=spec.overwrite)
    texts = calibration.read_texts(spec.calibration)  # before a checkpoint is loaded in vain
    with stage(progress, "load", spec.source):
        checkpoint = load_checkpoint(spec.source, task=spec.task, revision=spec.revision, layers=spec.layers)
    spec.output.mkdir(parents=True, exist_ok=True)
    with workspace(name, spec.output) as scratch:
        bundle, work = scratch / "bundle", scratch / "work"
        bundle.mkdir()
        work.mkdir()
        manifest = _build(spec, name, checkpoint, texts, bundle, work, progress)
        with stage(progress, "package", str(target)):
            package_bundle(bundle, target, manifest, card=checkpoint.card)
    return target, manifest


def _build(
    spec: ExportSpec, name: str, checkpoint: Checkpoint, texts: Sequence[str], bundle: Path, work: Path, progress: Progress
) -> Manifest:
    """Writes graphs and tokenizer into the folder `bundle`; returns the manifest."""
    precisions = choose_precisions(spec.providers, spec.precisions)
    raw = work / "raw.onnx"
    with stage(progress, "trace", f"opset {trace.OPSET}"):
        checkpoint = replace(checkpoint, inputs=trace.trace(checkpoint, raw))
    with stage(progress, "optimize", "cpu"):
        fused = cpu.optimize(raw, checkpoint)
    (bundle / TOKENIZER_FILE).write_text(checkpoint.tokenizer_json, encoding="utf-8")
    tokenizer_spec = checkpoint.tokenizer_spec(digest(bundle / TOKENIZER_FILE))
    tokenizer = Tokenizer(bundle / TOKENIZER_FILE, tokenizer_spec)
    with stage(progress, "reference", "PyTorch float32"):
        reference = _reference(checkpoint)
        flops = checkpoint.flops
    checkpoint.model.to_empty(device="meta")  # no later stage runs it, and without the weights of a large one sessions have room
    graphs: list[GraphSpec] = []
    example = None
    for provider in sorted(precisions, key=lambda provider: provider != "cpu"):
        artifacts: Iterable[Artifact]
        if provider == "cpu":
            artifacts = cpu.build_graphs(fused, precisions[provider], bundle, checkpoint, tokenizer, texts, spec.max_int8_error, progress)
        else:
            with stage(progress, "optimize", provider):
                artifacts = gpu.build_graphs(provider, precisions[provider], raw, bundle, checkpoint, tokenizer, texts)
        measured, engine = _measure(artifacts, precisions[provider], checkpoint, tokenizer, reference, progress)
        graphs += measured
        example = example or answer_example(checkpoint, tokenizer, engine)
    assert example is not None
    return _manifest(spec, name, checkpoint, tokenizer_spec, flops, graphs, example)


def _measure(
    artifacts: Iterable[Artifact],
    precisions: Sequence[Precision],
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    reference: Reference,
    progress: Progress,
) -> tuple[list[GraphSpec], OnnxEngine]:
    """Measures a provider's graphs; returns the manifest's entries of those to keep, and the engine of the default one."""
    measured: list[Artifact] = []
    graphs, engine = [], None
    # fp32 is measured even if it is not kept: without that a fault of the trace could hide in int8's wide bound
    for artifact in artifacts:
        default = artifact.precision == precisions[-1]
        with stage(progress, "parity", f"{artifact.provider}/{artifact.precision}"):
            onnx_files.finalize(artifact.path)
            graph, graph_engine = measure_graph(artifact, checkpoint, tokenizer, reference, default=default)
        measured.append(artifact)
        graphs.append(graph)
        engine = graph_engine if default else engine
        del graph_engine  # the next graph needs the memory
    kept = {artifact.path for artifact in measured if artifact.precision in precisions}
    for path in {artifact.path for artifact in measured} - kept:
        onnx_files.remove(path)
    assert engine is not None
    return [graph for graph in graphs if graph.precision in precisions], engine


def _reference(checkpoint: Checkpoint) -> Reference:
    """Returns the checkpoint's own outputs for the samples.

    Raises:
        ParityError: PyTorch itself cannot run some of the samples.
    """
    try:
        return sample_reference(checkpoint)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} itself cannot run all samples of up to {checkpoint.max_length} tokens in PyTorch: {error}; it is "
            "of a kind that is not understood, or its configuration says wrong lengths."
        ) from error


def _manifest(
    spec: ExportSpec,
    name: str,
    checkpoint: Checkpoint,
    tokenizer_spec: TokenizerSpec,
    flops: Flops,
    graphs: Sequence[GraphSpec],
    example: Example,
) -> Manifest:
    """Returns the manifest of a finished bundle."""
    return Manifest(
        format="bertserve-bundle",
        format_version=1,
        name=name,
        task=checkpoint.task,
        labels=checkpoint.labels,
        activation=checkpoint.activation,
        embedding=checkpoint.embedding,
        tokenizer=tokenizer_spec,
        flops=flops,
        graphs=tuple(graphs),
        example=example,
        figures=tuple(spec.figures),
        source=Source(
            checkpoint=checkpoint.source,
            revision=checkpoint.revision,
            weights_sha256=checkpoint.weights_sha256,
            versions=_versions(),
            commit=checkpoint.commit,
        ),
    )


def _versions() -> dict[str, str]:
    """Returns the versions of what the graphs depend on, for the manifest."""
    return {
        "bertserve": service.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "tokenizers": version("tokenizers"),
    }
