"""The texts that samples are made of, and how ordinary texts are read: alone, or as pairs of neighbors. Pure.

The same pairs calibrate int8, as token ids, and judge it, as texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Text = TypeVar("Text")
Pairs = Sequence[tuple[Text, Text]]
Arranged = tuple[list[Text], list[tuple[Text, Text]]]  # texts that are read alone, and pairs

LONG = (
    "The first half hour promises a great deal, and the cast is more than willing to deliver it. "
    "Then the script begins to repeat itself, the jokes wear thin, and nobody seems to know how to stop. "
)
NAMES = "Ada Lovelace met Charles Babbage in London, and the Royal Society of Sweden invited Maria Agnesi from Milan to Uppsala. "
SENTENCE = "A warm, funny and thoroughly engaging film."
TEXTS = [
    "good",
    SENTENCE,
    "It isn't that the acting is bad; it's that there is none.",
    "¡Qué película más aburrida! 😴 看了两遍，还是觉得很好。",
    "naïve café — “quotes”, tabs\tand\r\nlines\u200b with zero width",
    "3.5/10, would not watch again @ £12.50!!!",
    NAMES,
    LONG,
    LONG * 2,
    LONG * 4,
]


def halves(text: str) -> tuple[str, str]:
    """Returns the first and the second half of a text's words."""
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def read_alone(lines: Sequence[Text], passages: Sequence[Text], own: Pairs[Text], pairs_only: bool) -> Arranged[Text]:
    """Returns all texts to read alone, and the user's pairs."""
    return [*lines, *passages], list(own)


def neighbors(lines: Sequence[Text], passages: Sequence[Text]) -> list[tuple[Text, Text]]:
    """Returns each line with the next one, and then each passage with a line before it."""
    pairs = [(line, lines[(i + 1) % len(lines)]) for i, line in enumerate(lines)]
    return [*pairs, *((lines[i % len(lines)], passage) for i, passage in enumerate(passages))]
