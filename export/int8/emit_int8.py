"""Writes int8 into a graph: products of integers for those of floats, and word embeddings of integer rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export.graph import rewrite
from bertserve.export.graph.linear import Linear, find_linears
from bertserve.export.graph.rewrite import CONTRIB
from bertserve.export.int8 import gptq
from bertserve.export.int8.smoothquant import QuantParams

MIN_ROWS = 1024  # smaller tables, as those of positions mostly and of types always are, are not worth the lost precision


def emit_linears(graph: ir.Graph, params: Mapping[str, QuantParams]) -> None:
    """Replaces the linear layers that read these tensors, with the additions of their biases, by products of integers."""
    linears = find_linears(graph)
    for x, quant in params.items():
        nodes = linears[x].nodes
        tape = ir.tape.Tape()
        product = _emit(graph, tape, linears[x], quant)
        ir.convenience.replace_nodes_and_values(graph, nodes[-1], nodes, tape.nodes, nodes[-1].outputs, [product])


def _emit(graph: ir.Graph, tape: ir.tape.Tape, layer: Linear, quant: QuantParams) -> ir.Value:
    """Records the nodes of one layer: smoothing where there is any, the activation as uint8, and the product with its bias."""
    x, weight = layer.x, layer.weight
    smoothed = x
    if quant.multiplier is not None:
        smoothed = tape.op("Mul", [x, rewrite.add_constant(graph, f"{x.name}/multiplier", quant.multiplier)])
    scale = rewrite.add_constant(graph, f"{x.name}/scale", np.array(quant.scale))
    zero_point = rewrite.add_constant(graph, f"{x.name}/zero", np.array(quant.zero_point))
    inputs = [
        tape.op("QuantizeLinear", [smoothed, scale, zero_point]),
        rewrite.add_constant(graph, f"{weight.name}/steps", quant.weight),
        scale,
        rewrite.add_constant(graph, f"{weight.name}/scales", quant.weight_scale),
        zero_point,
        rewrite.add_constant(graph, f"{weight.name}/zeros", np.zeros_like(quant.weight[0])),
        rewrite.add_constant(graph, f"{weight.name}/bias", quant.bias),
    ]
    return tape.op("MatMulIntegerToFloat", inputs, domain=CONTRIB)


def emit_embeddings(graph: ir.Graph) -> int:
    """Replaces each gather from a large float table by gathers of int8 rows and of their scales; returns how many.

    A row is stored as `round(row / scale)` with `scale = max(abs(row)) / 127`, so an element is off by scale / 2 at most.
    """
    count = 0
    for node in tuple(graph):  # not the gathers that are put in
        axis = node.attributes.get_int("axis", 0)  # with another axis it would gather columns, and the scales are per row
        table = node.inputs[0] if node.op_type == "Gather" and axis == 0 else None
        shape = rewrite.constant_shape(table)
        if table is None or shape is None or len(shape) != 2 or shape[0] < MIN_ROWS:
            continue
        array = rewrite.constant(table)
        if array is None or array.dtype != np.float32:
            continue
        quantized_rows, scales = _quantize_rows(array)
        rows = rewrite.add_constant(graph, f"{table.name}/rows", quantized_rows)
        row_scales = rewrite.add_constant(graph, f"{table.name}/row_scales", scales)
        tape = ir.tape.Tape()
        quantized, scale = (tape.op("Gather", [value, node.inputs[1]]) for value in (rows, row_scales))
        floats = tape.op("Mul", [tape.op("Cast", [quantized], {"to": ir.DataType.FLOAT}), scale])
        ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [floats])
        count += 1
    return count


def _quantize_rows(table: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Returns the rows in int8, of the same shape, and their scales, float32 [rows, 1]."""
    quantized = np.empty(table.shape, dtype=np.int8)
    scales = np.empty((len(table), 1), dtype=np.float32)
    for start in range(0, len(table), MIN_ROWS):  # temporaries of a large vocabulary's table would take gigabytes
        part = table[start : start + MIN_ROWS]
        found = (np.maximum(np.abs(part).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / gptq.MAX_INT8).astype(np.float32)
        quantized[start : start + MIN_ROWS], scales[start : start + MIN_ROWS] = np.rint(part / found), found
    return quantized, scales
