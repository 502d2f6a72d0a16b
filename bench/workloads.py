"""The built-in workloads: English texts of known lengths, equal for equal seeds.

Lengths are fixed quantiles of a distribution, in an order that the seed determines, so that a workload has the same mean for every seed.
They count words and punctuation marks, each of which is about one token of BERT's English tokenizers. For this reason, the sentences
consist of common words.
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

# placeholder -> its words; a year is a random number
WORDS: Mapping[str, tuple[str, ...]] = {
    "name": ("Anna Weber", "David Stone", "Maria Lopez", "Peter Hall", "Henry Wood", "Laura Martin", "Thomas Reed", "Paul Becker"),
    "place": ("Lisbon", "Vienna", "Boston", "Toronto", "Madrid", "Oslo", "Glasgow", "Seattle", "Athens", "Hamburg", "Dublin", "Kyoto"),
    "thing": ("film", "novel", "concert", "meal", "lecture", "exhibition", "game", "album", "play", "documentary"),
    "good": ("warm", "clever", "quiet", "honest", "funny", "bold", "careful", "bright", "gentle", "sharp"),
    "bad": ("slow", "loud", "empty", "tired", "cold", "careless", "long", "flat", "heavy", "confused"),
    "year": tuple(map(str, range(1820, 1990))),
}
SENTENCES = (
    "The {thing} starts well enough, but after an hour it becomes so {bad} that we wished we had stayed at home.",
    "What a {good} and {good} {thing} this is, made by people who clearly know and love what they do.",
    "{name} moved to {place} in {year} and opened a small shop near the harbor that sold maps and old books.",
    "Nobody in {place} expected the new {thing} to be this {good}, and yet the hall was full every night.",
    "The train from {place} to {place} was late again, so {name} missed the meeting and called from the station.",
    "In {year} the council of {place} decided to build a second bridge over the river, which took seven years.",
    "It is not a perfect {thing}, and the last part is {bad}, but the music alone is worth the evening.",
    "The service was friendly, the room was clean, and the breakfast was {good}, but the street was very {bad}.",
    "The school in {place} was founded in {year} by {name}, who had been a teacher there for twenty years.",
    "My sister thought that the {thing} was {good}, my father found it {bad}, and I simply fell asleep.",
    "The manual is {bad}, the support line is closed at night, and the parts do not fit; I sent it back at once.",
    "The company was started in a garage in {place}, and by {year} it had more than four hundred people.",
)
QUESTIONS = (
    "Who founded the school?",
    "In which year did the council decide to build a second bridge?",
    "Where was the company started?",
    "What did the shop near the harbor sell?",
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
    if name == "qa":
        # with a question, about five windows of 384 tokens that overlap by 128
        passages = _texts(random_, lambda share: 1110 + 210 * share, COUNT // 2)
        return [{"question": QUESTIONS[i % len(QUESTIONS)], "context": text} for i, text in enumerate(passages)]
    texts = _texts(random_, _LENGTHS["short" if name == "mask" else name], COUNT)
    if name == "mask":
        for i, words in enumerate(map(str.split, texts)):
            words[random_.randrange(1, len(words) - 1)] = mask
            texts[i] = " ".join(words)
    return texts


def _texts(random_: random.Random, length: Callable[[float], float], count: int) -> list[Any]:
    """Returns texts whose lengths in tokens are values of the quantile function `length` at evenly spaced shares within (0, 1)."""
    lengths = [round(length((i + 0.5) / count)) for i in range(count)]
    random_.shuffle(lengths)
    return [_text(random_, max(tokens - 2, 5)) for tokens in lengths]  # a tokenizer adds two special tokens


def _text(random_: random.Random, tokens: int) -> str:
    """Returns sentences with this total number of words and punctuation marks; the last sentence is cut."""
    sentences = random_.sample(SENTENCES, len(SENTENCES)) * (tokens // 100 + 1)
    text = re.sub(r"{(\w+)}", lambda match: random_.choice(WORDS[match[1]]), " ".join(sentences))
    pieces = list(re.finditer(r"\w+|[^\w\s]", text))
    return text[: pieces[tokens - 1].start()].rstrip(" ,;:.") + "."
