"""Words as people read them, with their tokens, and offsets in the unit of the caller's language. It does not depend on tasks.

A word is the text between white space, without punctuation around it: `film`, `don't`, `well-known`, `1,000`. Each punctuation mark is a
separate word. In scripts without spaces each token is a word, because only the tokenizer separates words there.
"""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bertserve.service.text.tokenizer import Tokens

# Thai, Lao, Burmese, Khmer, Kana, and Chinese and Japanese ideographs.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
# Punctuation that is part of a word if letters, or digits, are on both sides.
_JOINS_LETTERS, _JOINS_DIGITS = "'’-‐", ".,:"
# Python counts code points, JavaScript and Java UTF-16 units, Go and Rust bytes.
Unit = Literal["code_points", "utf16", "utf8"]
_CODECS = {"utf16": ("utf-16-le", 2), "utf8": ("utf-8", 1)}


@dataclass(slots=True)
class Word:
    """A word of a text, with its start and end in code points, end exclusive, and the indices of its tokens."""

    start: int
    end: int
    tokens: range


def find_words(tokens: Tokens, token_range: range | None = None) -> list[Word]:
    """Returns the words of a text in order; each token belongs to at most one word.

    `token_range` gives the tokens to use, which can split words at the edges; None for all.
    """
    text = tokens.text
    token_range = range(len(tokens)) if token_range is None else token_range
    if not token_range:
        return []
    spans = [trimmed(text, start, end) for start, end in tokens.offsets_with_marks[token_range.start : token_range.stop]]
    word_ids = tokens.library_encoding.word_ids[token_range.start : token_range.stop]
    words: list[Word] = []
    first = 0
    for i, (start, end) in enumerate(spans):
        # a token that is empty or only white space belongs to the next word
        if start == end and i + 1 < len(spans):
            continue
        before = words[-1] if words else None
        if before is not None and (start == end or _continues(text, before.end, start, same=word_ids[i] == word_ids[i - 1])):
            words[-1] = Word(before.start, max(before.end, end), range(before.tokens.start, token_range.start + i + 1))
        else:
            words.append(Word(start, end, range(token_range.start + first, token_range.start + i + 1)))
        first = i + 1
    return [word for word in words if word.start < word.end]


def most_within(words: Sequence[Word], windows: Sequence[range]) -> int:
    """Returns the maximum number of words, including partial ones, in a window; `windows` gives the windows' tokens."""
    starts, stops = [word.tokens.start for word in words], [word.tokens.stop for word in words]
    return max(bisect_left(starts, window.stop) - bisect_right(stops, window.start) for window in windows)


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns a span without white space at its ends, which some tokenizers include in tokens; only white space becomes an empty span."""
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, max(start, end - (len(piece) - len(piece.rstrip())))


def _continues(text: str, end: int, start: int, *, same: bool) -> bool:
    """Returns whether a token continues the previous word, which ends at `end`; `same` is whether the tokenizer joins them."""
    if start < end:  # several tokens of the same character
        return True
    if any(char.isspace() for char in text[end:start]):
        return False
    left, right = text[end - 1], text[start]
    if _is_letter(left) and _is_letter(right):
        return same and not _UNSPACED.match(right)
    mark = start if _is_letter(left) else end - 1
    before, after = text[mark - 1 : mark], text[mark + 1 : mark + 2]
    if text[mark] in _JOINS_DIGITS:
        return before.isdigit() and after.isdigit()
    return text[mark] in _JOINS_LETTERS and _is_letter(before) and _is_letter(after)


def _is_letter(char: str) -> bool:
    """Returns whether a character is part of a word: a letter, a digit or a combining mark."""
    return bool(char) and unicodedata.category(char)[0] in "LNM"


def convert_offsets(spans: Sequence[dict[str, Any]], text: str, unit: Unit) -> None:
    """Converts `start` and `end` of each span, in any order, from code points of the text to the unit, in place; spans can overlap."""
    if unit == "code_points" or text.isascii():
        return
    codec, size = _CODECS[unit]
    converted: dict[int, int] = {0: 0}
    last = units = 0
    for position in sorted({span[key] for span in spans for key in ("start", "end")}):
        units += len(text[last:position].encode(codec)) // size
        converted[position], last = units, position
    for span in spans:
        span["start"], span["end"] = converted[span["start"]], converted[span["end"]]
