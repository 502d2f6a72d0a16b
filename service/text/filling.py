"""Filling: the text of token ids of which a few in the middle change, many times over, without decoding the rest of it again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bertserve.service.errors import TooLargeError
from bertserve.service.text.tokenizer import TokenIds, Tokenizer

# Tokens on either side of a place that may look different because of what is filled in, and as many before them, so that the first of these is
# not the first of its text. Decoders look no further: at the token before, at the characters of UTF-8 that a token has a part of.
CONTEXT = 8
# A text of no more tokens is decoded whole for each filling, which takes no longer.
SHORT_TOKENS = 64
# Tokens that may be decoded for the fillings of one place, if the decoder is not one of those.
MAX_WHOLE_TOKENS = 2**20
# Fillings that are decoded before other requests get a turn. Of a text of SHORT_TOKENS, they take 10 ms.
FILLINGS_PER_STEP = 256
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Fillings:
    """The texts of token ids with other tokens in some places."""

    def __init__(self, tokenizer: Tokenizer, ids: TokenIds, places: Sequence[range], *, skip_special: bool) -> None:
        """Decodes what all texts share.

        Args:
            tokenizer: What decodes.
            ids: Token ids of the whole text.
            places: What other tokens stand in for, ascending; each by itself.
            skip_special: Whether special tokens are left out.
        """
        self._tokenizer, self._ids, self._places, self._skip = tokenizer, list(ids), places, skip_special
        self._cuts: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._text = ""
        self._whole = len(ids) <= SHORT_TOKENS
        self._whole_tokens = [0] * len(places)  # that were decoded
        if not self._whole:
            self._cuts = [(self._clean_cut(place.start - CONTEXT, -1), self._clean_cut(place.stop + CONTEXT, 1)) for place in places]
            self._whole = not self._decode_shared()

    def texts(self, index: int, fillings: Sequence[TokenIds]) -> list[str]:
        """Returns the whole text with each of some fillings in one of the places.

        Raises:
            TooLargeError: The decoder needs the whole text for too many of them.
        """
        if self._whole:
            return self._written_whole(index, fillings)
        first, last = self._cuts[index]
        head, tail = self._text[: self._starts[first]], self._text[self._starts[last] :]
        found = self._near(index, fillings)
        others = iter(self._written_whole(index, [filling for filling, near in zip(fillings, found, strict=True) if near is None]))
        return [next(others) if near is None else f"{head}{near}{tail}" for near in found]

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
        """Returns the part of the text that a filling may change, for each; None where the context before it looks otherwise with it."""
        place, (first, last) = self._places[index], self._cuts[index]
        before, after = self._ids[max(first - CONTEXT, 0) : place.start], self._ids[place.stop : last]
        context, *texts = self._decoded(
            [self._ids[max(first - CONTEXT, 0) : first], *([*before, *filling, *after] for filling in fillings)]
        )
        return [text[len(context) :] if text.startswith(context) else None for text in texts]

    def _decode_shared(self) -> bool:
        """Decodes the text, and finds where in it the cuts are; returns whether it is what its parts are together."""
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
        """Returns whether the text is the same if one place is decoded by itself."""
        place, (first, last) = self._places[index], self._cuts[index]
        return self._near(index, [self._ids[place.start : place.stop]]) == [self._text[self._starts[first] : self._starts[last]]]

    def _clean_cut(self, cut: int, step: int) -> int:
        """Returns the nearest place to cut, in one direction, that is not within a character; a character has four bytes at most."""
        for nearest in range(cut, cut + 4 * step, step):
            if not 0 < nearest < len(self._ids):
                break
            (before,) = self._decoded([self._ids[max(nearest - CONTEXT, 0) : nearest]])
            if not before.endswith(_BROKEN):
                return nearest
        return min(max(cut, 0), len(self._ids))

    def _decoded(self, texts: Sequence[TokenIds]) -> list[str]:
        return self._tokenizer.decode_all(texts, skip_special=self._skip)
