"""Turns a checkpoint into a bundle: runs the stages in their order, in a temporary folder beside the output."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from export.calibration import Split, Texts
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.load import load_checkpoint
from export.checkpoint.module import load_module, module_name
from export.cpu import build as cpu
from export.errors import CheckpointError, ParityError, QuantizationError
from export.evidence.measure import measure_graph
from export.evidence.reference import NO_TEXTS, Reference, sample_reference
from export.gpu import build as gpu
from export.graph import onnx_files
from export.precisions import choose_precisions
from export.progress import Progress, stage
from export.tracers import Tracer
from export.workspace import workspace
from service.backend.onnx_engine import OnnxEngine
from service.bundle.evidence_policy import is_low
from service.bundle.files import TOKENIZER_FILE, digest
from service.bundle.graph_spec import GraphSpec, Precision, Provider
from service.bundle.manifest import NAME_PATTERN, Combine, Example, Figure, Flops, Layers, Manifest, OmittedGraph, Source, TokenizerSpec
from service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ExportSpec:
    """What to export, as the flags say.

    Attributes:
        source: A local checkpoint folder or a hub id.
        output: The models folder.
        name: Name of the bundle; the source's own when None.
        task: A Hugging Face task name or `auto`.
        precisions: Precisions to make graphs in; the last of each provider is its default graph. None for all, of which int8 is only the
            default where it answers as the checkpoint does.
        providers: Providers to make graphs for; a graph of the first one answers the stored example.
        revision: Hub revision.
        overwrite: Whether an existing bundle is replaced.
        figures: Measured task figures for manifest and card.
        calibration: Texts to choose the int8 scales on, one a line.
        validation: Texts to judge int8 on; where there are none, a third of the others is held out for it.
        max_int8_error: How far int8 may move the outputs on the validation texts, as a share of their spread.
        quick: Whether int8 is made without measuring which matrices matter most.
        layers: Outputs of an embedding model's graphs: the last layer, or also the last four side by side, or those of these numbers.
        combine: How these become one where a request names no layers; None where such a request gets the last layer.
        tracer: PyTorch's exporter to trace with; None for the first that can.
        module: Whether `source` is `FILE:FACTORY`, whose code is trusted and run.
        attentions: Whether the graphs give attention maps out; then they are for the CPU alone.
        ignored_weights: Patterns of the names of weights that the model may leave unused, with `*` for any characters.
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
    validation: Path | None = None
    max_int8_error: float = 0.1
    quick: bool = False
    layers: Layers = "last"
    combine: Combine | None = None
    tracer: Tracer | None = None
    module: bool = False
    attentions: bool = False
    ignored_weights: Sequence[str] = ()


@dataclass(frozen=True)
class _Measured:
    """A provider's graphs, as the manifest has them, the engine of the default one, and what is not there."""

    graphs: Sequence[GraphSpec]
    engine: OnnxEngine
    omitted: Sequence[OmittedGraph] = ()


def export(spec: ExportSpec, progress: Progress) -> tuple[Path, Manifest]:
    """Turns a checkpoint into a bundle.

    Args:
        spec: What to export.
        progress: Called with a line for each finished stage.

    Returns:
        The bundle's folder and its manifest. Where int8 was tried and missed what it must hold, the bundle has the verified float32 graph
        in its place, and the manifest says so (`omitted`).

    Raises:
        ExportError: A stage failed; nothing is left behind.
    """
    name = spec.name or _default_name(spec)
    if not re.fullmatch(NAME_PATTERN, name):
        raise CheckpointError(f"`{name}` cannot name a bundle: it does not match {NAME_PATTERN}; give another with --name.")
    target = spec.output / name
    refuse_existing(target, overwrite=spec.overwrite)
    texts = calibration.read_split(spec.calibration, spec.validation)  # before a checkpoint is loaded in vain
    with stage(progress, "load", spec.source):
        if spec.module:
            checkpoint = load_module(spec.source)
        else:
            checkpoint = load_checkpoint(
                spec.source,
                task=spec.task,
                revision=spec.revision,
                layers=spec.layers,
                combine=spec.combine,
                attentions=spec.attentions,
                ignored_weights=spec.ignored_weights,
            )
    spec.output.mkdir(parents=True, exist_ok=True)
    with workspace(name, spec.output) as scratch:
        bundle, work = scratch / "bundle", scratch / "work"
        bundle.mkdir()
        work.mkdir()
        manifest = _build(spec, name, checkpoint, texts, bundle, work, progress)
        with stage(progress, "package", str(target)):
            package_bundle(bundle, target, manifest, card=checkpoint.card)
    return target, manifest


def _default_name(spec: ExportSpec) -> str:
    """Returns the source's own name."""
    if spec.module:
        return module_name(spec.source)
    return (Path(spec.source).resolve() if Path(spec.source).is_dir() else Path(spec.source)).name


