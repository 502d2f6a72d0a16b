"""Takes the few channels of huge values out of what will be int8, and computes them beside it in float. Exact.

A handful of channels carry values ten times those of the others (Dettmers et al. 2022, arXiv:2208.07339). One int8 scale for all
then leaves few quantization steps for the rest. The split is made in the graph once, for channels known from calibration.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph import rewrite
from export.graph.linear import bias_add, bias_of
from export.graph.rewrite import CONTRIB

HIDDEN_UNITS = 16
INPUT_CHANNELS = 4

Floats = NDArray[np.float32]


def feed_forwards(graph: ir.Graph) -> list[ir.Node]:
    """Returns the activation in the middle of each feed-forward block: `MatMul(Gelu(MatMul(x) + bias))`."""
    return [node for node in graph if node.op_type == "Gelu" and _block(node) is not None]


def _block(activation: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Returns the product and the addition before an activation, and the product after it, all with constants; or None."""
    readers = [use.node for use in activation.outputs[0].uses()]
    before = None if activation.inputs[0] is None else activation.inputs[0].producer()
    bias = None if before is None or before.op_type != "Add" else bias_of(before)
    if before is None or bias is None or len(readers) != 1 or readers[0].op_type != "MatMul":
        return None
    product = before.inputs[1 - before.inputs.index(bias)]
    first = None if product is None else product.producer()
    if first is None or first.op_type != "MatMul":
        return None
    return None if any(rewrite.constant_shape(node.inputs[1]) is None for node in (first, readers[0])) else (first, before, readers[0])


def split_hidden_units(graph: ir.Graph, activation: ir.Node, peak: Floats) -> None:
    """Computes the hidden units of the largest values in a small feed-forward block of their own.

    A feed-forward block is a sum over its hidden units, so it may be cut in two.

    Args:
        graph: Changed in place.
        activation: One that `feed_forwards` returned.
        peak: Largest magnitude of each hidden unit's value, [units].
    """
    block = _block(activation)
    assert block is not None, activation.name
    first, add, second = block
    order = np.argsort(-peak, kind="stable")
    outlying, others = np.sort(order[:HIDDEN_UNITS]), np.sort(order[HIDDEN_UNITS:])
    x, bias = first.inputs[0], bias_of(add)
    assert bias is not None
    # units are columns of the first matrix and its bias, and rows of the second
    places = ((first, first.inputs[1], -1), (add, bias, -1), (second, second.inputs[1], 0))
    parts = []
    for node, value, axis in places:
        array = rewrite.constant(value)
        assert array is not None
        assert value is not None
        rest, part = (np.ascontiguousarray(np.take(array, units, axis=axis)) for units in (others, outlying))
        node.replace_input_with(node.inputs.index(value), rewrite.add_constant(graph, f"{value.name}/rest", rest))
        parts.append(rewrite.add_constant(graph, f"{value.name}/float", part))
    tape = ir.tape.Tape()
    hidden = tape.op("Gelu", [tape.op("Add", [tape.op("MatMul", [x, parts[0]]), parts[1]])], domain=CONTRIB)
    _add_to_output(graph, second, tape, tape.op("MatMul", [hidden, parts[2]]))


def split_input_channels(graph: ir.Graph, matmul: ir.Node, peak: Floats) -> None:
    """Multiplies the channels of the largest values with their rows of the matrix in float, and adds the result.

    Args:
        graph: Changed in place; the rows left behind are zero.
        matmul: A `MatMul` that is followed by the addition of its bias.
        peak: Largest magnitude of each channel that it reads, [channels].
    """
    x, weight = matmul.inputs
    array = rewrite.constant(weight)
    assert array is not None
    assert x is not None
    assert weight is not None
    outlying = np.sort(np.argsort(-peak, kind="stable")[:INPUT_CHANNELS])
    rest = array.copy()
    part = rewrite.add_constant(graph, f"{weight.name}/outlying", np.ascontiguousarray(rest[outlying]))
    rest[outlying] = 0
    matmul.replace_input_with(1, rewrite.add_constant(graph, f"{weight.name}/rest", rest))
    tape = ir.tape.Tape()
    channels = tape.op("Gather", [x, rewrite.add_constant(graph, f"{x.name}/outlying", outlying.astype(np.int64))], {"axis": -1})
    _add_to_output(graph, matmul, tape, tape.op("MatMul", [channels, part]))


def _add_to_output(graph: ir.Graph, matmul: ir.Node, tape: ir.tape.Tape, part: ir.Value) -> None:
    """Adds what a tape computes to the output of a linear layer, behind the layer's own bias: product and bias stay recognizable."""
    add = bias_add(matmul)
    assert add is not None, matmul.name
    output = add.outputs[0]
    total = ir.Value(name=output.name, type=output.type, shape=output.shape)
    output.name = f"{output.name}/int8"
    output.replace_all_uses_with(total, replace_graph_outputs=True)
    tape.op("Add", [output, part], output=total)
    graph.insert_after(add, tape.nodes)
