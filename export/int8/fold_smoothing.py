"""Brings the channels of an attention's output to like size in the matrices before and after it. Exact, and free at run time.

What int8 needs (`export.quantize`) a product elsewhere pays for with a multiplication of each activation. An attention's output is
a weighted sum of values, channel by channel, so its channels can be scaled where the values are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from export.graph.ir import Graph

Floats = NDArray[np.float32]


def fold_smoothing(graph: Graph, multipliers: Mapping[str, Floats]) -> set[str]:
    """Multiplies attention outputs by channel, and divides by the same in the matrix that reads them.

    Args:
        graph: Changed in place; its products are `MatMul` and `Add` of a bias.
        multipliers: By tensor, what its channels are to be multiplied with, float32 [channels]; one of zero is left alone.

    Returns:
        The tensors that were balanced: outputs of attention whose values are computed by a matrix that nothing else depends on.
    """
    producers, consumers = graph.producers(), graph.consumers()
    done = set()
    for x, multiplier in multipliers.items():
        attention, readers = producers.get(x), consumers[x]
        if attention is None or attention.op_type != "MultiHeadAttention" or len(readers) != 1 or readers[0].op_type != "MatMul":
            continue
        found = _value_projection(graph, attention, producers, consumers)
        if found is None:
            continue
        product, bias, columns = found
        by = np.where(multiplier > 0, multiplier, 1).astype(np.float32)
        _scale_constant(graph, product, 1, columns, by)
        _scale_constant(graph, bias, _constant_input(graph, bias), columns, by)
        _scale_constant(graph, readers[0], 1, slice(None), np.reciprocal(by)[:, None])
        done.add(x)
    return done


def _value_projection(
    graph: Graph, attention: NodeProto, producers: Mapping[str, NodeProto], consumers: Mapping[str, list[NodeProto]]
) -> tuple[NodeProto, NodeProto, slice] | None:
    """Returns the product and the addition that compute an attention's values, and which of their columns do."""
    name, start = attention.input[2], 0
    split = producers.get(name)
    if len(consumers[name]) != 1 or split is None:
        return None
    addition = split
    if split.op_type == "Split":
        widths = graph.constant(split.input[1])
        assert widths is not None, "export.pack splits at constants"
        start = int(widths[: list(split.output).index(name)].sum())
        addition = producers[split.input[0]]
    bias = _bias_of(graph, addition)
    product = None if bias is None else producers.get(addition.input[1 - _constant_input(graph, addition)])
    if bias is None or product is None or product.op_type != "MatMul" or graph.constant(product.input[1]) is None:
        return None
    reader = graph.constant(consumers[attention.output[0]][0].input[1])
    if reader is None:
        return None
    return product, addition, slice(start, start + len(reader))


def _bias_of(graph: Graph, node: NodeProto) -> Floats | None:
    if node.op_type != "Add" or _constant_input(graph, node) < 0:
        return None
    bias = graph.constant(node.input[_constant_input(graph, node)])
    return bias if bias is not None and bias.ndim == 1 else None


def _constant_input(graph: Graph, node: NodeProto) -> int:
    return next((i for i, name in enumerate(node.input) if graph.constant(name) is not None), -1)


def _scale_constant(graph: Graph, node: NodeProto, i: int, columns: slice, by: Floats) -> None:
    name = node.input[i]
    value = graph.constant(name)
    assert value is not None, name
    scaled = value.copy()
    scaled[..., columns] *= by
    node.input[i] = graph.add_constant(f"{name}/balanced", scaled)
