"""Counts a model's floating-point operations while it runs, because layers may be shared and weights stand in any kind of product.

Matrix products and convolutions are counted, two operations for each multiplication with its addition, at three lengths. What is the same
at all lengths is left out: layers on [CLS] alone, and tables of relative positions, which a batch needs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from bertserve.service.bundle.graph_spec import InputSpec
from bertserve.service.bundle.manifest import Flops

MAX_LENGTH = 32  # tokens; counts are exact at any length, and a large model should not take seconds


def count_flops(
    model: PreTrainedModel, inputs: Sequence[InputSpec], example_ids: Callable[[int], Sequence[int]], *, max_length: int
) -> Flops:
    """Returns the operations of a text: those that grow with its tokens, and those that grow with their square.

    A head that reads every position is counted at all of them. The exception is a masked language model, whose graphs run the head on the
    masks alone: if there is an input `mask_index`, the head is given one position, so that its count does not grow.

    Args:
        model: In evaluation mode, with eager attention, so that every product is an operator of its own.
        inputs: The graph's inputs.
        example_ids: Returns the token ids of a text of so many tokens.
        max_length: Usable length in tokens.
    """
    longest = min(max_length, MAX_LENGTH)
    lengths = [max(longest // 4, 1), max(longest // 2, 2), max(longest, 3)]
    masked = any(spec.fill == "mask_index" for spec in inputs)
    with torch.no_grad(), _head_on_one_position(model) if masked else nullcontext():
        counts = [_count_operations(model, inputs, example_ids(length)) for length in lengths]
    return fit_terms(lengths, counts)


def fit_terms(lengths: Sequence[int], counts: Sequence[int]) -> Flops:
    """Returns the two terms of `constant + linear * S + quadratic * S**2` through three points, neither below what is possible.

    Args:
        lengths: Three, ascending, in tokens.
        counts: Operations at each length.
    """
    (s, t, u), (x, y, z) = lengths, counts
    first, second = (y - x) / (t - s), (z - y) / (u - t)
    quadratic = max((second - first) / (u - s), 0.0)
    linear = first - quadratic * (s + t) if quadratic else (z - x) / (u - s)
    return Flops(linear=max(linear, 1.0), quadratic=quadratic)


def _count_operations(model: PreTrainedModel, inputs: Sequence[InputSpec], ids: Sequence[int]) -> int:
    """Runs one text and returns its operations."""
    values = {"token_ids": ids, "attention_mask": [1] * len(ids), "type_ids": [0] * len(ids)}
    feed = {spec.name: torch.tensor([values[spec.fill]]) for spec in inputs if spec.fill in values}
    counter = _FlopCounter()
    with counter:
        model(**feed)
    return counter.total


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its metaclass
    """Sums the operations of all operators, by PyTorch's own formulas.

    PyTorch's FlopCounterMode also tracks modules, by hooks for gradients, and here there are no gradients.
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
def _head_on_one_position(model: PreTrainedModel) -> Iterator[None]:
    """Makes the head read the encoder's first position alone until the block ends."""

    def keep_first(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        output["last_hidden_state"] = output["last_hidden_state"][:, :1]
        return output

    handle = model.base_model.register_forward_hook(keep_first)
    try:
        yield
    finally:
        handle.remove()
