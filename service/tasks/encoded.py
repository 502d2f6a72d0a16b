"""What a task's `encode` hands to the lanes and back to its `decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from service.bundle.manifest import Activation, Embedding, MaskToken
from service.text.tokenizer import Encoding

# Numbers in one answer: a million take 20 MB and a tenth of a second to write.
MAX_VALUES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The encodings of one input; a task adds what its `decode` needs besides.

    Attributes:
        encodings: One per window; none where there is nothing to run.
        truncated: Whether text was cut off.
        warnings: What else the caller should know, each `topic; message`.
        values: Length of the result, where it can be very long, as that of so many numbers of 20 bytes.
        reserve: Tokens that the queue holds besides: of what `decode` may run, at most, or for outputs much larger than those of a text.
    """

    encodings: list[Encoding]
    truncated: bool = False
    warnings: tuple[str, ...] = ()
    values: int = 0
    reserve: int = 0


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
