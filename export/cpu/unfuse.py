"""Takes fused operators apart again where ONNX Runtime's CPU kernels are slower than their parts.

Measured with onnxruntime 1.31 on one thread (docs/explanation/graphs.md): SkipLayerNormalization takes three to five times as long
as Add and LayerNormalization, BiasGelu twice as long as Add and Gelu, and Attention longer than three matrix products and
MultiHeadAttention. Fusing first is still worth it: it finds attention in the tracer's many forms.

The optimizer's own FusionOptions do not give this graph. Without `enable_skip_layer_norm` it finds no attention in models that
norm before their blocks (in none of 12 layers of Megatron-BERT, not in 11). Without `enable_bias_gelu` it also leaves the bias out
of FastGelu, as ALBERT has it. `use_multi_head_attention` takes the biases of the projections into the attention, where neither
packing nor int8 finds them, and does not fuse attention with a bias of its scores. Gemm and Einsum have no option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bertserve.export.errors import GraphError
from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import CONTRIB


def unfuse(source: Path, target: Path) -> None:
    """Writes the graph for the CPU provider to a new file: the same function, in operators whose kernels are fast.

    Args:
        source: The fused graph.
        target: The new graph.

    Raises:
        GraphError: A fused operator is used in a way that was not understood.
    """
    rules: dict[str, Callable[[ir.Graph, ir.Node, ir.tape.Tape], Sequence[ir.Value]]] = {
        "Attention": _attention,
        "SkipLayerNormalization": _skip_layer_norm,
        "BiasGelu": _bias_gelu,
        "Gemm": _gemm,
        "Einsum": _einsum,
    }
    model = rewrite.load(source)
    graph = model.graph
    for node in graph:
        tape = ir.tape.Tape()
        outputs = rules[node.op_type](graph, node, tape) if node.op_type in rules else ()
        if outputs:
            used = [value for value in node.outputs if value.name]
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, used, outputs)
    rewrite.save(model, target)


def _linear(tape: ir.tape.Tape, x: ir.Value | None, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    return tape.op("Add", [tape.op("MatMul", [x, weight]), bias])


def _attention(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """Three projections and MultiHeadAttention; its mask stays one key's padding per row, [rows, length].

    What is added to the scores, as a bias by relative position, goes along.
    """
    x, packed_weight, packed_bias, mask, past, score_bias = (*node.inputs, *[None] * 5)[:6]
    weight, bias = rewrite.constant(packed_weight), rewrite.constant(packed_bias)
    if weight is None or bias is None or past or any(node.inputs[6:]) or node.attributes.get_int("unidirectional", 0) != 0:
        raise GraphError(f"attention node `{node.name}` has inputs {_names(node.inputs)}, which is not understood.")
    assert packed_weight is not None
    assert packed_bias is not None
    projections = [
        _linear(
            tape,
            x,
            rewrite.add_constant(graph, f"{packed_weight.name}/{name}", np.ascontiguousarray(w)),
            rewrite.add_constant(graph, f"{packed_bias.name}/{name}", b),
        )
        for name, w, b in zip(("query", "key", "value"), np.split(weight, 3, axis=1), np.split(bias, 3), strict=True)
    ]
    attributes = {name: node.attributes[name] for name in ("num_heads", "scale", "mask_filter_value") if name in node.attributes}
    inputs = [*projections, None, mask, *([score_bias] if score_bias else [])]
    return [tape.op("MultiHeadAttention", inputs, attributes, domain=CONTRIB)]


def _skip_layer_norm(_: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """`LayerNormalization(x + bias + skip)`, without a shift where there is none; the sum itself may be read too."""
    x, skip, gamma, beta, bias = (*node.inputs, None, None)[:5]
    if any(value.name for value in node.outputs[1:3]):
        raise GraphError(f"`{node.name}` has inputs {_names(node.inputs)} and outputs {_names(node.outputs)}, which is not understood.")
    total = tape.op("Add", [x if bias is None else tape.op("Add", [x, bias]), skip])
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    norm = tape.op("LayerNormalization", [total, gamma, *([beta] if beta else [])], attributes)
    return [norm, *([total] if any(value.name for value in node.outputs[3:]) else [])]


def _bias_gelu(_: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    return [tape.op("Gelu", [tape.op("Add", node.inputs)], domain=CONTRIB)]


def _gemm(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """A product, and an addition where there is a bias: the form of all other layers, so that quantization need not know two."""
    attributes = node.attributes
    plain = attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0 and not attributes.get_int("transA", 0)
    x, weight, bias = (*node.inputs, None)[:3]
    array = rewrite.constant(weight)
    if weight is None or array is None or not plain:
        return ()
    if attributes.get_int("transB", 0):
        weight = rewrite.add_constant(graph, f"{weight.name}/transposed", np.ascontiguousarray(array.T))
    return [tape.op("MatMul", [x, weight]) if bias is None else _linear(tape, x, weight, bias)]


def _einsum(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """A product with a constant matrix, in whatever shape it is kept, as `MatMul`: faster, and quantization knows it.

    Understood are sums over the last axes of a computed tensor and the first or the last of a constant one, such as
    `ibh,hnd->ibnd` and `ibnd,hnd->ibh`; any other is left alone.
    """
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    weight = rewrite.constant(node.inputs[1]) if len(node.inputs) == 2 else None
    if weight is None or "->" not in equation or "." in equation:
        return ()
    (left, right), result = equation.partition("->")[0].split(","), equation.partition("->")[2]
    summed = "".join(letter for letter in left if letter in right and letter not in result)
    kept = left.removesuffix(summed)
    free = right.removeprefix(summed) if right.startswith(summed) else right.removesuffix(summed)
    if (
        not summed
        or not free
        or kept + summed != left
        or result != kept + free
        or len(kept) + len(free) + len(summed) != len({*left, *right})
    ):
        return ()
    size = int(np.prod([weight.shape[right.index(letter)] for letter in summed]))
    matrix = weight.reshape(size, -1) if right.startswith(summed) else weight.reshape(-1, size).T
    x, name = node.inputs[0], node.inputs[1].name  # type: ignore[union-attr]
    if len(summed) > 1:
        x = tape.op("Reshape", [x, _shape(graph, [*[0] * len(kept), size])])
    product = tape.op("MatMul", [x, rewrite.add_constant(graph, f"{name}/matrix", np.ascontiguousarray(matrix))])
    if len(free) == 1:
        return [product]
    shape = _shape(graph, [*[0] * len(kept), *(weight.shape[right.index(letter)] for letter in free)])
    return [tape.op("Reshape", [product, shape])]


def _shape(graph: ir.Graph, sizes: list[int]) -> ir.Value:
    """Returns a constant for `Reshape`; 0 keeps the size that there is."""
    return rewrite.add_constant(graph, "shape/" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))


def _names(values: Sequence[ir.Value | None]) -> list[str | None]:
    return ["" if value is None else value.name for value in values]
