"""Patches of transformers' model code for the time of tracing. They find functions by name, and never ask for a model's type.

- Relative positions are sorted into buckets by the ceiling or floor of a logarithm (DeBERTa v2 and v3, MPNet). At the border of two
  buckets the last bit decides, and ONNX Runtime's logarithm may round otherwise than PyTorch's; another bucket is another bias.
  These functions are replaced by tables that PyTorch fills when the model runs once before it is traced.
- DeBERTa v1 cuts its table of relative positions to the length of the text, and a tracer keeps the length that it saw. The whole
  table gives the same scores.
- BART and T5 classify by the last `</s>` of each row, which they take out of all that a mask selects: so many that only the ids say how
  many, and as many in each row, or they stop. The last one of each row is selected at once, for rows with any number of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# functions of transformers' models, by the names that they have there
BUCKET_FUNCTIONS = ("make_log_bucket_position", "relative_position_bucket")
SPAN_FUNCTIONS = ("compute_attention_span",)
# conditions on values, which no tracer can decide
CHECK_FUNCTIONS = ("torch_compilable_check",)


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
        stack.enter_context(_LastOfEachRow())
        for owner in _owners(model):
            for names, replace in (
                (BUCKET_FUNCTIONS, lambda function: _tabulate(function, length)),
                (SPAN_FUNCTIONS, lambda _: _full_span),
                (CHECK_FUNCTIONS, lambda _: _no_check),
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
    """Returns a function that looks up the bucket of each relative position, int64 of any shape, in a table.

    The table is filled when it is first looked up, which is before the model is traced: then it is a constant for each tracer.
    """
    tables: dict[Any, torch.Tensor] = {}

    def look_up(relative: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        key = args, tuple(options.items())
        if key not in tables:
            tables[key] = bucket(torch.arange(-length, length + 1), *args, **options)
        return tables[key][relative + length]

    return look_up


class _LastOfEachRow(TorchFunctionMode):
    """Makes `hidden[mask]` the last selected position of each row: of a mask, bool [rows, length], and a tensor [rows, length, values].

    What the models take of the result is that position: `hidden[mask, :].view(rows, -1, values)[:, -1, :]`. Of a row without any it is the
    first position, where the model itself would stop.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            mask, *rest = index if isinstance(index, tuple) else (index,)
            whole = all(part == slice(None) for part in rest)
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim == 2 and tensor.ndim == 3 and whole:
                places = torch.arange(mask.shape[1], dtype=torch.int32)
                last = (mask.to(torch.int32) * places).argmax(-1)
                return tensor[torch.arange(mask.shape[0]), last]
        return func(*args, **(kwargs or {}))


def _no_check(condition: object, *arguments: Any, **options: Any) -> None:
    """Replaces a function that stops where a condition on values does not hold."""


def _full_span(query: torch.Tensor, key: torch.Tensor, longest: int) -> int:
    """Replaces a function that returns how much of the table of relative positions a text of this length needs."""
    return longest
