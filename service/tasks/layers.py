"""Which layers of an encoder a text's vectors are made of, and how several become one.

Layers are counted as transformers counts `hidden_states`: 0 is what the embeddings give, 1 the first layer, and negative numbers count from
the end, so that -1 is the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertserve.service.bundle.manifest import LAST_FOUR, Combine, Embedding, Layers
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.decoding.scores import Floats, Row

_MOST_SHOWN = 32


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The layers that a vector is made of, and where the graph gives them out.

    Attributes:
        output: Name of the graph's output.
        count: Layers that stand in it side by side.
        places: Which of them are taken, in this order.
        combine: How several become one.
    """

    output: str = "last_hidden_state"
    count: int = 1
    places: tuple[int, ...] = (0,)
    combine: Combine = "concat"

    @property
    def widths(self) -> int:
        """How many times as many values a vector has as one of a single layer."""
        return len(self.places) if self.combine == "concat" else 1

    def of(self, row: Row) -> Floats:
        """Returns the tokens' vectors, float32 [length, values].

        Args:
            row: The graph's outputs of a text, float32 [length, count * values of a layer] each.
        """
        given = row[self.output]
        if self.count == 1:
            return given
        layers = given.reshape(len(given), self.count, -1)[:, list(self.places)]
        if self.combine == "concat":
            side_by_side: Floats = layers.reshape(len(given), -1)
            return side_by_side
        total: Floats = layers.sum(axis=1, dtype=np.float32)
        return total if self.combine == "sum" else total / np.float32(len(self.places))


LAST_LAYER = LayerChoice()


def choose(asked: Layers | list[int] | None, combine: Combine | None, embedding: Embedding) -> LayerChoice:
    """Returns the layers of a request.

    Args:
        asked: What the caller says; None for the bundle's own choice.
        combine: How several become one; None for the bundle's own way.
        embedding: What the bundle has.

    Raises:
        InvalidValueError: It does not give out one of the layers, or a layer is named twice.
    """
    if asked == "last_four" and embedding.layers == "last":
        raise InvalidValueError(
            "`layers` is `last_four`, but this model's graph gives out its last layer only; export it with `--layers last_four`."
        )
    wanted, known = _numbers(asked or embedding.default_layers), embedding.places
    if missing := [layer for layer in wanted if layer not in known]:
        raise InvalidValueError(
            "`layers` names the layer {missing}, and this model's graph gives out {describe}.",
            missing=missing[0],
            describe=_describe(embedding),
        )
    places = tuple(known[layer] for layer in wanted)
    if len(set(places)) < len(places):
        raise InvalidValueError("`layers` names a layer twice: {wanted}; name each once.", wanted=list(wanted))
    if places == (known[-1],):
        return LAST_LAYER
    return LayerChoice(embedding.layers_output, embedding.layer_count, places, combine or embedding.combine)


def _numbers(layers: Layers | list[int] | None) -> tuple[int, ...]:
    if layers == "last_four":
        return tuple(range(-LAST_FOUR, 0))
    return (-1,) if layers is None or isinstance(layers, str) else tuple(layers)


def _describe(embedding: Embedding) -> str:
    """Returns which layers there are, and what to do about others."""
    if embedding.layers == "last":
        return "its last layer only, which is -1; export it with `--layers` and a list for others"
    if embedding.layers == "last_four":
        return "the layers -4 to -1, counted from the end; export it with `--layers` and a list for others"
    depth = embedding.layers[-1]
    named = ", ".join(f"{layer} or {layer - depth - 1}" for layer in embedding.layers[:_MOST_SHOWN])
    return f"the layers {named}; export it with `--layers` and a list for others"
