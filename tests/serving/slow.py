"""A tiny bundle that takes its time: each text runs alone and multiplies large matrices first. Its answers are the tiny one's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

import tiny
from service.bundle.files import MANIFEST_FILE, digest
from service.bundle.manifest import Manifest

SIDE = 1000  # 2 GFLOP: tens of milliseconds on one core


def bundle(folder: Path, name: str = "slow") -> Path:
    """Writes the bundle to `folder/name` and returns its path."""
    path = tiny.bundle(folder, name, max_length=512, batch_invariant=False)
    manifest = Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
    file = path / manifest.graphs[0].file
    onnx.save(_graph(), str(file))
    graphs = (manifest.graphs[0].model_copy(update={"sha256": digest(file)}),)
    (path / MANIFEST_FILE).write_text(manifest.model_copy(update={"graphs": graphs}).model_dump_json())
    return path


def _graph() -> onnx.ModelProto:
    """Returns the tiny graph with work added to its logits that is always zero, but that nothing can fold away."""
    made = tiny.graph()
    nodes = made.graph.node
    nodes[-1].output[0] = "quick"
    nodes.extend(
        [
            helper.make_node("ReduceMean", ["quick"], ["scalar"], keepdims=0),
            helper.make_node("Expand", ["scalar", "shape"], ["square"]),
            helper.make_node("MatMul", ["square", "square"], ["product"]),
            helper.make_node("ReduceMean", ["product"], ["worked"], keepdims=0),
            helper.make_node("Mul", ["worked", "zero"], ["nothing"]),
            helper.make_node("Add", ["quick", "nothing"], ["logits"]),
        ]
    )
    made.graph.initializer.extend(
        [numpy_helper.from_array(np.array([SIDE, SIDE]), "shape"), numpy_helper.from_array(np.array(0, dtype=np.float32), "zero")]
    )
    onnx.checker.check_model(made)
    return made
