"""Filling: decodes a text many times with different tokens in a few places, without decoding the rest of it again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bertserve.service.errors import TooLargeError
from bertserve.service.text.tokenizer import TokenIds, Tokenizer

# Tokens on each side of a place whose text may depend on the filling, and as many tokens before them, so that the first of these is
# not the first of its text. Decoders only look at the previous token, and at the other bytes of a UTF-8 character.
CONTEXT = 8
# A text of at most this many tokens is decoded as a whole for each filling, which is not slower.
SHORT_TOKENS = 64
# Maximum number of tokens to decode for the fillings of one place, if each filling needs the whole text.
MAX_WHOLE_TOKENS = 2**20
# Fillings to decode before other requests get a turn; 10 ms for a text of SHORT_TOKENS.
FILLINGS_PER_STEP = 256
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class FilledText:
    """A long text with a filling, in three parts. The fillings of a place share the first and the last part.

    It becomes a string only when it is written. 660 copies of a text of 20,000 characters would take 26 MB if one letter is Greek.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __len__(self) -> int:
        """Returns the number of characters."""
        return sum(map(len, self._parts))

    def __eq__(self, other: object) -> bool:
        """Returns whether the other one is the same text, as a string or as a filled text."""
        return isinstance(other, str | FilledText) and str(self) == str(other)

    def __hash__(self) -> int:
        """Returns the hash of the string."""
        return hash(str(self))

    def __str__(self) -> str:
        """Returns the whole text."""
        return "".join(self._parts)


class Fillings:
    """The texts of token ids with different tokens in some places."""

    def __init__(self, tokenizer: Tokenizer, ids: TokenIds, places: Sequence[range], *, skip_special: bool) -> None:
        """Decodes the parts that all texts share; `places` are the ranges of tokens to replace, ascending, each separately."""
        self._tokenizer, self._ids, self._places, self._skip = tokenizer, list(ids), places, skip_special
        self._cuts: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._text = ""
        self._whole = len(ids) <= SHORT_TOKENS
        self._whole_tokens = [0] * len(places)  # decoded tokens of whole texts
        if not self._whole:
            self._cuts = [(self._clean_cut(place.start - CONTEXT, -1), self._clean_cut(place.stop + CONTEXT, 1)) for place in places]
            self._whole = not self._decode_shared()

    def texts(self, index: int, fillings: Sequence[TokenIds]) -> Sequence[str | FilledText]:
        """Returns the whole text for each filling of one place.

        Raises:
            TooLargeError: Too many fillings need the whole text to be decoded.
        """
        if self._whole:
            return self._written_whole(index, fillings)
        first, last = self._cuts[index]
        head, tail = self._text[: self._starts[first]], self._text[self._starts[last] :]
        parts = self._near(index, fillings)
        whole_texts = iter(self._written_whole(index, [filling for filling, part in zip(fillings, parts, strict=True) if part is None]))
        return [next(whole_texts) if part is None else FilledText(head, part, tail) for part in parts]

    def _written_whole(self, index: int, fillings: Sequence[TokenIds]) -> list[str]:
        place, count = self._places[index], len(self._ids)
        if count > SHORT_TOKENS:
            self._whole_tokens[index] += len(fillings) * count
            if self._whole_tokens[index] > MAX_WHOLE_TOKENS:
                raise TooLargeError(
                    "the text has {count} tokens, too many to decode it for each filling; shorten it, or make `top_k` smaller.", count=count
                )
        before, after = self._ids[: place.start], self._ids[place.stop :]
        return self._decoded([[*before, *filling, *after] for filling in fillings]) if fillings else []

    def _near(self, index: int, fillings: Sequence[TokenIds]) -> list[str | None]:
        """Returns, for each filling, the part of the text that it may change; None if the context before this part changes too."""
        place, (first, last) = self._places[index], self._cuts[index]
        before, after = self._ids[max(first - CONTEXT, 0) : place.start], self._ids[place.stop : last]
        context, *texts = self._decoded(
            [self._ids[max(first - CONTEXT, 0) : first], *([*before, *filling, *after] for filling in fillings)]
        )
        return [text[len(context) :] if text.startswith(context) else None for text in texts]

    def _decode_shared(self) -> bool:
        """Decodes the text and finds the positions of the cuts; returns whether the text equals its separately decoded parts."""
        cuts = sorted({0, len(self._ids), *(cut for pair in self._cuts for cut in pair)})
        parts = []
        for start, end in pairwise(cuts):
            parts += [self._ids[max(start - CONTEXT, 0) : start], self._ids[max(start - CONTEXT, 0) : end]]
        self._text, *decoded = self._decoded([self._ids, *parts])
        length = 0
        for cut, context, part in zip(cuts, decoded[::2], decoded[1::2], strict=False):
            self._starts[cut] = length
            if not part.startswith(context) or not self._text.startswith(part[len(context) :], length):
                return False
            length += len(part) - len(context)
        self._starts[len(self._ids)] = length
        return length == len(self._text) and all(self._is_near(index) for index in range(len(self._places)))

    def _is_near(self, index: int) -> bool:
        """Returns whether the text stays the same if one place is decoded separately."""
        place, (first, last) = self._places[index], self._cuts[index]
        return self._near(index, [self._ids[place.start : place.stop]]) == [self._text[self._starts[first] : self._starts[last]]]

    def _clean_cut(self, cut: int, step: int) -> int:
        """Returns the nearest cut in one direction that does not split a character, which has at most four bytes."""
        for nearest in range(cut, cut + 4 * step, step):
            if not 0 < nearest < len(self._ids):
                break
            (before,) = self._decoded([self._ids[max(nearest - CONTEXT, 0) : nearest]])
            if not before.endswith(_BROKEN):
                return nearest
        return min(max(cut, 0), len(self._ids))

    def _decoded(self, texts: Sequence[TokenIds]) -> list[str]:
        return self._tokenizer.decode_all(texts, skip_special=self._skip)
