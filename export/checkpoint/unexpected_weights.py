"""Judges a checkpoint's unexpected weights, those that its model has no place for: which are harmless, and which mean a wrong model.

transformers only warns of them. A classifier without the pooler of its pretraining is whole; one that leaves an encoder
layer unread answers otherwise than the model that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from export.errors import CheckpointError


def refuse_unexpected_weights(
    source: str, unexpected: Collection[str], *, expected: Iterable[str], modules: Collection[str], encoder: str
) -> None:
    """Refuses weights that the model should have used.

    Harmless are the pooler of a model that has none, other heads, which are modules beside the encoder that the model
    does not have, and stored buffers of position ids. transformers does not report the weights that a model's class itself
    declares to be ignored.

    Args:
        source: The checkpoint, for the message.
        unexpected: Names of the weights that the model has no place for.
        expected: Names of the model's own weights.
        modules: Names of the model's modules.
        encoder: Name of the encoder within the model, such as `bert`.

    Raises:
        CheckpointError: A weight is of a layer that the configuration leaves out, or of a part that the model lacks.
    """
    patterns = {_without_layer_numbers(name) for name in expected}
    of_more_layers = sorted(name for name in unexpected if _without_layer_numbers(name) in patterns)
    if of_more_layers:
        raise CheckpointError(
            f"`{source}` has weights of more layers than its config.json says: {len(of_more_layers)} would not be used, among them "
            f"{_first_names(of_more_layers)}. "
            "Set `num_hidden_layers` to what the weights have, or save the shortened model again with `save_pretrained`."
        )
    unknown = sorted(name for name in unexpected if not _is_harmless(name, modules, encoder))
    if unknown:
        raise CheckpointError(
            f"`{source}` has {len(unknown)} weights that its architecture has no place for, among them {_first_names(unknown)}. The model "
            "would answer without them; name the architecture that it was trained as in config.json, or merge or remove the weights."
        )


def _is_harmless(name: str, modules: Collection[str], encoder: str) -> bool:
    module, _, weight = name.rpartition(".")
    if weight == "position_ids":
        return True
    first, *rest = module.split(".")
    of_another_head = first != encoder or rest[:1] == ["pooler"]
    return of_another_head and module not in modules


def _first_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3])


def _without_layer_numbers(name: str) -> str:
    """Returns a weight's name with `*` in place of the numbers of its layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
