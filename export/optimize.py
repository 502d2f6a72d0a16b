"""Fuses a traced graph for a provider with ONNX Runtime's transformer optimizer, and counts what was fused."""

from __future__ import annotations

from pathlib import Path

from onnxruntime.transformers.fusion_options import AttentionMaskFormat, FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from export.checkpoint import Checkpoint
from export.errors import GraphError


def optimize(source: Path, target: Path, checkpoint: Checkpoint) -> dict[str, int]:
    """Writes the fused graph for the CPU provider to a new file.

    The embedding stays unfused: the fused operator would force one scale on the whole int8 table, where
    `export/quantize.py` keeps one per row. The mask stays a matrix, so that padding may be on either side.

    Returns:
        Fused operator -> count.

    Raises:
        GraphError: Attention was not fused in every layer; such a graph would be slow for no visible reason.
    """
    config = checkpoint.model.config
    options = FusionOptions("bert")
    options.enable_embed_layer_norm = False
    options.attention_mask_format = AttentionMaskFormat.AttentionMask
    fused = optimize_model(
        str(source),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=options,
        opt_level=0,
    )
    counts = {name: count for name, count in fused.get_fused_operator_statistics().items() if count}
    if counts.get("Attention", 0) != config.num_hidden_layers:
        raise GraphError(
            f"{counts.get('Attention', 0)} of {config.num_hidden_layers} attention layers were fused ({counts}); ONNX Runtime's "
            f"optimizer does not know this form of {type(checkpoint.model).__name__}."
        )
    fused.save_model_to_file(str(target))
    return counts
