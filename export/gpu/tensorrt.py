"""The graph for TensorRT: standard operators only, in float32. TensorRT fuses, and converts to half precision, on its own."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from bertserve.export.errors import GraphError
from bertserve.export.graph import onnx_files

FORM = "standard operators, for TensorRT to fuse"


def write_standard(source: Path, target: Path) -> None:
    """Writes the traced graph to a new file, after a look at its operators.

    Raises:
        GraphError: It has operators that are not ONNX's own: each would cut the engine in two.
    """
    model = ir.load(source)
    foreign = sorted({f"{node.domain}.{node.op_type}" for node in model.graph if node.domain})
    if foreign:
        raise GraphError(f"the graph has operators that TensorRT does not know: {', '.join(foreign)}.")
    onnx_files.save(model, target)
