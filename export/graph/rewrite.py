"""What all passes over a graph share: a model to rewrite, and its constants. onnx_ir holds the graph and knows what reads what."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from bertserve.export.errors import GraphError
from bertserve.export.graph import onnx_files

CONTRIB = "com.microsoft"  # ONNX Runtime's own operators
_MAPPING = threading.Lock()  # onnx_ir maps a constant's file when it is first asked for its value, and two threads must not do so at once


def load(path: Path) -> ir.Model:
    """Loads a model to rewrite; `Constant` nodes become initializers, so that all constants are found in one place.

    Raises:
        GraphError: A node has graphs of its own, as the branches of `If` and the body of `Loop` are. No pass looks into them, and what they
            read of the graph around them does not show among their inputs.
    """
    model = ir.load(path)
    for node in model.graph:
        if any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()):
            raise GraphError(
                f"the graph has a node `{node.op_type}` (`{node.name}`), which runs graphs of its own: the model's code decides or repeats "
                "something by what it reads. That is not understood; export a model whose steps are the same for every text."
            )
    common.LiftConstantsToInitializersPass(size_limit=0)(model)
    model.opset_imports.setdefault(CONTRIB, 1)
    return model


def save(model: ir.Model, path: Path, *, outputs: Sequence[str] = ()) -> None:
    """Writes a model without what nothing reads.

    Args:
        model: The model; nodes and constants that nothing reads are removed from it.
        path: The new file.
        outputs: Names of further float tensors to give out, after the model's own outputs; for calibration.
    """
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    own = len(graph.outputs)
    graph.outputs.extend(values[name] for name in outputs if not values[name].is_graph_output())
    common.RemoveUnusedNodesPass()(model)
    onnx_files.save(model, path)
    graph.outputs[own:] = []  # `del` would leave the values marked as outputs (onnx_ir 1.1)


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Returns the value of a constant, or None where it is none; from any thread."""
    if value is None or value.const_value is None:
        return None
    with _MAPPING:  # it reads nothing from the disk; whoever uses the values does
        return value.const_value.numpy()


def constant_shape(value: ir.Value | None) -> Sequence[int] | None:
    """Returns the shape of a constant, whose value is not read for it, or None where it is none."""
    return None if value is None or value.const_value is None else value.const_value.shape.numpy()


def add_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Adds a constant under its name, made distinct where another one has it; the same value again is the same constant."""
    while name in graph.initializers:
        known = constant(graph.initializers[name])
        if known is not None and known.dtype == array.dtype and np.array_equal(known, array):
            return graph.initializers[name]
        name += "_"
    value = ir.val(name, const_value=ir.Tensor(array, name=name))
    graph.register_initializer(value)
    return value


def add_to_output(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape, part: ir.Value) -> None:
    """Adds a value to what a node gives out, for all that reads it; the sum has the name, and the node's own output a new one.

    Args:
        graph: Changed in place.
        node: The node.
        tape: The nodes that compute the value, of which this takes over the insertion.
        part: The value, of a shape that broadcasts to the output's.
    """
    output = node.outputs[0]
    total = ir.Value(name=output.name, type=output.type, shape=output.shape)
    output.name = f"{output.name}/part"
    output.replace_all_uses_with(total, replace_graph_outputs=True)
    tape.op("Add", [output, part], output=total)
    graph.insert_after(node, tape.nodes)
