"""Fuses a traced graph for a provider with ONNX Runtime's transformer optimizer, and counts what was fused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from export.checkpoint.checkpoint import Checkpoint
from export.graph import onnx_files


def fuse(source: Path, target: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Writes the fused graph for the CPU provider to a new file.

    The embedding stays unfused: the fused operator would force one scale on the whole int8 table, where
    `export/int8/quantize.py` keeps one per row. The mask stays a matrix, so that padding may be on either side.

    A model whose attention the optimizer does not know keeps it as traced: slower, and right. `attention_form` says which it was.

    Returns:
        Fused operator -> count.
    """
    config = checkpoint.model.config
    options = FusionOptions("bert")
    options.enable_embed_layer_norm = False
    options.attention_mask_format = AttentionMaskFormat.AttentionMask
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    known = isinstance(heads, int) and isinstance(hidden, int) and hidden % heads == 0
    with onnx_files.lazy_weights(source) as model:
        fused = optimize_model(
            model,
            model_type="bert",
            num_heads=heads if known else 0,
            hidden_size=hidden if known else 0,
            optimization_options=options,
            opt_level=0,
        )
    counts = {name: count for name, count in fused.get_fused_operator_statistics().items() if count}
    fused.topological_sort()
    onnx_files.save_proto(fused.model, target, folder=source.parent)
    return counts


def attention_form(fusions: Mapping[str, int], checkpoint: Checkpoint) -> str:
    """Returns what became of the attention, for the manifest: fused in every layer, in some, or left as traced.

    Args:
        fusions: What `optimize` returned.
        checkpoint: Says how many layers there are.
    """
    layers = checkpoint.model.config.num_hidden_layers
    count = fusions.get("Attention", 0) + fusions.get("MultiHeadAttention", 0)
    if count >= layers:
        return "packed MultiHeadAttention with key padding"
    return f"attention fused in {count} of {layers} layers" if count else "attention as traced"
