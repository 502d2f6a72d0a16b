"""Turns logits into scores and their order, and token spans into the best answers. Only numpy, float32.

Spans are scored window by window, so memory holds the spans of one window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Activation
from bertserve.service.text.words import trimmed

Floats = NDArray[np.float32]
Row = Mapping[str, NDArray[Any]]  # one text's graph outputs by name, float32, or the parts that its task keeps


def activate(logits: Floats, activation: Activation) -> Floats:
    """Returns the scores of logits, float32 of the same shape.

    `softmax` runs over the last axis with its true maximum subtracted; `sigmoid` is per value and never overflows;
    `none` returns the logits.
    """
    logits = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        exponentials: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return shares
    if activation == "sigmoid":
        # exp of the negative magnitude is at most 1 for either sign of the logit
        decay: Floats = np.exp(-np.abs(logits))
        odds: Floats = (np.where(logits >= 0, 1, decay) / (1 + decay)).astype(np.float32)
        return odds
    return logits


def best_first(scores: Floats, top_k: int | None = None) -> list[int]:
    """Returns the indices of a one-dimensional array by falling score, then by rising index; at most `top_k`."""
    # not `np.argsort`, which releases the GIL: with busy threads it takes long to get it back
    return sorted(range(len(scores)), key=(-scores).tolist().__getitem__)[:top_k]


def best_tokens(scores: NDArray[Any], count: int, among: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Returns the best `count` ids of a vocabulary by falling score, then by id.

    Args:
        scores: float [vocabulary].
        count: Maximum number of ids.
        among: The ids to choose from, ascending; None for all.
    """
    values = scores if among is None else scores[among]
    count = min(count, len(values))
    floor = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero(values >= floor)  # with all that equal the last one, so that ties are complete
    best = places[np.argsort(-values[places], kind="stable")][:count]
    return best if among is None else among[best]


# Steps to turn a span into an answer, plus one step per this many characters.
ANSWER_STEPS, CHARS_PER_STEP = 4, 256


@dataclass(slots=True)
class Spans:
    """Scored token spans of one window, end inclusive, with indices in the whole passage; `cut` has the window's tokens."""

    cut: range
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    scores: Floats


def score_spans(start: Floats, end: Floats, cut: range, longest: int) -> Spans:
    """Scores every span of a window of at most `longest` tokens: p_start[i] * p_end[j].

    It only computes the band i <= j < i + longest, as a view of float32 [tokens, longest] on the padded ends.
    """
    longest = min(longest, len(start))
    padded = np.concatenate([end, np.full(longest - 1, -1, dtype=np.float32)])
    band = start[:, None] * sliding_window_view(padded, longest)
    i, length = np.nonzero(np.arange(len(start))[:, None] + np.arange(longest) < len(start))
    return Spans(cut, cut.start + i, cut.start + i + length, band[i, length])


class SpanTexts:
    """Turns token spans into answers."""

    def __init__(self, passage: str, offsets: Sequence[tuple[int, int]], word_ids: Sequence[int] | None) -> None:
        """Takes a passage with the offsets of each token and, to extend answers to whole words, the word of each token."""
        self._passage = passage
        self._offsets = offsets
        self._firsts = self._lasts = list(range(len(offsets)))
        if word_ids is not None:
            self._firsts, self._lasts = _word_bounds(word_ids)

    def answer(self, start: int, end: int, score: float, cut: range) -> dict[str, Any]:
        """Returns the answer of a span of tokens, end inclusive; words are extended only within `cut`. White space has the answer ""."""
        first = self._offsets[max(self._firsts[start], cut.start)][0]
        last = self._offsets[min(self._lasts[end], cut.stop - 1)][1]
        first, last = trimmed(self._passage, first, last)
        return {"answer": self._passage[first:last], "score": score, "start": first, "end": last}


def _steps(answer: dict[str, Any]) -> int:
    """Returns the steps to create an answer and to compare its text."""
    steps: int = ANSWER_STEPS + (answer["end"] - answer["start"]) // CHARS_PER_STEP
    return steps


