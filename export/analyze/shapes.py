"""The shape of an encoder, which decides its cost: named shapes, and variants of a shape with one difference. It has no side effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bertserve.export.errors import CheckpointError
from bertserve.service.errors import plural

Axis = Literal["layers", "heads", "hidden"]
AXES: tuple[Axis, ...] = ("layers", "heads", "hidden")
LENGTHS = (16, 64, 128, 256, 512)  # in tokens
MIDDLE = 128  # tokens for comparing shapes, and for the profile of a bundle


@dataclass(frozen=True)
class Shape:
    """The shape of an encoder.

    Attributes:
        layers: Number of layers.
        heads: Number of attention heads per layer.
        hidden: Size of a token's vector.
        inner: Size of the feed-forward block's hidden vector; None if the configuration does not have it.
    """

    layers: int
    heads: int
    hidden: int
    inner: int | None

    def __str__(self) -> str:
        inner = "" if self.inner is None else f", feed-forward {self.inner}"
        counts = (plural(count, name) for count, name in ((self.layers, "layer"), (self.heads, "head")))
        return f"{', '.join(counts)}, hidden {self.hidden}{inner}"


NAMED = {
    "bert-tiny": Shape(2, 2, 128, 512),
    "bert-mini": Shape(4, 4, 256, 1024),
    "bert-small": Shape(4, 8, 512, 2048),
    "bert-medium": Shape(8, 8, 512, 2048),
    "minilm": Shape(6, 12, 384, 1536),
    "distilbert": Shape(6, 12, 768, 3072),
    "bert-base": Shape(12, 12, 768, 3072),
    "bert-large": Shape(24, 16, 1024, 4096),
}


def variants(base: Shape, axis: Axis) -> list[Shape]:
    """Returns the shapes that differ from a base along one axis, including the base, smallest first.

    There are variants with a quarter and half of the layers; with one head, and a quarter, half and twice of the heads, as far as they
    divide the hidden size, with matrices of the same size; and with a quarter and half of the hidden size, with heads of the same size and
    a feed-forward block in proportion.
    """
    shapes = {base}
    if axis == "layers":
        shapes |= {replace(base, layers=count) for count in (base.layers // 4, base.layers // 2) if count}
    elif axis == "heads":
        counts = {1, base.heads // 4, base.heads // 2, 2 * base.heads}
        shapes |= {replace(base, heads=count) for count in counts if count and base.hidden % count == 0}
    else:
        for part in (4, 2):
            heads, remainder = divmod(base.heads, part)
            if heads and not remainder and base.hidden % part == 0:
                inner = None if base.inner is None else base.inner // part
                shapes.add(Shape(base.layers, heads, base.hidden // part, inner))
    return sorted(shapes, key=lambda shape: getattr(shape, axis))


def choose_lengths(lengths: Sequence[int] | None, default: Sequence[int], max_length: int) -> list[int]:
    """Returns the lengths to measure, in tokens: the requested ones, or default ones that the model can read, or only its maximum length.

    Raises:
        CheckpointError: The model cannot read a requested length.
    """
    if lengths is not None and max(lengths) > max_length:
        raise CheckpointError(f"the model takes at most {max_length} tokens, but --lengths has {max(lengths)}; give shorter ones.")
    return [length for length in lengths or default if length <= max_length] or [max_length]
