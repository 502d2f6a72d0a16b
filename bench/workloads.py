"""The built-in workloads: inputs of known lengths, equal for equal seeds, and the English sentences for them.

Lengths are fixed quantiles of a distribution, in an order that the seed determines, so that a workload has the same mean for every seed.
They count words and punctuation marks, each of which is about one token of BERT's English tokenizers. For this reason, the sentences were
written for this tool in common words. With a bundle, the exact number of tokens is counted.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

COUNT = 64
MASK = "[MASK]"  # BERT's spelling; other models have others
_SPECIAL_TOKENS = 2  # added to a text by a tokenizer
_MIN_TOKENS = 5  # without special tokens
_PASSAGE_TOKENS = (1110, 1320)  # with a question, about five windows of 384 tokens that overlap by 128

# placeholder -> its words; a year is a random number
WORDS: Mapping[str, tuple[str, ...]] = {
    "name": (
        "Anna Weber",
        "David Stone",
        "Maria Lopez",
        "Peter Hall",
        "Julia Brandt",
        "Henry Wood",
        "Laura Martin",
        "Thomas Reed",
        "Elena Rossi",
        "Paul Becker",
    ),
    "place": ("Lisbon", "Vienna", "Boston", "Toronto", "Madrid", "Oslo", "Glasgow", "Seattle", "Athens", "Hamburg", "Dublin", "Kyoto"),
    "thing": ("film", "novel", "concert", "meal", "lecture", "exhibition", "game", "album", "play", "documentary"),
    "good": ("warm", "clever", "quiet", "honest", "funny", "bold", "careful", "bright", "gentle", "sharp"),
    "bad": ("slow", "loud", "empty", "tired", "cold", "careless", "long", "flat", "heavy", "confused"),
}
SENTENCES = (
    "The {thing} starts well enough, but after an hour it becomes so {bad} that we wished we had stayed at home.",
    "What a {good} and {good} {thing} this is, made by people who clearly know and love what they do.",
    "{name} moved to {place} in {year} and opened a small shop near the harbor that sold maps and old books.",
    "Nobody in {place} expected the new {thing} to be this {good}, and yet the hall was full every night.",
    "The train from {place} to {place} was late again, so {name} missed the meeting and called from the station.",
    "I would not watch this {bad} {thing} a second time, even if somebody paid me for the ticket and the drinks.",
    "In {year} the council of {place} decided to build a second bridge over the river, which took seven years.",
    "It is not a perfect {thing}, and the last part is {bad}, but the music alone is worth the evening.",
    "{name} wrote a letter to the editor about the {thing}, and three weeks later an answer came from {place}.",
    "The service was friendly, the room was clean, and the breakfast was {good}, but the street was very {bad}.",
    "Every morning {name} walks along the old wall of {place}, buys a paper, and reads it under the same tree.",
    "A {bad} story with a {good} cast: the actors try hard, but the script gives them nothing to work with.",
    "The school in {place} was founded in {year} by {name}, who had been a teacher there for twenty years.",
    "They say that the {thing} will come to {place} next spring, although nobody has seen a contract so far.",
    "This {thing} asks for patience, and those who bring it will be paid back with some truly {good} moments.",
    "After the flood of {year} most families left {place}, and only a few of them ever came back to the valley.",
    "My sister thought that the {thing} was {good}, my father found it {bad}, and I simply fell asleep.",
    "{name} and {name} met in {place} during the winter of {year} and worked together until the end of the war.",
    "The phone arrived two days early, the battery lasts for a week, and the screen is {good} even in the sun.",
    "The manual is {bad}, the support line is closed at night, and the parts do not fit; I sent it back at once.",
    "On the first floor of the museum in {place} there is a clock that {name} repaired in {year} without being paid.",
    "If you liked the first {thing}, you will find the same {good} ideas here, only with more money behind them.",
    "The company was started in a garage in {place}, and by {year} it had more than four hundred people.",
    "Rain fell on {place} for nine days, the roads were closed, and the market had to move into the church.",
    "There is a {good} little joke near the end of the {thing}, and it is the only reason to stay for that long.",
    "When {name} became mayor of {place} in {year}, the first thing to change was the price of a bus ticket.",
    "The director takes a {good} idea and makes a {bad} {thing} of it, which is almost an art of its own.",
    "A farmer near {place} found the coins in {year} while he was looking for a lost dog behind his house.",
    "{name} painted the ceiling of the town hall in {place}, a work of three years that nearly cost her her sight.",
    "The line was long, the tickets were dear, and the {thing} was {bad}, but the company could not have been better.",
    "According to {name}, the oldest map of {place} was drawn in {year} by a sailor who had never been there.",
    "You can hear in every scene of this {thing} how {good} the writing is, and how much the actors enjoy it.",
    "The garden behind the library of {place} was a gift from {name}, who wanted the children to know the birds.",
    "Twice a year the ships from {place} bring salt, cloth and letters, and for one day nobody in the village works.",
    "I bought the {thing} as a present for my brother, and he has talked about nothing else since the weekend.",
    "The new road made the way to {place} shorter by an hour, but the noise has driven most of the birds away.",
)
QUESTIONS = (
    "Who founded the school?",
    "In which year did the council decide to build a second bridge?",
    "Where was the company started?",
    "Who repaired the clock in the museum?",
    "What did the farmer find near the city?",
    "Who drew the oldest map of the town?",
    "What did the shop near the harbor sell?",
    "When did most families leave the valley?",
    "Who gave the garden behind the library to the town?",
    "How long did the rain fall on the city?",
    "What do the ships bring twice a year?",
    "What was the first thing that the new mayor changed?",
)


# workload -> quantile function of its lengths in tokens
_LENGTHS: Mapping[str, Callable[[float], float]] = {
    "short": lambda share: 19 + 8 * share,
    "long": lambda share: 142 + 40 * share,
    # approximately log-normal: median 33, mean about 48, longest about 300
    "mixed": lambda share: 33 * math.exp(0.9 * NormalDist().inv_cdf(share)),
    "uniform": lambda share: 12 + 497 * share,
}
NAMES = (*_LENGTHS, "mask", "qa")


def workload_inputs(name: str, *, seed: int = 0, mask: str = MASK) -> list[Any]:
    """Returns the inputs of a workload in `NAMES`: texts, or objects with `question` and `context`; masks have the spelling `mask`."""
    random_ = random.Random(f"{name} {seed}")  # noqa: S311  # texts, not secrets
    if name == "mask":
        return _masked(random_, mask)
    return _questions(random_) if name == "qa" else _texts(random_, _LENGTHS[name])


def _masked(random_: random.Random, mask: str) -> list[Any]:
    masked = []
    for text in _texts(random_, _LENGTHS["short"]):
        words = text.split()
        words[random_.randrange(1, len(words) - 1)] = mask
        masked.append(" ".join(words))
    return masked


def _questions(random_: random.Random) -> list[Any]:
    shortest, longest = _PASSAGE_TOKENS
    passages = _texts(random_, lambda share: shortest + (longest - shortest) * share, count=COUNT // 2)
    return [{"question": QUESTIONS[i % len(QUESTIONS)], "context": text} for i, text in enumerate(passages)]


def _texts(random_: random.Random, length: Callable[[float], float], count: int = COUNT) -> list[Any]:
    """Returns texts whose lengths in tokens are values of the quantile function `length` at evenly spaced shares within (0, 1)."""
    lengths = [round(length((i + 0.5) / count)) for i in range(count)]
    random_.shuffle(lengths)
    return [_text(random_, max(tokens, _MIN_TOKENS + _SPECIAL_TOKENS) - _SPECIAL_TOKENS) for tokens in lengths]


def _text(random_: random.Random, tokens: int) -> str:
    """Returns sentences with this total number of words and punctuation marks; the last sentence is cut."""
    parts: list[str] = []
    remaining = tokens
    while True:
        for template in random_.sample(SENTENCES, len(SENTENCES)):
            sentence = _fill(random_, template)
            pieces = list(re.finditer(r"\w+|[^\w\s]", sentence))
            if len(pieces) > remaining:
                cut = sentence[: pieces[remaining - 1].start()].rstrip(" ,;:")
                return " ".join([*parts, f"{cut}."] if cut else parts)
            parts.append(sentence)
            remaining -= len(pieces)
            if not remaining:
                return " ".join(parts)


def _fill(random_: random.Random, template: str) -> str:
    def word(match: re.Match[str]) -> str:
        placeholder = match.group(1)
        if placeholder == "year":
            return str(random_.randrange(1820, 1990))
        return random_.choice(WORDS[placeholder])

    return re.sub(r"{(\w+)}", word, template)
