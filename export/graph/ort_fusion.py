"""Fuses a traced graph with ONNX Runtime's transformer optimizer."""

from pathlib import Path
from typing import Any

import onnx
from onnx import helper
from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from bertserve.export.graph import onnx_files


def fuse_graph(
    source: Path, heads_and_hidden_size: tuple[int, int], *, attention: bool, mask: AttentionMaskFormat, embeddings: bool = True
) -> tuple[Any, dict[str, int]]:
    """Returns the fused graph as the optimizer's own model, and its fused operators with their counts.

    `heads_and_hidden_size` is the number of heads of an attention, and of values that they divide; zeros if unknown. `attention` and
    `embeddings` say whether these are fused, and `mask` which form of the mask the fused operators read.
    """
    options = FusionOptions("bert")
    options.enable_attention, options.enable_embed_layer_norm, options.attention_mask_format = attention, embeddings, mask
    heads, hidden = heads_and_hidden_size
    with onnx_files.lazy_weights(source) as model:
        fused = optimize_model(model, model_type="bert", num_heads=heads, hidden_size=hidden, optimization_options=options, opt_level=0)
    if heads:
        _set_head_counts(fused.model, hidden // heads)
    return fused, {name: count for name, count in fused.get_fused_operator_statistics().items() if count}


def _set_head_counts(model: onnx.ModelProto, head_size: int) -> None:
    """Sets `num_heads` of each Attention by its matrix, [hidden, 3 * heads * head_size].

    The optimizer sets the same number for all of them. But with pruned heads, layers have different numbers.
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Attention":
            [heads] = [attribute for attribute in node.attribute if attribute.name == "num_heads"]
            heads.CopyFrom(helper.make_attribute("num_heads", shapes[node.input[1]][1] // 3 // head_size))
