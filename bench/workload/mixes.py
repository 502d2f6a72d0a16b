"""The built-in mixes: inputs of known lengths, the same for the same seed.

Lengths are fixed quantiles of a distribution, in an order drawn from the seed, so that a mix has the same mean for every seed.
They are counted in words and punctuation marks, each of which is about one token of BERT's English tokenizers. The exact number of
tokens is counted if a bundle is given.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

from bertserve.bench.workload import sentences

COUNT = 64
MASK = "[MASK]"  # of BERT; other models spell it otherwise
_SPECIAL_TOKENS = 2  # that a tokenizer puts around a text
_MIN_TOKENS = 5  # without special tokens
_PASSAGE_TOKENS = (1110, 1320)  # with a question, about five windows of 384 tokens that overlap by 128


def mix_inputs(name: str, *, seed: int = 0, mask: str = MASK) -> list[Any]:
    """Returns the inputs of a mix: texts, or objects with `question` and `context`.

    Args:
        name: One of NAMES.
        seed: Seed of the words and of the order.
        mask: How the model spells a word that it is to fill in.
    """
    inputs = _MIXES[name](random.Random(f"{name} {seed}"))  # noqa: S311  # texts, not secrets
    return [text.replace(MASK, mask) for text in inputs] if _MIXES[name] is _mask else inputs


def _short(random_: random.Random) -> list[Any]:
    return _texts(random_, lambda share: 19 + 8 * share)


def _long(random_: random.Random) -> list[Any]:
    return _texts(random_, lambda share: 142 + 40 * share)


def _mixed(random_: random.Random) -> list[Any]:
    # lengths of texts are about log-normal: median 33, mean about 48, longest about 300
    return _texts(random_, lambda share: 33 * math.exp(0.9 * NormalDist().inv_cdf(share)))


def _uniform(random_: random.Random) -> list[Any]:
    return _texts(random_, lambda share: 12 + 497 * share)


def _mask(random_: random.Random) -> list[Any]:
    masked = []
    for text in _short(random_):
        words = text.split()
        words[random_.randrange(1, len(words) - 1)] = MASK
        masked.append(" ".join(words))
    return masked


def _qa(random_: random.Random) -> list[Any]:
    shortest, longest = _PASSAGE_TOKENS
    passages = _texts(random_, lambda share: shortest + (longest - shortest) * share, count=COUNT // 2)
    return [{"question": sentences.QUESTIONS[i % len(sentences.QUESTIONS)], "context": text} for i, text in enumerate(passages)]


_MIXES: Mapping[str, Callable[[random.Random], list[Any]]] = {
    "short": _short,
    "long": _long,
    "mixed": _mixed,
    "uniform": _uniform,
    "mask": _mask,
    "qa": _qa,
}
NAMES = tuple(_MIXES)


def _texts(random_: random.Random, length: Callable[[float], float], count: int = COUNT) -> list[Any]:
    """Returns texts whose lengths in tokens are the quantile function `length` at evenly spaced shares within (0, 1)."""
    lengths = [round(length((i + 0.5) / count)) for i in range(count)]
    random_.shuffle(lengths)
    return [_text(random_, max(tokens, _MIN_TOKENS + _SPECIAL_TOKENS) - _SPECIAL_TOKENS) for tokens in lengths]


def _text(random_: random.Random, tokens: int) -> str:
    """Returns sentences with this many words and punctuation marks in all; the last sentence is cut."""
    parts: list[str] = []
    left = tokens
    while True:
        for template in random_.sample(sentences.SENTENCES, len(sentences.SENTENCES)):
            sentence = _fill(random_, template)
            pieces = list(re.finditer(r"\w+|[^\w\s]", sentence))
            if len(pieces) > left:
                cut = sentence[: pieces[left - 1].start()].rstrip(" ,;:")
                return " ".join([*parts, f"{cut}."] if cut else parts)
            parts.append(sentence)
            left -= len(pieces)
            if not left:
                return " ".join(parts)


def _fill(random_: random.Random, template: str) -> str:
    """Returns a sentence with its placeholders filled."""

    def word(match: re.Match[str]) -> str:
        placeholder = match.group(1)
        if placeholder == "year":
            return str(random_.randrange(1820, 1990))
        return random_.choice(sentences.WORDS[placeholder])

    return re.sub(r"{(\w+)}", word, template)
