"""Creates the graphs for a GPU's providers from the traced graph, each with the shapes in which it runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper
from onnxruntime.transformers.fusion_options import AttentionMaskFormat

from bertserve.export import inference
from bertserve.export.build_input import GraphBuildInput, new_graph
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.gpu.fp16 import convert_to_fp16
from bertserve.export.gpu.small_outputs import add_small_outputs
from bertserve.export.graph import onnx_files, ort_fusion
from bertserve.export.progress import stage
from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec, Precision, ShapeBucket, ShapePlan
from bertserve.service.providers import PROVIDERS, Provider, split_into_ranges
from bertserve.service.settings import GPU_BATCH_TOKENS

_PLANNED_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_PLANNED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
ROW_LENGTHS = InputSpec(name="lengths", fill="lengths", dtype="int32")


def build_for_cuda(build_input: GraphBuildInput, precisions: Sequence[Precision]) -> Iterator[GraphSpec]:
    """Creates the float32 graph, fused for CUDA, and from it the half-precision graph."""
    checkpoint, work = build_input.checkpoint, build_input.traced.parent
    fp32_path, fp16_path = (work / f"cuda.{precision}.onnx" for precision in ("fp32", "fp16"))
    with stage("optimize", "cuda"):
        fused = fuse_for_cuda(build_input.traced, fp32_path, checkpoint)
        description = f"{build_input.description}, {fused.description}"
        fused = fused.model_copy(update={"description": description, "shapes": _plan_for("cuda", checkpoint)})
        graph = add_small_outputs(fp32_path, build_input.folder / fused.file, fused, checkpoint)
    yield graph
    if "fp16" in precisions:
        with stage("optimize", "cuda, fp16"):
            feeds, padded_feeds = (
                inference.make_feeds(build_input.texts["calibration"], checkpoint, build_input.tokenizer, fused.inputs, padding=padding)
                for padding in (0, 3)
            )
            padded_feeds = [feed for feed in padded_feeds if inference.token_count(feed) <= checkpoint.tokenizer.max_length][:8]
            counts, error = convert_to_fp16(fp32_path, fp16_path, work, feeds, padded_feeds)
            report = fused.validation.model_copy(update={"quantized": counts, "quantization_error": error})
            half = fused.model_copy(update={"file": "model.cuda.fp16.onnx", "precision": "fp16", "validation": report})
            graph = add_small_outputs(fp16_path, build_input.folder / half.file, half, checkpoint)
        yield graph


def build_for_tensorrt(build_input: GraphBuildInput, precisions: Sequence[Precision]) -> Iterator[GraphSpec]:
    """Creates one float32 graph for all precisions: TensorRT itself fuses it and converts it to half precision."""
    checkpoint = build_input.checkpoint
    description = f"{build_input.description}, standard operators, for TensorRT to fuse"
    description += "; fp16 is TensorRT's own" if "fp16" in precisions else ""
    graph = new_graph(checkpoint, "tensorrt", description, checkpoint.inputs, {})
    graph = graph.model_copy(update={"shapes": _plan_for("tensorrt", checkpoint)})
    with stage("optimize", "tensorrt"):
        graph = add_small_outputs(build_input.traced, build_input.folder / graph.file, graph, checkpoint)
    for precision in dict.fromkeys(("fp32", *precisions)):
        yield graph.model_copy(update={"precision": precision})


def _plan_for(provider: Provider, checkpoint: Checkpoint) -> ShapePlan:
    has_masks = any(spec.fill == "mask_index" for spec in checkpoint.inputs)
    return plan_shapes(checkpoint.tokenizer.max_length, masks=has_masks, ranges=PROVIDERS[provider].ranges)


def plan_shapes(max_length: int, *, masks: bool, ranges: int) -> ShapePlan:
    """Returns the shape plan of a model: the lengths and numbers of rows to which its batches are padded.

    GPUs choose kernels by shape, and TensorRT builds them by shape, so a few warmed-up shapes are worth the padding. Lengths are multiples
    of 8, which half-precision kernels need, except the last length, which is the model's own. From 64 to 8,192, each length and each number
    of rows is at most 1.5 times the previous one, so a batch fills at least two thirds of each dimension. The lengths of one of the
    provider's ranges have the same numbers of rows, for which it reserves memory; with 0 ranges, each length has its own.
    """
    lengths = [*(length for length in _PLANNED_LENGTHS if length < max_length), max_length]
    max_rows = {
        length: max(GPU_BATCH_TOKENS // part[-1], 8 if ranges else 1)  # at least eight of the longest texts
        for part in split_into_ranges(lengths, ranges or len(lengths))
        for length in part
    }
    buckets = tuple(ShapeBucket(length=n, rows=tuple(r for r in _PLANNED_ROWS if r <= max_rows[n])) for n in lengths)
    tokens = max(bucket.length * bucket.rows[-1] for bucket in buckets)
    # a mask counts as another token, so a batch has at most half as many masks as tokens; a single text can have any number
    max_masks = max(tokens // 2, max_length)
    return ShapePlan(buckets=buckets, masks=tuple(2**i for i in range((max_masks - 1).bit_length() + 1)) if masks else ())


def fuse_for_cuda(source: Path, target: Path, checkpoint: Checkpoint) -> GraphSpec:
    """Writes the fused float32 graph for CUDA to a new file.

    Attention stays as traced, with the mask, unless it is fused in every layer and padding is on the right. A single layer that
    needs the mask requires copying it, and lengths do not describe padding on the left.
    """
    heads = checkpoint.heads_and_hidden_size
    fused, counts = ort_fusion.fuse_graph(source, heads, attention=True, mask=AttentionMaskFormat.MaskIndexEnd)
    all_fused = len(fused.get_nodes_by_op_type("Attention")) == checkpoint.attention_count and checkpoint.tokenizer.padding_side == "right"
    if all_fused:
        _replace_mask_by_lengths(fused)
    else:
        # with the other form, the fused embedding would sum a mask that no longer exists
        fused, counts = ort_fusion.fuse_graph(source, heads, attention=False, mask=AttentionMaskFormat.AttentionMask)
    fused.prune_graph()
    fused.remove_unused_constant()
    as_int32 = _narrow_inputs_to_int32(fused)
    fused.topological_sort()
    onnx_files.save_proto(fused.model, target, folder=source.parent)
    names = {value.name for value in fused.model.graph.input}
    inputs = [
        spec.model_copy(update={"dtype": "int32"}) if spec.name in as_int32 else spec for spec in checkpoint.inputs if spec.name in names
    ]
    description = f"fused for CUDA, attention {'with the length of each row' if all_fused else 'in standard operators'}"
    return new_graph(checkpoint, "cuda", description, (*inputs, *([ROW_LENGTHS] if all_fused else [])), counts)


def _replace_mask_by_lengths(model: Any) -> None:
    """Gives the fused operators the number of tokens per row as an input, after which no node reads the mask."""
    for node in model.get_nodes_by_op_type("Attention"):
        node.input[3] = ROW_LENGTHS.name
        for attribute in [attribute for attribute in node.attribute if attribute.name == "mask_filter_value"]:
            node.attribute.remove(attribute)  # an attribute of the removed mask
    for node in model.get_nodes_by_op_type("EmbedLayerNormalization"):
        if len(node.input) > 7:
            del node.input[7]
    graph = model.model.graph
    graph.input.append(helper.make_tensor_value_info(ROW_LENGTHS.name, TensorProto.INT32, ["rows"]))


def _narrow_inputs_to_int32(model: Any) -> set[str]:
    """Makes each input that is read only through casts to int32 an int32 input; returns the names of these inputs."""
    graph, names = model.model.graph, set()
    for value in graph.input:
        readers = [node for node in graph.node if value.name in node.input]
        if readers and all(
            node.op_type == "Cast" and helper.get_attribute_value(node.attribute[0]) == TensorProto.INT32 for node in readers
        ):
            for node in readers:
                model.replace_input_of_all_nodes(node.output[0], value.name)
                graph.node.remove(node)
            value.type.tensor_type.elem_type = TensorProto.INT32
            names.add(value.name)
    return names
