"""The graphs of a checkpoint for a GPU's providers, from the traced one; each with the shapes that it is to be run in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.calibration import Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.gpu import cuda, fp16, shape_plan, tensorrt
from bertserve.export.progress import Progress, stage
from bertserve.service.bundle.graph_spec import Precision, Provider
from bertserve.service.text.tokenizer import Tokenizer

PADDED_TEXTS, PADDING = 8, 3  # texts that are measured with padding too, and tokens of it


@dataclass(frozen=True)
class TracedGraph:
    """The graph that the others are made of.

    Attributes:
        path: The file.
        form: How it was traced, for the reader.
    """

    path: Path
    form: str


def build_graphs(
    provider: Provider,
    precisions: Sequence[Precision],
    traced: TracedGraph,
    folder: Path,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    texts: Texts,
    progress: Progress,
) -> Iterator[Artifact]:
    """Makes the graphs of a provider, each when it is asked for; float32 first, and always: the others are made of it.

    Args:
        provider: `cuda` or `tensorrt`.
        precisions: What to make.
        traced: The traced graph.
        folder: Where the files go, `model.<provider>.<precision>.onnx`.
        checkpoint: What was traced.
        tokenizer: The service's tokenizer, for the texts.
        texts: Calibration texts, on which half precision is measured.
        progress: Called with a line when a graph is made.

    Raises:
        GraphError: The graph has operators that the provider does not know.
    """
    has_masks = any(spec.fill == "mask_index" for spec in checkpoint.inputs)
    plan = shape_plan.plan(checkpoint.max_length, masks=has_masks, rectangle=provider == "tensorrt")
    fp32 = folder / f"model.{provider}.fp32.onnx"
    if provider == "tensorrt":
        with stage(progress, "optimize", provider):
            tensorrt.write_standard(traced.path, fp32)
        form = f"{traced.form}, {tensorrt.FORM}" + ("; fp16 is TensorRT's own" if "fp16" in precisions else "")
        yield from (
            Artifact(fp32, provider, precision, form, checkpoint.inputs, plan) for precision in dict.fromkeys(("fp32", *precisions))
        )
        return
    with stage(progress, "optimize", provider):
        fused = cuda.fuse(traced.path, fp32, checkpoint)
    form = f"{traced.form}, {fused.form}"
    yield Artifact(fp32, provider, "fp32", form, fused.inputs, plan, fused.fusions)
    if "fp16" in precisions:
        path = folder / f"model.{provider}.fp16.onnx"
        with stage(progress, "optimize", f"{provider}, fp16"):
            feeds = calibration.make_feeds(texts, checkpoint, tokenizer, fused.inputs)
            ids = next(spec.name for spec in fused.inputs if spec.fill == "token_ids")
            short = [feed for feed in feeds if feed[ids].shape[1] + PADDING <= checkpoint.max_length]
            padded = [calibration.pad(feed, fused.inputs, pad_id=checkpoint.pad_id, tokens=PADDING) for feed in short[:PADDED_TEXTS]]
            converted = fp16.convert_to_fp16(fp32, path, traced.path.parent, feeds, padded)
        yield Artifact(path, provider, "fp16", form, fused.inputs, plan, fused.fusions, converted.counts, converted.error)
