"""Which texts are read alone and which as pairs, for each task; single texts are paired with their neighbors. Pure.

The same pairs calibrate int8, as token ids, and judge it, as texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bertserve.export.choices import asked

Text = TypeVar("Text")
Pairs = list[tuple[Text, Text]]


def arrange(
    task: str, lines: Sequence[Text], passages: Sequence[Text], own: Sequence[tuple[Text, Text]], *, pairs_only: bool
) -> tuple[list[Text], Pairs[Text]]:
    """Returns the texts to read alone, and the pairs.

    Question answering, multiple choice, and a model that takes only pairs, get all texts as pairs. Other classifiers get all texts
    alone and every second one as a pair too, because nothing says whether they are used with pairs, unless the user's file has pairs.

    Args:
        task: Hugging Face name of the task.
        lines: Short texts.
        passages: Long texts, none where there are no short ones.
        own: Pairs of the user's file.
        pairs_only: Whether the model takes only pairs.
    """
    if task == "multiple-choice":
        return [], [(lines[asked(i, len(lines))], text) for side in (lines, passages) for i, text in enumerate(side)]
    if task == "question-answering" or pairs_only:
        return [], [*_neighbors(lines, passages), *own]
    if task == "text-classification" and not own:
        pairs = _neighbors(lines, passages)
        return [*lines, *passages], [*pairs[1 : len(lines) : 2], *pairs[len(lines) + 1 :: 2]]
    return [*lines, *passages], list(own)


def _neighbors(lines: Sequence[Text], passages: Sequence[Text]) -> Pairs[Text]:
    """Returns each line with the next one, and then each passage with a line before it."""
    pairs = [(line, lines[(i + 1) % len(lines)]) for i, line in enumerate(lines)]
    return [*pairs, *((lines[i % len(lines)], passage) for i, passage in enumerate(passages))]
