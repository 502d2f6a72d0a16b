"""The rules of the token-classification pipeline of transformers, which turn label scores into entities, in plain loops.

`make_token_classification.py` checks them against the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Entity = dict[str, Any]


@dataclass(frozen=True)
class Token:
    """One token of a text."""

    word: str  # in the vocabulary, or its text if it is unknown
    start: int
    end: int
    is_subword: bool  # it continues the word of the previous token


@dataclass(frozen=True)
class _Group:
    """Adjacent words of one entity: its label, the score of each word, and the indices of all tokens."""

    label: str
    scores: list[np.float32]
    tokens: list[int]


def softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def aggregate(
    text: str, tokens: list[Token], scores: Floats, labels: list[str], strategy: str, ignore_labels: Sequence[str]
) -> list[Entity]:
    """Returns the entities of a text from the label scores of its tokens, float32 [tokens, labels].

    The strategy "none" gives one entity per token. The others give one label per token ("simple") or per word ("first", "average",
    "max"). They join adjacent tokens or words with the same tag; a "B-" label starts a new entity.
    """
    entities: list[Entity] = []
    if strategy == "none":
        for index, (token, row) in enumerate(zip(tokens, scores, strict=True), 1):
            best = int(row.argmax())
            entity = {"entity": labels[best], "score": float(row[best]), "index": index}
            entities.append({**entity, "word": token.word, "start": token.start, "end": token.end})
        return [entity for entity in entities if entity["entity"] not in ignore_labels]

    words: list[list[int]] = []
    for number, token in enumerate(tokens):
        if strategy != "simple" and token.is_subword and words:
            words[-1].append(number)
        else:
            words.append([number])

    groups: list[_Group] = []
    previous = None
    for word in words:
        row = word_scores(scores[word], strategy)
        label = labels[int(row.argmax())]
        tag = label[2:] if label.startswith(("B-", "I-")) else label
        if tag != previous or label.startswith("B-"):
            groups.append(_Group(label.split("-", 1)[-1], [], []))
        groups[-1].scores.append(row.max())
        groups[-1].tokens.extend(word)
        previous = tag

    for group in groups:
        start, end = tokens[group.tokens[0]].start, tokens[group.tokens[-1]].end
        score = float(np.mean(group.scores, dtype=np.float32))
        entities.append({"entity_group": group.label, "score": score, "word": text[start:end], "start": start, "end": end})
    return [entity for entity in entities if entity["entity_group"] not in ignore_labels]


def word_scores(rows: Floats, strategy: str) -> Floats:
    """Returns the label scores of a word from the scores of its tokens."""
    if strategy == "average":
        mean: Floats = rows.mean(axis=0)
        return mean
    # If maxima are equal, the first token wins.
    return rows[int(rows.max(axis=1).argmax())] if strategy == "max" else rows[0]
