"""int8 for the CPU with fixed scales: what a row answers depends neither on its batch nor, but for rare sums, on the CPU.

Activations get one scale per tensor from calibration, weights one per column, the word embeddings one per row. Four things keep
the answers near float, each exact or cheap at run time (docs/export.md has what each buys):

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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from export import balance, calibration, outliers, rounding
from export.calibration import Activations, Feed
from export.errors import GraphError
from export.graph import CONTRIB, Graph

MIN_ROWS = 1024  # smaller tables, as those of positions mostly and of types always are, are not worth the lost precision
MIN_SIDE = 32  # smaller matrices, as a classifier's and the float parts of split ones, cost nothing in float
SAMPLE_ROWS = 3072
PROBE_TEXTS = 96
DRIFT = 2  # steps that an activation may go beyond calibration before a sum can saturate
# Shares of the average error of a tensor, each measured alone: above the one its outliers are worth computing in float, below the
# other its channels are not worth a multiplication.
SENSITIVE = 1 / 3
INDIFFERENT = 1 / 16

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Quantized:
    """What became of a graph.

    Attributes:
        counts: What was quantized, and what was kept in float -> count.
        error: Root mean square difference of the outputs from the float graph's on calibration texts, over their standard deviation.
    """

    counts: dict[str, int]
    error: float


@dataclass(frozen=True)
class _Fit:
    """How one tensor and the matrix that reads it are quantized.

    `x` is stored as `round(x * multiplier / scale) + zero`, a weight as `round(weight / multiplier / weight_scale)`.
    """

    multiplier: Floats | None
    scale: np.float32
    zero: np.uint8
    weight: NDArray[np.int8]
    weight_scale: Floats
    bias: Floats


def quantize(source: Path, target: Path, workspace: Path, feeds: Sequence[Feed], *, max_error: float) -> Quantized:
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
    products = _products(graph)
    if not products:
        raise GraphError("the graph has no matrix to quantize.")
    seen = _together(_observe(graph, list(products), observed, feeds), _shared(products))
    # without feedback, which takes longest and changes little of which tensors matter
    fits = _fits(graph, products, seen, feedback=False)
    errors = _errors(source, part, fits, feeds)
    average = sum(errors.values()) / len(errors)
    shared = {x for group in _shared(products) for x in group}
    balanced = balance.balance(graph, {x: fit.multiplier for x, fit in fits.items() if fit.multiplier is not None and x not in shared})
    counts = _split(graph, [x for x, error in errors.items() if error > average * SENSITIVE and x not in shared], seen)
    graph.save(split)
    # splitting moved channels between tensors
    products = _products(graph)
    seen = _together(_observe(graph, list(products), observed, feeds), _shared(products))
    plain = balanced | {x for x, error in errors.items() if error < average * INDIFFERENT}
    plain -= shared
    fits = _fits(graph, products, seen, feedback=True, plain=plain)
    fits, tables, error = _gate(split, target, fits, sorted(fits, key=lambda x: -errors.get(x, 0.0)), (source, feeds), max_error)
    kept = len(products) - len(fits)
    counts = {"MatMulIntegerToFloat": len(fits), "PerRowEmbedding": tables} | counts | ({"KeptFloat": kept} if kept else {})
    return Quantized(counts, error)


def _gate(
    source: Path, target: Path, fits: Mapping[str, _Fit], order: Sequence[str], reference: tuple[Path, Sequence[Feed]], max_error: float
) -> tuple[dict[str, _Fit], int, float]:
    """Writes the graph with as many of the matrices in int8 as the outputs bear; returns those, the tables in int8, and the error."""
    probe = _probe(reference[1])
    expected = calibration.outputs(reference[0], probe)
    for kept in (0, *(2**i for i in range(len(order)) if 2**i < len(order) - 1), len(order) - 1):
        chosen = {x: fit for x, fit in fits.items() if x not in order[:kept]}
        graph = Graph(source)
        _apply(graph, chosen)
        tables = _quantize_embeddings(graph)
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


def _split(graph: Graph, sensitive: Sequence[str], seen: Mapping[str, Activations]) -> dict[str, int]:
    """Computes outlying channels of the sensitive tensors in float; returns of how many, by the way in which it was done."""
    blocks = {node.output[0]: node for node in outliers.feed_forwards(graph)}
    products, producers, consumers = _products(graph), graph.producers(), graph.consumers()
    # a split keeps the addition of the bias as its end
    sensitive = [x for x in sensitive if _addition(graph, products[x], consumers) is not None]
    units = [x for x in sensitive if x in blocks]
    inputs = [x for x in sensitive if x in producers and producers[x].op_type == "LayerNormalization"]
    # units first: a block is not recognizable with its inputs split
    for x in units:
        outliers.split_units(graph, blocks[x], seen[x].peak)
    for x in inputs:
        outliers.split_inputs(graph, products[x], seen[x].peak)
    return {"FloatUnits": len(units), "FloatInputs": len(inputs)}


def _shared(products: Mapping[str, NodeProto]) -> list[list[str]]:
    """Returns the tensors that are multiplied with the same matrix, as those of shared layers are, for each that several are."""
    groups: dict[str, list[str]] = {}
    for x, product in products.items():
        groups.setdefault(product.input[1], []).append(x)
    return [group for group in groups.values() if len(group) > 1]


def _together(seen: Mapping[str, Activations], groups: Sequence[Sequence[str]]) -> dict[str, Activations]:
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


def _products(graph: Graph) -> dict[str, NodeProto]:
    """Returns, by the tensor that it reads, each product with a constant matrix.

    There is one for a tensor, or one with a bias and one without: `export.pack` has merged the others, and the one with a bias counts.
    What is computed from constants alone, as projections of a table of positions are, ONNX Runtime computes once.
    """
    consumers, fed = graph.consumers(), _fed(graph)
    found: dict[str, NodeProto] = {}
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or weight.ndim != 2 or min(weight.shape) < MIN_SIDE or node.input[0] not in fed:
            continue
        if node.input[0] not in found or _addition(graph, node, consumers) is not None:
            found[node.input[0]] = node
    return found


def _fed(graph: Graph) -> set[str]:
    """Returns the tensors that depend on the graph's inputs."""
    fed = set(graph.inputs)
    for node in graph.nodes:
        if fed.intersection(node.input):
            fed.update(node.output)
    return fed


