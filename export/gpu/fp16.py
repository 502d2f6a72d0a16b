"""Converts a graph to half precision, except the nodes whose values could overflow."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel

from bertserve.export import inference
from bertserve.export.graph import onnx_files
from bertserve.export.inference import Feed
from bertserve.export.progress import track

MAX_FP16_MAGNITUDE = float(np.finfo(np.float16).max) / 4  # other texts can have values four times as large as the measured ones


def convert_to_fp16(
    source: Path, target: Path, scratch: Path, feeds: Sequence[Feed], padded: Sequence[Feed]
) -> tuple[dict[str, int], float]:
    """Writes the half-precision graph to a new file; its outputs are float16, because half as many bytes leave the GPU.

    `feeds` are the calibration texts, and `padded` some of them with padding, for the large values of masks that are added to scores.

    Returns:
        The nodes in half precision (`Float16`) and the nodes that stay in float32 (`KeptFloat`) -> count; and the root mean square
        difference of the outputs from the float graph's on the texts, relative to their standard deviation.
    """
    probe = [*feeds[:: max(1, len(feeds) // 96)], *padded]
    peaks = _peaks(source, scratch / "all_outputs.onnx", probe)
    model = onnx.load(str(source))
    for i, node in enumerate(model.graph.node):  # the converter identifies nodes by name
        node.name = f"{i}/{node.op_type}"
    float_nodes = find_overflowing_nodes(model, peaks)
    node_count = sum(any(name in peaks for name in node.output) for node in model.graph.node)
    converter = OnnxModel(model)
    converter.convert_float_to_float16(keep_io_types=False, node_block_list=sorted(float_nodes))
    onnx_files.save_proto(converter.model, target)
    error = inference.rms_error(inference.compute_outputs(source, probe), inference.compute_outputs(target, probe))
    return {"Float16": node_count - len(float_nodes)} | ({"KeptFloat": len(float_nodes)} if float_nodes else {}), error


def find_overflowing_nodes(model: onnx.ModelProto, peaks: dict[str, float]) -> set[str]:
    """Returns the names of the nodes that must stay in float32, by the largest magnitude of each tensor that is not a constant.

    A tensor beyond the limit must not be in half precision, so the nodes that write and read it stay in float32. A fused sum
    (SkipLayerNormalization) can overflow inside, so its check uses the sum of its inputs' magnitudes.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    # converted one by one, because all values together would need the memory of the whole model again
    floats = {name: tensor for name, tensor in constants.items() if tensor.data_type == TensorProto.FLOAT and 0 not in tensor.dims}
    sizes = {name: float(np.abs(numpy_helper.to_array(tensor)).max()) for name, tensor in floats.items()} | peaks
    float_nodes = set()
    for node in model.graph.node:
        values = [sizes[name] for name in (*node.input, *node.output) if name in sizes]
        summands = [sizes[name] for name in (*node.input[:2], *node.input[4:5]) if name in sizes]
        inner_sum = sum(summands) if node.op_type == "SkipLayerNormalization" else 0.0
        # NaN and infinity also count as beyond the limit; products of a mask's minimum float overflow
        if node.op_type != "Constant" and any(not size <= MAX_FP16_MAGNITUDE for size in (*values, inner_sum)):
            float_nodes.add(node.name)
    return float_nodes


def _peaks(source: Path, path: Path, feeds: Sequence[Feed]) -> dict[str, float]:
    """Returns the largest magnitude of each float tensor that a node writes; it writes a graph with all of them as outputs to `path`."""
    model = ir.load(source)
    # ONNX Runtime infers the missing types
    model.graph.outputs.extend(value for node in model.graph for value in node.outputs if value.name and not value.is_graph_output())
    onnx_files.save(model, path)
    session = inference.open_cpu_session(path)
    names = [output.name for output in session.get_outputs() if output.type == "tensor(float)"]
    peaks = dict.fromkeys(names, 0.0)
    for feed in track(feeds, "find what overflows", unit="texts"):
        for name, value in zip(names, session.run(names, feed), strict=True):
            if value.size:
                peaks[name] = float(np.maximum(peaks[name], np.abs(value).max()))
    return peaks
