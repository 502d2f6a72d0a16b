"""Refuses a model that replaces layers of its own while it reads: what it answers depends on what it has read before.

BigBird does so. A short text makes it take full attention for good, in place of the sparse one that its configuration says; a graph of
either is not what transformers answers with the other. Which is meant only the checkpoint's owner can say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from export.errors import CheckpointError


@contextmanager
def checked(source: str, model: PreTrainedModel) -> Iterator[None]:
    """Compares a model's layers before and after the block, which runs it for the first time.

    Args:
        source: The checkpoint, for the message.
        model: The model.

    Raises:
        CheckpointError: A layer is of another class afterwards.
    """
    classes, settings = _classes(model), _settings(model)
    yield
    for name, now in _classes(model).items():
        before = classes.get(name, now)
        if now is before:
            continue
        chosen = _settings(model)
        told = " and ".join(
            f"`{key}` to {value!r} in place of {settings[key]!r}" for key, value in chosen.items() if settings[key] != value
        )
        raise CheckpointError(
            f"{type(model).__name__} of `{source}` puts a {now.__name__} in place of the {before.__name__} `{name}` when it reads a short text, "
            "so its answers depend on what it read before. "
            + (f"If all texts are to be read so, set {told} in config.json." if told else "Such a model is not understood.")
        )


def _classes(model: PreTrainedModel) -> dict[str, type]:
    """Returns the class of each layer."""
    return {name: type(module) for name, module in model.named_modules()}


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what a model holds of its configuration's fields, the configuration's own value where it holds none."""
    fields = {key: value for key, value in model.config.to_dict().items() if isinstance(value, str | int | float | bool)}
    return fields | {key: value for key, value in vars(model.base_model).items() if key in fields}
