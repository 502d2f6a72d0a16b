"""Makes a graph give out the attention maps that a run names, in place of those of all layers and heads. Exact.

All maps of a long text are many times what else a run holds, and most runs want none: those hold and copy nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export.graph import rewrite


def select_maps(source: Path, target: Path, layers: Sequence[str], *, index_name: str, output_name: str) -> None:
    """Writes the graph with one more input, and one output in place of those of the layers, to a new file.

    Args:
        source: The graph.
        target: The new graph.
        layers: Its outputs with the attention of each layer, [rows, heads, length, length].
        index_name: Name of the input: int64 [maps, 3], layer, row and head of each map, ascending.
        output_name: Name of the output: float32 [maps, length, length].
    """
    model = rewrite.load(source)
    graph = model.graph
    weights = {value.name: value for value in graph.outputs if value.name in layers}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in layers]
    index = ir.Value(name=index_name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["maps", 3]))
    graph.inputs.append(index)
    layer_of, place_of = _columns(graph, index)
    maps = [_maps_of_layer(graph, weights[name], number, layer_of, place_of) for number, name in enumerate(layers)]
    every = ir.Value(name=output_name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["maps", "length", "length"]))
    graph.append(ir.Node("", "Concat", maps, [ir.AttrInt64("axis", 0)], outputs=[every]))
    graph.outputs.append(every)
    rewrite.save(model, target)


def _columns(graph: ir.Graph, index: ir.Value) -> Sequence[ir.Value]:
    """Returns the layer of each map, [maps], and its row and head, [maps, 2]."""
    bounds = [rewrite.add_constant(graph, f"attention/{name}", np.array([i], dtype=np.int64)) for name, i in (("one", 1), ("three", 3))]
    tape = ir.tape.Tape()
    zero = rewrite.add_constant(graph, "attention/zero", np.array(0, dtype=np.int64))
    made = tape.op("Gather", [index, zero], {"axis": 1}), tape.op("Slice", [index, *bounds, bounds[0]])
    graph.insert_before(graph[0], tape.nodes)
    return made


def _maps_of_layer(graph: ir.Graph, weights: ir.Value, number: int, layer_of: ir.Value, place_of: ir.Value) -> ir.Value:
    """Returns the maps of one layer, [maps of it, length, length]."""
    producer = weights.producer()
    assert producer is not None, "weights are computed"
    tape = ir.tape.Tape()
    is_here = tape.op("Equal", [layer_of, rewrite.add_constant(graph, f"attention/layer_{number}", np.array(number, dtype=np.int64))])
    found = tape.op("GatherND", [weights, tape.op("Compress", [place_of, is_here], {"axis": 0})])
    # right behind the weights, so that an order of execution by the order of nodes lets go of them before the next layer's
    graph.insert_after(producer, tape.nodes)
    return found
