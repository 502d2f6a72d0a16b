"""Multiplies a tensor once with all matrices that read it, as query, key and value do. Exact.

One product with a matrix three times as wide costs less than three: the tensor is read, and quantized, once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto

from export.graph import Graph


def pack(source: Path, target: Path) -> int:
    """Writes the graph with products of the same tensor merged, to a new file.

    Args:
        source: A graph of `MatMul` and `Add` of a bias; narrowed before, because a packed product cannot be.
        target: The new graph.

    Returns:
        How many products were merged into others.
    """
    graph = Graph(source)
    consumers = graph.consumers()
    groups: dict[str, list[tuple[NodeProto, NodeProto]]] = {}
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type == "MatMul" else None
        readers = consumers[node.output[0]]
        if weight is None or weight.ndim != 2 or len(readers) != 1 or readers[0].op_type != "Add":
            continue
        if any((bias := graph.constant(name)) is not None and bias.ndim == 1 for name in readers[0].input):
            groups.setdefault(node.input[0], []).append((node, readers[0]))
    replaced: dict[int, list[NodeProto]] = {}
    for x, pairs in groups.items():
        if len(pairs) > 1:
            replaced |= {id(node): [] for pair in pairs for node in pair}
            # at the place of the first product: all that the others read is there, it is the same
            replaced[id(pairs[0][0])] = _packed(graph, x, pairs)
    graph.nodes = [part for node in graph.nodes for part in replaced.get(id(node), [node])]
    graph.save(target)
    return sum(len(pairs) - 1 for pairs in groups.values())


def _packed(graph: Graph, x: str, pairs: list[tuple[NodeProto, NodeProto]]) -> list[NodeProto]:
    weights = [value for product, _ in pairs if (value := graph.constant(product.input[1])) is not None]
    biases = [next(value for name in addition.input if (value := graph.constant(name)) is not None) for _, addition in pairs]
    weight = graph.add_constant(f"{pairs[0][0].input[1]}/packed", np.concatenate(weights, axis=1))
    bias = graph.add_constant(f"{x}/packed_bias", np.concatenate(biases))
    widths = graph.add_constant(f"{x}/widths", np.array([value.shape[1] for value in weights], dtype=np.int64))
    product, total = graph.fresh(x), graph.fresh(x)
    split = graph.node("Split", [total, widths], pairs[0][1].output[0], axis=-1)
    split.output.extend(addition.output[0] for _, addition in pairs[1:])
    return [graph.node("MatMul", [x, weight], product), graph.node("Add", [product, bias], total), split]
