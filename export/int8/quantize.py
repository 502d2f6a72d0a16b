"""int8 for the CPU with fixed scales: what a row answers depends neither on its batch nor, but for rare sums, on the CPU.

Activations get one scale per tensor from calibration, weights one per column, the word embeddings one per row. Four things keep
the answers near float, each exact or cheap at run time (docs/explanation/int8.md):

1. Of the tensors whose quantization moves the model's outputs most, the few largest channels are computed in float
   (`export.outliers`).
2. Channels are brought to like size before rounding, the inverse is in the weights (SmoothQuant, Xiao et al. 2022,
   arXiv:2211.10438); how far is chosen per matrix, by the error that its output shows on the calibration texts. It is free after
   attention (`export.balance`); elsewhere it costs a multiplication, and is left out where the model's outputs hardly move.
3. Weights are rounded with error feedback, and the mean error goes into the bias.
4. Columns whose products could saturate 16 bits, as CPUs without VNNI add them up in, get wider steps (`export.rounding`).

Last comes a gate: while the outputs are further from the float graph's than allowed, the matrices that matter most go back to float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export import calibration
from export.calibration import Activations, Feed
from export.errors import GraphError
from export.graph import linear
from export.graph.ir import Graph
from export.int8 import emit_int8, fold_smoothing, outlier_split, smoothquant
from export.int8.smoothquant import QuantParams

PROBE_TEXTS = 96
# Shares of the average error of a tensor, each measured alone: above the one its outliers are worth computing in float, below the
# other its channels are not worth a multiplication.
SPLIT_ABOVE = 1 / 3
SMOOTH_ABOVE = 1 / 16


@dataclass(frozen=True)
class Int8Graph:
    """What became of a graph.

    Attributes:
        counts: What was quantized, and what was kept in float -> count.
        error: Root mean square difference of the outputs from the float graph's on calibration texts, over their standard deviation.
    """

    counts: dict[str, int]
    error: float


def quantize(source: Path, target: Path, workspace: Path, feeds: Sequence[Feed], *, max_error: float) -> Int8Graph:
    """Writes the int8 graph to a new file.

    Args:
        source: The lowered float32 graph.
        target: The new graph.
        workspace: A folder for intermediate files.
        feeds: The calibration texts as the graph's inputs.
        max_error: How far its outputs may be from the float graph's, as `calibration.relative_error` measures it.

    Returns:
        What was done, and the error that is left.

    Raises:
        GraphError: There is no matrix to quantize, or none that the outputs bear.
    """
    observed, part, split = (workspace / f"{name}.onnx" for name in ("observed", "part", "split"))
    graph = Graph(source)
    found = linear.find_linears(graph)
    if not found:
        raise GraphError(
            "the graph has no matrix to quantize: none of its layers multiplies by a constant matrix. Export it with --precision fp32."
        )
    seen = _merge_activations(_observe(graph, list(found), observed, feeds), linear.sharing_weights(found))
    # without GPTQ, which takes longest and changes little of which tensors matter
    fits = smoothquant.choose_params(graph, found, seen, use_gptq=False)
    peaks = {x: entry.peak for x, entry in seen.items()}
    del seen  # of a large model the samples take gigabytes of disk
    errors = _sensitivities(source, part, fits, feeds)
    average = sum(errors.values()) / len(errors)
    shared = {x for group in linear.sharing_weights(found) for x in group}
    balanced = fold_smoothing.fold_smoothing(
        graph, {x: fit.multiplier for x, fit in fits.items() if fit.multiplier is not None and x not in shared}
    )
    counts = _split_outliers(graph, [x for x, error in errors.items() if error > average * SPLIT_ABOVE and x not in shared], peaks)
    graph.save(split)
    # splitting moved channels between tensors
    found = linear.find_linears(graph)
    seen = _merge_activations(_observe(graph, list(found), observed, feeds), linear.sharing_weights(found))
    unsmoothed = balanced | {x for x, error in errors.items() if error < average * SMOOTH_ABOVE}
    unsmoothed -= shared
    fits = smoothquant.choose_params(graph, found, seen, use_gptq=True, unsmoothed=unsmoothed)
    fits, tables, error = _emit_within_error(
        split, target, fits, sorted(fits, key=lambda x: -errors.get(x, 0.0)), (source, feeds), max_error
    )
    kept = len(found) - len(fits)
    counts = {"MatMulIntegerToFloat": len(fits), "PerRowEmbedding": tables} | counts | ({"KeptFloat": kept} if kept else {})
    return Int8Graph(counts, error)


def _emit_within_error(
    source: Path,
    target: Path,
    fits: Mapping[str, QuantParams],
    order: Sequence[str],
    reference: tuple[Path, Sequence[Feed]],
    max_error: float,
) -> tuple[dict[str, QuantParams], int, float]:
    """Writes the graph with as many of the matrices in int8 as the outputs bear; returns those, the tables in int8, and the error."""
    probe = _probe_feeds(reference[1])
    expected = calibration.outputs(reference[0], probe)
    for kept in (0, *(2**i for i in range(len(order)) if 2**i < len(order) - 1), len(order) - 1):
        chosen = {x: fit for x, fit in fits.items() if x not in order[:kept]}
        graph = Graph(source)
        emit_int8.emit_linears(graph, chosen)
        tables = emit_int8.emit_embeddings(graph)
        graph.share()
        graph.save(target)
        error = calibration.relative_error(expected, calibration.outputs(target, probe))
        if error <= max_error:
            return chosen, tables, error
    raise GraphError(
        f"int8 moves the model's outputs by {error:.2g} of their spread on the calibration texts, over the limit of {max_error:.2g}, even "
        f"with {kept} of {len(fits)} matrices in float; give texts of the model's own domain with --calibration, allow "
        "more with --max-int8-error, or export with --precision fp32."
    )


def _split_outliers(graph: Graph, sensitive: Sequence[str], peaks: Mapping[str, NDArray[np.float32]]) -> dict[str, int]:
    """Computes outlying channels of the sensitive tensors in float; returns of how many, by the way in which it was done."""
    blocks = {node.output[0]: node for node in outlier_split.feed_forwards(graph)}
    found, producers, consumers = linear.find_linears(graph), graph.producers(), graph.consumers()
    # a split keeps the addition of the bias as its end
    sensitive = [x for x in sensitive if linear.bias_add(graph, found[x], consumers) is not None]
    units = [x for x in sensitive if x in blocks]
    inputs = [x for x in sensitive if x in producers and producers[x].op_type == "LayerNormalization"]
    # units first: a block is not recognizable with its inputs split
    for x in units:
        outlier_split.split_hidden_units(graph, blocks[x], peaks[x])
    for x in inputs:
        outlier_split.split_input_channels(graph, found[x], peaks[x])
    return {"FloatUnits": len(units), "FloatInputs": len(inputs)}


def _merge_activations(seen: Mapping[str, Activations], groups: Sequence[Sequence[str]]) -> dict[str, Activations]:
    """Takes the tensors of a group for one, so that they get the same scales and their matrix is stored once."""
    merged = dict(seen)
    for group in groups:
        parts = [seen[x] for x in group]
        # each layer's share of the sample, so that it is no larger than another matrix's
        rows = np.concatenate([part.rows[i :: len(parts)] for i, part in enumerate(parts)])
        high, low = np.max([part.high for part in parts], axis=0), np.min([part.low for part in parts], axis=0)
        merged |= dict.fromkeys(group, Activations(rows, high, low))
    return merged


def _observe(graph: Graph, tensors: Sequence[str], path: Path, feeds: Sequence[Feed]) -> dict[str, Activations]:
    graph.save(path, also=tensors)
    return calibration.observe(path, tensors, feeds)


def _sensitivities(source: Path, part: Path, fits: Mapping[str, QuantParams], feeds: Sequence[Feed]) -> dict[str, float]:
    """Returns how much the quantization of each tensor, alone, moves the model's outputs: the square of their relative error."""
    probe = _probe_feeds(feeds)
    expected = calibration.outputs(source, probe)
    errors = {}
    for x, fit in fits.items():
        graph = Graph(source)
        emit_int8.emit_linears(graph, {x: fit})
        graph.save(part)
        errors[x] = calibration.relative_error(expected, calibration.outputs(part, probe)) ** 2
    return errors


def _probe_feeds(feeds: Sequence[Feed]) -> Sequence[Feed]:
    return feeds[:: max(1, len(feeds) // PROBE_TEXTS)]
