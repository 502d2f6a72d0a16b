"""What all passes over a graph share: a model to rewrite, its constants, and its linear layers. onnx_ir holds the graph and knows what reads what.

Linear layers are products with constant matrices, which are what int8 is for, and the additions of their biases.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

MIN_SIDE = 32  # smaller matrices, as a classifier's and the float parts of split ones, cost nothing in float
Floats = NDArray[np.float32]


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
                f"the graph has a node `{node.op_type}` (`{node.name}`), which runs subgraphs: the model's code branches "
                "or loops on its input. This is not supported; export a model that runs the same steps for every "
                "text."
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
    with _MAPPING:  # this reads nothing from the disk; the use of the values does
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


@dataclass(frozen=True)
class Linear:
    """A product with a constant matrix, and the addition of its bias where it has one. What it reads may be replaced.

    Attributes:
        matmul: The node of the product.
    """

    matmul: ir.Node

    @property
    def x(self) -> ir.Value:
        """What is multiplied, [..., inputs]."""
        x = self.matmul.inputs[0]
        assert x is not None
        return x

    @property
    def weight(self) -> ir.Value:
        """The matrix, [inputs, outputs]."""
        weight = self.matmul.inputs[1]
        assert weight is not None
        return weight

    @property
    def add(self) -> ir.Node | None:
        """The node that adds the bias; None where there is none, or where something else reads the product too."""
        product = self.matmul.outputs[0]
        readers = [use.node for use in product.uses()]
        if product.is_graph_output() or len(readers) != 1 or readers[0].op_type != "Add":
            return None
        return readers[0] if bias_of(readers[0]) is not None else None

    @property
    def bias(self) -> ir.Value | None:
        """The bias, [outputs], or None."""
        return None if self.add is None else bias_of(self.add)

    @property
    def nodes(self) -> list[ir.Node]:
        """The product, and the addition if there is one."""
        return [self.matmul, *([] if self.add is None else [self.add])]

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        inputs, outputs = constant_shape(self.weight) or (0, 0)
        return inputs, outputs

    def arrays(self) -> tuple[Floats, Floats]:
        """Returns the matrix, [inputs, outputs], and the bias, [outputs], which is zero where there is none."""
        weight = array(self.weight)
        return weight, np.zeros(weight.shape[1], dtype=np.float32) if self.bias is None else array(self.bias)


def as_linear(node: ir.Node | None) -> Linear | None:
    """Returns the linear layer whose product a node is, or None if it is not a product with a constant matrix."""
    shape = None if node is None or node.op_type != "MatMul" or node.inputs[0] is None else constant_shape(node.inputs[1])
    return None if node is None or shape is None or len(shape) != 2 else Linear(node)


def linear_of(add: ir.Node | None) -> Linear | None:
    """Returns the linear layer whose bias a node adds, or None where it adds anything else."""
    layers = [] if add is None else [as_linear(value.producer()) for value in add.inputs if value is not None]
    return next((layer for layer in layers if layer is not None and layer.add is add), None)


def find_linears(graph: ir.Graph) -> dict[str, Linear]:
    """Returns the linear layer that reads each tensor, by the tensor's name.

    There is one for a tensor, or one with a bias and one without: `bertserve.export.graph.cpu_passes` has merged the others, and the one with a
    bias counts. What is computed from constants alone, as projections of a table of positions are, ONNX Runtime computes once.
    """
    dependent = _input_dependent(graph)
    found: dict[str, Linear] = {}
    for node in graph:
        layer = as_linear(node)
        if layer is None or layer.x.name is None or layer.x not in dependent or min(constant_shape(layer.weight) or ()) < MIN_SIDE:
            continue
        if layer.x.name not in found or layer.add is not None:
            found[layer.x.name] = layer
    return found


def sharing_weights(linears: Mapping[str, Linear]) -> list[list[str]]:
    """Returns groups of tensors that are multiplied with the same matrix, as those of layers that share weights are."""
    groups: dict[ir.Value, list[str]] = {}
    for x, layer in linears.items():
        groups.setdefault(layer.weight, []).append(x)
    return [group for group in groups.values() if len(group) > 1]


def bias_of(add: ir.Node) -> ir.Value | None:
    """Returns the constant of one axis among what a node reads, or None where there is none."""
    return next((value for value in add.inputs if (shape := constant_shape(value)) is not None and len(shape) == 1), None)


def array(value: ir.Value | None) -> Floats:
    """Returns the value of what is known to be a constant of floats."""
    found = constant(value)
    assert found is not None, value
    return found


def _input_dependent(graph: ir.Graph) -> set[ir.Value | None]:
    dependent: set[ir.Value | None] = set(graph.inputs)
    for node in graph:
        if dependent.intersection(node.inputs):
            dependent.update(node.outputs)
    return dependent
