"""A loaded checkpoint as one plain record: a PyTorch model, a clean `tokenizer.json`, and what the later stages need to know of both.

Its floating-point operations are counted while the model runs, because layers may be shared and any kind of product may use weights.
Matrix products and convolutions are counted, two operations for each multiplication with its addition, at three lengths. What is the same
at all lengths is left out: layers on [CLS] alone, and tables of relative positions, which a batch needs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from bertserve.export.checkpoint.source import CardMetadata
from bertserve.service.bundle.graph_spec import InputSpec, OutputSpec
from bertserve.service.bundle.manifest import (
    Activation,
    Embedding,
    Flops,
    MaskToken,
    SpecialPiece,
    Task,
    TokenizerSpec,
)

MAX_LENGTH = 32  # tokens; counts are exact at any length, and a large model should not take seconds


@dataclass(frozen=True)
class Checkpoint:
    """Everything the later stages need of a checkpoint.

    Attributes:
        source: Name of a local folder, or the hub id.
        revision: Hub revision, if any.
        commit: The hub's commit that was loaded, or None for a local folder.
        weights_sha256: Digest over the weight files.
        model: In float32, evaluation mode, with eager attention.
        task: Hugging Face task name.
        inputs: The graph's inputs: what the model takes and the tokenizer fills, and for fill-mask the masks' positions.
        outputs: The graph's outputs.
        labels: Label names by id.
        activation: What turns logits into scores.
        tokenizer: The Hugging Face tokenizer, for the reference side of parity.
        tokenizer_json: Fast tokenizer without truncation and padding.
        tokenizer_spec: What the manifest says of it, without the digest of its file.
        card: The checkpoint's README.md, if it has one.
        card_metadata: What it says of license, language and data.
        embedding: How a text's vector is computed, for feature extraction.
        attention_heads: Heads of each layer, where the graph gives attention maps out; else none.
        ignored_weights: Patterns of the names of weights that the model may leave unused, because the user said so.
    """

    source: str
    model: PreTrainedModel
    task: Task
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    labels: tuple[str, ...]
    activation: Activation
    tokenizer: Any
    tokenizer_json: str
    tokenizer_spec: TokenizerSpec
    revision: str | None = None
    commit: str | None = None
    weights_sha256: str = ""
    card: str | None = None
    card_metadata: CardMetadata = field(default_factory=CardMetadata)
    embedding: Embedding | None = None
    attention_heads: tuple[int, ...] = ()
    ignored_weights: tuple[str, ...] = ()

    @property
    def mask(self) -> MaskToken | None:
        """The mask token, for fill-mask."""
        return self.tokenizer_spec.mask

    @property
    def attention_size(self) -> tuple[int, int]:
        """How many heads an attention has and how many values they share out, of whole heads; zeros where the configuration does not say."""
        heads, hidden = (getattr(self.model.config, name, None) for name in ("num_attention_heads", "hidden_size"))
        if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1 or hidden % heads:
            return 0, 0
        return heads, hidden

    @property
    def attentions(self) -> int:
        """How many attentions a text goes through: one a layer, and in a decoder that reads an encoder two."""
        config: Any = self.model.config
        reads_encoder = config.is_encoder_decoder and any(name.endswith("decoder") for name, _ in self.model.named_modules())
        counts: list[int] = [getattr(config, name, None) or 0 for name in ("num_decoder_layers", "decoder_layers")]
        encoder_layers: int = config.num_hidden_layers
        return encoder_layers + (2 * max(counts) if reads_encoder else 0)

    def example_ids(self, length: int) -> list[int]:
        """Returns token ids of a text of this many tokens, with its special tokens: the heads of some models look for the last of them.

        Args:
            length: Tokens, special tokens counted.
        """
        word, single = 0 if self.tokenizer_spec.pad_id else 1, self.tokenizer_spec.single
        place = next((i for i, piece in enumerate(single) if not isinstance(piece, SpecialPiece)), 0)
        before, after = ([piece.id for piece in side if isinstance(piece, SpecialPiece)] for side in (single[:place], single[place:]))
        return [*before, *[word] * (length - len(before) - len(after)), *after][-length:]

    @cached_property
    def flops(self) -> Flops:
        """Floating-point operations of a text, counted on first access by running the model."""
        return count_flops(self.model, self.inputs, self.example_ids, max_length=self.tokenizer_spec.max_length)


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
