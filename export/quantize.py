"""int8 for the CPU: weights per channel, activations at run time, and the word embeddings with a scale per row.

Stock dynamic quantization takes one scale for the whole embedding table, whose rows differ widely in size; a scale per
row costs two small gathers and answers closer to float. Matrices are quantized in blocks of 32 as MatMulNBits, with
activations scaled per block too: either all but attention's, or only those that narrow (the second of each feed-forward
block, whose inputs have the widest range). Slower than one scale a tensor, but spans and entities need the second, and labels
on CPUs without VNNI the first (docs/export.md has the measurements). The other activations get one scale per tensor and run,
so the graph is not batch-invariant.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from export.errors import GraphError

QUANTIZED_OPS = ("QAttention", "MatMulInteger", "MatMulNBits", "DynamicQuantizeLinear")
MIN_ROWS = 1024  # smaller tables, as those of positions mostly and of types always are, are not worth the lost precision
BLOCK = 32
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: compute in int8


def quantize(source: Path, target: Path, workspace: Path, *, narrowing_only: bool) -> dict[str, int]:
    """Writes the int8 graph to a new file.

    Args:
        source: The fused float32 graph.
        target: The new graph.
        workspace: A folder for an intermediate file.
        narrowing_only: Whether only matrices with more rows than columns are quantized in blocks, and the others as a whole.

    Returns:
        Quantized operator -> count.

    Raises:
        GraphError: Nothing was quantized.
    """
    part = workspace / "part-quantized.onnx"
    logging.disable(logging.WARNING)  # the libraries tell of every node, and advise preprocessing, which fusion has replaced
    try:
        model = onnx.load(str(source))
        tables = _quantize_embeddings(model.graph)
        onnx.save(_quantize_blocks(model, narrowing_only=narrowing_only), str(part))
        quantize_dynamic(
            str(part),
            str(target),
            per_channel=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Attention"],
            # shapes are unknown behind the fused operators; they all carry float32
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    finally:
        logging.disable(logging.NOTSET)
    counts = Counter(node.op_type for node in onnx.load(str(target)).graph.node)
    found = {name: counts[name] for name in QUANTIZED_OPS if counts[name]} | {"PerRowEmbedding": tables}
    if not counts["MatMulNBits"] or not tables:
        raise GraphError(f"the graph was not quantized as expected: {found}.")
    return found


def _quantize_blocks(model: onnx.ModelProto, *, narrowing_only: bool) -> onnx.ModelProto:
    """Quantizes matrices as MatMulNBits, 8 bit, a scale per 32 rows of each column."""
    weights = {weight.name: weight.dims for weight in model.graph.initializer}

    def chosen(node: NodeProto) -> bool:
        dims = weights.get(node.input[1]) if node.op_type == "MatMul" else None
        return dims is not None and len(dims) == 2 and dims[0] % BLOCK == 0 and (dims[0] > dims[1] or not narrowing_only)

    others = [node.name for node in model.graph.node if not chosen(node)]
    quantizer = MatMulNBitsQuantizer(
        model, bits=8, block_size=BLOCK, is_symmetric=True, accuracy_level=INT8_ACTIVATIONS, nodes_to_exclude=others
    )
    quantizer.process()
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


def _quantize_embeddings(graph: onnx.GraphProto) -> int:
    """Replaces each gather from a large float table by gathers of int8 rows and of their scales; returns how many.

    A row is stored as `round(row / scale)` with `scale = max(abs(row)) / 127`, so an element is off by scale / 2 at most.
    """
    tables = {table.name: table for table in graph.initializer}
    nodes: list[NodeProto] = []
    found = 0
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        values = None if table is None else numpy_helper.to_array(table)
        if table is None or values is None or values.dtype != np.float32 or values.ndim != 2 or len(values) < MIN_ROWS:
            nodes.append(node)
            continue
        scale = np.maximum(np.abs(values).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
        name = table.name
        if sum(name in other.input for other in graph.node) == 1:  # else a tied projection needs it, and is quantized by itself
            graph.initializer.remove(table)
        graph.initializer.append(numpy_helper.from_array(np.rint(values / scale).astype(np.int8), f"{name}.int8"))
        graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), f"{name}.scale"))
        indices, out = node.input[1], node.output[0]
        nodes += [
            helper.make_node("Gather", [f"{name}.int8", indices], [f"{out}.int8"]),
            helper.make_node("Gather", [f"{name}.scale", indices], [f"{out}.scale"]),
            helper.make_node("Cast", [f"{out}.int8"], [f"{out}.float"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", [f"{out}.float", f"{out}.scale"], [out]),
        ]
        found += 1
    del graph.node[:]
    graph.node.extend(nodes)
    return found
