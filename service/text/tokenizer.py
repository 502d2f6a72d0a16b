"""Converts texts to token ids with Hugging Face `tokenizers`, and adds special tokens by templates.

The library is called once per text, without special tokens, truncation or padding: these are mutable state of a `tokenizers` object,
and not thread-safe. Templates are filled here, and `windows.py` truncates. The engine pads batches, so this module depends neither on tasks
nor on padding.
"""

import hashlib
import json
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertserve.service.bundle.manifest import SpecialPart, TokenizerSpec
from bertserve.service.errors import EngineError, InvalidValueError, StartError

TokenIds = Sequence[int]
# A part of an input that the model reads in one encoding: the name of its text, empty if it is the only one, the index of its first
# code point, and the index after its last one.
ReadSpan = tuple[str, int, int]
INLINE_CHARS = 600  # characters that are tokenized on the event loop: about 0.2 ms, at 0.3 us per character
GROUP_CHARS = 2**16  # characters that are tokenized in one call, unless a single text is longer


@dataclass(slots=True)
class Tokens:
    """The tokens of a whole text, without special tokens.

    Offsets, spellings, and the words of the pre-tokenizer are only read on demand, from the `Encoding` of `tokenizers`.
    """

    text: str
    library_encoding: Any
    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and end of each token in the text, in code points, end exclusive."""
        return self.library_encoding.offsets

    def read_spans(self, token_ranges: Sequence[range], field: str = "") -> tuple[ReadSpan, ...]:
        """Returns the spans of ranges of tokens, such as the windows of the text; it reads only the offsets at their ends."""
        offsets = self.library_encoding.token_to_chars
        return tuple((field, offsets(part.start)[0], offsets(part.stop - 1)[1]) if part else (field, 0, 0) for part in token_ranges)

    @property
    def offsets_with_marks(self) -> list[tuple[int, int]]:
        """The offsets; combining marks without a token belong to the token before them."""
        text, offsets = self.text, self.offsets
        spans = []
        for (start, end), (following, _) in zip(offsets, [*offsets[1:], (len(text), 0)], strict=True):
            marks = 0
            while end + marks < following and unicodedata.category(text[end + marks])[0] == "M":
                marks += 1
            spans.append((start, end + marks))
        return spans


@dataclass(slots=True)
class Encoding:
    """The data of one row of a batch, including special tokens, without padding.

    Attributes:
        ids: Token ids, int64 [length].
        type_ids: Segment ids, int64 [length].
        starts: Position of the first token of each text.
        masks: Positions of the masks to fill.
        maps: Layer and head, counted from 0, of each requested attention map, ascending.
    """

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    starts: tuple[int, ...] = (1,)
    masks: tuple[int, ...] = ()
    maps: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def start(self) -> int:
        """Position of the first token of the text; of a pair, of the second text."""
        return self.starts[-1]


class Tokenizer:
    """Converts texts to encodings by the manifest's template. It is thread-safe."""

    def __init__(self, path: Path, spec: TokenizerSpec) -> None:
        """Loads `tokenizer.json`.

        Raises:
            StartError: The file is not a tokenizer that this version of `tokenizers` can read, or it cannot encode a question mark.
        """
        self.spec = spec
        self._tokenizer, self.unknown_id, self._replacement_id = _load(path)
        # for one text and for a pair: the sequence of special tokens and texts, and the tokens of texts that fit in addition
        self._templates = {False: spec.single} | ({} if spec.pair is None else {True: spec.pair})
        self._max_text_tokens = {
            pair: spec.max_length - sum(isinstance(part, SpecialPart) for part in parts) for pair, parts in self._templates.items()
        }
        self.vocabulary_size: int = self._tokenizer.get_vocab_size()
        # the library ignores its flag for special tokens if the vocabulary itself contains the spelling, as a piece or a whole word
        self._reserved = _special_ids(self._tokenizer, spec) - {self._replacement_id}
        special = [token.id for token in spec.added_tokens if token.special]
        self._skipped_ids = frozenset(special if spec.mask is None else [*special, spec.mask.id])

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the tokens of each text, without the template's special tokens.

        In a text, the mask and the manifest's added tokens are recognized as such, but no other special tokens.

        Raises:
            EngineError: The tokenizer panicked.
        """
        chars = sum(map(len, texts))
        try:
            if chars <= INLINE_CHARS:
                # `encode` keeps the GIL, which for such a short time costs less than getting it back from busy threads
                encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            else:
                encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:
            if is_tokenizer_failure(error):
                raise EngineError("the tokenizer failed with {name}. This is a bug.", name=type(error).__name__) from error
            raise
        texts_tokens = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids: list[int] = encoding.ids
            if not self._reserved.isdisjoint(ids):
                ids = [self._replacement_id if id_ in self._reserved else id_ for id_ in ids]
            texts_tokens.append(Tokens(text, encoding, ids))
        return texts_tokens

    def tokenize_lazily(self, texts: Iterable[str]) -> Iterator[Tokens]:
        """Yields the tokens of each text, like `tokenize`, but never holds the tokens of many long texts together."""
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

    def token_id(self, token: str) -> int | None:
        """Returns the id of exactly this vocabulary entry, or None."""
        return self._tokenizer.token_to_id(token)

    def token(self, id_: int) -> str | None:
        """Returns the vocabulary entry of an id, or None."""
        return self._tokenizer.id_to_token(id_)

    def decode_all(self, texts: Sequence[TokenIds], *, skip_special: bool) -> list[str]:
        """Returns the text of each list of token ids. It releases the GIL."""
        # the mask and added tokens are special for the model, but not for the library
        skipped_ids = self._skipped_ids if skip_special else ()
        id_lists = [[id_ for id_ in ids if id_ not in skipped_ids] for ids in texts]
        return self._tokenizer.decode_batch(id_lists, skip_special_tokens=skip_special)

    def max_text_tokens(self, *, pair: bool) -> int:
        """Returns the number of text tokens that fit in addition to the template's special tokens.

        Raises:
            InvalidValueError: The model cannot read pairs.
        """
        if pair not in self._max_text_tokens:
            raise InvalidValueError(
                "this model cannot read pairs of texts, because it has no token type for the second text; send single texts."
            )
        return self._max_text_tokens[pair]

    def assemble(self, a: TokenIds, b: TokenIds | None = None, *, masks: Sequence[int] = ()) -> Encoding:
        """Adds the special tokens to the token ids of a text or of a pair, which together must fit `max_text_tokens`.

        `masks` are the indices of the masks to fill, in the last text.

        Raises:
            InvalidValueError: The encoding would be empty: the text has no tokens, and the template adds none.
        """
        ids: list[int] = []
        type_ids: list[int] = []
        starts: dict[str, int] = {}
        for part in self._templates[b is not None]:
            if isinstance(part, SpecialPart):
                part_ids: TokenIds = (part.id,)
            else:
                part_ids = a if b is None or part.text == "a" else b
                starts[part.text] = len(ids)
            ids.extend(part_ids)
            type_ids.extend([part.type_id] * len(part_ids))
        if not ids:
            raise InvalidValueError("the text is empty, and this model adds no special token to it; give a text.")
        text_starts = tuple(starts[text] for text in sorted(starts))
        positions = tuple(text_starts[-1] + mask for mask in masks)
        return Encoding(np.array(ids, dtype=np.int64), np.array(type_ids, dtype=np.int64), text_starts, positions)


def is_tokenizer_failure(error: BaseException) -> bool:
    """Returns whether the library failed: its panic is not an Exception, and must end neither a thread nor a reload."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


