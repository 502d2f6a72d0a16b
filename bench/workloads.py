"""The built-in workloads: English texts of known lengths, equal for equal seeds.

Lengths are fixed quantiles of a distribution, in an order that the seed determines, so that a workload has the same mean for every seed.
They count words and punctuation marks, each of which is about one token of BERT's English tokenizers. For this reason, the sentences
consist of common words.
"""

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

COUNT = 64  # texts of a workload, enough for all lengths of its distribution; of `qa`, half as many
MASK = "[MASK]"  # BERT's spelling; other models have others

_TEXT = json.loads(Path(__file__).with_name("sentences.json").read_text(encoding="utf-8"))
SENTENCES, QUESTIONS = _TEXT["sentences"], _TEXT["questions"]
# placeholder -> its words; a year is a random number
WORDS: Mapping[str, Sequence[str]] = {**_TEXT["words"], "year": [str(year) for year in range(1820, 1990)]}

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
