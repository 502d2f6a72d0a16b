"""Shared parts of all graph passes: loading and saving a model, its constants and its linear layers."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from bertserve.export.errors import ExportError
from bertserve.export.graph import onnx_files
from bertserve.service.tasks.decoding import Floats

CONTRIB = "com.microsoft"  # ONNX Runtime's own operators
_MAP_LOCK = threading.Lock()  # onnx_ir maps a constant's file at the first access, which must not happen in two threads

MIN_MATRIX_SIDE = 32  # smaller matrices, such as a classifier's or the float parts of split ones, cost nothing in float


def load(path: Path) -> ir.Model:
    """Loads a model for rewriting; `Constant` nodes become initializers, so that all constants are in one place.

    Raises:
        ExportError: A node has subgraphs, such as the branches of `If` or the body of `Loop`. No pass reads these, and the values that
            they use from the outer graph are not among the node's inputs.
    """
    model = ir.load(path)
    for node in model.graph:
        if any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()):
            raise ExportError(f"the graph has `{node.op_type}` (`{node.name}`): code that branches or loops on its input is not supported.")
    common.LiftConstantsToInitializersPass(size_limit=0)(model)
    model.opset_imports.setdefault(CONTRIB, 1)
    return model


def save(model: ir.Model, path: Path, *, outputs: Sequence[str] = ()) -> None:
    """Writes a model after removing its unused parts; the file also returns the float tensors `outputs`, for calibration."""
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    count = len(graph.outputs)
    graph.outputs.extend(values[name] for name in outputs if not values[name].is_graph_output())
    common.RemoveUnusedNodesPass()(model)
    onnx_files.save(model, path)
    graph.outputs[count:] = []  # `del` would leave the values marked as outputs (onnx_ir 1.1)


def constant_array(value: ir.Value | None) -> NDArray[Any] | None:
    """Returns the value of a constant, or None if it is not a constant; thread-safe."""
    if value is None or value.const_value is None:
        return None
    with _MAP_LOCK:  # this reads nothing from the disk; only using the values does
        return value.const_value.numpy()


def constant_shape(value: ir.Value | None) -> Sequence[int] | None:
    """Returns the shape of a constant without reading its value, or None if it is not a constant."""
    return None if value is None or value.const_value is None else value.const_value.shape.numpy()


def add_constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Adds a constant with a name, which is changed if another constant has it; an equal constant is reused."""
    while name in graph.initializers:
        existing_array = constant_array(graph.initializers[name])
        if existing_array is not None and existing_array.dtype == array.dtype and np.array_equal(existing_array, array):
            return graph.initializers[name]
        name += "_"
    value = ir.val(name, const_value=ir.Tensor(array, name=name))
    graph.register_initializer(value)
    return value


def add_to_output(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape, part: ir.Value) -> None:
    """Adds `part`, the result of a tape's nodes, to a node's output, and inserts these nodes; all readers of the output then read the sum.

    The sum gets the output's name, and the output a new one.
    """
    output = node.outputs[0]
    total = ir.Value(name=output.name, type=output.type, shape=output.shape)
    output.name = f"{output.name}/part"
    output.replace_all_uses_with(total, replace_graph_outputs=True)
    tape.op("Add", [output, part], output=total)
    graph.insert_after(node, tape.nodes)


@dataclass(frozen=True)
class Linear:
    """A product `matmul` with a constant matrix, and the addition of its bias, if any. The input can be replaced."""

    matmul: ir.Node

    @property
    def input(self) -> ir.Value:
        """The input of the product, [..., inputs]."""
        value = self.matmul.inputs[0]
        assert value is not None
        return value

    @property
    def weight(self) -> ir.Value:
        """The matrix, [inputs, outputs]."""
        weight = self.matmul.inputs[1]
        assert weight is not None
        return weight

    @property
    def add(self) -> ir.Node | None:
        """The node that adds the bias; None if there is none, or if another node reads the product too."""
        product = self.matmul.outputs[0]
        readers = [use.node for use in product.uses()]
        if product.is_graph_output() or len(readers) != 1 or readers[0].op_type != "Add":
            return None
        return readers[0] if find_bias(readers[0]) is not None else None

    @property
    def bias(self) -> ir.Value | None:
        """The bias, [outputs], or None."""
        return None if self.add is None else find_bias(self.add)

    @property
    def nodes(self) -> list[ir.Node]:
        """The product and the addition, if any."""
        return [self.matmul, *([] if self.add is None else [self.add])]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of inputs and outputs."""
        inputs, outputs = constant_shape(self.weight) or (0, 0)
        return inputs, outputs

    def arrays(self) -> tuple[Floats, Floats]:
        """Returns the matrix, [inputs, outputs], and the bias, [outputs], which is zero if there is none."""
        weight = float_array(self.weight)
        return weight, np.zeros(weight.shape[1], dtype=np.float32) if self.bias is None else float_array(self.bias)


def as_linear(node: ir.Node | None) -> Linear | None:
    """Returns the linear layer of a product, or None if the node is not a product with a constant matrix."""
    shape = None if node is None or node.op_type != "MatMul" or node.inputs[0] is None else constant_shape(node.inputs[1])
    return None if node is None or shape is None or len(shape) != 2 else Linear(node)


def linear_with_bias(add: ir.Node | None) -> Linear | None:
    """Returns the linear layer whose bias a node adds, or None if it adds another value."""
    layers = [] if add is None else [as_linear(value.producer()) for value in add.inputs if value is not None]
    return next((layer for layer in layers if layer is not None and layer.add is add), None)


def linears_by_input(graph: ir.Graph) -> dict[str, Linear]:
    """Returns the linear layer that reads each tensor, by the tensor's name.

    A tensor that several layers read is multiplied once, because `cpu_passes.pack_qkv` merged the layers. At most two remain, with and
    without a bias; the one with a bias is returned. Layers that depend only on constants, such as projections of a table of positions, are
    left out, because ONNX Runtime computes them once.
    """
    dependent: set[ir.Value | None] = set(graph.inputs)
    linears: dict[str, Linear] = {}
    for node in graph:
        if dependent.isdisjoint(node.inputs):
            continue
        dependent.update(node.outputs)
        layer = as_linear(node)
        if layer is None or layer.input.name is None or min(layer.shape) < MIN_MATRIX_SIDE:
            continue
        if layer.input.name not in linears or layer.add is not None:
            linears[layer.input.name] = layer
    return linears


def group_by_weight(linears: Mapping[str, Linear]) -> list[list[str]]:
    """Returns groups of tensors that are multiplied by the same matrix, for layers with shared weights."""
    groups: dict[ir.Value, list[str]] = {}
    for tensor, layer in linears.items():
        groups.setdefault(layer.weight, []).append(tensor)
    return [group for group in groups.values() if len(group) > 1]


def find_bias(add: ir.Node) -> ir.Value | None:
    """Returns the one-dimensional constant that a node reads, or None."""
    return next((value for value in add.inputs if (shape := constant_shape(value)) is not None and len(shape) == 1), None)


def float_array(value: ir.Value | None) -> Floats:
    """Returns the values of a float constant."""
    values = constant_array(value)
    assert values is not None, value
    return values
