"""Takes the few channels of huge values out of what will be int8, and computes them beside it in float. Exact.

A handful of channels carry values ten times those of the others (Dettmers et al. 2022, arXiv:2208.07339). One int8 scale for all
then leaves few quantization steps for the rest. The split is made in the graph once, for channels known from calibration.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export.graph import rewrite
from bertserve.export.graph.linear import Linear, array, as_linear, linear_of
from bertserve.export.graph.rewrite import CONTRIB

HIDDEN_UNITS = 16
INPUT_CHANNELS = 4

Floats = NDArray[np.float32]


def feed_forwards(graph: ir.Graph) -> list[ir.Node]:
    """Returns the activation in the middle of each feed-forward block: `MatMul(Gelu(MatMul(x) + bias))`."""
    return [node for node in graph if node.op_type == "Gelu" and _block(node) is not None]


def _block(activation: ir.Node) -> tuple[Linear, Linear] | None:
    """Returns the linear layers before and after an activation, or None where there is anything else."""
    hidden, readers = activation.inputs[0], [use.node for use in activation.outputs[0].uses()]
    first = None if hidden is None else linear_of(hidden.producer())
    second = as_linear(readers[0]) if len(readers) == 1 else None
    return None if first is None or second is None else (first, second)


def split_hidden_units(graph: ir.Graph, activation: ir.Node, peak: Floats) -> NDArray[np.int64]:
    """Computes the hidden units of the largest values in a small feed-forward block of their own.

    A feed-forward block is a sum over its hidden units, so it may be cut in two.

    Args:
        graph: Changed in place.
        activation: One that `feed_forwards` returned.
        peak: Largest magnitude of each hidden unit's value, [units].

    Returns:
        The units that are left, int64.
    """
    block = _block(activation)
    assert block is not None, activation.name
    first, second = block
    order = np.argsort(-peak, kind="stable")
    outlying, others = np.sort(order[:HIDDEN_UNITS]), np.sort(order[HIDDEN_UNITS:])
    parts = []
    # units are columns of the first matrix and its bias, and rows of the second
    for node, value, axis in ((first.matmul, first.weight, -1), (first.add, first.bias, -1), (second.matmul, second.weight, 0)):
        assert node is not None
        assert value is not None
        rest, part = (np.ascontiguousarray(np.take(array(value), units, axis=axis)) for units in (others, outlying))
        node.replace_input_with(node.inputs.index(value), rewrite.add_constant(graph, f"{value.name}/rest", rest))
        parts.append(rewrite.add_constant(graph, f"{value.name}/float", part))
    tape = ir.tape.Tape()
    hidden = tape.op("Gelu", [tape.op("Add", [tape.op("MatMul", [first.x, parts[0]]), parts[1]])], domain=CONTRIB)
    _add_to_output(graph, second, tape, tape.op("MatMul", [hidden, parts[2]]))
    return others


def split_input_channels(graph: ir.Graph, layer: Linear, peak: Floats) -> None:
    """Multiplies the channels of the largest values with their rows of the matrix in float, and adds the result.

    Args:
        graph: Changed in place; the rows left behind are zero.
        layer: A linear layer with a bias.
        peak: Largest magnitude of each channel that it reads, [channels].
    """
    x, weight = layer.x, layer.weight
    outlying = np.sort(np.argsort(-peak, kind="stable")[:INPUT_CHANNELS])
    rest = array(weight).copy()
    part = rewrite.add_constant(graph, f"{weight.name}/outlying", np.ascontiguousarray(rest[outlying]))
    rest[outlying] = 0
    layer.matmul.replace_input_with(1, rewrite.add_constant(graph, f"{weight.name}/rest", rest))
    tape = ir.tape.Tape()
    channels = tape.op("Gather", [x, rewrite.add_constant(graph, f"{x.name}/outlying", outlying.astype(np.int64))], {"axis": -1})
    _add_to_output(graph, layer, tape, tape.op("MatMul", [channels, part]))


def _add_to_output(graph: ir.Graph, layer: Linear, tape: ir.tape.Tape, part: ir.Value) -> None:
    """Adds what a tape computes to the output of a linear layer, behind the layer's own bias: product and bias stay recognizable."""
    assert layer.add is not None, layer.matmul.name
    rewrite.add_to_output(graph, layer.add, tape, part)
