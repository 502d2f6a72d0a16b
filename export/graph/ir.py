"""Graph: an ONNX graph under surgery. Knows names and nodes, no model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from export.graph import onnx_files

CONTRIB = "com.microsoft"  # ONNX Runtime's own operators
WORTH_SHARING = 1024  # bytes


class Graph:
    """The nodes and constants of a model, to be rewritten and saved as another file.

    Attributes:
        nodes: The nodes in topological order.
    """

    def __init__(self, path: Path) -> None:
        """Loads a model; `Constant` nodes become initializers, so that all constants are found in one place."""
        self._model, self._constants = onnx_files.read(path)
        graph = self._model.graph
        self.nodes: list[NodeProto] = []
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            else:
                self.nodes.append(node)
        self.inputs = [value.name for value in graph.input]
        self.outputs = [value.name for value in graph.output]
        self._names = {name for node in graph.node for name in (*node.output, node.name)} | {*self.inputs}

    def constant(self, name: str) -> NDArray[Any] | None:
        """Returns a constant's value, or None where the name is no constant."""
        return self._constants.get(name)

    def add_constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds a constant under its name, made distinct where another value has it, and returns the name."""
        known = self._constants.get(name)
        if known is not None and (known.dtype != value.dtype or not np.array_equal(known, value)):
            return self.add_constant(f"{name}_", value)
        self._constants[name] = value
        return name

    def share(self) -> int:
        """Keeps one of constants that are equal, as the weights of shared layers are, and returns how many bytes that saves."""
        readers: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
        for node in self.nodes:
            for i, name in enumerate(node.input):
                if name in self._constants:
                    readers[name].append((node, i))
        kept: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        saved = 0
        for name, places in readers.items():
            value = self._constants[name]
            if value.nbytes < WORTH_SHARING:
                continue
            # a few elements tell most apart, so that few are compared whole
            alike = kept[value.dtype, value.shape, value.ravel()[:: max(1, value.size // 16)].tobytes()]
            same = next((other for other in alike if np.array_equal(self._constants[other], value)), None)
            if same is None:
                alike.append(name)
                continue
            for node, i in places:
                node.input[i] = same
            saved += value.nbytes
        return saved

    def fresh(self, hint: str) -> str:
        """Returns a new tensor name."""
        name = next(name for i in itertools.count(1) if (name := f"{hint}/{i}") not in self._names and name not in self._constants)
        self._names.add(name)
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> NodeProto:
        """Returns a new node with one output; it is not in the graph yet."""
        return helper.make_node(op, list(inputs), [output], name=self.fresh(op), domain=domain, **attributes)

    def consumers(self) -> dict[str, list[NodeProto]]:
        """Returns the nodes that read each tensor; the graph's own outputs are read by nobody."""
        found: dict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                found[name].append(node)
        return found

    def producers(self) -> dict[str, NodeProto]:
        """Returns the node that writes each tensor."""
        return {name: node for node in self.nodes for name in node.output if name}

    def save(self, path: Path, *, also: Sequence[str] = ()) -> None:
        """Writes the model without what nothing reads.

        Args:
            path: The new file.
            also: Further float tensors to give out, after the graph's own outputs; for calibration.
        """
        kept: list[NodeProto] = []
        needed = set(self.outputs) | set(also)
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        graph = model.graph
        del graph.node[:]
        graph.node.extend(reversed(kept))
        del graph.value_info[:]
        graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in also)
        if not any(entry.domain == CONTRIB for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        onnx_files.write(model, {name: value for name, value in self._constants.items() if name in needed}, path)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Returns an attribute's value, or the default where the node has none of that name."""
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)
