"""How much arithmetic a model does for a text, counted while it runs: layers may be shared, and weights stand in any kind of product.

Counted are products of matrices and convolutions, two operations for each multiplication with its addition, at three lengths.
What is the same at all of them is left out: layers on [CLS] alone, and tables of relative positions, which a batch needs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from service.bundle.graph_spec import InputSpec
from service.bundle.manifest import Flops

LONGEST = 32  # counts are exact at any length, and a large model should not take seconds


def measure(model: PreTrainedModel, inputs: Sequence[InputSpec], *, max_length: int, pad_id: int) -> Flops:
    """Returns the arithmetic of a text: what grows with its tokens, and what grows with their square.

    A head that reads every position is counted for all of them, but for that of a masked language model, which graphs run for the
    masks alone: where there is an input `mask_index` it is given one position, so that it does not grow.

    Args:
        model: In evaluation mode, with eager attention, so that every product is there to be counted.
        inputs: What the graph takes.
        max_length: Usable length in tokens.
        pad_id: Token id of the padding, which is not used.
    """
    longest = min(max_length, LONGEST)
    lengths = [max(longest // 4, 1), max(longest // 2, 2), max(longest, 3)]
    masked = any(spec.fill == "mask_index" for spec in inputs)
    with torch.no_grad(), _one_position(model) if masked else nullcontext():
        counts = [_count(model, inputs, length, pad_id) for length in lengths]
    return terms(lengths, counts)


def terms(lengths: Sequence[int], counts: Sequence[int]) -> Flops:
    """Returns the two terms of `constant + linear * S + quadratic * S**2` through three points, neither below what is possible.

    Args:
        lengths: Three, rising.
        counts: Operations at each.
    """
    (s, t, u), (x, y, z) = lengths, counts
    first, second = (y - x) / (t - s), (z - y) / (u - t)
    quadratic = max((second - first) / (u - s), 0.0)
    linear = first - quadratic * (s + t) if quadratic else (z - x) / (u - s)
    return Flops(linear=max(linear, 1.0), quadratic=quadratic)


def _count(model: PreTrainedModel, inputs: Sequence[InputSpec], length: int, pad_id: int) -> int:
    values = {"token_ids": 0 if pad_id else 1, "attention_mask": 1, "type_ids": 0}
    given = {spec.name: torch.full((1, length), values[spec.fill]) for spec in inputs if spec.fill in values}
    counter = _Counter()
    with counter:
        model(**given)
    return counter.total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of what makes subclasses of it
    """Adds up what operators do, by PyTorch's own formulas.

    PyTorch's FlopCounterMode also keeps track of modules, by hooks for gradients that there are none of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def _one_position(model: PreTrainedModel) -> Iterator[None]:
    """Has the head read the encoder's first position alone while the block runs."""

    def first(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        output["last_hidden_state"] = output["last_hidden_state"][:, :1]
        return output

    handle = model.base_model.register_forward_hook(first)
    try:
        yield
    finally:
        handle.remove()
