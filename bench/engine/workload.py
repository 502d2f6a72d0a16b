"""Bodies as inputs of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine has to do for some bodies.

    Attributes:
        feeds: For each body, the inputs of its runs: one a text, or one a window.
        lengths: Of each run, tokens, special ones counted.
        texts: Of each body.
    """

    feeds: Sequence[Sequence[Feed]]
    lengths: Sequence[Sequence[int]]
    texts: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each body."""
        return [sum(lengths) for lengths in self.lengths]
