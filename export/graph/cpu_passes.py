"""Three exact passes that make a fused graph faster on the CPU (docs/explanation/graphs.md).

`unfuse` splits fused operators, because ONNX Runtime's CPU kernels are slower than their parts: with onnxruntime 1.31 on one thread,
SkipLayerNormalization takes three to five times as long. The optimizer's own FusionOptions cannot produce this graph: without
`enable_skip_layer_norm` it finds no attention in models with norms before their blocks, and `use_multi_head_attention` moves the
projections' biases into the attention, where neither packing nor int8 finds them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import CONTRIB, Linear, as_linear

# operators whose output row depends only on the same row of these inputs (None: of all inputs that are not constants)
_ROWWISE: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div")),
    **dict.fromkeys(("Gelu", "FastGelu", "QuickGelu", "Relu", "Tanh", "Sigmoid", "Erf", "LayerNormalization", "MatMul"), (0,)),
    "MultiHeadAttention": (0,),  # the query's row; keys and values stay complete
}


def unfuse(model: ir.Model) -> None:
    """Changes a graph for the CPU provider, in place: the same function with operators that have fast kernels.

    A rule that does not support how an operator is used returns no nodes, and the operator stays.
    """
    rules: dict[str, Callable[[ir.Graph, ir.Node, ir.tape.Tape], Sequence[ir.Value]]] = {
        "Attention": _attention,
        "SkipLayerNormalization": _skip_layer_norm,
        "BiasGelu": _bias_gelu,
        "Gemm": _gemm,
        "Einsum": _einsum,
    }
    graph = model.graph
    for node in graph:
        tape = ir.tape.Tape()
        outputs = rules[node.op_type](graph, node, tape) if node.op_type in rules else ()
        if outputs:
            old_values = [value for value in node.outputs if value.name]
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, old_values, outputs)
    common.RemoveUnusedNodesPass()(model)


def _linear(tape: ir.tape.Tape, x: ir.Value | None, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    return tape.op("Add", [tape.op("MatMul", [x, weight]), bias])


def _attention(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """Returns three projections and MultiHeadAttention, with the same mask, the key padding of each row [rows, length]."""
    x, packed_weight, packed_bias, mask = (*node.inputs, None)[:4]
    weight, bias = rewrite.constant_array(packed_weight), rewrite.constant_array(packed_bias)
    if weight is None or bias is None or any(node.inputs[4:]) or node.attributes.get_int("unidirectional", 0) != 0:
        return ()
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
    return [tape.op("MultiHeadAttention", [*projections, None, mask], attributes, domain=CONTRIB)]


def _skip_layer_norm(_: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """Returns `LayerNormalization(x + bias + skip)`, without a shift if there is none; the sum can also be an output."""
    x, skip, gamma, beta, bias = (*node.inputs, None, None)[:5]
    if any(value.name for value in node.outputs[1:3]):
        return ()
    total = tape.op("Add", [x if bias is None else tape.op("Add", [x, bias]), skip])
    attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-5)}
    norm = tape.op("LayerNormalization", [total, gamma, *([beta] if beta else [])], attributes)
    return [norm, *([total] if any(value.name for value in node.outputs[3:]) else [])]


def _bias_gelu(_: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    return [tape.op("Gelu", [tape.op("Add", node.inputs)], domain=CONTRIB)]


def _gemm(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """Returns a product and the addition of a bias, if any: the form of all other layers, so quantization handles only one form."""
    attributes = node.attributes
    is_plain = attributes.get_float("alpha", 1.0) == attributes.get_float("beta", 1.0) == 1.0 and not attributes.get_int("transA", 0)
    x, weight, bias = (*node.inputs, None)[:3]
    array = rewrite.constant_array(weight)
    if weight is None or array is None or not is_plain:
        return ()
    if attributes.get_int("transB", 0):
        weight = rewrite.add_constant(graph, f"{weight.name}/transposed", np.ascontiguousarray(array.T))
    return [tape.op("MatMul", [x, weight]) if bias is None else _linear(tape, x, weight, bias)]


def _einsum(graph: ir.Graph, node: ir.Node, tape: ir.tape.Tape) -> Sequence[ir.Value]:
    """Returns a product with a constant matrix as `MatMul`, which is faster, and which quantization supports.

    It supports sums over the last axes of a computed tensor and the first or last axes of a constant, such as
    `ibh,hnd->ibnd` and `ibnd,hnd->ibh`; others stay unchanged.
    """
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    weight = rewrite.constant_array(node.inputs[1]) if len(node.inputs) == 2 else None
    if weight is None or "->" not in equation or "." in equation:
        return ()
    (left, right), result = equation.partition("->")[0].split(","), equation.partition("->")[2]
    summed_axes = "".join(letter for letter in left if letter in right and letter not in result)
    row_axes = left.removesuffix(summed_axes)
    column_axes = right.removeprefix(summed_axes) if right.startswith(summed_axes) else right.removesuffix(summed_axes)
    if (
        not summed_axes
        or not column_axes
        or row_axes + summed_axes != left
        or result != row_axes + column_axes
        or len(row_axes) + len(column_axes) + len(summed_axes) != len({*left, *right})
    ):
        return ()
    size = int(np.prod([weight.shape[right.index(letter)] for letter in summed_axes]))
    matrix = weight.reshape(size, -1) if right.startswith(summed_axes) else weight.reshape(-1, size).T
    x, name = node.inputs[0], node.inputs[1].name  # type: ignore[union-attr]
    if len(summed_axes) > 1:
        x = tape.op("Reshape", [x, _shape(graph, [*[0] * len(row_axes), size])])
    product = tape.op("MatMul", [x, rewrite.add_constant(graph, f"{name}/matrix", np.ascontiguousarray(matrix))])
    if len(column_axes) == 1:
        return [product]
    shape = _shape(graph, [*[0] * len(row_axes), *(weight.shape[right.index(letter)] for letter in column_axes)])
    return [tape.op("Reshape", [product, shape])]


def _shape(graph: ir.Graph, sizes: list[int]) -> ir.Value:
    """Returns a constant for `Reshape`; 0 keeps the size of an axis."""
    return rewrite.add_constant(graph, "shape/" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64))


def restrict_to_cls(model: ir.Model) -> int:
    """Makes an unfused graph compute only the first token's results, if `Gather(hidden, 0, axis=1)` is the only reader of hidden states.

    Returns the number of nodes that compute one row instead of all.
    """
    gathers = {node for node in model.graph if _gathers_cls(node)}
    # node -> indices of the inputs of which it only needs the first row
    restricted: dict[ir.Node, tuple[int, ...]] = dict.fromkeys(gathers, (0,))
    for node in reversed(model.graph):
        output = node.outputs[0]
        if node in restricted or len(node.outputs) != 1 or output.is_graph_output() or not output.uses():
            continue
        rows = _rowwise_inputs(node)
        if rows and all(use.idx in restricted.get(use.node, ()) for use in output.uses()):
            restricted[node] = rows
    _slice_inputs(model.graph, restricted, gathers)
    return len(restricted) - len(gathers)


def _gathers_cls(node: ir.Node) -> bool:
    """Returns whether a node takes the first row, [CLS], of computed hidden states."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 1 or node.inputs[0] is None or node.inputs[0].is_graph_input():
        return False
    index = rewrite.constant_array(node.inputs[1])
    return index is not None and index.ndim == 0 and int(index) == 0


