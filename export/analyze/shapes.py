"""The shape of an encoder: what decides its arithmetic. Named ones by their values, and those that differ from one in one thing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bertserve.export.errors import CheckpointError
from bertserve.service.errors import plural

Axis = Literal["layers", "heads", "hidden"]
AXES: tuple[Axis, ...] = ("layers", "heads", "hidden")
LENGTHS = (16, 64, 128, 256, 512)  # tokens
MIDDLE = 128  # tokens at which shapes are compared, and a bundle is profiled


@dataclass(frozen=True)
class Shape:
    """The shape of an encoder.

    Attributes:
        layers: Number of layers.
        heads: Attention heads of each layer.
        hidden: Size of a token's vector.
        inner: Size of the feed-forward block's hidden vector; None where the configuration does not say.
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
    """Returns the shapes that differ from a base along one axis, the base among them, smallest first.

    Layers are a quarter and a half as many. Heads are a third or a quarter as many, and twice as many, as far as they divide the hidden
    size: the matrices stay as they are. The hidden size is a quarter and a half, with heads of the same size and the block behind them in
    proportion.
    """
    found = {base}
    if axis == "layers":
        found |= {replace(base, layers=count) for count in (base.layers // 4, base.layers // 2) if count}
    elif axis == "heads":
        counts = {1, base.heads // 4, base.heads // 2, 2 * base.heads}
        found |= {replace(base, heads=count) for count in counts if count and base.hidden % count == 0}
    else:
        for part in (4, 2):
            heads, remainder = divmod(base.heads, part)
            if heads and not remainder and base.hidden % part == 0:
                inner = None if base.inner is None else base.inner // part
                found.add(Shape(base.layers, heads, base.hidden // part, inner))
    return sorted(found, key=lambda shape: getattr(shape, axis))


def choose_lengths(asked: Sequence[int] | None, default: Sequence[int], most: int) -> list[int]:
    """Returns the lengths to measure, in tokens: those that were asked for, or the default ones that a model takes.

    Args:
        asked: What was asked for, if anything.
        default: Used where nothing was.
        most: The model's usable length, which stands for default ones that are all longer.

    Raises:
        CheckpointError: The model does not take a length that was asked for.
    """
    if asked is not None and max(asked) > most:
        raise CheckpointError(f"the model takes at most {most} tokens, but --lengths has {max(asked)}; give shorter ones.")
    return [length for length in asked or default if length <= most] or [most]