def _build(spec: ExportSpec, name: str, checkpoint: Checkpoint, lines: Split, bundle: Path, work: Path, progress: Progress) -> Manifest:
    """Writes graphs and tokenizer into the folder `bundle`; returns the manifest."""
    precisions = choose_precisions(spec.providers, spec.precisions)
    raw = work / "raw.onnx"
    with stage(progress, "trace", f"to ONNX by {spec.tracer}" if spec.tracer else "to ONNX"):
        traced = trace.trace(checkpoint, raw, spec.tracer)
    checkpoint = replace(checkpoint, inputs=traced.inputs)
    with stage(progress, "optimize", f"cpu, from {traced.form}"):
        fused = cpu.optimize(raw, checkpoint, traced.form)
    (bundle / TOKENIZER_FILE).write_text(checkpoint.tokenizer_json, encoding="utf-8")
    tokenizer_spec = checkpoint.tokenizer_spec(digest(bundle / TOKENIZER_FILE))
    tokenizer = Tokenizer(bundle / TOKENIZER_FILE, tokenizer_spec)
    texts = lines.with_passages(tokenizer)
    with stage(progress, "reference", "PyTorch float32"):
        reference = _reference(checkpoint, texts.validation if "int8" in precisions.get("cpu", ()) else NO_TEXTS)
        flops = checkpoint.flops
    checkpoint.model.to_empty(device="meta")  # no later stage runs it, and without the weights of a large one sessions have room
    graphs: list[GraphSpec] = []
    omitted: list[OmittedGraph] = []
    example = None
    for provider in sorted(precisions, key=lambda provider: provider != "cpu"):
        artifacts: Iterable[Artifact]
        if provider == "cpu":
            int8 = cpu.Int8Options(texts, spec.max_int8_error, spec.quick)
            artifacts = cpu.build_graphs(fused, precisions[provider], bundle, checkpoint, tokenizer, int8, progress)
        else:
            with stage(progress, "optimize", provider):
                artifacts = gpu.build_graphs(
                    provider, precisions[provider], raw, traced.form, bundle, checkpoint, tokenizer, texts.calibration
                )
        measured = _measure(artifacts, precisions[provider], checkpoint, tokenizer, reference, progress)
        if spec.precisions is None and (better := _better_default(measured.graphs)) is not None:
            measured = _with_default(measured.graphs, better, bundle, checkpoint, measured.omitted)
        graphs += measured.graphs
        omitted += measured.omitted
        example = example or answer_example(checkpoint, tokenizer, measured.engine)
    assert example is not None
    return _manifest(spec, name, checkpoint, tokenizer_spec, flops, graphs, example, omitted)


def _measure(
    artifacts: Iterable[Artifact],
    precisions: Sequence[Precision],
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    reference: Reference,
    progress: Progress,
) -> _Measured:
    """Measures a provider's graphs, and removes those that are not kept."""
    measured: list[Artifact] = []
    graphs: list[GraphSpec] = []
    engine, omitted = None, []
    try:
        # fp32 is measured even if it is not kept: without that a fault of the trace could hide in int8's wide bound
        for artifact in artifacts:
            default = artifact.precision == precisions[-1]
            graph, graph_engine = _measure_graph(artifact, checkpoint, tokenizer, reference, progress, default=default)
            measured.append(artifact)
            graphs.append(graph)
            engine = graph_engine if default else engine
            del graph_engine  # the next graph needs the memory
    except QuantizationError as error:  # int8 is made last
        omitted = [OmittedGraph(provider="cpu", precision="int8", reason=str(error))]
        precisions = [precision for precision in precisions if precision != "int8"] or ["fp32"]
    kept = {artifact.path for artifact in measured if artifact.precision in precisions}
    for path in {artifact.path for artifact in measured} - kept:
        onnx_files.remove(path)
    graphs = [graph for graph in graphs if graph.precision in precisions]
    if omitted:
        return _with_default(graphs, graphs[-1], measured[0].path.parent, checkpoint, omitted)
    assert engine is not None
    return _Measured(graphs, engine)


def _measure_graph(
    artifact: Artifact, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference, progress: Progress, *, default: bool
) -> tuple[GraphSpec, OnnxEngine]:
    """Returns a graph's entry in the manifest, and its engine.

    Raises:
        QuantizationError: It is int8 and does not answer as the checkpoint does, or not at all; it is removed.
        ParityError: It is another one that does not.
    """
    try:
        with stage(progress, "parity", f"{artifact.provider}/{artifact.precision}"):
            onnx_files.finalize(artifact.path)
            return measure_graph(artifact, checkpoint, tokenizer, reference, default=default)
    except ParityError as error:
        if artifact.precision != "int8":
            raise
        onnx_files.remove(artifact.path)
        raise QuantizationError(str(error)) from error


def _with_default(
    graphs: Sequence[GraphSpec], default: GraphSpec, bundle: Path, checkpoint: Checkpoint, omitted: Sequence[OmittedGraph] = ()
) -> _Measured:
    """Returns the same graphs with another default one."""
    engine = OnnxEngine(
        bundle / default.file, default, pad_id=checkpoint.pad_id, padding_side=checkpoint.padding_side, provider=default.evidence.provider
    )
    return _Measured([graph.model_copy(update={"default": graph is default}) for graph in graphs], engine, omitted)


def _better_default(graphs: Sequence[GraphSpec]) -> GraphSpec | None:
    """Returns a provider's float32 graph where its default one answers too seldom as the checkpoint does; for those who did not ask for it."""
    default = next(graph for graph in graphs if graph.default)
    return next((graph for graph in graphs if graph.precision == "fp32"), None) if is_low(default) else None


def _reference(checkpoint: Checkpoint, texts: Texts) -> Reference:
    """Returns the checkpoint's own outputs for the samples, and for ordinary texts.

    Raises:
        ParityError: PyTorch itself cannot run some of the samples.
    """
    try:
        return sample_reference(checkpoint, texts)
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
    omitted: Sequence[OmittedGraph],
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
        omitted=tuple(omitted),
        attention_heads=checkpoint.attention_heads,
        source=Source(
            checkpoint=checkpoint.source,
            revision=checkpoint.revision,
            weights_sha256=checkpoint.weights_sha256,
            versions=_versions(),
            commit=checkpoint.commit,
            ignored_weights=checkpoint.ignored_weights,
            **asdict(checkpoint.card_metadata),
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
        "onnxscript": version("onnxscript"),
        "onnxruntime": onnxruntime.__version__,
        "tokenizers": version("tokenizers"),
    }
