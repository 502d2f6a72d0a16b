"""What all passes over a graph share: a model to rewrite, and its constants. onnx_ir holds the graph and knows what reads what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from export.graph import onnx_files

CONTRIB = "com.microsoft"  # ONNX Runtime's own operators


def load(path: Path) -> ir.Model:
    """Loads a model to rewrite; `Constant` nodes become initializers, so that all constants are found in one place."""
    model = ir.load(path)
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
    """Returns the value of a constant, or None where it is none."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


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
