"""Turns the start and end probabilities of tokens into the best answers of a passage. Only numpy, float32.

Spans are scored window by window, so memory holds the spans of one window.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bertserve.service.tasks.cost import ENTRY_US
from bertserve.service.tasks.decoding import Floats
from bertserve.service.text.tokenizer import Tokens
from bertserve.service.text.words import trimmed


def best_spans(start: Floats, end: Floats, window: range, *, longest: int, expected_count: int) -> Iterator[tuple[int, int, float]]:
    """Yields the spans of a window by falling score, then by position: first token, last token, score. Tokens count in the whole passage.

    `start` and `end` are the probabilities of each token of the window to be the first and the last one, float32 [tokens]. The score of a
    span is start[i] * end[j]. Only the band i <= j < i + longest is computed, as a view of float32 [tokens, longest] on the padded ends.
    Only as many spans are sorted as are needed; most callers read `expected_count`.
    """
    longest = min(longest, len(start))
    padded = np.concatenate([end, np.full(longest - 1, -1, dtype=np.float32)])
    band = start[:, None] * sliding_window_view(padded, longest)
    firsts, lengths = np.nonzero(np.arange(len(start))[:, None] + np.arange(longest) < len(start))
    scores, firsts = band[firsts, lengths], firsts + window.start
    lasts = firsts + lengths
    # more than `expected_count`, because spans with the same text, ignoring case, or with only white space give no further answer
    done, count = 0, 4 * expected_count + 32
    while done < len(scores):
        count = min(count, len(scores))
        # includes all spans that equal the last one, so that ties are complete
        floor = scores[np.argpartition(-scores, count - 1)[count - 1]]
        best = np.flatnonzero(scores >= floor)
        order = best[np.lexsort((lasts[best], firsts[best], -scores[best]))]
        for i in order[done:].tolist():
            yield int(firsts[i]), int(lasts[i]), float(scores[i])
        done, count = len(order), 8 * count  # grows fast, so that a window whose spans are nearly all equal is sorted only a few times


def _span_answers(passage: Tokens, *, with_marks: bool, align_to_words: bool) -> Callable[[int, int, float, range], dict[str, Any]]:
    """Returns a function that turns spans of tokens into answers, on request with combining marks and of whole words.

    It takes the first token of a span, the last one, the score, and the tokens to which the span can be extended. White space gives the
    answer "".
    """
    offsets = passage.offsets_with_marks if with_marks else passage.offsets
    word_ids = passage.library_encoding.word_ids if align_to_words else range(len(passage))
    firsts: list[int] = []  # the first and the last token of each token's word
    lasts: list[int] = []
    for _, group in groupby(range(len(word_ids)), word_ids.__getitem__):
        tokens = list(group)
        firsts += tokens[:1] * len(tokens)
        lasts += tokens[-1:] * len(tokens)

    def answer(first: int, last: int, score: float, token_range: range) -> dict[str, Any]:
        start = offsets[max(firsts[first], token_range.start)][0]
        end = offsets[min(lasts[last], token_range.stop - 1)][1]
        start, end = trimmed(passage.text, start, end)
        return {"answer": passage.text[start:end], "score": score, "start": start, "end": end}

    return answer


def _answer_us(answer: dict[str, Any]) -> int:
    """Returns the predicted microseconds to create an answer and to compare its text: one more per 256 characters."""
    return ENTRY_US + len(answer["answer"]) // 256


class BestAnswers:
    """The `top_k` best answers over all windows and spans; equal texts, ignoring case, keep their best score.

    It stores at most `top_k` answers: if this many answers are better than a span, in one window or after some windows, the span
    cannot be among the best.
    """

    def __init__(self, passage: Tokens, *, top_k: int, align_to_words: bool) -> None:
        """Starts without answers; with `align_to_words`, spans are extended to whole words."""
        self._top_k = top_k
        self._make_answer = _span_answers(passage, with_marks=True, align_to_words=align_to_words)
        self._whole = range(len(passage))
        # text in lower case -> ((-score, first token, last token), which orders answers; the answer; its window)
        self._by_text: dict[str, tuple[tuple[float, int, int], dict[str, Any], range]] = {}
        self._floor = -1.0

    def add(self, start: Floats, end: Floats, window: range, longest: int) -> int:
        """Adds the best spans of a window, and returns the predicted microseconds; `best_spans` describes the arguments."""
        texts, decode_us = set(), 0
        for first, last, score in best_spans(start, end, window, longest=longest, expected_count=self._top_k):
            if score < self._floor:
                break
            answer = self._make_answer(first, last, score, self._whole)
            decode_us += _answer_us(answer)
            if text := answer["answer"].lower():
                rank = (-score, first, last)
                if text not in self._by_text or rank < self._by_text[text][0]:
                    self._by_text[text] = (rank, answer, window)
                texts.add(text)
                if len(texts) == self._top_k:
                    break
        if len(self._by_text) >= self._top_k:
            best = sorted(self._by_text.items(), key=lambda item: item[1][0])[: self._top_k]
            self._by_text, self._floor = dict(best), best[-1][1][1]["score"]
        return decode_us

    def answers(self) -> list[dict[str, Any]]:
        """Returns the answers, best first."""
        answers = [answer for _, answer, _ in self._by_text.values()]
        return sorted(answers, key=lambda answer: (-answer["score"], answer["start"], answer["end"]))

    def span_and_window(self, answer: dict[str, Any]) -> tuple[range, range]:
        """Returns the tokens of an answer's span, before its extension to words, and the tokens of its window."""
        (_, first, last), _, window = self._by_text[answer["answer"].lower()]
        return range(first, last + 1), window


class SummedAnswers:
    """The answers of transformers 5.2.0: a few best spans of each window, with the scores of equal texts added up."""

    def __init__(self, passage: Tokens, *, top_k: int, align_to_words: bool) -> None:
        """Starts without answers; with `align_to_words`, spans are extended to whole words."""
        self._limit = 2 * top_k + 10 if align_to_words else top_k  # spans of a window
        self._make_answer = _span_answers(passage, with_marks=False, align_to_words=align_to_words)
        self._by_text: dict[str, dict[str, Any]] = {}

    def add(self, start: Floats, end: Floats, window: range, longest: int) -> int:
        """Adds the best spans of a window, and returns the predicted microseconds; `best_spans` describes the arguments."""
        count = decode_us = 0
        for first, last, score in best_spans(start, end, window, longest=longest, expected_count=self._limit):
            answer = self._make_answer(first, last, score, window)
            decode_us += _answer_us(answer)
            if answer["answer"]:
                earlier = self._by_text.setdefault(answer["answer"].lower(), answer)
                if earlier is not answer:
                    earlier["score"] += answer["score"]
                count += 1
                if count == self._limit:
                    break
        return decode_us

    def answers(self) -> list[dict[str, Any]]:
        """Returns the answers, without order."""
        return list(self._by_text.values())
