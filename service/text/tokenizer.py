"""Texts to token ids, over Hugging Face `tokenizers`, and the templates of special tokens around them.

The tokenizer is run once, without special tokens, truncation or padding: those are mutable state of a `tokenizers` object, and
unsafe to change between threads. Templates are filled here, `windows.py` truncates. It does not depend on tasks or on the padding of batches: the
engine pads.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import Piece, Side, SpecialPiece, TokenizerSpec
from bertserve.service.errors import BundleError, EngineError, InvalidValueError
from bertserve.service.text.windows import kept_of_pair

# Parallelism comes from the inference threads; tokenizers' own thread pool would compete with them for the same cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TokenIds = Sequence[int]
SHORT_CHARS = 600  # tokenized in about 0.2 ms (0.3 us a character, docs/explanation/scheduling.md)

GROUP_CHARS = 2**16  # that are tokenized at once, or one longer text


class Tokens:
    """The tokens of one whole text, without special tokens. Offsets and pieces are read only by who asks for them."""

    def __init__(self, encoding: Any, ids: list[int]) -> None:
        """Wraps an encoding of `tokenizers`, with ids of its tokens."""
        self._encoding = encoding
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and end of each token in the text, in code points, end exclusive."""
        offsets: list[tuple[int, int]] = self._encoding.offsets
        return offsets

    def span(self, cut: range) -> tuple[int, int]:
        """Returns the start of the first and the end of the last of some tokens, at least one, without reading the others."""
        return self._encoding.token_to_chars(cut.start)[0], self._encoding.token_to_chars(cut.stop - 1)[1]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the offsets, with combining marks that the tokenizer has stripped added to the token before them.

        Args:
            text: The text that these tokens are of.
        """
        offsets = self.offsets
        whole = []
        for (start, end), (following, _) in zip(offsets, [*offsets[1:], (len(text), 0)], strict=True):
            marks = 0
            while end + marks < following and unicodedata.category(text[end + marks])[0] == "M":
                marks += 1
            whole.append((start, end + marks))
        return whole

    @property
    def pieces(self) -> list[str]:
        """Each token as the vocabulary spells it."""
        pieces: list[str] = self._encoding.tokens
        return pieces

    @property
    def word_ids(self) -> list[int]:
        """The pre-tokenizer's word that each token is of."""
        word_ids: list[int] = self._encoding.word_ids
        return word_ids


@dataclass(frozen=True, slots=True)
class Encoding:
    """What one row of a batch is made from, special tokens included, not padded.

    Attributes:
        ids: Token ids, int64 [length].
        type_ids: Segment ids, int64 [length].
        start: Position of the first token of the last text of the template: the text itself, or of a pair the second.
        masks: Positions of the mask tokens to be filled.
        maps: Layer and head, from 0, of each attention map that is wanted, ascending.
    """

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    start: int = 1
    masks: tuple[int, ...] = ()
    maps: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def cost_tokens(self) -> int:
        """What it counts against the budget of a batch: projecting a mask onto the vocabulary is about a token's work."""
        return len(self.ids) + len(self.masks)


