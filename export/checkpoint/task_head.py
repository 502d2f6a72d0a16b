"""What a checkpoint is for: its task, the class that loads it, its labels, and what its graph gives out."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from export.checkpoint import sentence_transformers
from export.checkpoint import source as sources
from export.checkpoint.lora import Adapter
from export.errors import CheckpointError
from service.bundle.graph_spec import OutputSpec
from service.bundle.manifest import Activation, Task

HEADS: dict[str, tuple[Task, Any]] = {
    # suffix of the architecture's name -> task, and the class that loads it
    "ForSequenceClassification": ("text-classification", AutoModelForSequenceClassification),
    "ForTokenClassification": ("token-classification", AutoModelForTokenClassification),
    "ForQuestionAnswering": ("question-answering", AutoModelForQuestionAnswering),
    "ForMaskedLM": ("fill-mask", AutoModelForMaskedLM),
    "Model": ("feature-extraction", AutoModel),
}
TASKS = tuple(task for task, _ in HEADS.values())
OUTPUTS: dict[Task, tuple[OutputSpec, ...]] = {
    "text-classification": (OutputSpec(name="logits", kind="per_text"),),
    "token-classification": (OutputSpec(name="logits", kind="per_token"),),
    "question-answering": (OutputSpec(name="start_logits", kind="per_token"), OutputSpec(name="end_logits", kind="per_token")),
    "fill-mask": (OutputSpec(name="logits", kind="per_mask"),),
    "feature-extraction": sentence_transformers.OUTPUTS["last"],
}


def choose(config: Any, task: str, lora: Adapter | None) -> tuple[Task, Any]:
    """Returns the task and the class that loads it.

    Args:
        config: The model's configuration; an adapter's head and number of labels are put into it.
        task: A Hugging Face task name, or `auto` to read it from the architecture.
        lora: The adapter that is merged into the model, if any.

    Raises:
        CheckpointError: The task is not known, or the model has no head for it.
    """
    return _own(config, task) if lora is None else _adapted(config, task, lora)


def labels(source: str, config: Any) -> tuple[str, ...]:
    """Returns the labels' names by id.

    Raises:
        CheckpointError: They are not distinct names for all ids.
    """
    labels = tuple(str(config.id2label[i] or "") for i in sorted(config.id2label))
    if sorted(config.id2label) != list(range(len(labels))) or len(set(labels)) != len(labels) or "" in labels:
        raise CheckpointError(
            f"the labels of `{source}` are not distinct names for the ids 0 to {len(labels) - 1}: {config.id2label}; mend config.json."
        )
    return labels


def activation(config: Any) -> Activation:
    """Returns what turns logits into scores, by the rule of the Hugging Face text-classification pipeline."""
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def _own(config: Any, task: str) -> tuple[Task, Any]:
    """Returns the task and the class that loads it, from the architecture's name or the user's choice."""
    names = config.architectures or []
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        raise CheckpointError(f"architecture {names or 'none'} has a decoder; only encoders are exported: text in, scores out in one run.")
    # a language model's name ends in "LMHeadModel", which is no bare encoder
    read = next(
        (t for name in names for suffix, (t, loader) in HEADS.items() if "HeadModel" not in name and _has_head(name, suffix, loader)), None
    )
    wanted = read if task == "auto" else task
    if wanted is None:
        raise CheckpointError(f"cannot tell the task of architecture {names or 'none'}; give --task, one of {', '.join(TASKS)}.")
    # there is an encoder below every head
    if read not in (None, wanted) and wanted != "feature-extraction":
        raise CheckpointError(f"the checkpoint is a {names[0]}, made for {read}; --task {wanted} does not fit it.")
    built, loader = next((t, loader) for t, loader in HEADS.values() if t == wanted)
    if type(config) not in loader._model_mapping:
        raise CheckpointError(f"transformers has no head for {wanted} on a {type(config).__name__} (architecture {names or 'none'}).")
    return built, loader


def _adapted(config: Any, task: str, lora: Adapter) -> tuple[Task, Any]:
    """Returns the task and the class of a model that an adapter is merged into; the model's own head is another's, or none."""
    wanted = lora.task if task == "auto" else task
    if wanted == "auto":
        return _own(config, task)
    config.architectures = None
    built, loader = _own(config, wanted)
    with torch.device("meta"):  # shapes alone
        labels = lora.labels(
            sources.read("the configuration of the adapter's model", lambda _, **__: loader.from_config(config), lora.folder)
        )
    if labels is not None:
        config.num_labels = labels
    return built, loader


def _has_head(architecture: str, suffix: str, loader: Any) -> bool:
    """Returns whether an architecture is one that transformers has for a head; XLNet's, for one, end in another suffix."""
    return architecture.endswith(suffix) or architecture in loader._model_mapping._model_mapping.values()
