"""Embeddings in int8: which lookups become lookups of integer rows, and what they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bertserve.export.int8.graph_edits import MIN_ROWS, emit_embeddings
from staged import graph_of

pytestmark = pytest.mark.torch

# square and large in both directions, so that nothing but the axis tells rows from columns
TABLE = np.random.default_rng(0).normal(size=(MIN_ROWS, MIN_ROWS)).astype(np.float32) * np.geomspace(0.01, 100, MIN_ROWS, dtype=np.float32)


def looked_up(axis: int | None) -> tuple[int, ir.Model, NDArray[np.float32]]:
    """Emits int8 for one lookup; returns how many lookups were replaced, the model, and what it gives for the indices 3 and 0."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    node = helper.make_node("Gather", ["table", "ids"], ["y"], **attributes)
    model = ir.from_proto(graph_of([node], {"table": TABLE}, {"ids": ("n",)}, kind=TensorProto.INT64))
    count = emit_embeddings(model.graph)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    [values] = session.run(None, {"ids": np.array([3, 0])})
    return count, model, values


@pytest.mark.parametrize("axis", [None, 0])
def test_lookups_of_rows_are_of_integers(axis: int | None) -> None:
    """Each row within half a step of its scale; without the attribute the axis is 0."""
    count, model, values = looked_up(axis)
    assert 1 == count
    assert "table" not in {name for node in model.graph for name in (value.name for value in node.inputs if value is not None)}
    steps = np.abs(TABLE[[3, 0]]).max(axis=1, keepdims=True) / 127
    assert (np.abs(values - TABLE[[3, 0]]) <= 0.501 * steps).all()


@pytest.mark.parametrize("axis", [1, -1])
def test_lookups_of_columns_stay_in_float(axis: int) -> None:
    """The scales are of rows, so that columns would be others altogether."""
    count, model, values = looked_up(axis)
    assert (0, ["Gather"]) == (count, [node.op_type for node in model.graph])
    np.testing.assert_array_equal(TABLE[:, [3, 0]], values)
