"""Multiplies a tensor once with all matrices that read it, as query, key and value do. Exact.

One product with a matrix three times as wide costs less than three: the tensor is read, and quantized, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import NodeProto

from export.graph.ir import Graph


def pack_qkv(source: Path, target: Path) -> int:
    """Writes the graph with products of the same tensor merged, to a new file.

    Args:
        source: A graph of `MatMul` with or without `Add` of a bias; narrowed before, because a packed product cannot be.
        target: The new graph.

    Returns:
        How many products were merged into others.
    """
    graph = Graph(source)
    consumers = graph.consumers()
    groups: dict[tuple[str, bool], list[tuple[NodeProto, NodeProto | None]]] = {}
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or weight.ndim != 2:
            continue
        addition = _bias_add(graph, node, consumers)
        groups.setdefault((node.input[0], addition is None), []).append((node, addition))
    replaced: dict[int, list[NodeProto]] = {}
    for (x, _), pairs in groups.items():
        if len(pairs) > 1:
            replaced |= {id(node): [] for pair in pairs for node in pair if node is not None}
            # at the place of the first product: all that the others read is there, it is the same
            replaced[id(pairs[0][0])] = _packed_nodes(graph, x, pairs)
    graph.nodes = [part for node in graph.nodes for part in replaced.get(id(node), [node])]
    graph.share()
    graph.save(target)
    return sum(len(pairs) - 1 for pairs in groups.values())


def _bias_add(graph: Graph, product: NodeProto, consumers: Mapping[str, list[NodeProto]]) -> NodeProto | None:
    """Returns the addition of a product's bias, if it has one and nothing else reads the product."""
    readers = consumers[product.output[0]]
    if len(readers) != 1 or readers[0].op_type != "Add":
        return None
    constants = [value for name in readers[0].input if (value := graph.constant(name)) is not None]
    return readers[0] if any(value.ndim == 1 for value in constants) else None


def _packed_nodes(graph: Graph, x: str, pairs: list[tuple[NodeProto, NodeProto | None]]) -> list[NodeProto]:
    weights = [value for product, _ in pairs if (value := graph.constant(product.input[1])) is not None]
    weight = graph.add_constant(f"{pairs[0][0].input[1]}/packed", np.concatenate(weights, axis=1))
    widths = graph.add_constant(f"{x}/widths", np.array([value.shape[1] for value in weights], dtype=np.int64))
    total = graph.fresh(x)
    parts = [graph.node("MatMul", [x, weight], total)]
    additions = [addition for _, addition in pairs if addition is not None]
    if additions:
        biases = [next(value for name in addition.input if (value := graph.constant(name)) is not None) for addition in additions]
        product, total = total, graph.fresh(x)
        parts.append(graph.node("Add", [product, graph.add_constant(f"{x}/packed_bias", np.concatenate(biases))], total))
    outputs = [(product if addition is None else addition).output[0] for product, addition in pairs]
    split = graph.node("Split", [total, widths], outputs[0], axis=-1)
    split.output.extend(outputs[1:])
    return [*parts, split]
