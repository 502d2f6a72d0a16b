"""Fillings: the text of token ids with other tokens in some places equals the decoded whole, at a much lower cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from bertserve.service.errors import TooLargeError
from bertserve.service.text import filling
from bertserve.service.text.filling import Fillings
from bertserve.service.text.tokenizer import TokenIds

WORDS = ["[MASK]", "good", "film", "##ly", "##s", ".", ",", "'", "n't", "do", "not", "a", "日", "本", "?"]
_BYTES = decoders.ByteLevel()
_LEVEL = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
_FALLBACK = [f"<0x{code:02X}>" for code in (0x41, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80)]
KINDS: dict[str, tuple[list[str], Any]] = {
    "WordPiece": (WORDS, decoders.WordPiece()),
    "byte-level BPE": (["[MASK]", "Ġgood", "Ġfilm", "Ġa", "s", *_LEVEL], _BYTES),
    "SentencePiece": (["[MASK]", "▁good", "▁film", "▁", "ly", "s", ".", "▁a", "日"], decoders.Metaspace()),
    "BPE with suffixes": (["[MASK]", "good</w>", "fil", "m</w>", "a</w>", ".</w>", "s</w>"], decoders.BPEDecoder()),
    "SentencePiece with bytes": (
        ["[MASK]", "▁good", "▁film", "ly", "s", ".", *_FALLBACK],
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ),
}


class Decoder:
    """The part of a tokenizer that decoding needs; it counts the decoded tokens."""

    def __init__(self, kind: str) -> None:
        vocabulary, decoder = KINDS[kind]
        self._tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "[MASK]"))
        self._tokenizer.decoder = decoder
        self._tokenizer.add_special_tokens(["[MASK]"])
        self.size = len(vocabulary)
        self.decoded = 0

    def decode_all(self, texts: Sequence[TokenIds], *, skip_special: bool) -> list[str]:
        self.decoded += sum(map(len, texts))
        found: list[str] = self._tokenizer.decode_batch([list(ids) for ids in texts], skip_special_tokens=skip_special)
        return found


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_filled_text_equals_the_decoded_whole(kind: str, skip_special: bool) -> None:
    """Every token of a vocabulary is tried at several places of short and long random texts."""
    decoder, random_ = Decoder(kind), random.Random(5)
    for length in (1, 2, 60, 66, 80, 150, 300):
        for _ in range(6):
            ids = random_.choices(range(1, decoder.size), k=length)
            places = [range(place, place + 1) for place in sorted({0, length // 2, length - 1, random_.randrange(length)})]
            for place in places:
                ids[place.start] = 0
            fillings = Fillings(decoder, ids, places, skip_special=skip_special)  # type: ignore[arg-type]
            for index, place in enumerate(places):
                whole = [[*ids[: place.start], token, *ids[place.stop :]] for token in range(decoder.size)]
                expected = decoder.decode_all(whole, skip_special=skip_special)
                assert expected == fillings.texts(index, [[token] for token in range(decoder.size)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_byte_tokens_is_decoded_as_a_whole(kind: str) -> None:
    """A long run of partial characters surrounds the place, and a filling can break or complete a character."""
    decoder, random_ = Decoder(kind), random.Random(7)
    last = range(max(1, decoder.size - 10), decoder.size)
    for shift in range(12):
        ids = [1] * shift + [*last] * 8 + random_.choices(last, k=40) + [1] * 5
        place = range(len(ids) // 2, len(ids) // 2 + 2)
        fillings = Fillings(decoder, ids, [place], skip_special=True)  # type: ignore[arg-type]
        middles = [[], *([token] for token in range(decoder.size)), [*last][:4], [1, 2, 1]]
        whole = [[*ids[: place.start], *middle, *ids[place.stop :]] for middle in middles]
        assert decoder.decode_all(whole, skip_special=True) == fillings.texts(0, middles)


def test_a_decoder_that_needs_the_whole_text_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SimpleNamespace(decode_all=lambda texts, skip_special: [f"{len(ids)}:{sum(ids)}" for ids in texts])
    fillings = Fillings(decoder, [1] * 100, [range(50, 51)], skip_special=True)  # type: ignore[arg-type]
    assert ["100:101", "100:102"] == fillings.texts(0, [[2], [3]])
    monkeypatch.setattr(filling, "MAX_WHOLE_TOKENS", 150)
    with pytest.raises(TooLargeError):
        fillings.texts(0, [[2], [3]])