# Digest of a file -> its tokenizer, which is never changed. Many models share a vocabulary, and loading one takes 6 MB and 20 ms.
_loaded: WeakValueDictionary[bytes, Any] = WeakValueDictionary()
_loading = threading.Lock()


def _load(path: Path) -> tuple[Any, int | None, int]:
    """Returns the tokenizer of a file, the id of its unknown token, if any, and the id that replaces special tokens in a text.

    Raises:
        StartError: The file is not a tokenizer that this version of `tokenizers` can read, or it cannot encode a question mark.
    """
    try:
        content = path.read_bytes()
        key = hashlib.sha256(content).digest()
        with _loading:
            if (tokenizer := _loaded.get(key)) is None:
                tokenizer = _loaded[key] = tokenizers.Tokenizer.from_buffer(content)
                tokenizer.no_truncation()
                tokenizer.no_padding()
                # "[SEP]" in a caller's text is ordinary text; this flag is not stored in the file.
                tokenizer.encode_special_tokens = True
        spelling: str | None = getattr(tokenizer.model, "unk_token", None)
        # the library does not expose the unknown token of SentencePiece
        unknown_id = json.loads(content)["model"].get("unk_id") if spelling is None else tokenizer.token_to_id(spelling)
        # without an unknown token, a question mark is the replacement
        return tokenizer, unknown_id, tokenizer.encode("?", add_special_tokens=False).ids[-1] if unknown_id is None else unknown_id
    except BaseException as error:
        if is_tokenizer_failure(error):
            raise StartError(f"`{path}` cannot be read by this version of `tokenizers`: {error}.") from error
        raise


def _special_ids(tokenizer: Any, spec: TokenizerSpec) -> set[int]:
    """Returns the ids that a text must not produce: the ids of all special tokens except the mask."""
    ids = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids |= {part.id for part in spec.parts if isinstance(part, SpecialPart)} | {spec.pad_id}
    return ids - (set() if spec.mask is None else {spec.mask.id})
