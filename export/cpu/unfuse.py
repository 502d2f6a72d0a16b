"""Takes fused operators apart again where ONNX Runtime's CPU kernels are slower than their parts.

Measured with onnxruntime 1.31 on one thread (docs/explanation/graphs.md): SkipLayerNormalization takes three to five times as long
as Add and LayerNormalization, BiasGelu twice as long as Add and Gelu, and Attention longer than three matrix products and
MultiHeadAttention. Fusing first is still worth it: it finds attention in the tracer's many forms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import NodeProto

from export.errors import GraphError
from export.graph.ir import CONTRIB, Graph, attribute


def unfuse(source: Path, target: Path) -> None:
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
        "Einsum": _einsum,
    }
    graph.nodes = [part for node in graph.nodes for part in (rules[node.op_type](graph, node) if node.op_type in rules else [node])]
    graph.save(target)


def _linear(graph: Graph, x: str, weight: str, bias: str, output: str) -> list[NodeProto]:
    product = graph.fresh(output)
    return [graph.node("MatMul", [x, weight], product), graph.node("Add", [product, bias], output)]


def _attention(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """Three projections and MultiHeadAttention; its mask stays one key's padding per row, [rows, length].

    What is added to the scores, as a bias by relative position, goes along.
    """
    x, packed_weight, packed_bias, mask, past, scores = (*node.input, *[""] * 5)[:6]
    weight, bias = graph.constant(packed_weight), graph.constant(packed_bias)
    if weight is None or bias is None or past or any(node.input[6:]) or attribute(node, "unidirectional", 0):
        raise GraphError(f"attention node `{node.name}` has inputs {list(node.input)}, which is not understood.")
    parts, projected = [], []
    for name, w, b in zip(("query", "key", "value"), np.split(weight, 3, axis=1), np.split(bias, 3), strict=True):
        projected.append(f"{node.output[0]}/{name}")
        weight_name = graph.add_constant(f"{packed_weight}/{name}", np.ascontiguousarray(w))
        parts += _linear(graph, x, weight_name, graph.add_constant(f"{packed_bias}/{name}", b), projected[-1])
    kept = {name: attribute(node, name) for name in ("num_heads", "scale", "mask_filter_value")}
    attributes = {name: value for name, value in kept.items() if value is not None}
    inputs = [*projected, "", mask, scores] if scores else [*projected, "", mask]
    parts.append(graph.node("MultiHeadAttention", inputs, node.output[0], domain=CONTRIB, **attributes))
    return parts


def _skip_layer_norm(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """`LayerNormalization(x + bias + skip)`, without a shift where there is none; the sum itself may be read too."""
    x, skip, gamma, beta, bias = (*node.input, "", "")[:5]
    mean, deviation, summed = (*node.output[1:], "", "", "")[:3]
    if mean or deviation:
        raise GraphError(f"`{node.name}` has inputs {list(node.input)} and outputs {list(node.output)}, which is not understood.")
    parts = []
    if bias:
        x, product = graph.fresh(node.output[0]), x
        parts.append(graph.node("Add", [product, bias], x))
    total = summed or graph.fresh(node.output[0])
    parts.append(graph.node("Add", [x, skip], total))
    epsilon = attribute(node, "epsilon", 1e-5)
    inputs = [total, gamma, beta] if beta else [total, gamma]
    return [*parts, graph.node("LayerNormalization", inputs, node.output[0], axis=-1, epsilon=epsilon)]


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


def _einsum(graph: Graph, node: NodeProto) -> list[NodeProto]:
    """A product with a constant matrix, in whatever shape it is kept, as `MatMul`: faster, and quantization knows it.

    Understood are sums over the last axes of a computed tensor and the first or the last of a constant one, such as
    `ibh,hnd->ibnd` and `ibnd,hnd->ibh`; any other is left alone.
    """
    equation = attribute(node, "equation", b"").decode().replace(" ", "")
    weight = graph.constant(node.input[1]) if len(node.input) == 2 else None
    if weight is None or "->" not in equation or "." in equation:
        return [node]
    (left, right), result = equation.partition("->")[0].split(","), equation.partition("->")[2]
    summed = "".join(letter for letter in left if letter in right and letter not in result)
    kept = left.removesuffix(summed)
    free = right.removeprefix(summed) if right.startswith(summed) else right.removesuffix(summed)
    if (
        not summed
        or not free
        or kept + summed != left
        or result != kept + free
        or len(kept) + len(free) + len(summed) != len({*left, *right})
    ):
        return [node]
    size = int(np.prod([weight.shape[right.index(letter)] for letter in summed]))
    matrix = weight.reshape(size, -1) if right.startswith(summed) else weight.reshape(-1, size).T
    name = graph.add_constant(f"{node.input[1]}/matrix", np.ascontiguousarray(matrix))
    parts, x = [], node.input[0]
    if len(summed) > 1:
        x = graph.fresh(x)
        parts.append(graph.node("Reshape", [node.input[0], _shape(graph, [*[0] * len(kept), size])], x))
    if len(free) == 1:
        return [*parts, graph.node("MatMul", [x, name], node.output[0])]
    product = graph.fresh(node.output[0])
    shape = _shape(graph, [*[0] * len(kept), *(weight.shape[right.index(letter)] for letter in free)])
    return [*parts, graph.node("MatMul", [x, name], product), graph.node("Reshape", [product, shape], node.output[0])]


def _shape(graph: Graph, sizes: list[int]) -> str:
    """Returns a constant for `Reshape`; 0 keeps the size that there is."""
    return graph.add_constant("shape/" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))
