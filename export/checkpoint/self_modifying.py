"""Refuses a model that replaces layers of its own while it reads, because its answers depend on what it has read before.

BigBird is one. A short text switches it for good to full attention, in place of the sparse attention that its configuration names. A
graph of either attention differs from what transformers answers with the other, and only the checkpoint's owner can say which is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError


@contextmanager
def refuse_self_modifying(source: str, model: PreTrainedModel) -> Iterator[None]:
    """Compares a model's layers before and after the block, which runs it for the first time.

    Args:
        source: The checkpoint, for the message.
        model: The model.

    Raises:
        CheckpointError: A layer is of another class afterwards.
    """
    classes_before, settings_before = _layer_classes(model), _effective_settings(model)
    yield
    for name, after in _layer_classes(model).items():
        before = classes_before.get(name, after)
        if after is before:
            continue
        changes = " and ".join(
            f"`{key}` to {value!r} in place of {settings_before[key]!r}"
            for key, value in _effective_settings(model).items()
            if settings_before[key] != value
        )
        raise CheckpointError(
            f"{type(model).__name__} of `{source}` puts a {after.__name__} in place of the {before.__name__} `{name}` when it reads a short text, "
            "so its answers depend on what it read before. "
            + (f"If all texts are to be read so, set {changes} in config.json." if changes else "Such a model is not understood.")
        )


def _layer_classes(model: PreTrainedModel) -> dict[str, type]:
    """Returns the class of each layer by the layer's name."""
    return {name: type(module) for name, module in model.named_modules()}


def _effective_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the plain fields of the configuration, with the values that the encoder holds of them where it holds any."""
    fields = {key: value for key, value in model.config.to_dict().items() if isinstance(value, str | int | float | bool)}
    return fields | {key: value for key, value in vars(model.base_model).items() if key in fields}
