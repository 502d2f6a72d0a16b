"""Further: what a task's `decode` may return in place of a result, because the outputs decide what has to run next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from service.tasks.decoding.scores import Row
from service.text.tokenizer import Encoding


@dataclass(frozen=True, slots=True)
class Further:
    """Encodings that a request runs next, and what follows from their outputs.

    Attributes:
        work: At least one encoding, each with what keeps of its outputs what `finish` needs.
        finish: What was kept of each, in order -> the result, or what runs next.
        reserve: Tokens of what may run after these, at most.
    """

    work: Sequence[tuple[Encoding, Callable[[Row], Row]]]
    finish: Callable[[Sequence[Row]], Any]
    reserve: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of these encodings."""
        return sum(encoding.cost_tokens for encoding, _ in self.work)