class Tokenizer:
    """Turns texts into encodings as the manifest's template says. Safe to share between threads."""

    def __init__(self, path: Path, spec: TokenizerSpec) -> None:
        """Loads `tokenizer.json`.

        Raises:
            BundleError: The file is not a tokenizer that this version of `tokenizers` reads, or it fails on a question mark.
        """
        self._library = _library_tokenizer(path)
        self._tokenizer = self._library.tokenizer
        self._templates = {False: _Template(spec.single), True: _Template(spec.pair)}
        self.max_length = spec.max_length
        self.mask = spec.mask
        self.pairs_only = spec.pairs_only
        self.cls_index = spec.cls_index
        self.truncation_side = spec.truncation_side
        self.subword_prefix = spec.subword_prefix
        self.vocabulary_size: int = self._tokenizer.get_vocab_size()
        self.unknown: str | None = getattr(self._tokenizer.model, "unk_token", None)
        # The flag above has no effect if the vocabulary itself has the spelling: pieces of SentencePiece, and whole words.
        unknown = self._library.unknown_id if self.unknown is None else self.token_id(self.unknown)
        self._stand_in = self._library.id_of_question_mark(path) if unknown is None else unknown
        self._reserved = _special_ids(self._tokenizer, spec) - {self._stand_in}
        self._left_out = frozenset(token.id for token in spec.added_tokens if token.special)

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text, without the template's special tokens.

        A text can spell the mask, where there is one, and the added tokens that the manifest lists; no other special token.

        Raises:
            EngineError: The tokenizer panicked.
        """
        try:
            if sum(map(len, texts)) <= SHORT_CHARS:
                # `encode` keeps the GIL: for so short a time that is less than getting it back from busy threads takes
                encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            else:
                encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:
            if _is_failure(error):
                raise EngineError("the tokenizer failed with {name}. This is a bug.", name=type(error).__name__) from error
            raise
        return [Tokens(encoding, self._ids(encoding)) for encoding in encodings]

    def each(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """Yields the tokens of each text, as `tokenize` returns them, without holding those of many long texts at once."""
        group: list[str] = []
        chars = 0
        for text in texts:
            if group and chars + len(text) > GROUP_CHARS:
                yield from self.tokenize(group)
                group, chars = [], 0
            group.append(text)
            chars += len(text)
        if group:
            yield from self.tokenize(group)

    def _ids(self, encoding: Any) -> list[int]:
        """Returns the ids of an encoding; a special token that is spelled in the text is unknown text."""
        ids: list[int] = encoding.ids
        return ids if self._reserved.isdisjoint(ids) else [self._stand_in if id_ in self._reserved else id_ for id_ in ids]

    def token_id(self, token: str) -> int | None:
        """Returns the id of exactly this vocabulary entry, or None."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def token(self, id_: int) -> str | None:
        """Returns the vocabulary entry of an id, or None."""
        token: str | None = self._tokenizer.id_to_token(id_)
        return token

    def decode(self, ids: TokenIds, *, skip_special: bool) -> str:
        """Returns the text of token ids."""
        text: str = self._tokenizer.decode(self._kept(ids, skip_special), skip_special_tokens=skip_special)
        return text

    def decode_all(self, texts: Sequence[TokenIds], *, skip_special: bool) -> list[str]:
        """Returns the text of each of several lists of token ids. Other threads run meanwhile."""
        kept = [self._kept(ids, skip_special) for ids in texts]
        found: list[str] = self._tokenizer.decode_batch(kept, skip_special_tokens=skip_special)
        return found

    def _kept(self, ids: TokenIds, skip_special: bool) -> list[int]:
        """Returns ids without the special added tokens, which the library knows as plain ones, where special tokens are left out."""
        return [id_ for id_ in ids if id_ not in self._left_out] if skip_special and self._left_out else list(ids)

    def room(self, *, pair: bool) -> int:
        """Returns how many text tokens fit in addition to the special tokens of the template."""
        return self.max_length - self._templates[pair].specials

    def starts(self, a: int, b: int | None = None) -> list[int]:
        """Returns where each text begins in the encoding of texts of so many tokens.

        Args:
            a: Tokens of the text.
            b: Those of the second text, if there is one.
        """
        return self._templates[b is not None].starts({"a": a, "b": b or 0})

    def assemble(self, a: TokenIds, b: TokenIds | None = None, *, masks: Sequence[int] = ()) -> Encoding:
        """Puts the special tokens around one text, or a pair.

        Args:
            a: Token ids of the text.
            b: Those of the second text; together they must fit `room`.
            masks: Indices into the last text of the mask tokens to be filled.

        Raises:
            InvalidValueError: There is no token at all: the text has none, and the template no special ones.
        """
        encoding = self._templates[b is not None].fill(a, () if b is None else b, masks)
        if not len(encoding.ids):
            raise InvalidValueError("the text is empty, and this model adds no special token to it; give a text.")
        return encoding

    def pairs(self, texts: Iterable[str], side: Side | None = None) -> Iterator[tuple[int, Encoding]]:
        """Yields the first text with each of the others: the tokens of both, and their encoding, cut to the model's length.

        Args:
            texts: The texts.
            side: The end at which texts are cut, the longer one of a pair first; None for the model's own.
        """
        others = self.each(texts)
        first = next(others)
        room = self.room(pair=True)
        for second in others:
            a, b = kept_of_pair(len(first), len(second), room, side or self.truncation_side)
            yield len(first) + len(second), self.assemble(first.ids[a.start : a.stop], second.ids[b.start : b.stop])


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _LibraryTokenizer:
    """A tokenizer of the library, as all that have its file use it; it is not changed any more.

    Attributes:
        tokenizer: The library's.
        unknown_id: Of SentencePiece, the id of what stands for text that the vocabulary does not have: the library does not tell it.
    """

    tokenizer: Any
    unknown_id: int | None

    def id_of_question_mark(self, path: Path) -> int:
        """Returns the last id of a question mark, which stands for unknown text where the vocabulary has no token for it.

        Raises:
            BundleError: The tokenizer cannot encode it.
        """
        try:
            id_: int = self.tokenizer.encode("?", add_special_tokens=False).ids[-1]
            return id_
        except BaseException as error:
            if _is_failure(error):
                raise _unreadable(path, error) from error
            raise


