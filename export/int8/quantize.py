"""int8 for the CPU with fixed scales: what a row answers depends neither on its batch nor, but for rare sums, on the CPU.

Activations get one scale per tensor from calibration, weights one per column, the word embeddings one per row. Four things keep
the answers near float, each exact or cheap at run time (docs/explanation/int8.md):

1. The few largest channels are computed in float, of those tensors whose quantization moves the model's outputs most
   (`export.int8.outlier_split`).
2. Channels are smoothed (SmoothQuant), with an alpha chosen per matrix by the error that its output shows on the calibration texts
   (`export.int8.smoothquant`). That is free after attention (`export.int8.fold_smoothing`); elsewhere it costs a multiplication,
   and is left out where the model's outputs hardly move.
3. Weights are rounded by GPTQ, and the mean error goes into the bias.
4. Columns whose products could saturate 16 bits, in which CPUs without VNNI add them up, get wider steps (`export.int8.gptq`).

Last comes a gate: while the outputs are further from the float graph's than allowed, the matrices that matter most go back to float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from export import calibration
from export.calibration import Activations, Feed
from export.errors import GraphError
from export.graph import linear, rewrite
from export.graph.linear import Linear
from export.int8 import emit_int8, fold_smoothing, outlier_split, smoothquant
from export.int8.smoothquant import QuantParams
from export.progress import track

PROBE_TEXTS = 96
# Shares of the average sensitivity. The outliers of a tensor above the first are worth computing in float; the channels of a tensor
# below the second are not worth a multiplication.
SPLIT_ABOVE = 1 / 3
SMOOTH_ABOVE = 1 / 16


@dataclass(frozen=True)
class Int8Graph:
    """What was quantized.

    Attributes:
        counts: What was quantized, and what was kept in float -> count.
        error: Root mean square difference of the outputs from the float graph's on calibration texts, over their standard deviation.
    """

    counts: dict[str, int]
    error: float


def quantize(source: Path, target: Path, workspace: Path, feeds: Sequence[Feed], *, max_error: float) -> Int8Graph:
    """Writes the int8 graph to a new file.

    Args:
        source: The float32 graph, as `export.cpu.pack_qkv` writes it.
        target: The new graph.
        workspace: A folder for intermediate files.
        feeds: The calibration texts as the graph's inputs.
        max_error: How far its outputs may be from the float graph's, as `calibration.relative_error` measures it.

    Returns:
        What was done, and the error that is left.

    Raises:
        GraphError: There is no matrix to quantize, or none that the outputs bear.
    """
    observed, part = workspace / "observed.onnx", workspace / "part.onnx"
    model = rewrite.load(source)
    graph = model.graph
    linears = linear.find_linears(graph)
    if not linears:
        raise GraphError(
            "the graph has no matrix to quantize: none of its layers multiplies by a constant matrix. Export it with --precision fp32."
        )
    probe = feeds[:: max(1, len(feeds) // PROBE_TEXTS)]
    expected = calibration.outputs(source, probe)
    activations = _observe(model, linears, observed, feeds)
    # without GPTQ, which takes longest and changes little of which tensors matter
    params = smoothquant.choose_params(linears, activations, use_gptq=False)
    peaks = {x: entry.peak for x, entry in activations.items()}
    del activations  # of a large model the samples take gigabytes of disk
    sensitivities = _sensitivities(model, part, params, probe, expected)
    average = sum(sensitivities.values()) / len(sensitivities)
    shared = {x for group in linear.sharing_weights(linears) for x in group}
    multipliers = {x: quant.multiplier for x, quant in params.items() if quant.multiplier is not None and x not in shared}
    folded = fold_smoothing.fold_smoothing(graph, multipliers)
    counts = _split_outliers(graph, [x for x, error in sensitivities.items() if error > average * SPLIT_ABOVE and x not in shared], peaks)
    # splitting moved channels between tensors
    linears = linear.find_linears(graph)
    activations = _observe(model, linears, observed, feeds)
    unsmoothed = (folded | {x for x, error in sensitivities.items() if error < average * SMOOTH_ABOVE}) - shared
    params = smoothquant.choose_params(linears, activations, use_gptq=True, unsmoothed=unsmoothed)
    order = sorted(params, key=lambda x: -sensitivities.get(x, 0.0))
    chosen, tables, error = _emit_within(max_error, model, target, params, order, probe, expected)
    kept = len(linears) - len(chosen)
    counts = {"MatMulIntegerToFloat": len(chosen), "PerRowEmbedding": tables} | counts | ({"KeptFloat": kept} if kept else {})
    return Int8Graph(counts, error)


def _emit_within(
    max_error: float,
    model: ir.Model,
    target: Path,
    params: Mapping[str, QuantParams],
    order: Sequence[str],
    probe: Sequence[Feed],
    expected: Sequence[NDArray[np.float32]],
) -> tuple[list[str], int, float]:
    """Writes the graph with as many of the linear layers in int8 as the outputs bear.

    Returns:
        Those layers by the tensor that they read, the number of tables in int8, and the error.

    Raises:
        GraphError: The outputs bear none.
    """
    for kept in (0, *(2**i for i in range(len(order)) if 2**i < len(order) - 1), len(order) - 1):
        chosen = {x: quant for x, quant in params.items() if x not in order[:kept]}
        candidate = model.clone()
        emit_int8.emit_linears(candidate.graph, chosen)
        tables = emit_int8.emit_embeddings(candidate.graph)
        common.DeduplicateHashedInitializersPass()(candidate)
        rewrite.save(candidate, target)
        error = calibration.relative_error(expected, calibration.outputs(target, probe))
        if error <= max_error:
            return list(chosen), tables, error
    raise GraphError(
        f"int8 moves the model's outputs by {error:.2g} of their spread on the calibration texts, over the limit of {max_error:.2g}, even "
        f"with {kept} of {len(params)} matrices in float; give texts of the model's own domain with --calibration, allow "
        "more with --max-int8-error, or export with --precision fp32."
    )


def _split_outliers(graph: ir.Graph, sensitive: Sequence[str], peaks: Mapping[str, NDArray[np.float32]]) -> dict[str, int]:
    """Computes outlying channels of the sensitive tensors in float; returns of how many, by the way in which it was done."""
    linears = linear.find_linears(graph)
    blocks = {str(node.outputs[0].name): node for node in outlier_split.feed_forwards(graph)}
    normed = {node.outputs[0].name for node in graph if node.op_type == "LayerNormalization"}
    # a split keeps the addition of the bias as its end
    sensitive = [x for x in sensitive if linears[x].add is not None]
    units = [x for x in sensitive if x in blocks]
    inputs = [x for x in sensitive if x in normed]
    # units first: a block is not recognizable with its inputs split
    for x in units:
        outlier_split.split_hidden_units(graph, blocks[x], peaks[x])
    for x in inputs:
        outlier_split.split_input_channels(graph, linears[x], peaks[x])
    return {"FloatUnits": len(units), "FloatInputs": len(inputs)}


def _observe(model: ir.Model, linears: Mapping[str, Linear], path: Path, feeds: Sequence[Feed]) -> dict[str, Activations]:
    """Returns what each tensor that a linear layer reads was on the calibration texts.

    Tensors that are multiplied with the same matrix count as one, so that they get the same scales and their matrix is stored once.
    """
    rewrite.save(model, path, outputs=list(linears))
    activations = calibration.observe(path, list(linears), feeds)
    for group in linear.sharing_weights(linears):
        parts = [activations[x] for x in group]
        # a part of each layer's sample, so that together they are no larger than another matrix's
        rows = np.concatenate([part.rows[i :: len(parts)] for i, part in enumerate(parts)])
        high, low = np.max([part.high for part in parts], axis=0), np.min([part.low for part in parts], axis=0)
        activations |= dict.fromkeys(group, Activations(rows, high, low))
    return activations


def _sensitivities(
    model: ir.Model, path: Path, params: Mapping[str, QuantParams], probe: Sequence[Feed], expected: Sequence[NDArray[np.float32]]
) -> dict[str, float]:
    """Returns how much the quantization of each tensor, alone, moves the model's outputs: the square of their relative error."""
    found = {}
    for x, quant in track(params.items(), "measure sensitivity", unit="matrices"):
        candidate = model.clone()
        emit_int8.emit_linears(candidate.graph, {x: quant})
        rewrite.save(candidate, path)
        found[x] = calibration.relative_error(expected, calibration.outputs(path, probe)) ** 2
    return found
