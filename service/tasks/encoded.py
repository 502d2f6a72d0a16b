"""What a task's `encode` hands to the lanes and back to its `decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.bundle.manifest import Activation, Embedding, MaskToken
from service.text.tokenizer import Encoding, Tokens

# Windows of a text that are told of.
MAX_SPANS = 64


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A part of an input that the model read in one encoding.

    Attributes:
        field: The text of the input that it is of; empty where the input has one text.
        start: Its first code point.
        end: The one after its last.
    """

    field: str
    start: int
    end: int


def spans_read(tokens: Tokens, cuts: Sequence[range], field: str = "") -> tuple[ReadSpan, ...]:
    """Returns what windows have of a text, of the first `MAX_SPANS` and one more; `cuts` are their tokens."""
    return tuple(ReadSpan(field, *tokens.span(cut)) if cut else ReadSpan(field, 0, 0) for cut in cuts[: MAX_SPANS + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The encodings of one input; a task adds what its `decode` needs besides.

    Attributes:
        encodings: One per window; none where there is nothing to run.
        truncated: Whether text was cut off.
        warnings: What else the caller should know, each `topic; message`.
        read: What the model reads of a text that is cut or read in several windows; empty where it reads all at once.
    """

    encodings: list[Encoding]
    truncated: bool = False
    warnings: tuple[str, ...] = ()
    read: tuple[ReadSpan, ...] = ()


class ModelConfig(Protocol):
    """What `decode` needs to know of the model; a manifest has it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Label names by id."""
        ...

    @property
    def activation(self) -> Activation:
        """What turns logits into scores."""
        ...

    @property
    def mask(self) -> MaskToken | None:
        """The token that stands for a word to be filled in, of a model that fills them."""
        ...

    @property
    def embedding(self) -> Embedding | None:
        """What a text's vector is made of, of a model that gives vectors."""
        ...

    @property
    def attention_heads(self) -> tuple[int, ...]:
        """Heads of each layer, of a model that gives its attention out; else none."""
        ...
