"""Loads a checkpoint's weights into its model, and refuses those that do not fit: a model with random parts would still answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from export.checkpoint import sentence_transformers, unexpected_weights
from export.checkpoint import source as sources
from export.checkpoint.source import Files
from export.errors import CheckpointError
from service.bundle.manifest import Task


def load(found: Files, task: Task, loader: Any, config: Any) -> PreTrainedModel:
    """Returns the model in float32 and evaluation mode, with eager attention, an adapter merged into it.

    Args:
        found: The checkpoint's files.
        task: What it is for.
        loader: The class that loads it.
        config: Its configuration.

    Raises:
        CheckpointError: Weights are missing, left over, of other shapes than configured, or not finite.
    """
    source, lora = found.source, found.lora
    model, report = sources.read(
        f"the weights of `{source}`",
        loader.from_pretrained,
        found.base,
        config=config,
        use_safetensors=True,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # only to say it better
    )
    replaced = set() if lora is None else lora.merge(model)
    _refuse_other_shapes(source, [entry for entry in report["mismatched_keys"] if entry[0] not in replaced])
    missing = set(report["missing_keys"]) - replaced
    if task == "feature-extraction":
        missing = sentence_transformers.drop_pooler(model, missing)
    _refuse_missing(source, missing, f"{task} model", config.architectures or "", type(model).__name__)
    unexpected_weights.refuse(
        source,
        report["unexpected_keys"],
        taken=model.state_dict(),
        modules={name for name, _ in model.named_modules()},
        encoder=model.base_model_prefix,
    )
    _refuse_not_finite(source, model)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _refuse_missing(source: str, missing: Collection[str], kind: str, architectures: Any, loaded: str) -> None:
    if missing:
        raise CheckpointError(
            f"`{source}` lacks weights that a {kind} needs: {', '.join(sorted(missing)[:3])}. "
            f"It was not fine-tuned for this task, or its architecture {architectures} is not {loaded}, "
            "which transformers has for it; give the right --task or checkpoint."
        )


def _refuse_other_shapes(source: str, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuses weights of other shapes than config.json gives them: transformers would put random ones in their place."""
    if mismatched:
        name, given, configured = min(mismatched, key=lambda entry: entry[0])
        raise CheckpointError(
            f"{len(mismatched)} weights of `{source}` have another shape than its config.json says: `{name}` is {list(given)}, configured is "
            f"{list(configured)}. Mend config.json (`vocab_size`, the labels, `hidden_size` and the like) or take the weights that belong to it."
        )


def _refuse_not_finite(source: str, model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"`{source}` has NaN or infinite weights in `{name}`; the training diverged.")
