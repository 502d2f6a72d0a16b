"""The order of the stages, in a temporary folder beside the output. Nothing clever."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import transformers

import service
from export import (
    accelerate,
    answers,
    calibration,
    checkpoint,
    half,
    lower,
    narrow,
    optimize,
    pack,
    package,
    parity,
    quantize,
    samples,
    speed,
    trace,
)
from export.calibration import Feed
from export.checkpoint import Checkpoint
from export.errors import CheckpointError, ParityError
from export.rows import MAX_ROW_ERROR
from export.signals import held_off
from export.targets import choose
from service.api import reading
from service.bundle import TOKENIZER_FILE, digest
from service.engine import OnnxEngine, why_not
from service.errors import BertServeError
from service.graph import Evidence, GraphSpec, InputSpec, Precision, Provider
from service.manifest import NAME_PATTERN, Example, Figure, Layers, Manifest, Source, Task, TokenizerSpec
from service.shape_plan import ShapePlan
from service.tokenization import Tokenizer

# Requests whose answers are clear, so that another CPU's rounding does not change them.
EXAMPLES: dict[Task, dict[str, Any]] = {
    "text-classification": {"inputs": "This is a surprisingly touching film, and beautifully acted."},
    "token-classification": {"inputs": "Ada Lovelace wrote to Charles Babbage from London."},
    "question-answering": {
        "inputs": {"question": "Where was the bridge built?", "context": "The bridge was built in Porto in 1886 by Eiffel's company."}
    },
    "fill-mask": {"inputs": "The king of [MASK] died in 1066.", "parameters": {"top_k": 1}},
    "feature-extraction": {"inputs": "The bridge was built in Porto in 1886.", "parameters": {"dimensions": 8, "normalize": True}},
}
Progress = Callable[[str], None]
TRACED = f"torchscript opset {trace.OPSET}"
FORM = f"{TRACED}, packed MultiHeadAttention with key padding"
_ORDER: tuple[Precision, ...] = ("fp32", "int8")


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


@dataclass(frozen=True)
class _Form:
    """Of what operators the graphs are made.

    Attributes:
        name: What the manifest says.
        fusions: Fused operator -> count.
        provider: What they are for.
        inputs: What they take, where that is not what the traced graph does.
        shapes: What they are run in, where that is planned.
    """

    name: str
    fusions: dict[str, int]
    provider: Provider = "cpu"
    inputs: tuple[InputSpec, ...] | None = None
    shapes: ShapePlan | None = None


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
    texts = calibration.read(spec.calibration)  # before a checkpoint is loaded for nothing
    with _stage(progress, "load", spec.source):
        loaded = checkpoint.load(spec.source, task=spec.task, revision=spec.revision, layers=spec.layers)
    spec.output.mkdir(parents=True, exist_ok=True)
    with _workspace(name, spec.output) as scratch:
        built, work = scratch / "bundle", scratch / "work"
        built.mkdir()
        work.mkdir()
        manifest = _build(spec, name, loaded, texts, built, work, progress)
        with _stage(progress, "package", str(target)):
            package.package(built, target, manifest, card=loaded.card)
    return target, manifest


@contextmanager
def _workspace(name: str, output: Path) -> Iterator[Path]:
    """Makes a hidden folder on the output's file system, and removes it whatever happens."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=output))
    try:
        yield scratch
    finally:
        with held_off():
            shutil.rmtree(scratch, ignore_errors=True)


