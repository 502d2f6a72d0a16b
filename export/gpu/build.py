"""The graphs of a checkpoint for a GPU's providers, from the traced one; each with the shapes that it is to be run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.calibration import Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import GraphError
from bertserve.export.gpu import cuda, fp16
from bertserve.export.graph import onnx_files
from bertserve.export.progress import Progress, stage
from bertserve.service.bundle.graph_spec import Precision, ShapeBucket, ShapePlan
from bertserve.service.providers import PROVIDERS, Provider
from bertserve.service.text.tokenizer import Tokenizer

PADDED_TEXTS, PADDING = 8, 3  # texts that are measured with padding too, and tokens of it
MAX_TOKENS = 16384  # of a batch: enough to fill the largest GPUs (8 to 16 thousand tokens a launch)
_LEAST_ROWS = 8  # of the longest texts, in a plan that is a rectangle
_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


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
        provider: One of `BUILDERS`.
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
    plan = plan_shapes(checkpoint.max_length, masks=has_masks, rectangle=PROVIDERS[provider].reserves_largest)
    yield from BUILDERS[provider](_Order(precisions, traced, folder, checkpoint, tokenizer, texts, progress, plan))


@dataclass(frozen=True)
class _Order:
    """The arguments of `build_graphs`, and the shape plan."""

    precisions: Sequence[Precision]
    traced: TracedGraph
    folder: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    texts: Texts
    progress: Progress
    plan: ShapePlan


def _build_for_cuda(order: _Order) -> Iterator[Artifact]:
    checkpoint, traced = order.checkpoint, order.traced
    fp32, fp16_path = (order.folder / f"model.cuda.{precision}.onnx" for precision in ("fp32", "fp16"))
    with stage(order.progress, "optimize", "cuda"):
        fused = cuda.fuse(traced.path, fp32, checkpoint)
    form = f"{traced.form}, {fused.form}"
    yield Artifact(fp32, "cuda", "fp32", form, fused.inputs, order.plan, fused.fusions)
    if "fp16" in order.precisions:
        with stage(order.progress, "optimize", "cuda, fp16"):
            feeds = calibration.make_feeds(order.texts, checkpoint, order.tokenizer, fused.inputs)
            ids = next(spec.name for spec in fused.inputs if spec.fill == "token_ids")
            short = [feed for feed in feeds if feed[ids].shape[1] + PADDING <= checkpoint.max_length]
            padded = [calibration.pad(feed, fused.inputs, pad_id=checkpoint.pad_id, tokens=PADDING) for feed in short[:PADDED_TEXTS]]
            converted = fp16.convert_to_fp16(fp32, fp16_path, traced.path.parent, feeds, padded)
        yield Artifact(fp16_path, "cuda", "fp16", form, fused.inputs, order.plan, fused.fusions, converted.counts, converted.error)


def _build_for_tensorrt(order: _Order) -> Iterator[Artifact]:
    """Makes one float32 graph for all precisions: TensorRT fuses, and converts to half precision, on its own."""
    fp32 = order.folder / "model.tensorrt.fp32.onnx"
    with stage(order.progress, "optimize", "tensorrt"):
        write_standard(order.traced.path, fp32)
    form = f"{order.traced.form}, standard operators, for TensorRT to fuse"
    form += "; fp16 is TensorRT's own" if "fp16" in order.precisions else ""
    for precision in dict.fromkeys(("fp32", *order.precisions)):
        yield Artifact(fp32, "tensorrt", precision, form, order.checkpoint.inputs, order.plan)


BUILDERS: dict[Provider, Callable[[_Order], Iterator[Artifact]]] = {"cuda": _build_for_cuda, "tensorrt": _build_for_tensorrt}


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


def plan_shapes(max_length: int, *, masks: bool, rectangle: bool) -> ShapePlan:
    """Returns the shape plan for a model: the lengths and row counts that its batches are padded to.

    GPUs choose kernels, and TensorRT builds them, by shape: a few shapes, all warmed up, are worth the padding. Lengths are multiples of
    8 (except the last, the model's own), as half-precision kernels want them. From 64 on, each length and each row count is at most half
    as large again as the one before, so a batch fills two thirds of its shape at least.

    Args:
        max_length: Its usable length in tokens.
        masks: Whether the graph takes the positions of masks.
        rectangle: Whether all lengths have the same row counts. For a provider that reserves memory for the longest text in
            the largest batch, which then has as many tokens as any other largest batch.
    """
    lengths = [*(length for length in _LENGTHS if length < max_length), max_length]
    last = max(MAX_TOKENS // max_length, _LEAST_ROWS)
    buckets = tuple(
        ShapeBucket(length=n, rows=tuple(r for r in _ROWS if r == 1 or (r <= last if rectangle else r * n <= MAX_TOKENS))) for n in lengths
    )
    tokens = max(bucket.length * bucket.rows[-1] for bucket in buckets)
    # a mask counts as a token beside its own, so that no batch has more than half as many masks as tokens; one text may have any number
    return ShapePlan(buckets=buckets, masks=_powers_of_two(max(tokens // 2, max_length)) if masks else ())


def _powers_of_two(last: int) -> tuple[int, ...]:
    """Returns the powers of two up to the first that is not below `last`."""
    return tuple(2**i for i in range((last - 1).bit_length() + 1))
