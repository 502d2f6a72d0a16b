"""The graph for the CUDA provider: ONNX Runtime's fused operators, and the number of tokens of each row in place of a mask.

Which attention kernel CUDA runs depends on the form of the mask: with [rows, length] none of the fast ones, with the length of each
row (padding on the right) cuDNN's or TensorRT's. The lengths are a graph input, for the service knows them: that saves copying a
mask and summing it up again. Ids that the operators want as int32 are taken as that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.graph import head_counts, onnx_files
from bertserve.service.bundle.graph_spec import InputSpec

LENGTHS = InputSpec(name="lengths", fill="lengths", dtype="int32")
FUSED_FORM = "fused for CUDA, attention with the length of each row"
PARTLY_FUSED_FORM = "fused for CUDA, attention in standard operators"


@dataclass(frozen=True)
class CudaGraph:
    """A fused graph.

    Attributes:
        form: How it was made, for the reader.
        inputs: What it takes now.
        fusions: Fused operator -> count.
    """

    form: str
    inputs: tuple[InputSpec, ...]
    fusions: dict[str, int]


def fuse(source: Path, target: Path, checkpoint: Checkpoint) -> CudaGraph:
    """Writes the fused float32 graph to a new file.

    Attention stays as it was traced, with the mask, where it is not fused in every layer, or where padding is on the left. One layer
    that needs the mask needs it copied, and lengths do not say which tokens on the left are padding.
    """
    fused = _optimize(source, checkpoint, attention=True)
    all_fused = len(_nodes(fused, "Attention")) == checkpoint.attentions and checkpoint.padding_side == "right"
    if not all_fused:
        fused = _optimize(source, checkpoint, attention=False)
    counts = {name: count for name, count in fused.get_fused_operator_statistics().items() if count}
    if all_fused:
        _take_lengths(fused)
    fused.prune_graph()
    fused.remove_unused_constant()
    as_int32 = _take_int32(fused)
    fused.topological_sort()
    onnx_files.save_proto(fused.model, target, folder=source.parent)
    names = {value.name for value in fused.model.graph.input}
    inputs = [
        spec.model_copy(update={"dtype": "int32"}) if spec.name in as_int32 else spec for spec in checkpoint.inputs if spec.name in names
    ]
    return CudaGraph(FUSED_FORM if all_fused else PARTLY_FUSED_FORM, (*inputs, *([LENGTHS] if all_fused else [])), counts)


def _optimize(source: Path, checkpoint: Checkpoint, *, attention: bool) -> Any:
    options = FusionOptions("bert")
    options.enable_attention = attention
    options.attention_mask_format = AttentionMaskFormat.MaskIndexEnd if attention else AttentionMaskFormat.AttentionMask
    # the fused embedding sums up a mask that is then no longer there
    heads, hidden = checkpoint.attention_size
    with onnx_files.lazy_weights(source) as model:
        made = optimize_model(model, model_type="bert", num_heads=heads, hidden_size=hidden, optimization_options=options, opt_level=0)
    if heads:
        head_counts.count_heads(made.model, hidden // heads)
    return made


def _nodes(model: Any, operator: str) -> list[onnx.NodeProto]:
    return list(model.get_nodes_by_op_type(operator))


def _take_lengths(model: Any) -> None:
    """Gives the fused operators the number of tokens of each row as an input; then nothing reads the mask."""
    for node in _nodes(model, "Attention"):
        node.input[3] = LENGTHS.name
        for attribute in [attribute for attribute in node.attribute if attribute.name == "mask_filter_value"]:
            node.attribute.remove(attribute)  # of the mask that is gone
    for node in _nodes(model, "EmbedLayerNormalization"):
        if len(node.input) > 7:
            del node.input[7]
    graph = model.model.graph
    graph.input.append(helper.make_tensor_value_info(LENGTHS.name, TensorProto.INT32, ["rows"]))


def _take_int32(model: Any) -> set[str]:
    """Takes each input that is only ever cast to int32 as int32; returns which."""
    graph, taken = model.model.graph, set()
    for value in graph.input:
        readers = [node for node in graph.node if value.name in node.input]
        if readers and all(
            node.op_type == "Cast" and helper.get_attribute_value(node.attribute[0]) == TensorProto.INT32 for node in readers
        ):
            for node in readers:
                model.replace_input_of_all_nodes(node.output[0], value.name)
                graph.node.remove(node)
            value.type.tensor_type.elem_type = TensorProto.INT32
            taken.add(value.name)
    return taken
