"""The attention of a model as transformers returns it: whether it does, in the form that is served, and how many heads each layer has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from bertserve.export.errors import CheckpointError

_TOLERANCE = 1e-3  # of the sum of a token's weights


@contextmanager
def returning_attention(model: PreTrainedModel) -> Iterator[None]:
    """Makes a model return its attention; only where it is wanted, for all that of a long text is gigabytes."""
    before = model.config.output_attentions
    model.config.output_attentions = True
    try:
        yield
    finally:
        model.config.output_attentions = before


def count_heads(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Returns the heads of each layer, as the model returns its attention.

    Args:
        model: With eager attention; others return none.
        tokenizer: Gives it a text.

    Raises:
        CheckpointError: It returns none, or not for each token a weight of each token, whose sum is 1.
    """
    ids = torch.tensor([tokenizer("a b c")["input_ids"]])
    with torch.no_grad(), returning_attention(model):
        outputs: Any = model(input_ids=ids)
    layers = outputs.get("attentions")
    if layers is None:
        raise CheckpointError(
            f"{type(model).__name__} returns no attention of one text's tokens to each other; export it without --attentions."
        )
    length = ids.shape[1]
    for number, weights in enumerate(layers):
        if weights is None or tuple(weights.shape[:1] + weights.shape[2:]) != (1, length, length):
            found = "none" if weights is None else f"a tensor of {list(weights.shape)}"
            raise CheckpointError(
                f"{type(model).__name__} returns {found} as the attention of layer {number} to a text of {length} tokens, and not one "
                f"of [1, heads, {length}, {length}]; export it without --attentions."
            )
        sums = weights.sum(-1)
        if weights.min() < 0 or (sums - 1).abs().max() > _TOLERANCE:
            raise CheckpointError(
                f"the attention of layer {number} of {type(model).__name__} is no share of each token: a token's weights add up to "
                f"{sums.min():.3g} to {sums.max():.3g}, and the least is {weights.min():.3g}; export it without --attentions."
            )
    return tuple(int(weights.shape[1]) for weights in layers)
