"""The pairs of one text with each of several others, such as a query with each text to rank."""

from collections.abc import Callable, Iterable
from itertools import chain

from bertserve.service.bundle.manifest import Side
from bertserve.service.errors import InvalidValueError
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from bertserve.service.text.windows import kept_of_pair

# Index of a pair, and the numbers of tokens of its two texts -> the tokens that are kept of both.
Cut = Callable[[int, int, int], tuple[range, range]]


def encode_pairs(tokenizer: Tokenizer, first: str, others: Iterable[str], cut: Cut) -> tuple[list[Encoding], bool]:
    """Returns the encodings of a text with each other text, and whether a pair is truncated."""
    encodings, truncated = [], False
    texts = tokenizer.tokenize_lazily(chain([first], others))
    a = next(texts)
    for index, b in enumerate(texts):
        kept_a, kept_b = cut(index, len(a), len(b))
        truncated |= len(kept_a) + len(kept_b) < len(a) + len(b)
        encodings.append(tokenizer.assemble(a.ids[kept_a.start : kept_a.stop], b.ids[kept_b.start : kept_b.stop]))
    return encodings, truncated


def longest_first(tokenizer: Tokenizer, side: Side | None = None, *, must_fit: bool, field: str, option: str) -> Cut:
    """Returns a function that cuts the longer text of a pair first, at the end `side`; None for the model's own.

    If `must_fit` is true, it raises InvalidValueError for a pair that is too long: `field` names the other texts, and `option` truncates.
    """
    max_tokens = tokenizer.max_text_tokens(pair=True)

    def cut(index: int, a: int, b: int) -> tuple[range, range]:
        if a + b > max_tokens and must_fit:
            raise InvalidValueError(
                "`{field}[{index}]` has {total} tokens together with the other text of its pair, and the model takes {max_tokens}; "
                "shorten them, or set `{option}` to true.",
                field=field,
                index=index,
                total=a + b,
                max_tokens=max_tokens,
                option=option,
            )
        return kept_of_pair(a, b, max_tokens, side or tokenizer.spec.truncation_side)

    return cut