def _addition(graph: Graph, product: NodeProto, consumers: Mapping[str, list[NodeProto]]) -> NodeProto | None:
    """Returns the node that adds a product's bias, or None where it has none."""
    readers = consumers[product.output[0]]
    if product.output[0] in graph.outputs or len(readers) != 1 or readers[0].op_type != "Add":
        return None
    return readers[0] if any((bias := graph.constant(name)) is not None and bias.ndim == 1 for name in readers[0].input) else None


def _weight_and_bias(graph: Graph, product: NodeProto) -> tuple[Floats, Floats]:
    weight = graph.constant(product.input[1])
    assert weight is not None, product.name
    addition = _addition(graph, product, graph.consumers())
    if addition is None:
        return weight, np.zeros(weight.shape[1], dtype=np.float32)
    return weight, next(value for name in addition.input if (value := graph.constant(name)) is not None)


def _fits(
    graph: Graph, products: Mapping[str, NodeProto], seen: Mapping[str, Activations], *, feedback: bool, plain: Collection[str] = ()
) -> dict[str, _Fit]:
    """Returns how each tensor is quantized; those that share a matrix, and so what was seen, share that too."""
    fits: dict[str, _Fit] = {}
    first: dict[tuple[str, bytes], str] = {}
    for x, product in products.items():
        _, bias = _weight_and_bias(graph, product)
        same = first.setdefault((product.input[1], bias.tobytes()), x)
        fits[x] = fits[same] if same in fits else _fit(graph, product, seen[x], feedback=feedback, plain=x in plain)
    return fits


