"""The linear layers of a graph: products with constant matrices, which are what int8 is for, and the additions of their biases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph.rewrite import constant, constant_shape

MIN_SIDE = 32  # smaller matrices, as a classifier's and the float parts of split ones, cost nothing in float


def find_linears(graph: ir.Graph) -> dict[str, ir.Node]:
    """Returns the product with a constant matrix that reads each tensor, by the tensor's name.

    There is one for a tensor, or one with a bias and one without: `export.cpu.pack_qkv` has merged the others, and the one with a
    bias counts. What is computed from constants alone, as projections of a table of positions are, ONNX Runtime computes once.
    """
    dependent = _input_dependent(graph)
    found: dict[str, ir.Node] = {}
    for node in graph:
        x = node.inputs[0] if node.op_type == "MatMul" else None
        if x is None or x.name is None or x not in dependent:
            continue
        sides = constant_shape(node.inputs[1])
        if sides is not None and len(sides) == 2 and min(sides) >= MIN_SIDE and (x.name not in found or bias_add(node) is not None):
            found[x.name] = node
    return found


def sharing_weights(linears: Mapping[str, ir.Node]) -> list[list[str]]:
    """Returns groups of tensors that are multiplied with the same matrix, as those of layers that share weights are."""
    groups: dict[ir.Value | None, list[str]] = {}
    for x, matmul in linears.items():
        groups.setdefault(matmul.inputs[1], []).append(x)
    return [group for group in groups.values() if len(group) > 1]


def bias_add(matmul: ir.Node) -> ir.Node | None:
    """Returns the node that adds a bias to a product, or None where there is none, or where something else reads the product too."""
    product = matmul.outputs[0]
    readers = [use.node for use in product.uses()]
    if product.is_graph_output() or len(readers) != 1 or readers[0].op_type != "Add":
        return None
    return readers[0] if bias_of(readers[0]) is not None else None


def bias_of(add: ir.Node) -> ir.Value | None:
    """Returns the constant of one axis among what a node reads, or None where there is none."""
    return next((value for value in add.inputs if (shape := constant_shape(value)) is not None and len(shape) == 1), None)


def weight_and_bias(matmul: ir.Node) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns a layer's matrix, [inputs, outputs], and bias, [outputs], which is zero where it has none."""
    weight = constant(matmul.inputs[1])
    assert weight is not None, matmul.name
    add = bias_add(matmul)
    bias = None if add is None else constant(bias_of(add))
    return weight, np.zeros(weight.shape[1], dtype=np.float32) if bias is None else bias


def _input_dependent(graph: ir.Graph) -> set[ir.Value | None]:
    """Returns the values that depend on the graph's inputs."""
    dependent: set[ir.Value | None] = set(graph.inputs)
    for node in graph:
        if dependent.intersection(node.inputs):
            dependent.update(node.outputs)
    return dependent
