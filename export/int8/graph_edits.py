"""The changes of a graph for int8.

Splits compute the few channels with very large values in float, which is exact: values ten times the others (Dettmers et al. 2022,
arXiv:2208.07339) would leave the others few quantization steps.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import CONTRIB, Linear, as_linear, float_array, linear_with_bias, linears_by_input
from bertserve.export.int8.gptq import LayerParams
from bertserve.export.int8.scales import quantize_table
from bertserve.service.tasks.decoding import Floats

# Number of hidden units of a feed-forward block, and of input channels of a matrix, that are computed in float. Twice as many were slower,
# and hardly more accurate (bench/results/2026-11-21-int8-steps.md).
HIDDEN_UNITS, INPUT_CHANNELS = 16, 4

MIN_TABLE_ROWS = 1024  # smaller tables, such as for types and usually for positions, are not worth the lost precision


def feed_forward_blocks(graph: ir.Graph) -> dict[str, tuple[Linear, Linear]]:
    """Returns the two linear layers of each feed-forward block `MatMul(Gelu(MatMul(x) + bias))`, by the name of Gelu's output."""
    blocks = {}
    for node in graph:
        if node.op_type == "Gelu":
            hidden, readers = node.inputs[0], [use.node for use in node.outputs[0].uses()]
            first = None if hidden is None else linear_with_bias(hidden.producer())
            second = as_linear(readers[0]) if len(readers) == 1 else None
            if first is not None and second is not None:
                blocks[str(node.outputs[0].name)] = (first, second)
    return blocks


def split_hidden_units(graph: ir.Graph, block: tuple[Linear, Linear], peak: Floats) -> NDArray[np.int64]:
    """Moves the hidden units with the largest values to a small separate feed-forward block in float; returns the others, int64.

    A feed-forward block is a sum over its hidden units, so it can be split in two. `peak` is the largest magnitude of each unit, [units].
    """
    first, second = block
    order = np.argsort(-peak, kind="stable")
    outlying_units, other_units = np.sort(order[:HIDDEN_UNITS]), np.sort(order[HIDDEN_UNITS:])
    parts = []
    # units are columns of the first matrix and its bias, and rows of the second matrix
    for node, value, axis in ((first.matmul, first.weight, -1), (first.add, first.bias, -1), (second.matmul, second.weight, 0)):
        assert node is not None
        assert value is not None
        rest, part = (np.ascontiguousarray(np.take(float_array(value), units, axis=axis)) for units in (other_units, outlying_units))
        node.replace_input_with(node.inputs.index(value), rewrite.add_constant(graph, f"{value.name}/rest", rest))
        parts.append(rewrite.add_constant(graph, f"{value.name}/float", part))
    tape = ir.tape.Tape()
    hidden = tape.op("Gelu", [tape.op("Add", [tape.op("MatMul", [first.input, parts[0]]), parts[1]])], domain=CONTRIB)
    # after the bias, so that product and bias stay recognizable
    rewrite.add_to_output(graph, second.nodes[-1], tape, tape.op("MatMul", [hidden, parts[2]]))
    return other_units


def split_input_channels(graph: ir.Graph, layer: Linear, peak: Floats) -> None:
    """Multiplies the channels with the largest values by their rows of the matrix in float, and adds the result after the bias.

    These rows of the layer's own matrix become zero. `peak` is the largest magnitude of each channel, [channels].
    """
    x, weight = layer.input, layer.weight
    outlying_channels = np.sort(np.argsort(-peak, kind="stable")[:INPUT_CHANNELS])
    rest = float_array(weight).copy()
    part = rewrite.add_constant(graph, f"{weight.name}/outlying", np.ascontiguousarray(rest[outlying_channels]))
    rest[outlying_channels] = 0
    layer.matmul.replace_input_with(1, rewrite.add_constant(graph, f"{weight.name}/rest", rest))
    tape = ir.tape.Tape()
    channels = tape.op("Gather", [x, rewrite.add_constant(graph, f"{x.name}/outlying", outlying_channels.astype(np.int64))], {"axis": -1})
    # after the bias, so that product and bias stay recognizable
    rewrite.add_to_output(graph, layer.nodes[-1], tape, tape.op("MatMul", [channels, part]))


def fold_smoothing(graph: ir.Graph, multipliers: Mapping[str, Floats]) -> set[str]:
    """Multiplies attention outputs by channel, float32 [channels], and divides the matrix that reads them; a factor of zero has no effect.

    It multiplies the values, of which each output is a weighted sum by channel, so smoothing is free at run time. Returns the smoothed
    tensors: outputs of attention whose values come from a matrix that nothing else uses.
    """
    smoothed = set()
    for attention in graph:
        output = attention.outputs[0]
        multiplier = multipliers.get(output.name or "") if attention.op_type == "MultiHeadAttention" else None
        readers = [use.node for use in output.uses()]
        reader = as_linear(readers[0]) if len(readers) == 1 else None
        projection = None if multiplier is None or reader is None else _value_projection(attention, reader)
        if multiplier is None or reader is None or projection is None:
            continue
        layer, columns = projection
        factors = np.where(multiplier > 0, multiplier, 1).astype(np.float32)
        for node, value in ((layer.matmul, layer.weight), (layer.add, layer.bias)):
            _scale(graph, node, value, columns, factors)
        _scale(graph, reader.matmul, reader.weight, slice(None), np.reciprocal(factors)[:, None])
        smoothed.add(str(output.name))
    return smoothed


