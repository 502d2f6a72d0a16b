"""Sentence similarity: the cosine between the embedding of one sentence and those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.tasks import embed
from service.tasks.encoded import Encoded, ModelConfig
from service.tasks.scores import Row
from service.text.tokenizer import Tokenizer

TASK = "sentence-similarity"


@dataclass(frozen=True, slots=True)
class Request:
    """One sentence, and those it is compared with.

    Attributes:
        source_sentence: The one.
        sentences: The others.
        like: How each is embedded; its text means nothing.
    """

    source_sentence: str
    sentences: tuple[str, ...]
    like: embed.Request

    @property
    def chars(self) -> int:
        """Characters that have to be tokenized."""
        return sum(request.chars for request in self.requests())

    def requests(self) -> list[embed.Request]:
        """Returns how the sentence and the others are embedded, in this order; nothing where there is nothing to compare."""
        texts = (self.source_sentence, *self.sentences) if self.sentences else ()
        return [replace(self.like, text=text) for text in texts]


def fits(head: ModelConfig) -> bool:
    """Returns whether a model embeds texts: every one of that task does."""
    return head.embedding is not None


def estimate(request: Request, max_length: int) -> int:
    """Returns a cheap guess of the tokens that the request will cost."""
    return sum(embed.estimate(each, max_length) for each in request.requests())


def encode(request: Request, tokenizer: Tokenizer) -> Encoded:
    """Returns one encoding per sentence, the source first.

    Raises:
        InvalidValueError: A sentence is too long and must not be cut.
    """
    encoded = [embed.encode(each, tokenizer) for each in request.requests()]
    return Encoded(encodings=[item.encodings[0] for item in encoded], truncated=any(item.truncated for item in encoded))


def decode(request: Request, encoded: Encoded, rows: Sequence[Row], head: ModelConfig) -> list[float]:
    """Returns the cosine of each sentence with the source, from -1 to 1.

    Args:
        request: The request.
        encoded: Not needed.
        rows: One row per sentence, the source first, as for `embed.decode`.
        head: Not needed.
    """
    if not rows:
        return []
    unit = embed.normalized(np.stack([embed.vectors(request.like, row) for row in rows]))
    cosines: list[float] = np.clip(unit[1:] @ unit[0], -1, 1).tolist()
    return cosines