def _rowwise_inputs(node: ir.Node) -> tuple[int, ...]:
    """Returns the indices of inputs with rows; empty if the operator mixes rows or is unknown."""
    if node.op_type not in _ROWWISE:
        return ()
    shapes = [rewrite.constant_shape(value) for value in node.inputs]
    if node.op_type == "MatMul" and shapes[1] is None:
        return ()  # a product of two computed tensors, such as scores, mixes rows
    if node.op_type != "MatMul" and any(shape is not None and len(shape) > 1 for shape in shapes):
        return ()  # a constant with its own rows
    positions = _ROWWISE[node.op_type]
    return tuple(i for i, shape in enumerate(shapes) if shape is None) if positions is None else positions


def _slice_inputs(graph: ir.Graph, restricted: Mapping[ir.Node, tuple[int, ...]], gathers: Collection[ir.Node]) -> None:
    """Lets restricted nodes read only the first row of the outputs of other nodes."""
    zero, one = (rewrite.add_constant(graph, f"first_row/{i}", np.array([i], dtype=np.int64)) for i in (0, 1))
    one_row = restricted.keys() - gathers
    sliced: dict[ir.Value, ir.Value] = {}
    for node in graph:
        for i in restricted[node] if node in one_row else ():
            value = node.inputs[i]
            if value is None or value.producer() in one_row:
                continue
            if value not in sliced:
                cut = ir.node("Slice", [value, zero, one, one])
                graph.insert_before(node, cut)
                sliced[value] = cut.outputs[0]
            node.replace_input_with(i, sliced[value])


def pack_qkv(model: ir.Model) -> None:
    """Merges products of the same tensor, such as query, key and value, in place: the tensor is then read, and quantized, once.

    The last layer must already be restricted to [CLS] if possible, because packed products cannot be restricted.
    """
    groups: dict[tuple[ir.Value, bool], list[Linear]] = {}
    for layer in map(as_linear, model.graph):
        if layer is not None:
            groups.setdefault((layer.input, layer.add is None), []).append(layer)
    for layers in groups.values():
        if len(layers) > 1:
            _pack(model.graph, layers)
    common.DeduplicateHashedInitializersPass()(model)


def _pack(graph: ir.Graph, layers: Sequence[Linear]) -> None:
    """Replaces several products of a tensor by one, with one addition if these have biases."""
    x, first = layers[0].input, layers[0].weight
    weights, biases = zip(*(layer.arrays() for layer in layers), strict=True)
    tape = ir.tape.Tape()
    packed = tape.op("MatMul", [x, rewrite.add_constant(graph, f"{first.name}/packed", np.concatenate(weights, axis=1))])
    if layers[0].add is not None:
        packed = tape.op("Add", [packed, rewrite.add_constant(graph, f"{x.name}/packed_bias", np.concatenate(biases))])
    widths = rewrite.add_constant(graph, f"{x.name}/widths", np.array([len(bias) for bias in biases], dtype=np.int64))
    parts = tape.op_multi_out("Split", [packed, widths], {"axis": -1}, num_outputs=len(layers))
    nodes = [node for layer in layers for node in layer.nodes]
    outputs = [layer.nodes[-1].outputs[0] for layer in layers]
    # at the position of the first product, where the shared input exists
    ir.convenience.replace_nodes_and_values(graph, nodes[0], nodes, tape.nodes, outputs, parts)
