"""Converts the graph of an exported program (torch.export) to the form of a traced graph, which later passes support. It is exact.

The graph is simplified first. It lacks patterns that ONNX Runtime's optimizer looks for: a mask in a known form, sizes as elements of
a whole shape, shapes that are filled with a number, a shift in every norm. It also has source positions of operators, and inputs
that are not read, which are removed.

The values that are added to attention scores for padding get BERT's old form, which optimizers support. Each version of each
exporter computes them from the mask in another way: by comparing, gathering or expanding. They are recognized by their values
instead of their operators: values that depend only on the mask are computed for a few masks. They are key padding if they are 0 for each
key that is kept, and the same low number for each other key, for every query.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common as rules

from bertserve.export.graph import rewrite

# onnxscript's own rules, except the rules that remove an addition of 0 or a product with 1, which take a norm's epsilon of 1e-12 for 0.
_RULES = (
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.reshape_reshape_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_static_scatter_nd_rule,
)

LOWEST = float(np.finfo(np.float32).min)
MAX_BIAS = -1e3  # after a softmax, a score that is lower by this much becomes 0
_SHAPES = ((1, 2), (2, 7), (3, 5))  # rows and lengths of the masks to try, in addition to one of the maximum length
_UNKNOWN = 9  # a token id; values that depend on other inputs than by their shapes are not tried


def normalize(model: ir.Model, mask: str | None, length: int) -> None:
    """Changes a model with symbolic shapes in place, to the same function of the remaining inputs.

    `mask` is the name of the attention mask, if any, and `length` the maximum length of a text in tokens.
    """
    common.ClearMetadataAndDocStringPass()(model)  # it includes paths of this machine
    _simplify(model)
    _read_sizes_of_first(model.graph)
    _fill_shapes(model.graph)
    _shift_norms(model.graph)
    if mask is not None:
        use_key_padding(model, mask, length)
    common.RemoveUnusedNodesPass()(model)
    graph = model.graph
    inputs = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    graph.inputs[:] = inputs


def _simplify(model: ir.Model) -> None:
    """Applies the exporter's own optimizations, with only the exact rules."""
    common.InlinePass()(model)
    for _ in range(2):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        # also large transposed tables, because a product with a computed matrix would not be quantized
        optimizer.fold_constants(
            model, onnx_shape_inference=False, should_fold=lambda node: node.op_type == "Transpose", output_size_limit=sys.maxsize
        )
        rewriter.rewrite(model, _RULES)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.NameFixPass()(model)


def _read_sizes_of_first(graph: ir.Graph) -> None:
    """Reads rows and length from the first input's shape, so that an input that is only read for its shape can be removed."""
    first = graph.inputs[0]
    sizes = [
        node
        for node in graph
        if node.op_type == "Shape"
        and node.inputs[0] is not None
        and node.inputs[0].is_graph_input()
        and node.inputs[0].shape == first.shape
    ]
    if not sizes:
        return
    shape = ir.node("Shape", [first])
    graph.insert_before(graph[0], shape)
    zero = rewrite.add_constant(graph, "sizes/axis_0", np.array([0], dtype=np.int64))
    for node in sizes:
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 2)
        if end - start == 1:
            tape = ir.tape.Tape()
            index = rewrite.add_constant(graph, f"sizes/{start}", np.array(start, dtype=np.int64))
            size = tape.op("Unsqueeze", [tape.op("Gather", [shape.outputs[0], index], {"axis": 0}), zero])
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [size])
        else:
            node.replace_input_with(0, first)


def _fill_shapes(graph: ir.Graph) -> None:
    """Fills a shape with a number instead of expanding the number to the shape, for example for token types that a model adds itself."""
    for node in graph:
        number = rewrite.constant(node.inputs[0]) if node.op_type == "Expand" and rewrite.constant_shape(node.inputs[0]) == () else None
        if number is not None:
            tape = ir.tape.Tape()
            filled = tape.op("ConstantOfShape", [node.inputs[1]], {"value": ir.Tensor(number.reshape(1))})
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [filled])


def _shift_norms(graph: ir.Graph) -> None:
    """Gives each norm without a shift a shift of zeros, because ONNX Runtime's optimizer always reads it."""
    for node in graph:
        if node.op_type == "LayerNormalization" and (len(node.inputs) == 2 or node.inputs[2] is None):
            shape = rewrite.constant_shape(node.inputs[1])
            if shape is not None:
                node.resize_inputs(3)
                zeros = np.zeros(tuple(shape), dtype=np.float32)
                node.replace_input_with(2, rewrite.add_constant(graph, f"no_shift/{'_'.join(map(str, shape))}", zeros))


