"""Measures a model, and variants with one difference, as long as the time allows.

The graphs are created like in an export, float32 and int8 by `--quick`, but without a validation report. Missing weights are random,
because the duration of a run does not depend on their values. A model with random weights is an encoder without head and tokenizer, so that
all layers are complete and every text has the stated length.
"""

from __future__ import annotations

import copy
import gc
import inspect
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, BertConfig, PreTrainedModel, initialization

from bertserve.export import cpu, trace
from bertserve.export.analyze.profiling import make_feed
from bertserve.export.analyze.shapes import LENGTHS, MIDDLE, NAMED, Axis, Shape, choose_lengths, variants
from bertserve.export.analyze.timing import AnalysisTiming, measure_apart
from bertserve.export.artifact import Artifact
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.checkpoint.signature import INPUTS
from bertserve.export.checkpoint.source import read_with_transformers
from bertserve.export.errors import CheckpointError, ExportError
from bertserve.export.graph import onnx_files
from bertserve.export.inference import Feed
from bertserve.export.int8 import quantize
from bertserve.export.progress import stage
from bertserve.export.tasks import feature_extraction
from bertserve.export.validation.measure import without_validation_report
from bertserve.service.bundle.graph_spec import InputSpec, Precision
from bertserve.service.bundle.manifest import Flops, TokenizerSpec

_SPREAD = 0.05  # standard deviation of the random weights
_DEFAULT_LENGTH = 512

TEXTS, TOKENS = 16, 16  # for int8: scales for random weights need no accuracy, and few texts are enough
CELL_SECONDS = 2.0  # time for the runs of a length


def read_config(source: str) -> Any:
    """Returns the configuration of a named shape, of a `config.json` or of a folder with one.

    Raises:
        CheckpointError: It cannot be read, or lacks the shape.
    """
    if source in NAMED:
        return with_shape(BertConfig(), NAMED[source])
    path = Path(source)
    config = read_with_transformers(f"the configuration `{source}`", AutoConfig.from_pretrained, path if path.is_dir() else path.absolute())
    shape_of(config)
    return config


def shape_of(config: Any) -> Shape:
    """Returns the shape in a configuration.

    Raises:
        CheckpointError: It lacks layers, heads or hidden size.
    """
    values = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    if not all(isinstance(value, int) for value in values):
        raise CheckpointError(
            f"a {type(config).__name__} does not have layers, heads and a hidden size as numbers ({values}); give "
            "the configuration of a BERT-like encoder."
        )
    inner = _inner_name(config)
    layers, heads, hidden = (int(value) for value in values if value is not None)
    return Shape(layers, heads, hidden, None if inner is None else int(getattr(config, inner)))


def with_shape(config: Any, shape: Shape) -> Any:
    """Returns a copy of a configuration with another shape."""
    new_config = copy.deepcopy(config)
    new_config.num_hidden_layers, new_config.num_attention_heads, new_config.hidden_size = shape.layers, shape.heads, shape.hidden
    inner = _inner_name(config)
    if inner is not None and shape.inner is not None:
        setattr(new_config, inner, shape.inner)
    return new_config


def random_checkpoint(config: Any) -> Checkpoint:
    """Returns an encoder with random weights, in the form that the export stages use.

    Raises:
        CheckpointError: transformers has no encoder for this configuration, or only one that does not read token ids.
    """
    try:
        # the usual initialization takes a hundred times as long
        with initialization.no_init_weights():
            model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"transformers cannot create an encoder from this {type(config).__name__} ({shape_of(config)}): {error}."
        ) from error
    _fill(model)
    parameters = inspect.signature(model.forward).parameters
    if model.main_input_name not in INPUTS:
        raise CheckpointError(f"{type(model).__name__} reads `{model.main_input_name}`, not token ids; only text models can be analyzed.")
    return Checkpoint(
        source="random weights",
        model=model,
        task=feature_extraction.TASK.name,
        inputs=tuple(INPUTS[name] for name in parameters if name in INPUTS),
        outputs=feature_extraction.TASK.outputs,
        labels=(),
        activation="none",
        tokenizer=None,
        tokenizer_json="",
        tokenizer_spec=TokenizerSpec(
            sha256="",
            max_length=int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH),
            pad_id=max(config.pad_token_id or 0, 0),  # some configurations have -1
            padding_side="right",
            single=(),
            pair=(),
            cls_index=None,
            subword_prefix=None,
            mask=None,
        ),
    )


def _inner_name(config: Any) -> str | None:
    """Returns the name of the field for the feed-forward block's size, which differs between models."""
    return next((name for name in ("intermediate_size", "hidden_dim", "ffn_dim") if isinstance(getattr(config, name, None), int)), None)