def _value_projection(attention: ir.Node, reader: Linear) -> tuple[Linear, slice] | None:
    """Returns the layer that computes an attention's values, and its columns with these values.

    None if the values are computed in another way, or have other readers.
    """
    values = attention.inputs[2]
    add = None if values is None else values.producer()
    if values is None or add is None or len(values.uses()) != 1:
        return None
    start = 0
    if add.op_type == "Split":
        widths = rewrite.constant_array(add.inputs[1])
        assert widths is not None, "`pack_qkv` splits at constants"
        start = int(widths[: values.index()].sum())
        add = None if add.inputs[0] is None else add.inputs[0].producer()
    layer = linear_with_bias(add)
    return None if layer is None else (layer, slice(start, start + len(float_array(reader.weight))))


def _scale(graph: ir.Graph, node: ir.Node | None, value: ir.Value | None, columns: slice, factors: Floats) -> None:
    """Scales columns of a constant for one of its readers."""
    assert node is not None
    assert value is not None
    scaled = float_array(value).copy()
    scaled[..., columns] *= factors
    node.replace_input_with(node.inputs.index(value), rewrite.add_constant(graph, f"{value.name}/balanced", scaled))


def emit_linears(graph: ir.Graph, params: Mapping[str, LayerParams]) -> None:
    """Replaces the linear layers that read these tensors, with the additions of their biases, by integer products, in the graph's order."""
    for tensor, layer in linears_by_input(graph).items():
        if tensor in params:
            nodes, tape = layer.nodes, ir.tape.Tape()
            product = _emit(graph, tape, layer, params[tensor])
            ir.convenience.replace_nodes_and_values(graph, nodes[-1], nodes, tape.nodes, nodes[-1].outputs, [product])


def _emit(graph: ir.Graph, tape: ir.tape.Tape, layer: Linear, quant: LayerParams) -> ir.Value:
    """Records the nodes of one layer: smoothing, if any, the input as uint8, and the product with its bias."""
    x, weight, input_params = layer.input, layer.weight, quant.input_params
    smoothed = x
    if input_params.is_smoothed:
        smoothed = tape.op("Mul", [x, rewrite.add_constant(graph, f"{x.name}/multiplier", input_params.multiplier)])
    scale = rewrite.add_constant(graph, f"{x.name}/scale", np.array(input_params.scale))
    zero_point = rewrite.add_constant(graph, f"{x.name}/zero", np.array(input_params.zero_point))
    inputs = [
        tape.op("QuantizeLinear", [smoothed, scale, zero_point]),
        rewrite.add_constant(graph, f"{weight.name}/steps", quant.weight),
        scale,
        rewrite.add_constant(graph, f"{weight.name}/scales", quant.weight_scale),
        zero_point,
        rewrite.add_constant(graph, f"{weight.name}/zeros", np.zeros_like(quant.weight[0])),
        rewrite.add_constant(graph, f"{weight.name}/bias", quant.bias),
    ]
    return tape.op("MatMulIntegerToFloat", inputs, domain=CONTRIB)


def emit_embeddings(graph: ir.Graph) -> int:
    """Replaces each gather from a large float table by gathers of int8 rows and their scales; returns the number of gathers.

    A row is stored as `round(row / scale)` with `scale = max(abs(row)) / 127`, so the error of an element is at most scale / 2.
    """
    count = 0
    for node in tuple(graph):  # a copy, without the new gathers
        axis = node.attributes.get_int("axis", 0)  # another axis would gather columns, but the scales are per row
        table = node.inputs[0] if node.op_type == "Gather" and axis == 0 else None
        shape = rewrite.constant_shape(table)
        if table is None or shape is None or len(shape) != 2 or shape[0] < MIN_TABLE_ROWS:
            continue
        array = rewrite.constant_array(table)
        if array is None or array.dtype != np.float32:
            continue
        rows, scales = quantize_table(array)
        stored_rows = rewrite.add_constant(graph, f"{table.name}/rows", rows)
        row_scales = rewrite.add_constant(graph, f"{table.name}/row_scales", scales)
        tape = ir.tape.Tape()
        quantized, scale = (tape.op("Gather", [value, node.inputs[1]]) for value in (stored_rows, row_scales))
        floats = tape.op("Mul", [tape.op("Cast", [quantized], {"to": ir.DataType.FLOAT}), scale])
        ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [floats])
        count += 1
    return count
