"""Texts to token ids, over Hugging Face `tokenizers`, and the index arithmetic of truncation and windows.

The tokenizer is run once, without special tokens, truncation or padding (those are mutable state of a `tokenizers`
object and unsafe to change between threads); templates, truncation and windows are done here on plain integers. Knows
no task and no padding to a batch: the engine pads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from service.bundle import Piece, SpecialPiece, TokenizerSpec
from service.errors import BundleError, EngineError

# Parallelism comes from the lanes; tokenizers' own thread pool would compete with them for the same cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What one row of a batch is made from, special tokens included, not padded.

    Attributes:
        ids: Token ids, int64 [length].
        type_ids: Segment ids, int64 [length].
    """

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """Turns texts into encodings as the manifest's template says. Safe to share between threads."""

    def __init__(self, path: Path, spec: TokenizerSpec) -> None:
        """Loads `tokenizer.json`.

        Raises:
            BundleError: The file is not a tokenizer that this version of `tokenizers` reads.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception for every failure
            raise BundleError(f"`{path}` is not a tokenizer this version of `tokenizers` reads: {error}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "[SEP]" in a caller's text is text; the flag does not survive serialization.
        self._tokenizer.encode_special_tokens = True
        self._templates = {False: _Template(spec.single), True: _Template(spec.pair)}
        self.max_length = spec.max_length

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without special tokens.

        Raises:
            EngineError: The tokenizer panicked.
        """
        try:
            # encode_batch releases the GIL, encode does not.
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:
            # A Rust panic is no Exception; let it not take a lane with it.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise EngineError(f"the tokenizer failed with {type(error).__name__}. This is a bug.") from error
            raise
        return [encoding.ids for encoding in encodings]

    def room(self, *, pair: bool) -> int:
        """Returns how many text tokens fit beside the special tokens of the template."""
        return self.max_length - self._templates[pair].specials

    def assemble(self, a: TokenIds, b: TokenIds | None = None) -> Encoding:
        """Puts the special tokens around one text, or a pair; `a` and `b` together must fit `room`."""
        return self._templates[b is not None].fill(a, () if b is None else b)


class _Template:
    """The manifest's sequence of special tokens and texts, with its segment ids."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.specials = sum(isinstance(piece, SpecialPiece) for piece in pieces)

    def fill(self, a: TokenIds, b: TokenIds) -> Encoding:
        ids: list[int] = []
        type_ids: list[int] = []
        for piece in self._pieces:
            part: Any = (piece.id,) if isinstance(piece, SpecialPiece) else (a if piece.text == "a" else b)
            ids.extend(part)
            type_ids.extend([piece.type_id] * len(part))
        return Encoding(np.array(ids, dtype=np.int64), np.array(type_ids, dtype=np.int64))


def truncate_longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts to keep, the longer one cut first, as Hugging Face's `longest_first`.

    Args:
        a: Tokens of the first text.
        b: Tokens of the second text.
        room: Tokens that both may have together.
    """
    if a + b <= room:
        return a, b
    short = min(a, b)
    kept_long = max(short, room - short)
    if short + kept_long > room:
        short, kept_long = room // 2, room - room // 2
    return (kept_long, short) if a > b else (short, kept_long)


def windows(count: int, room: int, stride: int) -> list[range]:
    """Cuts `count` tokens into windows of at most `room`, neighbors overlapping by `stride` tokens.

    There is always one window, also of nothing, and the last one ends with the last token.

    Args:
        count: Tokens of the text.
        room: Tokens of a full window, greater than `stride`.
        stride: Tokens that a window shares with the one before.
    """
    starts = range(0, max(count - stride, 1), room - stride)
    return [range(start, min(start + room, count)) for start in starts]


def estimate_tokens(text: str) -> int:
    """Returns a cheap guess of a text's tokens: 4 characters a token in ASCII, else 1.5 (CJK is near 1)."""
    return len(text) // 4 + 1 if text.isascii() else int(len(text) / 1.5) + 1
