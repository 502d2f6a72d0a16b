"""Converts the graph of an exported program (torch.export) to the form of a traced graph, which later passes support. It is exact.

ONNX Runtime's optimizer looks for patterns that such a graph lacks: sizes as elements of a whole shape, filled shapes, and a bias in every
LayerNormalization. Source positions and unused inputs are removed.
"""

import sys

import numpy as np
import onnx_ir as ir
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
    rules.squeeze_reshape_1d_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_static_scatter_nd_rule,
)


def normalize(model: ir.Model) -> None:
    """Changes a model with symbolic shapes in place, to the same function of the remaining inputs."""
    common.ClearMetadataAndDocStringPass()(model)  # it includes paths of this machine
    _simplify(model)
    _read_sizes_from_first_input(model.graph)
    _replace_expand_by_fill(model.graph)
    _add_missing_norm_biases(model.graph)
    common.RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = [value for value in model.graph.inputs if value.uses() or value.is_graph_output()]


def _simplify(model: ir.Model) -> None:
    """Applies onnxscript's optimizations, restricted to exact rules."""
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


def _read_sizes_from_first_input(graph: ir.Graph) -> None:
    """Reads rows and length from the first input's shape, so that an input that is only read for its shape can be removed."""
    first_input = graph.inputs[0]
    sizes = [
        node
        for node in graph
        if node.op_type == "Shape"
        and node.inputs[0] is not None
        and node.inputs[0].is_graph_input()
        and node.inputs[0].shape == first_input.shape
    ]
    if not sizes:
        return
    shape = ir.node("Shape", [first_input])
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
            node.replace_input_with(0, first_input)


def _replace_expand_by_fill(graph: ir.Graph) -> None:
    """Fills a shape with a number instead of expanding the number to the shape, for example for token types that a model adds itself."""
    for node in graph:
        if node.op_type == "Expand" and (number := rewrite.constant_array(node.inputs[0])) is not None and number.ndim == 0:
            tape = ir.tape.Tape()
            filled = tape.op("ConstantOfShape", [node.inputs[1]], {"value": ir.Tensor(number.reshape(1))})
            ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [filled])


def _add_missing_norm_biases(graph: ir.Graph) -> None:
    """Gives each norm without a bias a bias of zeros, because ONNX Runtime's optimizer always reads it."""
    for node in graph:
        if node.op_type == "LayerNormalization" and (len(node.inputs) == 2 or node.inputs[2] is None):
            shape = rewrite.constant_shape(node.inputs[1])
            if shape is not None:
                node.resize_inputs(3)
                zeros = np.zeros(tuple(shape), dtype=np.float32)
                node.replace_input_with(2, rewrite.add_constant(graph, f"no_shift/{'_'.join(map(str, shape))}", zeros))
