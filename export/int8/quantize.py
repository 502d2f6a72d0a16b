"""int8 for the CPU with fixed scales: the result of a row depends neither on its batch nor on the CPU, unless a 16-bit sum saturates.

Activations have one scale per tensor from calibration, weights one per column, word embeddings one per row. docs/explanation/int8.md
explains the numbered steps, which keep the answers close to float, and the gate after them.
"""

import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import Literal

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from threadpoolctl import threadpool_limits

from bertserve.export import inference
from bertserve.export.errors import ExportError
from bertserve.export.graph import onnx_files, rewrite
from bertserve.export.graph.rewrite import Linear
from bertserve.export.inference import Feed
from bertserve.export.int8 import graph_edits
from bertserve.export.int8.activations import Activations, observe
from bertserve.export.int8.gptq import LayerParams, quantize_weight
from bertserve.export.int8.scales import ActivationParams, choose_activation_params
from bertserve.export.int8.sensitivity import measure_sensitivity
from bertserve.export.progress import parallel_map

# Multiples of the average sensitivity. Above the first, outliers of a tensor are computed in float. Below the second, the channels of a
# tensor are not worth a multiplication; other values gave the same result (bench/results/2026-11-22-int8-speed.md).
SPLIT_ABOVE = 1 / 2
SMOOTH_ABOVE = 1 / 12
Layers = dict[str, "Int8Layer"]  # by the name of the activation


@dataclass(frozen=True)
class Int8Layer:
    """A linear layer that reads an activation, and the quantization of the activation so far.

    Attributes:
        shares_matrix: Whether other activations are multiplied by the same matrix. They have the same samples and parameters.
        sensitivity: The effect of quantizing the layer on the outputs, relative to the average layer; NaN if it was not measured.
        float_part: The part of the layer that is computed in float, as the manifest counts it.
    """

    linear: Linear
    shares_matrix: bool
    observed: Activations
    params: ActivationParams
    sensitivity: float = nan
    float_part: Literal["FloatUnits", "FloatInputs"] | None = None

    @property
    def producer(self) -> str | None:
        """The operator that computes the activation."""
        node = self.linear.input.producer()
        return None if node is None else node.op_type

    @property
    def is_worth_smoothing(self) -> bool:
        """Whether smoothing is worth a multiplication at run time; True if it was not measured."""
        return not self.sensitivity < SMOOTH_ABOVE


