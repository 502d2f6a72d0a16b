"""Loads a checkpoint's weights into its model, and refuses those that do not fit: a model with random parts would still answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.checkpoint.pruned_heads import prune_while_loading
from bertserve.export.checkpoint.source import SourceFiles, read_with_transformers
from bertserve.export.checkpoint.unexpected_weights import refuse_unexpected_weights
from bertserve.export.errors import CheckpointError
from bertserve.export.tasks.catalog import TASKS
from bertserve.service.bundle.manifest import Task


def load_model(files: SourceFiles, task: Task, auto_class: Any, config: Any, ignored_weights: Sequence[str] = ()) -> PreTrainedModel:
    """Returns the model in float32 and evaluation mode, with eager attention, an adapter merged into it.

    Args:
        files: The checkpoint's files.
        task: Its task.
        auto_class: The class of transformers that loads it.
        config: Its configuration.
        ignored_weights: Patterns of the names of weights that the model may leave unused.

    Raises:
        CheckpointError: Weights are missing, unexpected, of other shapes than configured, or not finite.
    """
    source, adapter = files.source, files.adapter
    with prune_while_loading(source, config):
        model, report = read_with_transformers(
            f"the weights of `{source}`",
            auto_class.from_pretrained,
            files.model_folder,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with a better message
        )
    replaced = set() if adapter is None else adapter.merge(model)
    _refuse_other_shapes(source, [entry for entry in report["mismatched_keys"] if entry[0] not in replaced])
    missing = set(report["missing_keys"]) - replaced
    if TASKS[task].embeds:
        missing = _drop_pooler(model, missing)
    _refuse_missing(source, missing, f"{task} model", config.architectures or "", type(model).__name__)
    refuse_unexpected_weights(source, report["unexpected_keys"], model, ignored_weights)
    _refuse_not_finite(source, model)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _drop_pooler(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Removes the layer on [CLS] from an encoder, which no embedding reads; returns the missing weights of other layers.

    Checkpoints of other heads often lack it, and transformers would fill it with random weights.
    """
    if isinstance(getattr(model, "pooler", None), torch.nn.Module):
        # some models' code calls it without looking, so that there must be one
        model.pooler = torch.nn.Identity()
    return {name for name in missing if not name.startswith("pooler.")}


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
