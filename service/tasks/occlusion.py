"""Occlusion: what each word does to a score, by leaving it out. All variants of an input run together, after its score is known.

A word is left out by deleting its tokens. The text is not tokenized again, so that the other words are read as they were, and offsets hold.
A mask token in the place of the word was no better on the embedded classifier (bench/results/2026-11-23-explain.md), and most models have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.cost import SCORE_BYTES, Cost, text_bytes
from bertserve.service.text.tokenizer import Encoding, TokenIds, Tokenizer
from bertserve.service.text.words import Unit, Word, rebase

# A text of n words is n texts. A window of /answer, 384 tokens unless asked otherwise, has no more.
MAX_WORDS = 384


# Bytes that a word takes in an answer, without its text, and steps that it takes.
WORD_BYTES, WORD_STEPS = 96 + SCORE_BYTES, 8


class WordImportance(TypedDict):
    """How much a score owes to a word: the score with all words minus the score without this one."""

    word: Annotated[str, Field(examples=["engaging"])]
    start: Annotated[int, Field(examples=[31])]
    end: Annotated[int, Field(examples=[39])]
    importance: Annotated[float, Field(examples=[0.002])]
    field: NotRequired[Annotated[str, Field(description="The text that has the word, if the input has two texts.")]]


@dataclass(frozen=True, slots=True)
class Part:
    """One text of an input, as the model reads it.

    Attributes:
        field: Its name in the input; empty where the input has one text.
        text: The whole text.
        ids: The token ids of what is read of it.
        first: Which of the text's tokens the first of these is.
        words: The words to leave out, all of them within what is read.
    """

    field: str
    text: str
    ids: TokenIds
    first: int
    words: Sequence[Word]

    def without(self, word: Word) -> TokenIds:
        """Returns the token ids without those of a word."""
        return [*self.ids[: word.tokens.start - self.first], *self.ids[word.tokens.stop - self.first :]]


def check_count(words: int, of: str, instead: str) -> None:
    """Checks that no more words are left out than are allowed.

    Args:
        words: How many there are.
        of: What has them.
        instead: What to do where there are too many.

    Raises:
        InvalidValueError: There are too many.
    """
    if words > MAX_WORDS:
        raise InvalidValueError(
            "{of} has {words} words and `explain` takes at most {limit}; {instead}, or remove `explain`.",
            of=of,
            words=words,
            limit=MAX_WORDS,
            instead=instead,
        )


def estimate(tokens: int, length: int) -> int:
    """Returns a cheap guess of the tokens of all variants of `length` tokens each, of texts of so many tokens."""
    return min(tokens, MAX_WORDS) * length


def cost(words: int, length: int, texts: Sequence[str], *, explained: int = 1) -> Cost:
    """Returns the cost of an explanation: the runs without one word each, and the words in the answer.

    Args:
        words: How many there are.
        length: Tokens of a run.
        texts: What has them.
        explained: How many scores are explained.
    """
    return Cost(
        answer_bytes=explained * (words * WORD_BYTES + sum(map(text_bytes, texts))),
        steps=words * WORD_STEPS * (1 + explained),
        reserved_tokens=words * length,
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """An input without one word.

    Attributes:
        part: The text that the word is part of.
        word: The word.
        encoding: What is left of the input.
    """

    part: Part
    word: Word
    encoding: Encoding


def variants(parts: Sequence[Part], tokenizer: Tokenizer) -> list[Variant]:
    """Returns an input without each of its words in turn.

    Args:
        parts: The input's text, or its two.
        tokenizer: Puts the variants together.
    """
    found = []
    for place, part in enumerate(parts):
        for word in part.words:
            texts = [each.ids if i != place else part.without(word) for i, each in enumerate(parts)]
            if not any(texts) and tokenizer.room(pair=len(parts) > 1) == tokenizer.max_length:
                continue  # nothing is left of it, not even a special token
            found.append(Variant(part, word, tokenizer.assemble(*texts)))
    return found


def described(left_out: Sequence[Variant], importances: Sequence[float], unit: Unit) -> list[WordImportance]:
    """Returns the words with their importance, in order of the texts; offsets are of the text that a word stands in."""
    found: list[WordImportance] = []
    for part in {id(variant.part): variant.part for variant in left_out}.values():
        items: list[dict[str, Any]] = [
            {
                "word": part.text[variant.word.start : variant.word.end],
                "start": variant.word.start,
                "end": variant.word.end,
                "importance": importance,
            }
            for variant, importance in zip(left_out, importances, strict=True)
            if variant.part is part
        ]
        rebase(items, part.text, unit)
        found += [cast("WordImportance", item | ({"field": part.field} if part.field else {})) for item in items]
    return found
