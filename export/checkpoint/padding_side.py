"""Finds the side on which a model tolerates padding, by running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

Side = Literal["left", "right"]

MAX_DIFFERENCE = 1e-3


def find_padding_side(model: PreTrainedModel, tokenizer: Any, names: Sequence[str]) -> Side:
    """Returns the side on which padding leaves a text's outputs unchanged: the tokenizer's own if it does, else the other.

    XLNet, for one, reads its last position, so it tolerates padding on the left alone. If neither side is tolerated the tokenizer's is
    returned: parity then finds the graph not batch-invariant, and the service runs it one text at a time.

    Args:
        model: In evaluation mode.
        tokenizer: Its Hugging Face tokenizer.
        names: The inputs that the tokenizer fills.
    """
    declared: Side = tokenizer.padding_side
    sides: tuple[Side, ...] = (declared, "left" if declared == "right" else "right")
    return next((side for side in sides if _tolerates(model, tokenizer, names, side)), declared)


def _tolerates(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], side: Side) -> bool:
    """Compares a text's outputs with padding on one side with those without padding."""
    short, long = "A short one.", "Another text, which is a good deal longer than the one before it."
    batch = tokenizer([short, long], padding=True, padding_side=side, return_tensors="pt", return_token_type_ids=True)
    alone = tokenizer([short], return_tensors="pt", return_token_type_ids=True)
    length = alone["input_ids"].shape[1]
    with torch.no_grad():
        padded_outputs, outputs = (model(**{name: inputs[name] for name in names}) for inputs in (batch, alone))
    for name in outputs:
        padded, expected = padded_outputs[name], outputs[name]
        if not isinstance(expected, torch.Tensor):
            continue
        if expected.ndim > 1 and expected.shape[1] == length:
            padded = padded[:, -length:] if side == "left" else padded[:, :length]
        if not torch.allclose(padded[:1], expected, rtol=0, atol=MAX_DIFFERENCE):
            return False
    return True
