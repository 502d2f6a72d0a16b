"""Request bodies as inputs of the graph, tokenized before any run is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Feed = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EncodedBodies:
    """The runs of the graph that some bodies need.

    Attributes:
        feeds: For each body, the inputs of its runs: one run for each text, or one for each window of a long text.
        lengths: For each body, the length of each run in tokens, including special tokens.
        texts: For each body, its number of texts.
    """

    feeds: Sequence[Sequence[Feed]]
    lengths: Sequence[Sequence[int]]
    texts: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each body, including special tokens."""
        return [sum(lengths) for lengths in self.lengths]