def _word_bounds(word_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns for each token the first and the last token of its word."""
    firsts = list(range(len(word_ids)))
    lasts = list(range(len(word_ids)))
    for i in range(1, len(word_ids)):
        if word_ids[i] == word_ids[i - 1]:
            firsts[i] = firsts[i - 1]
    for i in range(len(word_ids) - 2, -1, -1):
        if word_ids[i] == word_ids[i + 1]:
            lasts[i] = lasts[i + 1]
    return firsts, lasts


class BestAnswers:
    """The `top_k` best answers over all windows and spans; equal texts, ignoring case, keep their best score.

    It stores at most `top_k` answers: if this many answers are better than a span, in one window or after some windows, the span
    cannot be among the best.
    """

    def __init__(self, texts: SpanTexts, *, top_k: int, count: int) -> None:
        """Starts with no answers; `count` is the number of tokens of the passage."""
        self._wanted = top_k
        self._texts = texts
        self._whole = range(count)
        # text in lower case -> ((-score, first token, last token), which orders answers; the answer; its window)
        self._found: dict[str, tuple[tuple[float, int, int], dict[str, Any], range]] = {}
        self._floor = -1.0

    def add(self, window: Spans) -> int:
        """Adds the best spans of a window, and returns the steps that this took."""
        here, steps = set(), 0
        for i in _best_first(window.starts, window.ends, window.scores, at_least=self._wanted):
            start, end, score = int(window.starts[i]), int(window.ends[i]), float(window.scores[i])
            if score < self._floor:
                break
            answer = self._texts.answer(start, end, score, self._whole)
            steps += _steps(answer)
            if text := answer["answer"].lower():
                rank = (-score, start, end)
                if text not in self._found or rank < self._found[text][0]:
                    self._found[text] = (rank, answer, window.cut)
                here.add(text)
                if len(here) == self._wanted:
                    break
        if len(self._found) >= self._wanted:
            best = sorted(self._found.items(), key=lambda item: item[1][0])[: self._wanted]
            self._found, self._floor = dict(best), best[-1][1][1]["score"]
        return steps

    def answers(self) -> list[dict[str, Any]]:
        """Returns the answers, best first."""
        return sorted(
            (answer for _, answer, _ in self._found.values()), key=lambda answer: (-answer["score"], answer["start"], answer["end"])
        )

    def place_of(self, answer: dict[str, Any]) -> tuple[range, range]:
        """Returns the tokens of an answer's span, before its extension to words, and the tokens of its window."""
        (_, start, end), _, cut = self._found[answer["answer"].lower()]
        return range(start, end + 1), cut


def _best_first(starts: NDArray[np.int64], ends: NDArray[np.int64], scores: Floats, at_least: int) -> Iterator[int]:
    """Yields the indices of spans by falling score, then start, then end; it sorts only as many as are needed."""
    done, count = 0, 4 * at_least + 32
    while done < len(scores):
        count = min(count, len(scores))
        # includes all spans that equal the last one, so that ties are complete
        floor = scores[np.argpartition(-scores, count - 1)[count - 1]]
        best = np.flatnonzero(scores >= floor)
        order = best[np.lexsort((ends[best], starts[best], -scores[best]))]
        yield from order[done:].tolist()
        done, count = len(order), 8 * count


class SummedAnswers:
    """The answers of transformers 5.2.0: a few best spans of each window, with the scores of equal texts added up."""

    def __init__(self, texts: SpanTexts, *, limit: int) -> None:
        """Starts with no answers; `limit` is the number of spans per window."""
        self._limit = limit
        self._texts = texts
        self._found: dict[str, dict[str, Any]] = {}

    def add(self, window: Spans) -> int:
        """Adds the best spans of a window, and returns the steps that this took."""
        count = steps = 0
        for i in _best_first(window.starts, window.ends, window.scores, at_least=self._limit):
            answer = self._texts.answer(int(window.starts[i]), int(window.ends[i]), float(window.scores[i]), window.cut)
            steps += _steps(answer)
            if answer["answer"]:
                earlier = self._found.setdefault(answer["answer"].lower(), answer)
                if earlier is not answer:
                    earlier["score"] += answer["score"]
                count += 1
                if count == self._limit:
                    break
        return steps

    def answers(self) -> list[dict[str, Any]]:
        """Returns the answers, without order."""
        return list(self._found.values())
