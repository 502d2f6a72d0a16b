"""The products of a graph with constant matrices, which are what int8 is for, and the additions of their biases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from export.graph.ir import Graph

MIN_SIDE = 32  # smaller matrices, as a classifier's and the float parts of split ones, cost nothing in float


def find_linears(graph: Graph) -> dict[str, NodeProto]:
    """Returns, by the tensor that it reads, each product with a constant matrix.

    There is one for a tensor, or one with a bias and one without: `export.pack` has merged the others, and the one with a bias counts.
    What is computed from constants alone, as projections of a table of positions are, ONNX Runtime computes once.
    """
    consumers, fed = graph.consumers(), _input_dependent(graph)
    found: dict[str, NodeProto] = {}
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type == "MatMul" else None
        if weight is None or weight.ndim != 2 or min(weight.shape) < MIN_SIDE or node.input[0] not in fed:
            continue
        if node.input[0] not in found or bias_add(graph, node, consumers) is not None:
            found[node.input[0]] = node
    return found


def sharing_weights(found: Mapping[str, NodeProto]) -> list[list[str]]:
    """Returns the tensors that are multiplied with the same matrix, as those of shared layers are, for each that several are."""
    groups: dict[str, list[str]] = {}
    for x, product in found.items():
        groups.setdefault(product.input[1], []).append(x)
    return [group for group in groups.values() if len(group) > 1]


def bias_add(graph: Graph, product: NodeProto, consumers: Mapping[str, list[NodeProto]]) -> NodeProto | None:
    """Returns the node that adds a product's bias, or None where it has none."""
    readers = consumers[product.output[0]]
    if product.output[0] in graph.outputs or len(readers) != 1 or readers[0].op_type != "Add":
        return None
    return readers[0] if any((bias := graph.constant(name)) is not None and bias.ndim == 1 for name in readers[0].input) else None


def weight_and_bias(graph: Graph, product: NodeProto) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns a product's matrix, [inputs, outputs], and bias, [outputs], which is zero where it has none."""
    weight = graph.constant(product.input[1])
    assert weight is not None, product.name
    adds = bias_add(graph, product, graph.consumers())
    if adds is None:
        return weight, np.zeros(weight.shape[1], dtype=np.float32)
    return weight, next(value for name in adds.input if (value := graph.constant(name)) is not None)


def _input_dependent(graph: Graph) -> set[str]:
    """Returns the tensors that depend on the graph's inputs."""
    fed = set(graph.inputs)
    for node in graph.nodes:
        if fed.intersection(node.input):
            fed.update(node.output)
    return fed
