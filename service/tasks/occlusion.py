"""Occlusion: the importance of each word for a score, found by leaving it out. All variants of an input run after its score is known.

A word is left out by deleting its tokens. The text is not tokenized again, so the other tokens and the offsets stay the same.
A mask token instead of the word was not better on the included classifier (bench/results/2026-11-23-explain.md), and most models lack one.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.errors import InvalidValueError
from bertserve.service.tasks.cost import ENTRY_BYTES, Cost, text_bytes
from bertserve.service.tasks.decoding import Floats
from bertserve.service.tasks.step import Step
from bertserve.service.text.tokenizer import Encoding, TokenIds, Tokenizer, Tokens
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
    """One text of an input, of which the model reads the tokens in a range, and the words to leave out, which are all within this range.

    `field` is its name, or empty if it is the only one.
    """

    field: str
    tokens: Tokens
    token_range: range
    words: Sequence[Word]

    def ids(self, *, without: range) -> TokenIds:
        """Returns the ids of the tokens that are read, without a range of them, which can be empty."""
        ids, read = self.tokens.ids, self.token_range
        return [*ids[read.start : without.start], *ids[without.stop : read.stop]] if without else ids[read.start : read.stop]


def cost(words: int, length: int, texts: Sequence[str], *, subject: str, remedy: str, explained: int = 1) -> Cost:
    """Returns the cost of an explanation: one run of `length` tokens per word, and the words in the answer for each explained score.

    Raises:
        InvalidValueError: There are too many words; `subject` is their text, and `remedy` makes them fewer.
    """
    if words > MAX_WORDS:
        raise InvalidValueError(
            "{subject} has {count} words and `explain` takes at most {limit}; {remedy}, or remove `explain`.",
            subject=subject,
            count=words,
            limit=MAX_WORDS,
            remedy=remedy,
        )
    return Cost(response_bytes=explained * (words * ENTRY_BYTES + sum(map(text_bytes, texts))), reserved_tokens=words * length)


def explain(
    entries: Sequence[Any],
    texts: Sequence[OccludedText],
    tokenizer: Tokenizer,
    read_scores: Callable[[Outputs, Encoding, OccludedText, Word], Floats],
    unit: Unit,
) -> Generator[Step, Sequence[Outputs], None]:
    """Adds `explanation` to entries of an answer: the importance of each word for their `score`, in the order of the texts.

    It runs the input without each word. `read_scores` returns the scores of the entries, float32 [entries], from the outputs of such a run,
    its encoding, and the word that is left out of a text.
    """
    removed, encodings = [], []
    for text in texts:
        for word in text.words:
            ids = [other.ids(without=word.tokens if other is text else range(0)) for other in texts]
            # a template without special tokens cannot encode an input without tokens
            if any(ids) or tokenizer.max_text_tokens(pair=len(texts) > 1) < tokenizer.spec.max_length:
                removed.append((text, word))
                encodings.append(tokenizer.assemble(*ids))
    rows = yield Step(encodings, keep=lambda index, row: {"scores": read_scores(row, encodings[index], *removed[index])})
    for index, entry in enumerate(entries):
        words = [
            {"word": text.tokens.text[word.start : word.end], "start": word.start, "end": word.end}
            | {"importance": entry["score"] - float(row["scores"][index])}
            | ({"field": text.field} if text.field else {})
            for (text, word), row in zip(removed, rows, strict=True)
        ]
        for text in texts:
            convert_offsets([word for word, (other, _) in zip(words, removed, strict=True) if other is text], text.tokens.text, unit)
        entry["explanation"] = words
