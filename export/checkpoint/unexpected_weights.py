"""Judges a checkpoint's unexpected weights, those that its model has no place for: which are harmless, and which mean a wrong model.

transformers only warns of them. A classifier without the pooler of its pretraining is complete. One that leaves an encoder layer or
an LSTM behind the encoder unread gives other answers than the model that was trained. So a weight is harmless only where transformers
has a model of this configuration that has it, with another head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from bertserve.export.errors import CheckpointError

# modules that only a training had: TinyBERT's matrices that compared its layers with those of its teacher
_OF_TRAINING = ("fit_dense.",)
_CLASSES = (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


def refuse_unexpected_weights(source: str, unexpected: Collection[str], model: PreTrainedModel, ignored: Sequence[str] = ()) -> None:
    """Refuses weights that the model should have used.

    Harmless are the weights of other heads that transformers has for the model's configuration, and stored buffers of position ids.
    transformers does not report the weights that a model's class itself declares to be ignored.

    Args:
        source: The checkpoint, for the message.
        unexpected: Names of the weights that the model has no place for.
        model: The loaded model.
        ignored: Patterns of names, with `*` for any characters, that the user takes for harmless.

    Raises:
        CheckpointError: A weight is of a layer that the configuration leaves out, or of a part that the model lacks.
    """
    left = sorted(name for name in unexpected if not any(fnmatchcase(name, pattern) for pattern in ignored))
    if not left:
        return
    patterns = {_without_layer_numbers(name) for name in model.state_dict()}
    of_more_layers = [name for name in left if _without_layer_numbers(name) in patterns]
    if of_more_layers:
        raise CheckpointError(
            f"`{source}` has weights of more layers than its config.json says: {len(of_more_layers)} would not be used, among them "
            f"{_first_names(of_more_layers)}. "
            "Set `num_hidden_layers` to what the weights have, or save the shortened model again with `save_pretrained`."
        )
    modules = {name for name, _ in model.named_modules()}
    other_heads = _names_with_other_heads(model)
    unknown = [name for name in left if not _is_harmless(name, modules, other_heads)]
    if unknown:
        raise CheckpointError(
            f"`{source}` has {len(unknown)} weights that its architecture has no place for, among them {_first_names(unknown)}. The model "
            "would answer without them. Name the architecture that it was trained as in config.json, merge or remove the weights, export the "
            "module with --module, or, if they do not matter, pass --ignore-weights with a pattern such as "
            f"`{unknown[0].partition('.')[0]}.*`."
        )


def _is_harmless(name: str, modules: Collection[str], other_heads: Collection[str]) -> bool:
    """Returns whether a weight is of a part that the model does not have, and another head does; or a buffer of position ids."""
    module, _, weight = name.rpartition(".")
    return weight == "position_ids" or name.startswith(_OF_TRAINING) or (name in other_heads and module not in modules)


def _names_with_other_heads(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights of all models that transformers has for a configuration, with and without the encoder's prefix."""
    names: set[str] = set()
    config: Any = model.config
    for auto_class in _CLASSES:
        if type(config) not in auto_class._model_mapping:
            continue
        try:
            with torch.device("meta"):  # only names are needed
                other = auto_class.from_config(config, attn_implementation="eager")
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError):
            continue  # a head that this configuration does not fit
        own = set(other.state_dict())
        prefix = f"{other.base_model_prefix}."
        names |= own | {name.removeprefix(prefix) for name in own} | {prefix + name for name in own if auto_class is AutoModel}
    return names


def _first_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3])


def _without_layer_numbers(name: str) -> str:
    """Returns a weight's name with `*` in place of the numbers of its layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
