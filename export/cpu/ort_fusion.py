"""Fuses a traced graph for a provider with ONNX Runtime's transformer optimizer, and counts what was fused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.graph import head_counts, onnx_files


def fuse(source: Path, target: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Writes the fused graph for the CPU provider to a new file.

    The embedding stays unfused: the fused operator would force one scale on the whole int8 table, where
    `export/int8/quantize.py` keeps one per row. The mask stays a matrix, so that padding may be on either side.

    A model whose attention the optimizer does not know keeps it as traced: slower, and right. So does one that gives its attention out, of
    which nothing is left after fusion. `attention_form` says which it was.

    Returns:
        Fused operator -> count.
    """
    options = FusionOptions("bert")
    options.enable_embed_layer_norm = False
    options.enable_attention = not checkpoint.attention_heads
    options.attention_mask_format = AttentionMaskFormat.AttentionMask
    heads, hidden = checkpoint.attention_size
    with onnx_files.lazy_weights(source) as model:
        fused = optimize_model(
            model,
            model_type="bert",
            num_heads=heads,
            hidden_size=hidden,
            optimization_options=options,
            opt_level=0,
        )
    counts = {name: count for name, count in fused.get_fused_operator_statistics().items() if count}
    if heads:
        head_counts.count_heads(fused.model, hidden // heads)
    fused.topological_sort()
    onnx_files.save_proto(fused.model, target, folder=source.parent)
    return counts


def attention_form(fusions: Mapping[str, int], checkpoint: Checkpoint) -> str:
    """Returns what became of the attention, for the manifest: fused in every layer, in some, or left as traced.

    Args:
        fusions: What `optimize` returned.
        checkpoint: Says how many layers there are.
    """
    layers = checkpoint.attentions
    count = fusions.get("Attention", 0) + fusions.get("MultiHeadAttention", 0)
    if checkpoint.attention_heads:
        return "attention as traced and given out"
    if not count:
        return "attention as traced"
    return "packed MultiHeadAttention with key padding" if count >= layers else f"attention fused in {count} of {layers} layers"