def _is_failure(error: BaseException) -> bool:
    """Returns whether the library failed: a panic of it is not an Exception, and must end neither a thread nor a reload."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _unreadable(path: Path, error: BaseException) -> BundleError:
    """Returns the error of a tokenizer file that the library fails on."""
    return BundleError(f"`{path}` cannot be read by this version of `tokenizers`: {error}.")


# Content -> what was loaded of it. Many models have one vocabulary, and it takes 6 MB and 20 ms each time.
_loaded: WeakValueDictionary[bytes, _LibraryTokenizer] = WeakValueDictionary()
_loading = threading.Lock()


def _library_tokenizer(path: Path) -> _LibraryTokenizer:
    """Returns the tokenizer of a file, the same one for files of the same content.

    Raises:
        BundleError: The file is not a tokenizer that this version of `tokenizers` reads.
    """
    try:
        content = path.read_bytes()
        key = hashlib.sha256(content).digest()
        with _loading:
            if (known := _loaded.get(key)) is not None:
                return known
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            # "[SEP]" in a caller's text is text; the flag does not survive serialization.
            tokenizer.encode_special_tokens = True
            has_unknown = getattr(tokenizer.model, "unk_token", None) is not None
            created = _LibraryTokenizer(tokenizer, None if has_unknown else json.loads(content)["model"].get("unk_id"))
            _loaded[key] = created
            return created
    except BaseException as error:
        if _is_failure(error):
            raise _unreadable(path, error) from error
        raise


def _special_ids(tokenizer: Any, spec: TokenizerSpec) -> set[int]:
    """Returns the ids that mean something to the model which no text may say: all special tokens but the mask to be filled in."""
    ids = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids |= {piece.id for piece in (*spec.single, *spec.pair) if isinstance(piece, SpecialPiece)} | {spec.pad_id}
    return ids - (set() if spec.mask is None else {spec.mask.id})


class _Template:
    """The manifest's sequence of special tokens and texts, with its segment ids."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.specials = sum(isinstance(piece, SpecialPiece) for piece in pieces)

    def fill(self, a: TokenIds, b: TokenIds, masks: Sequence[int]) -> Encoding:
        ids: list[int] = []
        type_ids: list[int] = []
        start = 0
        for piece in self._pieces:
            if isinstance(piece, SpecialPiece):
                part: TokenIds = (piece.id,)
            else:
                part, start = (a if piece.text == "a" else b), len(ids)
            ids.extend(part)
            type_ids.extend([piece.type_id] * len(part))
        placed = tuple(start + mask for mask in masks)
        return Encoding(np.array(ids, dtype=np.int64), np.array(type_ids, dtype=np.int64), start, placed)

    def starts(self, lengths: Mapping[str, int]) -> list[int]:
        positions, place = [], 0
        for piece in self._pieces:
            if isinstance(piece, SpecialPiece):
                place += 1
            else:
                positions.append(place)
                place += lengths[piece.text]
        return positions


def estimate_tokens(text: str) -> int:
    """Returns a cheap guess of a text's tokens: 4 characters a token in ASCII, else 1.5 (CJK is near 1)."""
    return len(text) // 4 + 1 if text.isascii() else int(len(text) / 1.5) + 1
