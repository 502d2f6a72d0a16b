"""The graphs of a checkpoint for the CPU, from the traced one: fused in float32, and int8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from export import calibration, trace
from export.artifact import Artifact
from export.checkpoint.checkpoint import Checkpoint
from export.cpu import cls_only_last_layer, ort_fusion, pack_qkv, unfuse
from export.graph import onnx_files
from export.int8 import quantize
from export.progress import Progress, stage
from service.bundle.graph_spec import Precision
from service.text.tokenizer import Tokenizer

TRACED = f"torchscript opset {trace.OPSET}"
FORM = f"{TRACED}, packed MultiHeadAttention with key padding"


@dataclass(frozen=True)
class OptimizedGraph:
    """The float32 graph that the others are made of.

    Attributes:
        path: The file.
        form: Of what operators it is made, for the reader.
        fusions: Fused operator -> count.
    """

    path: Path
    form: str
    fusions: dict[str, int]


def optimize(raw: Path, checkpoint: Checkpoint) -> OptimizedGraph:
    """Makes the float32 graph, beside the traced one.

    Args:
        raw: The traced graph.
        checkpoint: What was traced.
    """
    fused, unfused, cls_only, packed = (raw.with_name(f"{name}.onnx") for name in ("fused", "unfused", "cls_only", "packed"))
    fusions = ort_fusion.fuse(raw, fused, checkpoint)
    unfuse.unfuse(fused, unfused)
    onnx_files.remove(fused)  # each is as large as the model
    restricted = cls_only_last_layer.restrict_to_cls(unfused, cls_only)
    onnx_files.remove(unfused)
    pack_qkv.pack_qkv(cls_only, packed)
    onnx_files.remove(cls_only)
    form = f"{TRACED}, {ort_fusion.attention_form(fusions, checkpoint)}" + (", last layer for the first token only" if restricted else "")
    return OptimizedGraph(packed, form, fusions)


def build_graphs(
    optimized: OptimizedGraph,
    precisions: Sequence[Precision],
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    max_error: float,
    progress: Progress,
) -> Iterator[Artifact]:
    """Makes the graphs, each when it is asked for; float32 first, and always: int8 is made of it.

    Args:
        optimized: The float32 graph.
        precisions: What to make.
        folder: Where the files go, `model.cpu.<precision>.onnx`.
        checkpoint: What was traced.
        tokenizer: The service's tokenizer, for the texts.
        texts: Calibration texts.
        max_error: How far int8 may move the outputs on these texts, as a share of their standard deviation.
        progress: Called with a line when int8 is made.

    Raises:
        GraphError: The outputs do not bear int8.
    """
    path = folder / "model.cpu.fp32.onnx"
    onnx_files.copy(optimized.path, path)
    yield Artifact(path, "cpu", "fp32", optimized.form, checkpoint.inputs, fusions=optimized.fusions)
    if "int8" in precisions:
        path = folder / "model.cpu.int8.onnx"
        feeds = calibration.make_feeds(texts, checkpoint, tokenizer)
        with stage(progress, "quantize", f"int8, calibrated on {len(feeds)} texts"):
            int8 = quantize.quantize(optimized.path, path, optimized.path.parent, feeds, max_error=max_error)
        yield Artifact(
            path, "cpu", "int8", optimized.form, checkpoint.inputs, fusions=optimized.fusions, quantized=int8.counts, error=int8.error
        )