@contextmanager
def _one_thread_per_product() -> Iterator[None]:
    """Makes torch and numpy use one thread: each core has its own task, and tasks with shared threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(threads)


@_one_thread_per_product()
def quantize(
    source: Path, target: Path, scratch: Path, feeds: Sequence[Feed], gate: Sequence[Feed], *, max_error: float, quick: bool = False
) -> tuple[dict[str, int], float]:
    """Writes the int8 graph of a float32 graph from `bertserve.export.graph.cpu_passes` to a new file.

    Args:
        source: The float32 graph.
        target: The new graph.
        scratch: A folder for intermediate files.
        feeds: The texts for all choices, as graph inputs.
        gate: Other texts, which decide which matrices return to float; the validation report uses a third set of texts.
        max_error: Maximum difference of its outputs from the float graph's, by `inference.rms_error`.
        quick: Whether to skip the measurement of each matrix; then all channels are smoothed, and none is computed in float.

    Returns:
        Operators by kind, as in docs/reference/manifest.md -> count, without zeros; and the error of the outputs on the gate's texts.

    Raises:
        ExportError: There is no matrix to quantize, or the error is too large with any matrix in int8.
    """
    instrumented, samples = scratch / "instrumented.onnx", scratch / "samples"
    model = rewrite.load(source)
    layers = _observe_layers(model, instrumented, feeds, samples)  # steps 1 to 3 of the docs
    if not quick:
        layers = _measure_sensitivities(model, layers, instrumented, feeds)
    onnx_files.remove(instrumented)
    layers = _fold_smoothing(model.graph, layers)
    layers = _split_outliers(model.graph, layers)  # step 4
    layers = _rescale_changed(layers)
    params = _quantize_weights(layers, use_gptq=True)  # step 5
    shutil.rmtree(samples)
    # the most sensitive first; without a measurement a layer is average, or if none was measured, the error of its own output counts
    sensitivities = {tensor: layer.sensitivity for tensor, layer in layers.items() if not isnan(layer.sensitivity)}
    priorities = sensitivities or {tensor: layer.params.error for tensor, layer in layers.items()}
    by_priority = {tensor: params[tensor] for tensor in sorted(layers, key=lambda tensor: -priorities.get(tensor, 1.0))}
    float_count, table_count, error = _emit_within(max_error, model, target, by_priority, source, gate)
    int8_params, float_parts = list(by_priority.values())[float_count:], [layer.float_part for layer in layers.values()]
    counts = {
        "MatMulIntegerToFloat": len(int8_params),
        "PerRowEmbedding": table_count,
        "FloatUnits": float_parts.count("FloatUnits"),
        "FloatInputs": float_parts.count("FloatInputs"),
        "KeptFloat": float_count,
        "RoundedToNearest": sum(not layer.by_gptq for layer in int8_params),
    }
    return {name: count for name, count in counts.items() if count}, error


def _observe_layers(model: ir.Model, path: Path, feeds: Sequence[Feed], samples: Path) -> Layers:
    """Runs the texts, and chooses the parameters of all activations, with smoothing, from files of tensors in `samples`."""
    linears = rewrite.linears_by_input(model.graph)
    if not linears:
        raise ExportError("the graph has no matrix to quantize; export it with --precision fp32.")
    observed = observe(model, linears, path, feeds, samples)
    shared = {tensor for group in rewrite.group_by_weight(linears) for tensor in group}

    def choose(tensor: str) -> ActivationParams:
        return choose_activation_params(linears[tensor].arrays()[0], observed[tensor], smooth=True)

    first_tensors = {layer.weight: tensor for tensor, layer in reversed(linears.items())}
    results = parallel_map(choose, first_tensors.values(), "choose scales", unit="matrices")
    params = dict(zip(first_tensors, results, strict=True))
    return {tensor: Int8Layer(layer, tensor in shared, observed[tensor], params[layer.weight]) for tensor, layer in linears.items()}


def _measure_sensitivities(model: ir.Model, layers: Layers, path: Path, feeds: Sequence[Feed]) -> Layers:
    """Measures the sensitivity of the layers that can be split, or whose smoothing costs time; it writes a temporary graph to `path`."""
    # for attention outputs smoothing is free, and they are never split
    measured = {tensor: layer for tensor, layer in layers.items() if not layer.shares_matrix and layer.producer != "MultiHeadAttention"}
    params = _quantize_weights(measured, use_gptq=False)
    sensitivities = measure_sensitivity(model, params, path, feeds, limits=(SPLIT_ABOVE, SMOOTH_ABOVE))
    return layers | {tensor: replace(layers[tensor], sensitivity=value) for tensor, value in sensitivities.items()}


def _fold_smoothing(graph: ir.Graph, layers: Layers) -> Layers:
    """Moves the smoothing of attention outputs into the matrices before and after them, where it takes no time."""
    multipliers = {name: layer.params.multiplier for name, layer in layers.items() if layer.params.is_smoothed and not layer.shares_matrix}
    folded = {}
    for tensor in graph_edits.fold_smoothing(graph, multipliers):
        layer = layers[tensor]
        folded[tensor] = replace(layer, observed=layer.observed.scaled(multipliers[tensor]), params=layer.params.folded())
    return layers | folded


def _split_outliers(graph: ir.Graph, layers: Layers) -> Layers:
    """Computes outlying channels of the sensitive layers in float: hidden units of feed-forward blocks, and inputs after a LayerNorm."""
    blocks = graph_edits.feed_forward_blocks(graph)
    # a split needs the addition of the bias as its end
    sensitive = {tensor: layer for tensor, layer in layers.items() if layer.sensitivity > SPLIT_ABOVE and layer.linear.add is not None}
    # smaller matrices would be in float as a whole
    min_units = rewrite.MIN_MATRIX_SIDE + graph_edits.HIDDEN_UNITS
    split: dict[str, Int8Layer] = {}
    # units first, because the float part of a block has all of its inputs
    for tensor, layer in sensitive.items():
        if tensor in blocks and layer.linear.shape[0] >= min_units:
            units = graph_edits.split_hidden_units(graph, blocks[tensor], layer.observed.peak)
            split[tensor] = replace(layer, observed=layer.observed.restricted(units), float_part="FloatUnits")
    for tensor, layer in sensitive.items():
        if layer.producer == "LayerNormalization":
            graph_edits.split_input_channels(graph, layer.linear, layer.observed.peak)
            split[tensor] = replace(layer, float_part="FloatInputs")
    return layers | split


def _rescale_changed(layers: Layers) -> Layers:
    """Chooses the parameters of activations again, for layers with a float part, and for layers that are not worth smoothing."""

    def rescaled(tensor: str) -> Int8Layer:
        layer = layers[tensor]
        weight, _ = layer.linear.arrays()
        return replace(layer, params=choose_activation_params(weight, layer.observed, smooth=layer.is_worth_smoothing))

    changed = [name for name, layer in layers.items() if layer.float_part or (layer.params.is_smoothed and not layer.is_worth_smoothing)]
    return layers | dict(zip(changed, parallel_map(rescaled, changed, "choose scales", unit="matrices"), strict=True))


def _quantize_weights(layers: Layers, *, use_gptq: bool) -> dict[str, LayerParams]:
    """Returns the quantization of each layer; layers with the same matrix and bias share the result of the first."""
    keys = {tensor: (layer.linear.weight, layer.linear.arrays()[1].tobytes()) for tensor, layer in layers.items()}
    first_layers = {keys[tensor]: layer for tensor, layer in reversed(layers.items())}

    def quantized(layer: Int8Layer) -> LayerParams:
        return quantize_weight(*layer.linear.arrays(), layer.observed, layer.params, use_gptq=use_gptq)

    work = "round by GPTQ" if use_gptq else "round to nearest"
    results = dict(zip(first_layers, parallel_map(quantized, first_layers.values(), work, unit="matrices"), strict=True))
    return {tensor: results[key] for tensor, key in keys.items()}


def _emit_within(
    max_error: float, model: ir.Model, target: Path, params: Mapping[str, LayerParams], source: Path, feeds: Sequence[Feed]
) -> tuple[int, int, float]:
    """Writes the graph with as many linear layers in int8 as the error allows; the first of `params` return to float first.

    The error is the difference from the outputs of the graph `source` on some of the texts.

    Returns:
        The numbers of layers in float and of int8 tables, and the error of the outputs by `inference.rms_error`.
    """
    probe = feeds[:: max(1, len(feeds) // 48)]  # fewer than 96 texts, because they run for each attempt
    expected = inference.compute_outputs(source, probe)

    def emit(int8_count: int) -> tuple[int, float]:
        candidate = model.clone()
        graph_edits.emit_linears(candidate.graph, dict(islice(params.items(), len(params) - int8_count, None)))
        table_count = graph_edits.emit_embeddings(candidate.graph)
        common.DeduplicateHashedInitializersPass()(candidate)
        rewrite.save(candidate, target)
        return table_count, inference.rms_error(expected, inference.compute_outputs(target, probe))

    count = len(params)
    table_count, error = emit(count)
    if error <= max_error:
        return 0, table_count, error
    _, error = emit(1)
    if not error <= max_error:  # NaN is over the limit too
        raise ExportError(
            f"int8 changes the outputs by {error:.2g} of their standard deviation on unseen texts, over the limit of {max_error:.2g}, even "
            f"with {count - 1} of {count} matrices in float; give texts of the model's domain with --int8-texts, a higher "
            "--max-int8-error, or --precision fp32."
        )
    count = bisect_left(range(count), True, 2, key=lambda int8_count: not emit(int8_count)[1] <= max_error) - 1
    return len(params) - count, *emit(count)
