"""The order of the stages, in a temporary folder beside the output. Nothing clever."""

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
from export.bundle import example as examples
from export.bundle import package
from export.checkpoint.load import Checkpoint, load_checkpoint
from export.cpu import build as cpu
from export.errors import CheckpointError, ParityError
from export.evidence import measure, parity, samples
from export.gpu import build as gpu
from export.graph import onnx_files
from export.precisions import choose
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
        precisions: Graphs to make; of each provider the last that it has is the default graph.
        providers: What to make graphs for; the stored example is answered by the first one's.
        revision: Hub revision.
        overwrite: Whether an existing bundle is replaced.
        figures: Measured task figures to put into manifest and card.
        calibration: Texts to choose the int8 scales on, one a line.
        max_int8_error: How far int8 may move the outputs on these texts, as a share of their spread.
        layers: What the graphs of an embedding model give out: the last layer, or the last four side by side too.
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
    package.check_free(target, overwrite=spec.overwrite)
    texts = calibration.read_texts(spec.calibration)  # before a checkpoint is loaded for nothing
    with stage(progress, "load", spec.source):
        loaded = load_checkpoint(spec.source, task=spec.task, revision=spec.revision, layers=spec.layers)
    spec.output.mkdir(parents=True, exist_ok=True)
    with workspace(name, spec.output) as scratch:
        built, work = scratch / "bundle", scratch / "work"
        built.mkdir()
        work.mkdir()
        manifest = _build(spec, name, loaded, texts, built, work, progress)
        with stage(progress, "package", str(target)):
            package.package(built, target, manifest, card=loaded.card)
    return target, manifest


def _build(spec: ExportSpec, name: str, loaded: Checkpoint, texts: Sequence[str], built: Path, work: Path, progress: Progress) -> Manifest:
    """Writes graphs and tokenizer into `built`; returns the manifest."""
    chosen = choose(spec.providers, spec.precisions)
    raw = work / "raw.onnx"
    with stage(progress, "trace", f"opset {trace.OPSET}"):
        loaded = replace(loaded, inputs=trace.trace(loaded, raw))
    with stage(progress, "optimize", "cpu"):
        fused = cpu.optimize(raw, loaded)
    (built / TOKENIZER_FILE).write_text(loaded.tokenizer_json, encoding="utf-8")
    tokenizer = loaded.tokenizer_spec(digest(built / TOKENIZER_FILE))
    served = Tokenizer(built / TOKENIZER_FILE, tokenizer)
    with stage(progress, "reference", "PyTorch float32"):
        reference = _reference(loaded)
        arithmetic = loaded.flops
    loaded.model.to_empty(device="meta")  # it has said all that it is asked; large ones leave room for sessions
    graphs: list[GraphSpec] = []
    example = None
    for provider in sorted(chosen, key=lambda provider: provider != "cpu"):
        made: Iterable[Artifact]
        if provider == "cpu":
            made = cpu.build_graphs(fused, chosen[provider], built, loaded, served, texts, spec.max_int8_error, progress)
        else:
            with stage(progress, "optimize", provider):
                made = gpu.build_graphs(provider, chosen[provider], raw, built, loaded, served, texts)
        measured, engine = _measured(made, chosen[provider], loaded, served, reference, progress)
        graphs += measured
        example = example or examples.answered(loaded, served, engine)
    assert example is not None
    return _manifest(spec, name, loaded, tokenizer, arithmetic, graphs, example)


def _measured(
    made: Iterable[Artifact],
    precisions: Sequence[Precision],
    loaded: Checkpoint,
    tokenizer: Tokenizer,
    reference: parity.Reference,
    progress: Progress,
) -> tuple[list[GraphSpec], OnnxEngine]:
    """Measures a provider's graphs; returns the manifest's entries of those to keep, and the engine of the default one."""
    done: list[Artifact] = []
    graphs, engine = [], None
    # fp32 also where it is not kept: without it a fault of the trace could hide in int8's wide bound
    for one in made:
        default = one.precision == precisions[-1]
        with stage(progress, "parity", f"{one.provider}/{one.precision}"):
            onnx_files.finalize(one.path)
            graph, ran = measure.measure(one, loaded, tokenizer, reference, default=default)
        done.append(one)
        graphs.append(graph)
        engine = ran if default else engine
        del ran  # the next graph needs the memory
    for path in {one.path for one in done} - {one.path for one in done if one.precision in precisions}:
        onnx_files.remove(path)
    assert engine is not None
    return [graph for graph in graphs if graph.precision in precisions], engine


def _reference(loaded: Checkpoint) -> parity.Reference:
    """Returns the checkpoint's own answers.

    Raises:
        ParityError: It has none, in PyTorch itself, to some of the samples.
    """
    try:
        return parity.Reference(loaded, samples.samples(loaded.task, loaded.max_length, loaded.mask.token if loaded.mask else None))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ParityError(
            f"{type(loaded.model).__name__} itself cannot run all samples of up to {loaded.max_length} tokens in PyTorch: {error}; it is of a kind "
            "that is not understood, or its configuration says wrong lengths."
        ) from error


def _manifest(
    spec: ExportSpec,
    name: str,
    loaded: Checkpoint,
    tokenizer: TokenizerSpec,
    arithmetic: Flops,
    graphs: Sequence[GraphSpec],
    example: Example,
) -> Manifest:
    return Manifest(
        format="bertserve-bundle",
        format_version=1,
        name=name,
        task=loaded.task,
        labels=loaded.labels,
        activation=loaded.activation,
        embedding=loaded.embedding,
        tokenizer=tokenizer,
        flops=arithmetic,
        graphs=tuple(graphs),
        example=example,
        figures=tuple(spec.figures),
        source=Source(
            checkpoint=loaded.source,
            revision=loaded.revision,
            weights_sha256=loaded.weights_sha256,
            versions=_versions(),
            commit=loaded.commit,
        ),
    )


def _versions() -> dict[str, str]:
    return {
        "bertserve": service.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "tokenizers": version("tokenizers"),
    }
