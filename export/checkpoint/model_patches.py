"""Patches of transformers' model code during tracing. They find functions by name, and never check a model's type.

- Relative positions are sorted into buckets by the ceiling or floor of a logarithm (DeBERTa v2 and v3, MPNet). At the border of two
  buckets the last bit decides, and ONNX Runtime can round the logarithm in another way than PyTorch, which would select another bias.
  So these functions are replaced by tables, which PyTorch fills in a run of the model before the tracing.
- DeBERTa v1 cuts its table of relative positions to the length of the text, and a tracer would keep the example's length. The whole
  table gives the same scores.
- ONNX Runtime's optimizer finds attention by how the values for padding are computed. It knows BERT's old form, `(1 - mask) * lowest`, but
  not what each version of transformers and of the tracers makes of a choice by a Boolean mask. The values are the same.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


@contextmanager
def patch_for_tracing(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Makes a model traceable for texts of up to `length` tokens: replaces functions of its code until the block ends."""
    # name of a function in transformers' models -> what replaces it
    replacements: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "make_log_bucket_position": lambda function: _tabulate(function, length),
        "relative_position_bucket": lambda function: _tabulate(function, length),
        # it returns the part of the table of relative positions for a text's length
        "compute_attention_span": lambda _: lambda query, key, longest: longest,
        "create_bidirectional_mask": _mask_keys,
        # it checks a condition on values, which a tracer cannot evaluate
        "torch_compilable_check": lambda _: lambda *arguments, **options: None,
    }
    classes = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")}
    owners: list[Any] = sorted({sys.modules[cls.__module__] for cls in classes} | classes, key=str)
    with ExitStack() as stack:
        stack.enter_context(_SelectLastPosition())
        for owner in owners:
            for name, replace in replacements.items():
                original = vars(owner).get(name)
                if original is not None:
                    is_static = isinstance(original, staticmethod)
                    replacement = replace(original.__func__ if is_static else original)
                    stack.enter_context(mock.patch.object(owner, name, staticmethod(replacement) if is_static else replacement))
        yield


def _tabulate(bucket: Callable[..., torch.Tensor], length: int) -> Callable[..., torch.Tensor]:
    """Returns a function that looks up the bucket of each relative position, int64 of any shape, in a table.

    The table is filled at the first call, which is before the tracing, so it is a constant for each tracer.
    """
    tables: dict[Any, torch.Tensor] = {}

    def look_up(relative: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        key = args, tuple(options.items())
        if key not in tables:
            tables[key] = bucket(torch.arange(-length, length + 1), *args, **options)
        return tables[key][relative + length]

    return look_up


def _mask_keys(create_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that returns the values to add to the scores for padding, float32 [rows, 1, 1, length]."""

    def mask_keys(*args: Any, **options: Any) -> Any:
        attention_mask = inspect.signature(create_mask).bind(*args, **options).arguments["attention_mask"]
        is_window = any(options.get(name) is not None for name in ("and_mask_function", "or_mask_function"))
        if attention_mask is None or attention_mask.ndim != 2 or is_window:
            return create_mask(*args, **options)
        # the expansion changes nothing, but the optimizer looks for it
        padding = 1.0 - attention_mask[:, None, None, :].expand(-1, -1, -1, -1).float()
        return padding.masked_fill(padding.bool(), torch.finfo(torch.float32).min)

    return mask_keys


class _SelectLastPosition(TorchFunctionMode):
    """Makes `hidden[mask]` return the last selected position of each row; mask is bool [rows, length], hidden is [rows, length, values].

    BART and T5 classify by the last `</s>`: `hidden[mask, :].view(rows, -1, values)[:, -1, :]`, which fails unless each row has the same
    number. For a row without a selected position it is the first position, where the model itself would fail.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            mask, *rest = index if isinstance(index, tuple) else (index,)
            takes_all_values = all(part == slice(None) for part in rest)
            if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim == 2 and tensor.ndim == 3 and takes_all_values:
                positions = torch.arange(mask.shape[1], dtype=torch.int32)
                last = (mask.to(torch.int32) * positions).argmax(-1)
                return tensor[torch.arange(mask.shape[0]), last]
        return func(*args, **(kwargs or {}))
