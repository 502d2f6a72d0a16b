"""Judges the weights of a checkpoint that its model did not take: which may be left, and which mean a wrong model.

transformers only warns of them. A classifier without the pooler of its pretraining is whole; one that leaves an encoder
layer unread answers other than the model that was trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from export.errors import CheckpointError


def refuse(source: str, leftovers: Collection[str], *, taken: Iterable[str], modules: Collection[str], encoder: str) -> None:
    """Refuses weights that the model should have used.

    Harmless are the pooler of a model that has none, other heads, which are modules beside the encoder that the model
    does not have, stored buffers of position ids, and what the model's class itself declares to be ignored (of that
    transformers tells nothing).

    Args:
        source: The checkpoint, for the message.
        leftovers: Names of the weights that were not taken.
        taken: Names of the model's own weights.
        modules: Names of the model's modules.
        encoder: Name of the encoder within the model, such as `bert`.

    Raises:
        CheckpointError: A weight is of a layer that the configuration leaves out, or of a part that the model lacks.
    """
    shapes = {_numberless(name) for name in taken}
    more = sorted(name for name in leftovers if _numberless(name) in shapes)
    if more:
        raise CheckpointError(
            f"`{source}` has weights of more layers than its config.json says: {len(more)} would not be used, among them {_some(more)}. "
            "Set `num_hidden_layers` to what the weights have, or save the shortened model again with `save_pretrained`."
        )
    unknown = sorted(name for name in leftovers if not _harmless(name, modules, encoder))
    if unknown:
        raise CheckpointError(
            f"`{source}` has {len(unknown)} weights that its architecture has no place for, among them {_some(unknown)}. The model would "
            "answer without them; name the architecture that it was trained as in config.json, or merge or remove the weights."
        )


def _harmless(name: str, modules: Collection[str], encoder: str) -> bool:
    module, _, weight = name.rpartition(".")
    if weight == "position_ids":
        return True
    first, *rest = module.split(".")
    of_another_head = first != encoder or rest[:1] == ["pooler"]
    return of_another_head and module not in modules


def _some(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3])


def _numberless(name: str) -> str:
    """Returns a weight's name with the indices of its layers left open."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
