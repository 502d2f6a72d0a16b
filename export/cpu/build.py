"""The graphs of a checkpoint for the CPU, from the traced one: fused in float32, and int8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.calibration import Split, Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.cpu import cls_only_last_layer, ort_fusion, pack_qkv, unfuse
from bertserve.export.graph import onnx_files
from bertserve.export.inference import Feed
from bertserve.export.int8 import quantize
from bertserve.export.progress import Progress, stage
from bertserve.service.bundle.graph_spec import Precision
from bertserve.service.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Int8Options:
    """How int8 is made.

    Attributes:
        texts: What it is chosen on, and what its gate runs.
        max_error: How far it may move the outputs on the texts of the gate, as a share of their standard deviation.
        quick: Whether it is left out to measure which matrices matter most.
    """

    texts: Split
    max_error: float
    quick: bool = False


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


def optimize(raw: Path, checkpoint: Checkpoint, traced: str) -> OptimizedGraph:
    """Makes the float32 graph, beside the traced one.

    Args:
        raw: The traced graph.
        checkpoint: What was traced.
        traced: How it was traced, for the reader.
    """
    fused, unfused, cls_only, packed = (raw.with_name(f"{name}.onnx") for name in ("fused", "unfused", "cls_only", "packed"))
    fusions = ort_fusion.fuse(raw, fused, checkpoint)
    unfuse.unfuse(fused, unfused)
    onnx_files.remove(fused)  # each is as large as the model
    restricted = cls_only_last_layer.restrict_to_cls(unfused, cls_only)
    onnx_files.remove(unfused)
    pack_qkv.pack_qkv(cls_only, packed)
    onnx_files.remove(cls_only)
    form = f"{traced}, {ort_fusion.attention_form(fusions, checkpoint)}" + (", last layer for the first token only" if restricted else "")
    return OptimizedGraph(packed, form, fusions)


def build_graphs(
    optimized: OptimizedGraph,
    precisions: Sequence[Precision],
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    int8: Int8Options,
    progress: Progress,
) -> Iterator[Artifact]:
    """Makes the graphs, each when it is asked for; float32 first, and always: int8 is made of it.

    Args:
        optimized: The float32 graph.
        precisions: What to make.
        folder: Where the files go, `model.cpu.<precision>.onnx`.
        checkpoint: What was traced.
        tokenizer: The service's tokenizer, for the texts.
        int8: How int8 is made.
        progress: Called with a line when it is.

    Raises:
        GraphError: There is nothing to quantize, or the outputs do not bear it; the float32 graph came before.
    """
    path = folder / "model.cpu.fp32.onnx"
    onnx_files.copy(optimized.path, path)
    yield Artifact(path, "cpu", "fp32", optimized.form, checkpoint.inputs, fusions=optimized.fusions)
    if "int8" in precisions:
        yield _build_int8(optimized, folder / "model.cpu.int8.onnx", checkpoint, tokenizer, int8, progress)


def _build_int8(
    optimized: OptimizedGraph, path: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, int8: Int8Options, progress: Progress
) -> Artifact:
    def feeds(texts: Texts) -> list[Feed]:
        return calibration.make_feeds(texts, checkpoint, tokenizer)

    texts = int8.texts
    with stage(progress, "quantize", f"int8, calibrated on {len(texts.calibration)} texts, gate on {len(texts.gate)} others"):
        made = quantize.quantize(
            optimized.path,
            path,
            optimized.path.parent,
            feeds(texts.calibration),
            feeds(texts.gate),
            max_error=int8.max_error,
            quick=int8.quick,
        )
    form = f"{optimized.form}, int8 by --quick" if int8.quick else optimized.form
    return Artifact(
        path,
        "cpu",
        "int8",
        form,
        checkpoint.inputs,
        fusions=optimized.fusions,
        quantized=made.counts,
        error=made.error,
        max_error=int8.max_error,
    )