def use_key_padding(model: ir.Model, mask: str, length: int) -> None:
    """Replaces the values that are added to the scores for padding by `(1 - mask) * lowest`, [rows, 1, 1, length].

    A model with another form of masking stays unchanged.

    Args:
        model: The model with constants as initializers; it is changed in place. Unused nodes stay.
        mask: Name of the attention mask, an input of [rows, length] with 1 for tokens and 0 for padding.
        length: Maximum length of a text in tokens. A query's attention window may cover all shorter texts.
    """
    graph = model.graph
    value = next((value for value in graph.inputs if value.name == mask), None)
    candidates = [] if value is None else _biases(graph, value)
    if value is None or not candidates:
        return
    for old, lowest in zip(candidates, _lowest(model, value, candidates, length), strict=True):
        if lowest is not None:
            new, nodes = _classic_form(graph, value, lowest)
            graph.insert_before(graph[0], nodes)
            old.replace_all_uses_with(new)


def _biases(graph: ir.Graph, mask: ir.Value) -> list[ir.Value]:
    """Returns the values that depend only on the mask and on sizes, and are added to values that depend on more."""
    determined, of_mask = {mask}, {mask}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None and value.const_value is None]
        sizes = node.op_type == "Shape" and inputs[0].is_graph_input() if inputs else False
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            continue
        if sizes or (determined.issuperset(inputs) and node.outputs):
            determined.update(node.outputs)
            if not sizes and of_mask.intersection(inputs):
                of_mask.update(node.outputs)
    return [
        value
        for node in graph
        for value in node.outputs
        if value in of_mask
        and value.uses()
        and not value.is_graph_output()
        and all(use.node.op_type == "Add" and use.node.outputs[0] not in determined for use in value.uses())
    ]


def _lowest(model: ir.Model, mask: ir.Value, candidates: Sequence[ir.Value], longest: int) -> list[float | None]:
    """Returns the number that each candidate adds to the score of a padding key, or None if it is not key padding."""
    graph = ir.convenience.extract(model.graph, model.graph.inputs, candidates)
    for output in graph.outputs:
        output.type = output.shape = None  # ONNX Runtime infers them
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    results: list[list[float | None]] = [[] for _ in candidates]
    for rows, length in (*_SHAPES, (1, longest)):
        mask_values = random.integers(0, 2, (rows, length))
        mask_values[:, random.integers(0, length)] = 1  # each row has a token, because the result for a row without tokens has no meaning
        mask_values[0, :2] = (1, 0)
        feed = {value.name: np.full((rows, length)[: len(value.shape or ())], _UNKNOWN) for value in graph.inputs}
        for values, bias in zip(results, session.run(None, feed | {mask.name: mask_values}), strict=True):
            values.append(_key_padding(bias, mask_values))
    return [values[0] if len(set(values)) == 1 else None for values in results]


def _key_padding(bias: NDArray[np.generic], mask: NDArray[np.int64]) -> float | None:
    """Returns the low number for padding in a bias, [rows, 1, queries or 1, length], or None if it is not key padding."""
    rows, length = mask.shape
    if bias.dtype != np.float32 or bias.ndim != 4 or bias.shape[:2] != (rows, 1) or bias.shape[3] != length:
        return None
    lowest = np.float32(bias.min())
    same = np.array_equal(bias, np.broadcast_to(np.where(mask[:, None, None], np.float32(0), lowest), bias.shape))
    # the lowest float has the same effect as infinity, but times 0 it is 0
    return max(float(lowest), LOWEST) if same and lowest <= MAX_BIAS else None


def _classic_form(graph: ir.Graph, mask: ir.Value, lowest: float) -> tuple[ir.Value, Sequence[ir.Node]]:
    """Returns the values to add to the scores, [rows, 1, 1, length], and the nodes that compute them."""
    tape = ir.tape.Tape()

    def constant(name: str, value: Any, dtype: Any) -> ir.Value:
        return rewrite.add_constant(graph, f"key_padding/{name}", np.array(value, dtype=dtype))

    axes = [constant(f"axis_{axis}", [axis], np.int64) for axis in (1, 2)]
    unsqueezed = tape.op("Unsqueeze", [tape.op("Unsqueeze", [mask, axes[0]]), axes[1]])
    # expands nothing, but ONNX Runtime's optimizer looks for this form
    expanded = tape.op("Expand", [unsqueezed, constant("shape", [1, 1, 1, 1], np.int64)])
    tokens = tape.op("Cast", [expanded], {"to": ir.DataType.FLOAT})
    padding = tape.op("Sub", [constant("one", 1, np.float32), tokens])
    is_padding = tape.op("Cast", [padding], {"to": ir.DataType.BOOL})
    return tape.op("Where", [is_padding, constant("lowest", lowest, np.float32), padding]), tape.nodes
