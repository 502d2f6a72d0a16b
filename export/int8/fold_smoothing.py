"""Smooths the channels of an attention's output in the matrices before and after it. Exact, and free at run time.

What int8 needs (`export.int8.smoothquant`) costs a multiplication of each activation elsewhere. An attention's output is a weighted
sum of values, channel by channel, so its channels can be scaled where the values are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.graph import rewrite
from export.graph.linear import bias_of

Floats = NDArray[np.float32]


def fold_smoothing(graph: ir.Graph, multipliers: Mapping[str, Floats]) -> set[str]:
    """Multiplies attention outputs by channel, and divides by the same in the matrix that reads them.

    Args:
        graph: Changed in place; its linear layers are `MatMul` and `Add` of a bias.
        multipliers: By tensor, what its channels are to be multiplied with, float32 [channels]; one of zero is left alone.

    Returns:
        The tensors that were smoothed: outputs of attention whose values are computed by a matrix that nothing else depends on.
    """
    done = set()
    for attention in graph:
        x = attention.outputs[0]
        multiplier = multipliers.get(x.name or "") if attention.op_type == "MultiHeadAttention" else None
        readers = [use.node for use in x.uses()]
        if multiplier is None or len(readers) != 1 or readers[0].op_type != "MatMul":
            continue
        found = _value_projection(attention, readers[0])
        if found is None:
            continue
        matmul, add, columns = found
        factors = np.where(multiplier > 0, multiplier, 1).astype(np.float32)
        _scale(graph, matmul, 1, columns, factors)
        _scale(graph, add, add.inputs.index(bias_of(add)), columns, factors)
        _scale(graph, readers[0], 1, slice(None), np.reciprocal(factors)[:, None])
        done.add(str(x.name))
    return done


def _value_projection(attention: ir.Node, reader: ir.Node) -> tuple[ir.Node, ir.Node, slice] | None:
    """Returns the product and the addition that compute an attention's values, and which of their columns do.

    None where the values are computed otherwise, or something else reads them, or `reader` is no product with a constant matrix.
    """
    values = attention.inputs[2]
    add = None if values is None else values.producer()
    width = rewrite.constant_shape(reader.inputs[1])
    if values is None or add is None or len(values.uses()) != 1 or width is None:
        return None
    start = 0
    if add.op_type == "Split":
        widths = rewrite.constant(add.inputs[1])
        assert widths is not None, "`pack_qkv` splits at constants"
        start = int(widths[: values.index()].sum())
        add = add.inputs[0].producer() if add.inputs[0] is not None else None
    if add is None or add.op_type != "Add" or (bias := bias_of(add)) is None:
        return None
    product = add.inputs[1 - add.inputs.index(bias)]
    matmul = None if product is None else product.producer()
    if matmul is None or matmul.op_type != "MatMul" or rewrite.constant_shape(matmul.inputs[1]) is None:
        return None
    return matmul, add, slice(start, start + width[0])


def _scale(graph: ir.Graph, node: ir.Node, i: int, columns: slice, factors: Floats) -> None:
    """Scales columns of the constant that a node reads in place `i`, for that node alone."""
    value = node.inputs[i]
    array = rewrite.constant(value)
    assert value is not None
    assert array is not None, value.name
    scaled = array.copy()
    scaled[..., columns] *= factors
    node.replace_input_with(i, rewrite.add_constant(graph, f"{value.name}/balanced", scaled))
