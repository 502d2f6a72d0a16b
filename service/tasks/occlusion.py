"""Occlusion: the importance of each word for a score, found by leaving it out. All variants of an input run after its score is known.

A word is left out by deleting its tokens. The text is not tokenized again, so the other tokens and the offsets stay the same.
A mask token instead of the word was not better on the included classifier (bench/results/2026-11-23-explain.md), and most models have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.cost import ITEM_BYTES, Cost, text_bytes
from bertserve.service.text.tokenizer import Encoding, TokenIds, Tokenizer
from bertserve.service.text.words import Unit, Word, convert_offsets

# A text of n words needs n texts. A window of /answer, 384 tokens by default, has at most as many words.
MAX_WORDS = 384


class WordImportance(TypedDict):
    """The importance of a word for a score: the score with all words minus the score without this word."""

    word: Annotated[str, Field(examples=["engaging"])]
    start: Annotated[int, Field(examples=[31])]
    end: Annotated[int, Field(examples=[39])]
    importance: Annotated[float, Field(examples=[0.002])]
    field: NotRequired[Annotated[str, Field(description="The text that has the word, if the input has two texts.")]]


@dataclass(slots=True)
class OccludedText:
    """One text of an input, as the model reads it.

    Attributes:
        field: Name of the text; empty if the input has one text.
        text: The whole text.
        ids: The token ids of the part that is read.
        first_token: Index of the first of these tokens in the text.
        words: The words to leave out, all within the part that is read.
    """

    field: str
    text: str
    ids: TokenIds
    first_token: int
    words: Sequence[Word]

    def without(self, word: Word) -> TokenIds:
        """Returns the token ids without the tokens of a word."""
        return [*self.ids[: word.tokens.start - self.first_token], *self.ids[word.tokens.stop - self.first_token :]]


def check_word_count(count: int, subject: str, remedy: str) -> None:
    """Checks the number of words; in the message, `subject` is their text, and `remedy` makes them fewer.

    Raises:
        InvalidValueError: There are too many words.
    """
    if count > MAX_WORDS:
        raise InvalidValueError(
            "{subject} has {count} words and `explain` takes at most {limit}; {remedy}, or remove `explain`.",
            subject=subject,
            count=count,
            limit=MAX_WORDS,
            remedy=remedy,
        )


def cost(words: int, length: int, texts: Sequence[str], *, explained: int = 1) -> Cost:
    """Returns the cost of an explanation: one run of `length` tokens per word, and the words in the answer for each explained score."""
    return Cost(response_bytes=explained * (words * ITEM_BYTES + sum(map(text_bytes, texts))), reserved_tokens=words * length)


def variants(occluded_texts: Sequence[OccludedText], tokenizer: Tokenizer) -> tuple[list[tuple[OccludedText, Word]], list[Encoding]]:
    """Returns the words of an input of one or two texts, each with its text, and for each word the encoding of the rest of the input."""
    removed_words, encodings = [], []
    for index, occluded in enumerate(occluded_texts):
        for word in occluded.words:
            texts = [other.ids if i != index else occluded.without(word) for i, other in enumerate(occluded_texts)]
            if not any(texts) and tokenizer.max_text_tokens(pair=len(occluded_texts) > 1) == tokenizer.max_length:
                continue  # no token is left, not even a special one
            removed_words.append((occluded, word))
            encodings.append(tokenizer.assemble(*texts))
    return removed_words, encodings


def describe_words(removed_words: Sequence[tuple[OccludedText, Word]], importances: Sequence[float], unit: Unit) -> list[WordImportance]:
    """Returns the words with their importance, in the order of the texts; offsets refer to the word's own text."""
    words: list[dict[str, Any]] = []
    for (occluded, word), importance in zip(removed_words, importances, strict=True):
        described = {"word": occluded.text[word.start : word.end], "start": word.start, "end": word.end, "importance": importance}
        words.append(described | ({"field": occluded.field} if occluded.field else {}))
    for text, items in groupby(zip(removed_words, words, strict=True), lambda pair: pair[0][0].text):
        convert_offsets([word for _, word in items], text, unit)
    return cast("list[WordImportance]", words)
