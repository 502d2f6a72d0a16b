"""Writes int8 into a graph: products of integers for those of floats, and word embeddings of integer rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto

from export.graph import linear
from export.graph.ir import CONTRIB, Graph
from export.int8 import gptq
from export.int8.smoothquant import QuantParams

MIN_ROWS = 1024  # smaller tables, as those of positions mostly and of types always are, are not worth the lost precision


def emit_linears(graph: Graph, fits: Mapping[str, QuantParams]) -> None:
    """Replaces the products that read each tensor, and the additions of their biases."""
    found, consumers = linear.find_linears(graph), graph.consumers()
    replaced: dict[int, list[NodeProto]] = {}
    for x, fit in fits.items():
        product = found[x]
        addition = linear.bias_add(graph, product, consumers)
        last = product if addition is None else addition
        stored, name = _quantize_input(graph, x, fit), product.input[1]
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


def emit_embeddings(graph: Graph) -> int:
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
        scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / gptq.MAX_INT8
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


def _quantize_input(graph: Graph, x: str, fit: QuantParams) -> list[NodeProto]:
    """Returns the nodes that quantize a tensor; the last one's output is it."""
    nodes, current = [], x
    if fit.multiplier is not None:
        current = graph.fresh(x)
        nodes.append(graph.node("Mul", [x, graph.add_constant(f"{x}/multiplier", fit.multiplier)], current))
    constants = [graph.add_constant(f"{x}/scale", np.array(fit.scale)), graph.add_constant(f"{x}/zero", np.array(fit.zero_point))]
    return [*nodes, graph.node("QuantizeLinear", [current, *constants], graph.fresh(x))]
