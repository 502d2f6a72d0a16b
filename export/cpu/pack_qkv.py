"""Multiplies a tensor once with all matrices that read it, as query, key and value do. Exact.

One product with a matrix three times as wide costs less than three: the tensor is read, and quantized, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from bertserve.export.graph import rewrite
from bertserve.export.graph.linear import Linear, as_linear


def pack_qkv(source: Path, target: Path) -> int:
    """Writes the graph with products of the same tensor merged, to a new file.

    Args:
        source: A graph of `MatMul` with or without `Add` of a bias. Its last layer is already restricted to [CLS] where that is
            possible: packed products cannot be restricted.
        target: The new graph.

    Returns:
        How many products were merged into others.
    """
    model = rewrite.load(source)
    groups: dict[tuple[ir.Value, bool], list[Linear]] = {}
    for layer in map(as_linear, model.graph):
        if layer is not None:
            groups.setdefault((layer.x, layer.add is None), []).append(layer)
    merged = [layers for layers in groups.values() if len(layers) > 1]
    for layers in merged:
        _pack(model.graph, layers)
    common.DeduplicateHashedInitializersPass()(model)
    rewrite.save(model, target)
    return sum(len(layers) - 1 for layers in merged)


def _pack(graph: ir.Graph, layers: Sequence[Linear]) -> None:
    """Puts one product, with one addition where these have biases, in the place of several of the same tensor."""
    x, first = layers[0].x, layers[0].weight
    weights, biases = zip(*(layer.arrays() for layer in layers), strict=True)
    tape = ir.tape.Tape()
    packed = tape.op("MatMul", [x, rewrite.add_constant(graph, f"{first.name}/packed", np.concatenate(weights, axis=1))])
    if layers[0].add is not None:
        packed = tape.op("Add", [packed, rewrite.add_constant(graph, f"{x.name}/packed_bias", np.concatenate(biases))])
    widths = rewrite.add_constant(graph, f"{x.name}/widths", np.array([len(bias) for bias in biases], dtype=np.int64))
    parts = tape.op_multi_out("Split", [packed, widths], {"axis": -1}, num_outputs=len(layers))
    nodes = [node for layer in layers for node in layer.nodes]
    outputs = [layer.nodes[-1].outputs[0] for layer in layers]
    # at the place of the first product: what the others read is there, for it is the same
    ir.convenience.replace_nodes_and_values(graph, nodes[0], nodes, tape.nodes, outputs, parts)