def _fit(graph: Graph, product: NodeProto, seen: Activations, *, feedback: bool, plain: bool = False) -> _Fit:
    """Returns the scales that put the least error on what the matrix gives out for the calibration texts; all 1 if `plain`."""
    weight, bias = _weight_and_bias(graph, product)
    used = np.abs(weight).max(axis=1) > 0  # rows of zeros are computed elsewhere, in float
    all_rows, high, low = (value * used.astype(np.float32) for value in (seen.rows, seen.high, seen.low))
    rows = all_rows[:: max(1, len(all_rows) // SAMPLE_ROWS)]
    expected = rows @ weight
    wide = np.abs(weight).max(axis=1)

    def error(spread: Floats, share: float) -> float:
        scaled = weight * spread[:, None]
        scale, zero = _range(share * float((low / spread).min()), share * float((high / spread).max()))
        scales = rounding.column_scales(scaled, _peak(high / spread, scale, zero))
        actual = _values(rows / spread, scale, zero) @ (rounding.to_nearest(scaled, scales) * scales)
        return float(np.mean((actual - expected) ** 2))

    spreads = [np.ones_like(wide)] if plain else _spreads(rows, np.maximum(high, -low), wide)
    spread = min(spreads, key=lambda spread: error(spread, 1.0))
    share = min((1.0, 0.9, 0.8), key=lambda share: error(spread, share))
    scale, zero = _range(share * float((low / spread).min()), share * float((high / spread).max()))
    scaled, peak = weight * spread[:, None], _peak(high / spread, scale, zero)
    scales = rounding.column_scales(scaled, peak)
    stored = _values(all_rows / spread, scale, zero)
    steps = rounding.with_feedback(scaled, scales, stored, peak) if feedback else rounding.to_nearest(scaled, scales)
    shift = all_rows.mean(axis=0) @ weight - stored.mean(axis=0) @ (steps * scales)
    multiplier = np.where(used, 1 / spread, 0).astype(np.float32)
    return _Fit(None if (spread == 1).all() else multiplier, scale, zero, steps, scales, (bias + shift).astype(np.float32))


def _spreads(rows: Floats, peak: Floats, weight_peak: Floats) -> Iterator[Floats]:
    """Yields what channels may be divided by: from nothing to their whole size, of all values or of all but one in a thousand."""
    peak = np.maximum(peak, 1e-3)
    common = np.maximum(np.quantile(np.abs(rows), 0.999, axis=0), 1e-3)
    weight_peak = np.maximum(weight_peak, 1e-4)
    yield np.ones_like(peak)
    for size, powers in ((peak, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)), (common, (0.7, 0.8, 0.9))):
        for power in powers:
            spread = size**power / weight_peak ** (1 - power)
            yield (spread / np.exp(np.log(spread).mean())).astype(np.float32)
    for times in (1, 1.5, 2, 3):
        yield np.maximum(peak / (np.median(peak) * times), 1).astype(np.float32)


def _range(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Returns scale and zero point of uint8 for values of this range, which zero is always in."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32(max(high - low, 1e-6) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def _steps(x: Floats, scale: np.float32, zero: np.uint8) -> NDArray[np.uint8]:
    steps: NDArray[np.uint8] = np.clip(np.rint(x / scale) + np.float32(zero), 0, 255).astype(np.uint8)
    return steps


def _peak(high: Floats, scale: np.float32, zero: np.uint8) -> NDArray[np.uint8]:
    """Returns the largest step of each channel: that of calibration, whose matrices before this one were not yet quantized, and more."""
    peak: NDArray[np.uint8] = np.minimum(_steps(high, scale, zero), 255 - DRIFT) + np.uint8(DRIFT)
    return peak


def _values(x: Floats, scale: np.float32, zero: np.uint8) -> Floats:
    """Returns what is left of values after quantization."""
    return (_steps(x, scale, zero).astype(np.float32) - np.float32(zero)) * scale


def _errors(source: Path, part: Path, fits: Mapping[str, _Fit], feeds: Sequence[Feed]) -> dict[str, float]:
    """Returns how much the quantization of each tensor, alone, moves the model's outputs: the square of their relative error."""
    probe = _probe(feeds)
    expected = calibration.outputs(source, probe)
    errors = {}
    for x, fit in fits.items():
        graph = Graph(source)
        _apply(graph, {x: fit})
        graph.save(part)
        errors[x] = calibration.relative_error(expected, calibration.outputs(part, probe)) ** 2
    return errors


def _probe(feeds: Sequence[Feed]) -> Sequence[Feed]:
    return feeds[:: max(1, len(feeds) // PROBE_TEXTS)]


def _apply(graph: Graph, fits: Mapping[str, _Fit]) -> None:
    """Replaces the products that read each tensor, and the additions of their biases."""
    products, consumers = _products(graph), graph.consumers()
    replaced: dict[int, list[NodeProto]] = {}
    for x, fit in fits.items():
        product = products[x]
        addition = _addition(graph, product, consumers)
        last = product if addition is None else addition
        stored, name = _store(graph, x, fit), product.input[1]
        inputs = [
            stored[-1].output[0],
            graph.add_constant(f"{name}/steps", fit.weight),
            stored[-1].input[1],
            graph.add_constant(f"{name}/scales", fit.weight_scale),
            stored[-1].input[2],
            graph.add_constant(f"{name}/zeros", np.zeros_like(fit.weight[0])),
            graph.add_constant(f"{name}/bias", fit.bias),
        ]
        replaced[id(product)] = stored
        product_and_bias = graph.node("MatMulIntegerToFloat", inputs, last.output[0], domain=CONTRIB)
        replaced[id(last)] = [*replaced.get(id(last), []), product_and_bias]
    graph.nodes = [part for node in graph.nodes for part in replaced.get(id(node), [node])]


def _store(graph: Graph, x: str, fit: _Fit) -> list[NodeProto]:
    """Returns the nodes that quantize a tensor; the last one's output is it."""
    nodes, current = [], x
    if fit.multiplier is not None:
        current = graph.fresh(x)
        nodes.append(graph.node("Mul", [x, graph.add_constant(f"{x}/multiplier", fit.multiplier)], current))
    constants = [graph.add_constant(f"{x}/scale", np.array(fit.scale)), graph.add_constant(f"{x}/zero", np.array(fit.zero))]
    return [*nodes, graph.node("QuantizeLinear", [current, *constants], graph.fresh(x))]


def _quantize_embeddings(graph: Graph) -> int:
    """Replaces each gather from a large float table by gathers of int8 rows and of their scales; returns how many.

    A row is stored as `round(row / scale)` with `scale = max(abs(row)) / 127`, so an element is off by scale / 2 at most.
    """
    nodes: list[NodeProto] = []
    found = 0
    for node in graph.nodes:
        table = graph.constant(node.input[0]) if node.op_type == "Gather" else None
        if table is None or table.dtype != np.float32 or table.ndim != 2 or len(table) < MIN_ROWS:
            nodes.append(node)
            continue
        scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / rounding.MAX_INT8
        steps, scale, floats = (graph.fresh(node.output[0]) for _ in range(3))
        rows = graph.add_constant(f"{node.input[0]}/rows", np.rint(table / scales).astype(np.int8))
        row_scales = graph.add_constant(f"{node.input[0]}/row_scales", scales.astype(np.float32))
        nodes += [
            graph.node("Gather", [rows, node.input[1]], steps),
            graph.node("Gather", [row_scales, node.input[1]], scale),
            graph.node("Cast", [steps], floats, to=onnx.TensorProto.FLOAT),
            graph.node("Mul", [floats, scale], node.output[0]),
        ]
        found += 1
    graph.nodes = nodes
    return found
