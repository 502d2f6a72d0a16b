"""Makes the graphs of a checkpoint as an export does, float32 and int8 by `--quick`, without its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertserve.export import trace
from bertserve.export.analyze.timing import BuiltGraph
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.cpu import build as cpu
from bertserve.export.graph import onnx_files
from bertserve.export.inference import Feed
from bertserve.export.int8 import quantize
from bertserve.service.bundle.graph_spec import Evidence, GraphSpec, Precision

TEXTS, TOKENS = 16, 16  # for int8: scales of random weights need be no good, and few texts are soon seen


def build_fp32(checkpoint: Checkpoint, folder: Path) -> BuiltGraph:
    """Makes the float32 graph in a folder.

    Raises:
        GraphError: The model cannot be traced.
    """
    raw = folder / "raw.onnx"
    traced = trace.trace(checkpoint, raw)
    optimized = cpu.optimize(raw, replace(checkpoint, inputs=traced.inputs), traced.form)
    onnx_files.remove(raw)
    return _describe(optimized.path, replace(checkpoint, inputs=traced.inputs), "fp32", optimized.form)


def build_int8(fp32: BuiltGraph, checkpoint: Checkpoint, folder: Path) -> BuiltGraph:
    """Makes the int8 graph of a float32 one in the same folder, whatever its error.

    Raises:
        GraphError: There is no matrix to quantize.
    """
    path = folder / "int8.onnx"
    feeds = _random_feeds(fp32.spec, checkpoint)
    quantize.quantize(fp32.path, path, folder, feeds, feeds, max_error=inf, quick=True)
    return _describe(path, replace(checkpoint, inputs=fp32.spec.inputs), "int8", f"{fp32.spec.form}, int8 by --quick")


def _random_feeds(graph: GraphSpec, checkpoint: Checkpoint) -> Sequence[Feed]:
    """Returns texts of random tokens as the graph's inputs."""
    rng = np.random.default_rng(0)
    embeddings: Any = checkpoint.model.get_input_embeddings()
    rows: int = embeddings.weight.shape[0]
    shape = (1, min(TOKENS, checkpoint.max_length))
    feeds: list[Feed] = []
    for _ in range(TEXTS):
        values: dict[str, NDArray[Any]] = {
            "token_ids": rng.integers(0, rows, shape),
            "attention_mask": np.ones(shape),
            "type_ids": np.zeros(shape),
        }
        feeds.append({spec.name: values[spec.fill].astype(spec.dtype) for spec in graph.inputs})
    return feeds


def _describe(path: Path, checkpoint: Checkpoint, precision: Precision, form: str) -> BuiltGraph:
    unknown = Evidence(samples=0, worst_abs_error=0.0, label_agreement=None, worst_row_error=0.0, nodes=0, fusions={}, quantized={})
    spec = GraphSpec(
        file=path.name,
        sha256="",
        provider="cpu",
        precision=precision,
        form=form,
        default=True,
        batch_invariant=False,
        inputs=checkpoint.inputs,
        outputs=checkpoint.outputs,
        evidence=unknown,
    )
    return BuiltGraph(path, spec, checkpoint.pad_id, sum(file.stat().st_size for file in onnx_files.files(path)))
