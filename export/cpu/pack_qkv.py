"""Multiplies a tensor once with all matrices that read it, as query, key and value do. Exact.

One product with a matrix three times as wide costs less than three: the tensor is read, and quantized, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from export.graph import rewrite
from export.graph.linear import bias_add, bias_of


def pack_qkv(source: Path, target: Path) -> int:
    """Writes the graph with products of the same tensor merged, to a new file.

    Args:
        source: A graph of `MatMul` with or without `Add` of a bias; its last layer already restricted to [CLS] where that is
            possible, because it is not of packed products.
        target: The new graph.

    Returns:
        How many products were merged into others.
    """
    model = rewrite.load(source)
    groups: dict[tuple[ir.Value | None, bool], list[ir.Node]] = {}
    for node in model.graph:
        shape = rewrite.constant_shape(node.inputs[1]) if node.op_type == "MatMul" else None
        if shape is not None and len(shape) == 2:
            groups.setdefault((node.inputs[0], bias_add(node) is None), []).append(node)
    merged = [matmuls for matmuls in groups.values() if len(matmuls) > 1]
    for matmuls in merged:
        _pack(model.graph, matmuls)
    common.DeduplicateHashedInitializersPass()(model)
    rewrite.save(model, target)
    return sum(len(matmuls) - 1 for matmuls in merged)


def _pack(graph: ir.Graph, matmuls: Sequence[ir.Node]) -> None:
    """Puts one product, with one addition where these have biases, in the place of several of the same tensor."""
    x, first_weight = matmuls[0].inputs
    assert x is not None
    assert first_weight is not None
    adds = [add for matmul in matmuls if (add := bias_add(matmul)) is not None]
    weights = [weight for matmul in matmuls if (weight := rewrite.constant(matmul.inputs[1])) is not None]
    biases = [bias for add in adds if (bias := rewrite.constant(bias_of(add))) is not None]
    tape = ir.tape.Tape()
    packed = tape.op("MatMul", [x, rewrite.add_constant(graph, f"{first_weight.name}/packed", np.concatenate(weights, axis=1))])
    if biases:
        packed = tape.op("Add", [packed, rewrite.add_constant(graph, f"{x.name}/packed_bias", np.concatenate(biases))])
    widths = rewrite.add_constant(graph, f"{x.name}/widths", np.array([weight.shape[1] for weight in weights], dtype=np.int64))
    parts = tape.op_multi_out("Split", [packed, widths], {"axis": -1}, num_outputs=len(weights))
    replaced = [node.outputs[0] for node in adds or matmuls]
    # at the place of the first product: what the others read is there, for it is the same
    ir.convenience.replace_nodes_and_values(graph, matmuls[0], [*matmuls, *adds], tape.nodes, replaced, parts)
