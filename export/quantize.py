"""int8 for the CPU: weights per channel, activations at run time, and the word embeddings with a scale per row.

Stock dynamic quantization takes one scale for the whole embedding table, whose rows differ widely in size; a scale per
row costs two small gathers and answers closer to float (docs/export.md has the measurements). Activations get one scale
per tensor and run, so the graph is not batch-invariant.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from export.errors import GraphError

QUANTIZED_OPS = ("QAttention", "MatMulInteger", "DynamicQuantizeLinear")
MIN_ROWS = 1024  # smaller tables (positions, types) are not worth the lost precision


def quantize(source: Path, target: Path, workspace: Path) -> dict[str, int]:
    """Writes the int8 graph to a new file.

    Args:
        source: The fused float32 graph.
        target: The new graph.
        workspace: A folder for an intermediate file.

    Returns:
        Quantized operator -> count.

    Raises:
        GraphError: Nothing was quantized.
    """
    embedded = workspace / "per-row-embeddings.onnx"
    model = onnx.load(str(source))
    tables = _quantize_embeddings(model.graph)
    onnx.save(model, str(embedded))
    logging.disable(logging.WARNING)  # the library advises preprocessing, which the fusions have replaced
    try:
        quantize_dynamic(
            str(embedded),
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
    if not counts["MatMulInteger"] or not tables:
        raise GraphError(f"the graph was not quantized as expected: {found}.")
    return found


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
