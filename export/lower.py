"""Takes fused operators apart again where ONNX Runtime's CPU kernels are slower than their parts.

Measured with onnxruntime 1.31 on one thread (docs/export.md): SkipLayerNormalization takes three to five times as long
as Add and LayerNormalization, BiasGelu twice as long as Add and Gelu, and Attention longer than three matrix products and
MultiHeadAttention. Fusing first is still worth it: it finds attention in the tracer's many forms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import NodeProto

from export.errors import GraphError
from export.graph import CONTRIB, Graph, attribute


def lower(source: Path, target: Path) -> None:
    """Writes the graph for the CPU provider to a new file: the same function, in operators whose kernels are fast.

    Args:
        source: The fused graph.
        target: The new graph.

    Raises:
        GraphError: A fused operator is used in a way that was not understood.
    """
    graph = Graph(source)
    rules: dict[str, Callable[[Graph, NodeProto], list[NodeProto]]] = {
        "Attention": _attention,
        "SkipLayerNormalization": _skip_layer_norm,
        "BiasGelu": _bias_gelu,
        "Gemm": _gemm,
    }
    graph.nodes = [part for node in graph.nodes for part in (rules[node.op_type](graph, node) if node.op_type in rules else [node])]
    graph.save(target)


def _linear(graph: Graph, x: str, weight: str, bias: str, output: str) -> list[NodeProto]:
    product = graph.fresh(output)
    return [graph.node("MatMul", [x, weight], product), graph.node("Add", [product, bias], output)]


def _attention(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """Three projections and MultiHeadAttention; its mask stays one key's padding per row, [rows, length]."""
    x, packed_weight, packed_bias, mask = (*node.input, "", "")[:4]
    weight, bias = graph.constant(packed_weight), graph.constant(packed_bias)
    if weight is None or bias is None or any(node.input[4:]) or attribute(node, "unidirectional", 0):
        raise GraphError(f"attention node `{node.name}` has inputs {list(node.input)}, which is not understood.")
    parts, projected = [], []
    for name, w, b in zip(("query", "key", "value"), np.split(weight, 3, axis=1), np.split(bias, 3), strict=True):
        projected.append(f"{node.output[0]}/{name}")
        weight_name = graph.add_constant(f"{packed_weight}/{name}", np.ascontiguousarray(w))
        parts += _linear(graph, x, weight_name, graph.add_constant(f"{packed_bias}/{name}", b), projected[-1])
    kept = {name: attribute(node, name) for name in ("num_heads", "scale", "mask_filter_value")}
    attributes = {name: value for name, value in kept.items() if value is not None}
    parts.append(graph.node("MultiHeadAttention", [*projected, "", mask], node.output[0], domain=CONTRIB, **attributes))
    return parts


def _skip_layer_norm(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """`LayerNormalization(x + bias + skip)`."""
    x, skip, gamma, beta, bias = (*node.input, "", "")[:5]
    if not beta or any(node.output[1:]):
        raise GraphError(f"`{node.name}` has inputs {list(node.input)} and outputs {list(node.output)}, which is not understood.")
    parts = []
    if bias:
        x, product = graph.fresh(node.output[0]), x
        parts.append(graph.node("Add", [product, bias], x))
    total = graph.fresh(node.output[0])
    parts.append(graph.node("Add", [x, skip], total))
    epsilon = attribute(node, "epsilon", 1e-5)
    return [*parts, graph.node("LayerNormalization", [total, gamma, beta], node.output[0], axis=-1, epsilon=epsilon)]


def _bias_gelu(graph: Graph, node: NodeProto) -> list[NodeProto]:
    biased = graph.fresh(node.output[0])
    return [graph.node("Add", list(node.input), biased), graph.node("Gelu", [biased], node.output[0], domain=CONTRIB)]


def _gemm(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """A product and an addition, the form of all other layers, so that quantization need not know two."""
    weight = graph.constant(node.input[1])
    plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0 and not attribute(node, "transA", 0)
    if weight is None or len(node.input) != 3 or not plain:
        return [node]
    name = node.input[1]
    if attribute(node, "transB", 0):
        name = graph.add_constant(f"{name}/transposed", np.ascontiguousarray(weight.T))
    return _linear(graph, node.input[0], name, node.input[2], node.output[0])
