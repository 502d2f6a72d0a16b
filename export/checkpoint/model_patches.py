"""Patches of transformers' model code for the time of tracing. They find functions by name, and never ask for a model's type.

- Relative positions are sorted into buckets by the ceiling or floor of a logarithm (DeBERTa v2 and v3, MPNet). At the border of two
  buckets the last bit decides, and ONNX Runtime's logarithm may round otherwise than PyTorch's; another bucket is another bias.
  These functions are replaced by tables that PyTorch fills.
- DeBERTa v1 cuts its table of relative positions to the length of the text, and a tracer keeps the length that it saw. The whole
  table gives the same scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

# functions of transformers' models, by the names that they have there
BUCKET_FUNCTIONS = ("make_log_bucket_position", "relative_position_bucket")
SPAN_FUNCTIONS = ("compute_attention_span",)


@contextmanager
def patch_for_tracing(model: PreTrainedModel, length: int) -> Iterator[list[str]]:
    """Makes a model traceable for every length, by replacing functions of its code until the block ends.

    Args:
        model: The model.
        length: The longest text that it will read, in tokens.

    Yields:
        The names of the functions that were replaced.
    """
    replaced: list[str] = []
    with ExitStack() as stack:
        for owner in _owners(model):
            for names, replace in (
                (BUCKET_FUNCTIONS, lambda function: _tabulate(function, length)),
                (SPAN_FUNCTIONS, lambda _: _full_span),
            ):
                for name in names:
                    original = vars(owner).get(name)
                    if original is None:
                        continue
                    is_static = isinstance(original, staticmethod)
                    replacement = replace(original.__func__ if is_static else original)
                    stack.enter_context(mock.patch.object(owner, name, staticmethod(replacement) if is_static else replacement))
                    replaced.append(name)
        yield replaced


def _owners(model: PreTrainedModel) -> list[Any]:
    """Returns the classes of a model's modules, and the Python modules that define them, each once."""
    classes = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")}
    return sorted({sys.modules[cls.__module__] for cls in classes} | classes, key=str)


def _tabulate(bucket: Callable[..., torch.Tensor], length: int) -> Callable[..., torch.Tensor]:
    """Returns a function that looks up the bucket of each relative position, int64 of any shape, in a table."""

    def look_up(relative: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # through numpy, so that the tracer records the table as a constant, and not the operators that fill it
        table = torch.from_numpy(bucket(torch.arange(-length, length + 1), *args, **options).numpy())
        return table[relative + length]

    return look_up


def _full_span(query: torch.Tensor, key: torch.Tensor, longest: int) -> int:
    """Replaces a function that returns how much of the table of relative positions a text of this length needs."""
    return longest
