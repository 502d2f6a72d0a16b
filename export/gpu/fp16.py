"""Half precision for a GPU: what overflows stays in float32, by measurement on the calibration texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel

from bertserve.export import inference
from bertserve.export.graph import onnx_files
from bertserve.export.inference import Feed
from bertserve.export.progress import track

HEADROOM = 4  # times that another text's values may be larger than all that were seen
LIMIT = float(np.finfo(np.float16).max) / HEADROOM
PROBE_TEXTS = 96


@dataclass(frozen=True)
class Fp16Graph:
    """What was converted.

    Attributes:
        counts: Nodes that compute in half precision (`Float16`) and those kept in float32 (`KeptFloat`).
        error: Root mean square difference of the outputs from the float graph's on calibration texts, over their standard deviation.
    """

    counts: dict[str, int]
    error: float


def convert_to_fp16(source: Path, target: Path, workspace: Path, feeds: Sequence[Feed], padded: Sequence[Feed]) -> Fp16Graph:
    """Writes the half-precision graph to a new file; its inputs and outputs stay as they are.

    Args:
        source: The float32 graph.
        target: The new graph.
        workspace: A folder for intermediate files.
        feeds: The calibration texts as the graph's inputs.
        padded: Some of them with padding, where the values of a mask that is added to the scores are large.
    """
    probe = [*feeds[:: max(1, len(feeds) // PROBE_TEXTS)], *padded]
    peaks = _peaks(source, workspace / "all_outputs.onnx", probe)
    model = onnx.load(str(source))
    for i, node in enumerate(model.graph.node):  # the converter knows nodes by their names
        node.name = f"{i}/{node.op_type}"
    kept = overflowing(model, peaks)
    computing = sum(any(name in peaks for name in node.output) for node in model.graph.node)
    converted = OnnxModel(model)
    converted.convert_float_to_float16(keep_io_types=True, node_block_list=sorted(kept))
    onnx_files.save_proto(converted.model, target)
    error = inference.relative_error(inference.outputs(source, probe), inference.outputs(target, probe))
    return Fp16Graph({"Float16": computing - len(kept)} | ({"KeptFloat": len(kept)} if kept else {}), error)


def overflowing(model: onnx.ModelProto, peaks: dict[str, float]) -> set[str]:
    """Returns the names of the nodes that must stay in float32.

    A tensor beyond the limit must not pass through half precision, so both its writer and its readers are kept. A fused sum
    (SkipLayerNormalization) overflows inside, so the magnitudes of what it adds up count together.

    Args:
        model: The float32 graph, its nodes named.
        peaks: Float tensor -> its largest magnitude; constants are looked up in the model.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    # one value at a time: together they are the whole model once more
    sizes = {name: float(np.abs(numpy_helper.to_array(tensor)).max()) for name, tensor in constants.items() if _is_float(tensor)} | peaks
    kept = set()
    for node in model.graph.node:
        floats = [sizes[name] for name in (*node.input, *node.output) if name in sizes]
        added = [sizes[name] for name in (*node.input[:2], *node.input[4:5]) if name in sizes]
        inside = sum(added) if node.op_type == "SkipLayerNormalization" else 0.0
        # not finite counts as beyond: the least of all floats, as masks have it, times anything is
        if node.op_type != "Constant" and any(not size <= LIMIT for size in (*floats, inside)):
            kept.add(node.name)
    return kept


def _is_float(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.FLOAT and 0 not in tensor.dims


def _peaks(source: Path, path: Path, feeds: Sequence[Feed]) -> dict[str, float]:
    """Returns the largest magnitude of each float tensor that a node of a graph writes; `path` is for a graph that gives them all out."""
    model = ir.load(source)
    # without a type: ONNX Runtime knows it
    model.graph.outputs.extend(value for node in model.graph for value in node.outputs if value.name and not value.is_graph_output())
    onnx_files.save(model, path)
    session = inference.open_session(path)
    names = [output.name for output in session.get_outputs() if output.type == "tensor(float)"]
    peaks = dict.fromkeys(names, 0.0)
    for feed in track(feeds, "find what overflows", unit="texts"):
        for name, value in zip(names, session.run(names, feed), strict=True):
            if value.size:
                peaks[name] = float(np.maximum(peaks[name], np.abs(value).max()))
    return peaks
