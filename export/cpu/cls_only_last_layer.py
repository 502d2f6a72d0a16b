"""Computes the last layer for the first token only, where a head reads nothing else. Exact.

A classifier on [CLS] drops every other row of the last layer's output. Keys and values are still needed for all tokens; the
query, the attention's output, the feed-forward block and both norms are not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto

from export.graph.ir import Graph, attribute

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


def restrict_to_cls(source: Path, target: Path) -> int:
    """Writes the graph in which only what the first token needs is computed, to a new file.

    Args:
        source: A lowered graph whose hidden states are [rows, length, hidden].
        target: The new graph; the same as before where no `Gather(hidden, 0, axis=1)` is the only reader of hidden states.

    Returns:
        How many nodes compute one row instead of all.
    """
    graph = Graph(source)
    consumers = graph.consumers()
    firsts = [node for node in graph.nodes if _gathers_cls(graph, node)]
    # readers of a tensor that want its first row only, by the reader's identity
    narrowed: dict[int, tuple[int, ...]] = {id(node): (0,) for node in firsts}
    count = 0
    for node in reversed(graph.nodes):
        read = consumers[node.output[0]]
        if id(node) in narrowed or len(node.output) != 1 or node.output[0] in graph.outputs or not read:
            continue
        wanted = all(i in narrowed.get(id(reader), ()) for reader in read for i, name in enumerate(reader.input) if name == node.output[0])
        positions = _rowwise_inputs(graph, node)
        if wanted and positions:
            narrowed[id(node)] = positions
            count += 1
    _slice_inputs(graph, narrowed, {id(node) for node in firsts})
    graph.save(target)
    return count


def _gathers_cls(graph: Graph, node: NodeProto) -> bool:
    if node.op_type != "Gather" or attribute(node, "axis", 0) != 1 or node.input[0] in graph.inputs:
        return False
    index = graph.constant(node.input[1])
    return index is not None and index.ndim == 0 and int(index) == 0


def _rowwise_inputs(graph: Graph, node: NodeProto) -> tuple[int, ...]:
    """Returns which inputs hold the rows; none where the operator mixes rows or is not known."""
    if node.op_type not in _ROWWISE:
        return ()
    if node.op_type == "MatMul" and graph.constant(node.input[1]) is None:
        return ()  # a product of two computed tensors, as scores are, mixes rows
    constants = [graph.constant(name) for name in node.input]
    if any(value is not None and value.ndim > 1 for value in constants) and node.op_type != "MatMul":
        return ()  # a constant with rows of its own
    positions = _ROWWISE[node.op_type]
    return tuple(i for i, value in enumerate(constants) if value is None) if positions is None else positions


def _slice_inputs(graph: Graph, narrowed: dict[int, tuple[int, ...]], firsts: set[int]) -> None:
    """Cuts the first row out of what narrowed nodes read from nodes that are not."""
    bounds = [graph.add_constant(f"first_row/{name}", np.array([i], dtype=np.int64)) for name, i in (("start", 0), ("end", 1), ("axis", 1))]
    narrow_outputs = {node.output[0] for node in graph.nodes if id(node) in narrowed and id(node) not in firsts}
    cuts: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        for i in narrowed.get(id(node), ()):
            name = node.input[i]
            if id(node) in firsts or name in narrow_outputs:
                continue
            if name not in cuts:
                cuts[name] = graph.fresh(name)
                nodes.append(graph.node("Slice", [name, *bounds], cuts[name]))
            node.input[i] = cuts[name]
        nodes.append(node)
    graph.nodes = nodes
