"""Smooths the channels of an attention's output in the matrices before and after it. Exact, and free at run time.

What int8 needs (`bertserve.export.int8.smoothquant`) costs a multiplication of each activation elsewhere. An attention's output is a weighted
sum of values, channel by channel, so its channels can be scaled where the values are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export.graph import rewrite
from bertserve.export.graph.linear import Linear, array, as_linear, linear_of

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
        reader = as_linear(readers[0]) if len(readers) == 1 else None
        found = None if multiplier is None or reader is None else _value_projection(attention, reader)
        if multiplier is None or reader is None or found is None:
            continue
        layer, columns = found
        factors = np.where(multiplier > 0, multiplier, 1).astype(np.float32)
        for node, value in ((layer.matmul, layer.weight), (layer.add, layer.bias)):
            _scale(graph, node, value, columns, factors)
        _scale(graph, reader.matmul, reader.weight, slice(None), np.reciprocal(factors)[:, None])
        done.add(str(x.name))
    return done


def _value_projection(attention: ir.Node, reader: Linear) -> tuple[Linear, slice] | None:
    """Returns the layer that computes an attention's values, and which of its columns do.

    None where the values are computed otherwise, or something else reads them.
    """
    values = attention.inputs[2]
    add = None if values is None else values.producer()
    if values is None or add is None or len(values.uses()) != 1:
        return None
    start = 0
    if add.op_type == "Split":
        widths = rewrite.constant(add.inputs[1])
        assert widths is not None, "`pack_qkv` splits at constants"
        start = int(widths[: values.index()].sum())
        add = None if add.inputs[0] is None else add.inputs[0].producer()
    layer = linear_of(add)
    return None if layer is None else (layer, slice(start, start + len(array(reader.weight))))


def _scale(graph: ir.Graph, node: ir.Node | None, value: ir.Value | None, columns: slice, factors: Floats) -> None:
    """Scales columns of a constant for one node that reads it."""
    assert node is not None
    assert value is not None
    scaled = array(value).copy()
    scaled[..., columns] *= factors
    node.replace_input_with(node.inputs.index(value), rewrite.add_constant(graph, f"{value.name}/balanced", scaled))