def _build(spec: ExportSpec, name: str, loaded: Checkpoint, texts: Sequence[str], built: Path, work: Path, progress: Progress) -> Manifest:
    chosen = choose(spec.providers, spec.precisions)
    raw, fused, lowered, narrow_, final = (work / f"{name}.onnx" for name in ("raw", "fused", "lowered", "narrow", "packed"))
    with _stage(progress, "trace", f"opset {trace.OPSET}"):
        loaded = replace(loaded, inputs=trace.trace(loaded, raw))
    with _stage(progress, "optimize", "cpu"):
        fusions = optimize.optimize(raw, fused, loaded)
        lower.lower(fused, lowered)
        narrowed = narrow.narrow(lowered, narrow_)
        pack.pack(narrow_, final)
        form = _Form(
            f"{TRACED}, {optimize.attention_form(fusions, loaded)}" + (", last layer for the first token only" if narrowed else ""), fusions
        )
    (built / TOKENIZER_FILE).write_text(loaded.tokenizer_json, encoding="utf-8")
    tokenizer = Tokenizer(built / TOKENIZER_FILE, _tokenizer_spec(loaded, built))
    with _stage(progress, "reference", "PyTorch float32"):
        reference = _reference(loaded)
    graphs: dict[tuple[Provider, Precision], GraphSpec] = {}
    example = None
    wanted = chosen.get("cpu", ())
    for precision in _ORDER if wanted else ():
        # fp32 is compared also where it is not kept: without it a fault of the trace could hide in int8's wide bound
        if precision == "fp32" or precision in wanted:
            path = (built if precision in wanted else work) / f"model.cpu.{precision}.onnx"
            quantized = _write_graph(precision, final, path, calibration.feeds(texts, loaded, tokenizer), spec.max_int8_error, progress)
            default = precision == wanted[-1]
            with _stage(progress, "parity", f"cpu/{precision}"):
                graphs["cpu", precision], engine = _measured(path, precision, form, loaded, tokenizer, reference, quantized, default)
            if default:
                example = _example(loaded, tokenizer, engine)
    for provider in (other for other in chosen if other != "cpu"):
        with _stage(progress, "optimize", provider):
            made = accelerate.graphs(provider, chosen[provider], raw, built, loaded, tokenizer, texts)
        others, engine = _accelerated(made, provider, chosen[provider], loaded, tokenizer, reference, progress)
        graphs |= {(provider, graph.precision): graph for graph in others}
        example = example or _example(loaded, tokenizer, engine)
    assert example is not None
    return Manifest(
        format="bertserve-bundle",
        format_version=1,
        name=name,
        task=loaded.task,
        labels=loaded.labels,
        activation=loaded.activation,
        embedding=loaded.embedding,
        tokenizer=_tokenizer_spec(loaded, built),
        flops=loaded.flops,
        graphs=tuple(graph for (provider, precision), graph in graphs.items() if precision in chosen[provider]),
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


def _accelerated(
    made: Sequence[accelerate.Made],
    provider: Provider,
    precisions: Sequence[Precision],
    loaded: Checkpoint,
    tokenizer: Tokenizer,
    reference: parity.Reference,
    progress: Progress,
) -> tuple[list[GraphSpec], OnnxEngine]:
    """Measures a GPU provider's graphs; returns the manifest's entries of those to keep, and the engine of the default one."""
    graphs, engines = {}, {}
    for one in made:  # fp32 also where it is not kept, as on the CPU
        form = _Form(one.form, one.fusions, provider, one.inputs, one.shapes)
        quantized = quantize.Quantized(one.quantized, one.error)
        with _stage(progress, "parity", f"{provider}/{one.precision}"):
            default = one.precision == precisions[-1]
            measured = _measured(one.path, one.precision, form, loaded, tokenizer, reference, quantized, default)
            graphs[one.precision], engines[one.precision] = measured
    for path in {one.path for one in made} - {one.path for one in made if one.precision in precisions}:
        path.unlink()
    return [graphs[precision] for precision in graphs if precision in precisions], engines[precisions[-1]]


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


def _tokenizer_spec(loaded: Checkpoint, built: Path) -> TokenizerSpec:
    facts = ("max_length", "pad_id", "padding_side", "single", "pair", "cls_index", "subword_prefix", "mask")
    return TokenizerSpec.model_validate({"sha256": digest(built / TOKENIZER_FILE)} | {fact: getattr(loaded, fact) for fact in facts})


def _write_graph(
    precision: Precision, source: Path, path: Path, feeds: Sequence[Feed], max_error: float, progress: Progress
) -> quantize.Quantized:
    """Writes the graph of a precision and returns what was quantized."""
    if precision == "fp32":
        shutil.copyfile(source, path)
        return quantize.Quantized({}, 0.0)
    with _stage(progress, "quantize", f"{precision}, calibrated on {len(feeds)} texts"):
        return quantize.quantize(source, path, source.parent, feeds, max_error=max_error)


def _measured(
    path: Path,
    precision: Precision,
    form: _Form,
    loaded: Checkpoint,
    tokenizer: Tokenizer,
    reference: parity.Reference,
    quantized: quantize.Quantized,
    default: bool,
) -> tuple[GraphSpec, OnnxEngine]:
    """Compares a graph with the checkpoint; returns its manifest entry with the evidence, and the engine that ran it.

    Raises:
        ParityError: It answers differently, or cannot be served.
    """
    graph = _graph_spec(path, form, loaded, precision, default=default)
    measured_on = form.provider if why_not(form.provider) is None else "cpu"
    try:
        engine = OnnxEngine(path, graph, pad_id=loaded.pad_id, padding_side=loaded.padding_side, provider=measured_on)
        found = parity.compare(engine, tokenizer, reference, loaded, precision)
    except BertServeError as error:
        raise ParityError(f"the {precision} graph cannot be served: {error}") from error
    model = onnx.load(str(path))
    evidence = Evidence(
        **dataclasses.asdict(found) | {"lengths": found.lengths},
        nodes=len(model.graph.node),
        opset=next((opset.version for opset in model.opset_import if not opset.domain), None),
        speed=speed.measure(engine, max_length=loaded.max_length, pad_id=loaded.pad_id),
        fusions=form.fusions,
        quantized=quantized.counts,
        quantization_error=quantized.error,
        provider=measured_on,
    )
    invariant = found.worst_row_error <= (half.MAX_ROW_ERROR if precision == "fp16" else MAX_ROW_ERROR)
    return graph.model_copy(update={"evidence": evidence, "batch_invariant": invariant}), engine


def _example(loaded: Checkpoint, tokenizer: Tokenizer, engine: OnnxEngine) -> Example:
    """Returns a request body and what the graph answers to it, in the form of the wire."""
    example = dict(EXAMPLES[loaded.task])
    if loaded.mask is not None:
        example["inputs"] = example["inputs"].replace("[MASK]", loaded.mask.token)
    body = reading.read(loaded.task, json.dumps(example).encode(), reading.Limits(max_inputs=1, max_chars=1000))
    (request,) = body.requests(loaded)
    return Example(request=example, result=body.shape([answers.answer(loaded.task, request, tokenizer, engine, loaded)]))


def _graph_spec(path: Path, form: _Form, loaded: Checkpoint, precision: Precision, *, default: bool) -> GraphSpec:
    """Returns the manifest entry of a graph, its evidence still to come."""
    unknown = Evidence(samples=0, worst_abs_error=0.0, label_agreement=0.0, worst_row_error=0.0, nodes=0, fusions={}, quantized={})
    return GraphSpec(
        file=path.name,
        sha256=digest(path),
        provider=form.provider,
        precision=precision,
        form=form.name,
        default=default,
        batch_invariant=False,
        inputs=loaded.inputs if form.inputs is None else form.inputs,
        outputs=loaded.outputs,
        evidence=unknown,
        shapes=form.shapes,
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


@contextmanager
def _stage(progress: Progress, name: str, detail: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    progress(f"{name:<10}{detail}  ({time.perf_counter() - start:.1f} s)")
