"""int8 for the CPU with fixed scales: the result of a row depends neither on its batch nor on the CPU, unless a 16-bit sum saturates.

Activations have one scale per tensor from calibration, weights one per column, word embeddings one per row. docs/explanation/int8.md
explains the steps that keep the answers close to float, and the gate after them: if the outputs on unseen texts differ from the float
graph's by more than allowed, the most sensitive matrices return to float.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes import common
from threadpoolctl import threadpool_limits

from bertserve.export import inference
from bertserve.export.errors import GraphError
from bertserve.export.graph import onnx_files, rewrite
from bertserve.export.graph.rewrite import Linear
from bertserve.export.inference import Feed
from bertserve.export.int8 import graph_edits, quantization_params, sensitivity
from bertserve.export.int8.activations import Activations, observe
from bertserve.export.int8.quantization_params import ActivationParams, LayerParams
from bertserve.export.progress import parallel_map

T = TypeVar("T")
# Multiples of the average sensitivity. Above the first, outliers of a tensor are computed in float. Below the second, the channels of a
# tensor are not worth a multiplication; other values gave the same result (bench/results/2026-11-22-int8-speed.md).
SPLIT_ABOVE = 1 / 2
SMOOTH_ABOVE = 1 / 12


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
        GraphError: There is no matrix to quantize, or the error is too large with any matrix in int8.
    """
    instrumented, samples = scratch / "instrumented.onnx", scratch / "samples"
    model = rewrite.load(source)
    layers = rewrite.linears_by_input(model.graph)
    if not layers:
        raise GraphError("the graph has no matrix to quantize; export it with --precision fp32.")
    observed = observe(model, layers, instrumented, feeds, samples)
    activation_params = _choose_activation_params(layers, observed)
    shared_inputs = {tensor for group in rewrite.group_by_weight(layers) for tensor in group}
    # for attention outputs smoothing is free, and they are never split, so their sensitivity does not matter
    fixed_inputs = shared_inputs | {node.outputs[0].name for node in model.graph if node.op_type == "MultiHeadAttention"}
    changeable_layers = {tensor: layer for tensor, layer in layers.items() if tensor not in fixed_inputs}
    nearest_params = _quantize_weights({} if quick else changeable_layers, observed, activation_params, use_gptq=False)
    sensitivities = sensitivity.measure(model, nearest_params, instrumented, feeds, limits=(SPLIT_ABOVE, SMOOTH_ABOVE))
    onnx_files.remove(instrumented)
    insensitive_inputs = {tensor for tensor, share in sensitivities.items() if share < SMOOTH_ABOVE}
    multipliers = {name: param.multiplier for name, param in activation_params.items() if param.is_smoothed and name not in shared_inputs}
    for tensor in graph_edits.fold_smoothing(model.graph, multipliers):
        observed[tensor], activation_params[tensor] = observed[tensor].scaled(multipliers[tensor]), activation_params[tensor].folded()
    units, inputs = _split_outliers(model.graph, [tensor for tensor, share in sensitivities.items() if share > SPLIT_ABOVE], observed)
    rescaled = {*units, *inputs, *(tensor for tensor in insensitive_inputs if activation_params[tensor].is_smoothed)}
    layers = rewrite.linears_by_input(model.graph)  # a split has replaced matrices
    rescaled_layers = {tensor: layers[tensor] for tensor in activation_params if tensor in rescaled}
    activation_params |= _choose_activation_params(rescaled_layers, observed, unsmoothed=insensitive_inputs)
    layer_params = _quantize_weights(layers, observed, activation_params, use_gptq=True)
    shutil.rmtree(samples)
    # the most sensitive first; without a measurement a matrix counts as average, or if none was measured, its own output error counts
    priorities = sensitivities or {tensor: params.error for tensor, params in activation_params.items()}
    order = sorted(layer_params, key=lambda tensor: -priorities.get(tensor, 1.0))
    probe = gate[:: max(1, len(gate) // 48)]  # fewer than 96 texts, because they run for each attempt
    expected = inference.compute_outputs(source, probe)
    float_count, table_count, error = _emit_within(max_error, model, target, layer_params, order, probe, expected)
    counts = {
        "MatMulIntegerToFloat": len(order) - float_count,
        "PerRowEmbedding": table_count,
        "FloatUnits": len(units),
        "FloatInputs": len(inputs),
        "KeptFloat": float_count,
        "RoundedToNearest": sum(not layer_params[tensor].by_gptq for tensor in order[float_count:]),
    }
    return {name: count for name, count in counts.items() if count}, error


def _choose_activation_params(
    layers: Mapping[str, Linear], observed: Mapping[str, Activations], *, unsmoothed: Collection[str] = ()
) -> dict[str, ActivationParams]:
    """Returns the quantization of each activation; layers that share a matrix, and thus their samples, have the same."""

    def choose(tensor: str) -> ActivationParams:
        return quantization_params.choose_activation_params(layers[tensor].arrays()[0], observed[tensor], smooth=tensor not in unsmoothed)

    return _compute_once_per_key(choose, {tensor: layer.weight for tensor, layer in layers.items()}, "choose scales")


def _quantize_weights(
    layers: Mapping[str, Linear],
    observed: Mapping[str, Activations],
    activation_params: Mapping[str, ActivationParams],
    *,
    use_gptq: bool,
) -> dict[str, LayerParams]:
    """Returns the quantization of each layer; layers with the same matrix and bias have the same."""
    keys = {tensor: (layer.weight, layer.arrays()[1].tobytes()) for tensor, layer in layers.items()}

    def quantized(tensor: str) -> LayerParams:
        return quantization_params.quantize_weight(*layers[tensor].arrays(), observed[tensor], activation_params[tensor], use_gptq=use_gptq)

    return _compute_once_per_key(quantized, keys, "round by GPTQ" if use_gptq else "round to nearest")


def _compute_once_per_key(function: Callable[[str], T], keys: dict[str, Any], work: str) -> dict[str, T]:
    """Returns the function's result for each tensor; tensors with the same key share the result of the first."""
    first_input = {key: tensor for tensor, key in reversed(keys.items())}
    by_key = dict(zip(first_input, parallel_map(function, first_input.values(), work, unit="matrices"), strict=True))
    return {tensor: by_key[key] for tensor, key in keys.items()}


def _split_outliers(graph: ir.Graph, sensitive_inputs: Sequence[str], observed: dict[str, Activations]) -> tuple[list[str], list[str]]:
    """Computes outlying channels of the sensitive tensors in float, and updates the records of these tensors.

    Returns:
        The tensors that lost hidden units, and the tensors with some channels in float.
    """
    layers = rewrite.linears_by_input(graph)
    blocks = {str(node.outputs[0].name): node for node in graph_edits.feed_forward_gelus(graph)}
    norm_outputs = {node.outputs[0].name for node in graph if node.op_type == "LayerNormalization"}
    # a split needs the addition of the bias as its end
    sensitive_inputs = [tensor for tensor in sensitive_inputs if layers[tensor].add is not None]
    # smaller matrices would be in float as a whole
    enough = rewrite.MIN_MATRIX_SIDE + graph_edits.HIDDEN_UNITS
    units = [tensor for tensor in sensitive_inputs if tensor in blocks and len(layers[tensor].arrays()[0]) >= enough]
    inputs = [tensor for tensor in sensitive_inputs if tensor in norm_outputs]
    # units first, because a block with split inputs is not recognized
    for tensor in units:
        observed[tensor] = observed[tensor].restricted(graph_edits.split_hidden_units(graph, blocks[tensor], observed[tensor].peak))
    for tensor in inputs:
        graph_edits.split_input_channels(graph, layers[tensor], observed[tensor].peak)
    return units, inputs


def _emit_within(
    max_error: float,
    model: ir.Model,
    target: Path,
    params: Mapping[str, LayerParams],
    order: Sequence[str],
    probe: Sequence[Feed],
    expected: Sequence[NDArray[np.float32]],
) -> tuple[int, int, float]:
    """Writes the graph with as many linear layers in int8 as the error allows; the first layers of `order` return to float first.

    Returns:
        The numbers of layers in float and of int8 tables, and the error of the outputs by `inference.rms_error`.
    """

    def emit(float_count: int) -> tuple[int, float]:
        candidate = model.clone()
        graph_edits.emit_linears(candidate.graph, {tensor: quant for tensor, quant in params.items() if tensor not in order[:float_count]})
        table_count = graph_edits.emit_embeddings(candidate.graph)
        common.DeduplicateHashedInitializersPass()(candidate)
        rewrite.save(candidate, target)
        return table_count, inference.rms_error(expected, inference.compute_outputs(target, probe))

    table_count, error = emit(0)
    if error <= max_error:
        return 0, table_count, error
    too_few, enough = 0, len(order) - 1
    _, error = emit(enough)
    if not error <= max_error:  # NaN is over the limit too
        raise GraphError(
            f"int8 changes the outputs by {error:.2g} of their standard deviation on unseen texts, over the limit of {max_error:.2g}, even "
            f"with {enough} of {len(order)} matrices in float; give texts of the model's domain with --int8-texts, a higher "
            "--max-int8-error, or --precision fp32."
        )
    while enough - too_few > 1:
        count = (too_few + enough) // 2
        _, error = emit(count)
        if error <= max_error:
            enough = count
        else:
            too_few = count
    if not error <= max_error:
        _, error = emit(enough)
    return enough, table_count, error
