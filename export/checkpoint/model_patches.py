"""What a model's code does that none of its declared facts says, and what to do about it. One place for all of it.

Nothing here asks for a model's name: what is looked for is a function or a module that the model's own code has.

- Relative positions come in buckets, by the ceiling or the floor of a logarithm (DeBERTa v2 and v3, MPNet). At the border of two
  buckets the last bit decides, and ONNX Runtime's logarithm may round otherwise than PyTorch's; another bucket is another bias.
  While a graph is traced such functions are tables, filled by PyTorch.
- DeBERTa v1 cuts its table of relative positions to the length of the text, and a tracer keeps the length that it saw. The whole
  table gives the same scores.
- A padded text is to be read as it is alone. Which side padding goes to is what the tokenizer says, unless the model shows that it
  bears only the other (`padding_side`). XLNet reads its last position, and bears the left one alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest import mock

import torch
from transformers import PreTrainedModel

Side = Literal["left", "right"]

# functions of a model's code, by the name that it gives them
_BUCKETS = ("make_log_bucket_position", "relative_position_bucket")
_SPANS = ("compute_attention_span",)
_NEAR = 1e-3


@contextmanager
def mended(model: PreTrainedModel, length: int) -> Iterator[list[str]]:
    """Lets a model be traced for every length, by replacing functions of its code until the block ends.

    Args:
        model: The model.
        length: The longest text that it will read, in tokens.

    Yields:
        The names of what was replaced.
    """
    found: list[str] = []
    with ExitStack() as stack:
        for owner in _owners(model):
            for names, replacement in ((_BUCKETS, lambda original: _tabulated(original, length)), (_SPANS, lambda original: _whole)):
                for name in names:
                    original = vars(owner).get(name)
                    if original is None:
                        continue
                    static = isinstance(original, staticmethod)
                    new = replacement(original.__func__ if static else original)
                    stack.enter_context(mock.patch.object(owner, name, staticmethod(new) if static else new))
                    found.append(name)
        yield found


def _owners(model: PreTrainedModel) -> list[Any]:
    """Returns the classes of a model's modules, and the Python modules that they stand in, each once."""
    classes = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")}
    return sorted({sys.modules[cls.__module__] for cls in classes} | classes, key=str)


def _tabulated(bucket: Callable[..., torch.Tensor], length: int) -> Callable[..., torch.Tensor]:
    """Returns a function of relative positions, element by element, that looks its results up."""

    def looked_up(relative: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # through numpy, so that the tracer sees a constant and not how it came about
        table = torch.from_numpy(bucket(torch.arange(-length, length + 1), *args, **options).numpy())
        return table[relative + length]

    return looked_up


def _whole(query: torch.Tensor, key: torch.Tensor, longest: int) -> int:
    """Stands in for a function that returns how much of the table of relative positions a text of this length needs."""
    return longest


def padding_side(model: PreTrainedModel, tokenizer: Any, names: Sequence[str]) -> Side:
    """Returns where padding must go for a text to be read as it is alone: by the tokenizer, or else the other side.

    Args:
        model: In evaluation mode.
        tokenizer: Its Hugging Face tokenizer.
        names: The inputs that the tokenizer fills.
    """
    declared: Side = tokenizer.padding_side
    sides: tuple[Side, ...] = (declared, "left" if declared == "right" else "right")
    # where neither does, parity finds the graph not batch-invariant, and the service runs it one text at a time
    return next((side for side in sides if _bears(model, tokenizer, names, side)), declared)


def _bears(model: PreTrainedModel, tokenizer: Any, names: Sequence[str], side: Side) -> bool:
    short, long = "A short one.", "Another text, which is a good deal longer than the one before it."
    batch = tokenizer([short, long], padding=True, padding_side=side, return_tensors="pt", return_token_type_ids=True)
    alone = tokenizer([short], return_tensors="pt", return_token_type_ids=True)
    length = alone["input_ids"].shape[1]
    with torch.no_grad():
        together, single = (model(**{name: inputs[name] for name in names}) for inputs in (batch, alone))
    for name in single:
        a, b = together[name], single[name]
        if not isinstance(b, torch.Tensor):
            continue
        if b.ndim > 1 and b.shape[1] == length:
            a = a[:, -length:] if side == "left" else a[:, :length]
        if not torch.allclose(a[:1], b, rtol=0, atol=_NEAR):
            return False
    return True
