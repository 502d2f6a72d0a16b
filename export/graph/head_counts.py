"""Counts the heads of each fused attention by its matrix: where heads were pruned, layers have different numbers of them."""

from __future__ import annotations

import onnx
from onnx import helper


def count_heads(model: onnx.ModelProto, head_size: int) -> None:
    """Sets `num_heads` of each Attention, in place; the optimizer sets the number that it is told for all of them.

    Args:
        model: A fused graph whose Attention nodes have query, key and value in one matrix, [hidden, 3 * heads * head_size].
        head_size: Values of a head.
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Attention":
            [heads] = [attribute for attribute in node.attribute if attribute.name == "num_heads"]
            heads.CopyFrom(helper.make_attribute("num_heads", shapes[node.input[1]][1] // 3 // head_size))
