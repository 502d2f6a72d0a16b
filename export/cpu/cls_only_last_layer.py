"""Computes the last layer for the first token only, where a head reads nothing else. Exact.

A classifier on [CLS] drops every other row of the last layer's output. Keys and values are still needed for all tokens; the
query, the attention's output, the feed-forward block and both norms are not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export.graph import rewrite

# operators whose output row depends on the same row of these inputs only (None: of every input that is no constant)
_ROWWISE: dict[str, tuple[int, ...] | None] = {
    "Add": None,
    "Sub": None,
    "Mul": None,
    "Div": None,
    "Gelu": (0,),
    "FastGelu": (0,),
    "QuickGelu": (0,),
    "Relu": (0,),
    "Tanh": (0,),
    "Sigmoid": (0,),
    "Erf": (0,),
    "LayerNormalization": (0,),
    "MatMul": (0,),
    "MultiHeadAttention": (0,),  # a query's row; keys and values stay whole
}
_SCORE_BIAS = 5  # input of MultiHeadAttention: what is added to the scores, [1 or rows, heads, queries, keys]


def restrict_to_cls(source: Path, target: Path) -> int:
    """Writes the graph in which only what the first token needs is computed, to a new file.

    Args:
        source: An unfused graph whose hidden states are [rows, length, hidden].
        target: The new graph; the same as before where no `Gather(hidden, 0, axis=1)` is the only reader of hidden states.

    Returns:
        How many nodes compute one row instead of all.
    """
    model = rewrite.load(source)
    gathers = {node for node in model.graph if _gathers_cls(node)}
    # the inputs of which a node needs the first row only
    restricted: dict[ir.Node, tuple[int, ...]] = dict.fromkeys(gathers, (0,))
    for node in reversed(model.graph):
        output = node.outputs[0]
        if node in restricted or len(node.outputs) != 1 or output.is_graph_output() or not output.uses():
            continue
        rows = _rowwise_inputs(node)
        if rows and all(use.idx in restricted.get(use.node, ()) for use in output.uses()):
            restricted[node] = rows
    _slice_inputs(model.graph, restricted, gathers)
    rewrite.save(model, target)
    return len(restricted) - len(gathers)


def _gathers_cls(node: ir.Node) -> bool:
    """Returns whether a node takes the first row, which is [CLS], out of computed hidden states."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 1 or node.inputs[0] is None or node.inputs[0].is_graph_input():
        return False
    index = rewrite.constant(node.inputs[1])
    return index is not None and index.ndim == 0 and int(index) == 0


def _rowwise_inputs(node: ir.Node) -> tuple[int, ...]:
    """Returns which inputs hold the rows; none where the operator mixes rows or is not known."""
    if node.op_type not in _ROWWISE:
        return ()
    shapes = [rewrite.constant_shape(value) for value in node.inputs]
    if node.op_type == "MatMul" and shapes[1] is None:
        return ()  # a product of two computed tensors, as scores are, mixes rows
    if node.op_type != "MatMul" and any(shape is not None and len(shape) > 1 for shape in shapes):
        return ()  # a constant with rows of its own
    positions = _ROWWISE[node.op_type]
    return tuple(i for i, shape in enumerate(shapes) if shape is None) if positions is None else positions


def _slice_inputs(graph: ir.Graph, restricted: Mapping[ir.Node, tuple[int, ...]], gathers: Collection[ir.Node]) -> None:
    """Takes the first row of what restricted nodes read from nodes that are not restricted, and of a bias of scores the first query's."""
    names = {"start": 0, "end": 1, "axis": 1, "query_axis": 2}
    bounds = {name: rewrite.add_constant(graph, f"first_row/{name}", np.array([i], dtype=np.int64)) for name, i in names.items()}
    one_row = restricted.keys() - gathers
    sliced: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in graph:
        if node in gathers:
            continue
        axes = dict.fromkeys(restricted.get(node, ()), "axis")
        if axes and node.op_type == "MultiHeadAttention" and len(node.inputs) > _SCORE_BIAS:
            axes[_SCORE_BIAS] = "query_axis"
        for i, axis in axes.items():
            value = node.inputs[i]
            if value is None or (axis == "axis" and value.producer() in one_row):
                continue
            if (value, axis) not in sliced:
                cut = ir.node("Slice", [value, bounds["start"], bounds["end"], bounds[axis]])
                graph.insert_before(node, cut)
                sliced[value, axis] = cut.outputs[0]
            node.replace_input_with(i, sliced[value, axis])