def _fill(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-_SPREAD, _SPREAD, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def build_fp32(checkpoint: Checkpoint, folder: Path) -> Artifact:
    """Creates the float32 graph in a folder.

    Raises:
        GraphError: The model cannot be traced.
    """
    raw = folder / "raw.onnx"
    traced = trace.trace(checkpoint, raw)
    optimized = cpu.optimize(raw, replace(checkpoint, inputs=traced.inputs), traced.form)
    onnx_files.remove(raw)
    return optimized


def build_int8(fp32: Artifact, checkpoint: Checkpoint, folder: Path) -> Artifact:
    """Creates the int8 graph of a float32 graph in the same folder, without a limit on its error.

    Raises:
        GraphError: There is no matrix to quantize.
    """
    path = folder / "int8.onnx"
    feeds = _random_feeds(fp32.inputs, checkpoint)
    quantize.quantize(fp32.path, path, folder, feeds, feeds, max_error=inf, quick=True)
    return replace(fp32, path=path, precision="int8", form=f"{fp32.form}, int8 by --quick")


def _random_feeds(inputs: Sequence[InputSpec], checkpoint: Checkpoint) -> Sequence[Feed]:
    """Returns texts with random tokens as graph inputs."""
    rng = np.random.default_rng(0)
    embeddings: Any = checkpoint.model.get_input_embeddings()
    length = min(TOKENS, checkpoint.tokenizer_spec.max_length)
    feed = make_feed(inputs, length, checkpoint.tokenizer_spec.pad_id)
    ids = next(spec.name for spec in inputs if spec.fill == "token_ids")
    return [feed | {ids: rng.integers(0, embeddings.weight.shape[0], (1, length))} for _ in range(TEXTS)]


@dataclass(frozen=True)
class SweepSpec:
    """The options of a sweep.

    Attributes:
        source: A named shape, a configuration, or a checkpoint.
        precisions: fp32 or int8 or both, in this order.
        lengths: Lengths in tokens; None for those of `LENGTHS` that the model can read.
        axes: The axes of the variants.
        batch: Number of texts of a batch.
        seconds: Time after which no new measurement starts.
    """

    source: str
    precisions: Sequence[Precision]
    lengths: Sequence[int] | None
    axes: Sequence[Axis]
    batch: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """A measured graph.

    Attributes:
        axis: The property that differs from the base; `base` for the base itself.
        shape: Its shape.
        precision: Its precision.
        parameters: Number of the model's parameters.
        graph_bytes: Size of the graph's files.
        flops: Operations of a text by its length.
        timings: Measured times, by length.
    """

    axis: Axis | Literal["base"]
    shape: Shape
    precision: Precision
    parameters: int
    graph_bytes: int
    flops: Flops
    timings: Sequence[AnalysisTiming]

    def gflop(self, length: int) -> float:
        """Returns the operations of a text of `length` tokens, in 10^9."""
        return (self.flops.linear * length + self.flops.quadratic * length**2) / 1e9


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep: the base and its shape, a point per measured graph, and a line with the reason per omitted measurement."""

    model: str
    base: Shape
    points: Sequence[Point]
    omitted: Sequence[str]


def steps_within(seconds: float, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[str, bool]]:
    """Yields each step with whether the time is enough for it, if it takes as long as the longest so far; the first one always starts."""
    end, longest = clock() + seconds, 0.0
    for i, name in enumerate(names):
        start = clock()
        fits = i == 0 or start + longest < end
        yield name, fits
        if fits:
            longest = max(longest, clock() - start)


def run_sweep(spec: SweepSpec) -> Sweep:
    """Measures the base at all lengths and in all precisions, and the variants at the middle length.

    Raises:
        CheckpointError: The source cannot be read, or the model cannot read a length.
        ExportError: The base cannot be measured. Errors of variants are in the result.
    """
    checkpoint, config = _base(spec.source)
    base = shape_of(config)
    lengths = choose_lengths(spec.lengths, LENGTHS, checkpoint.tokenizer_spec.max_length)
    middle = min(lengths, key=lambda length: abs(length - MIDDLE))  # the length for comparing shapes
    variations = [(axis, shape) for axis in spec.axes for shape in variants(base, axis) if shape != base]
    steps = {"the model itself": None} | {f"{axis}: {shape}": (axis, shape) for axis, shape in variations}
    points: list[Point] = []
    omitted: list[str] = []
    for name, fits in steps_within(spec.seconds, steps):
        variant = steps[name]
        if not fits:
            omitted.append(f"{name}: not started, because --seconds {spec.seconds:g} would not have been enough")
        elif variant is None:
            points += _measure(checkpoint, "base", base, spec, lengths)
            del checkpoint  # the next model needs its memory
        else:
            axis, shape = variant
            try:
                points += _measure(random_checkpoint(with_shape(config, shape)), axis, shape, spec, [middle])
            except ExportError as error:
                omitted.append(f"{name}: {error}")
        gc.collect()
    return Sweep(f"{spec.source} ({type(config).__name__})", base, points, omitted)


def _base(source: str) -> tuple[Checkpoint, object]:
    """Returns the model that a source names, with random weights if it has none, and its configuration."""
    path = Path(source)
    if (
        source in NAMED
        or path.is_file()
        or (path.is_dir() and not any(file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in path.rglob(pattern)))
    ):
        config = read_config(source)
        return random_checkpoint(config), config
    checkpoint = load_checkpoint(source, task=feature_extraction.TASK.name)
    return checkpoint, checkpoint.model.config


def _measure(
    checkpoint: Checkpoint, axis: Axis | Literal["base"], shape: Shape, spec: SweepSpec, lengths: Sequence[int]
) -> Iterator[Point]:
    parameters, flops = sum(parameter.numel() for parameter in checkpoint.model.parameters()), checkpoint.flops
    with tempfile.TemporaryDirectory(prefix="bert-export-analyze-") as name:
        folder = Path(name)
        with stage("build", f"{shape}, fp32"):
            fp32 = build_fp32(checkpoint, folder)
        for precision in spec.precisions:
            graph = fp32
            if precision == "int8":
                with stage("build", f"{shape}, int8"):
                    graph = build_int8(fp32, checkpoint, folder)
            size = sum(file.stat().st_size for file in onnx_files.files(graph.path))
            with stage("measure", f"{shape}, {precision}"):
                entry, pad_id = without_validation_report(graph, checkpoint, default=True), checkpoint.tokenizer_spec.pad_id
                seconds = min(CELL_SECONDS, spec.seconds / 20)
                timings = measure_apart(graph.path, entry, pad_id, lengths, batch=spec.batch, seconds=seconds)
            yield Point(axis, shape, precision, parameters, size, flops, timings)
