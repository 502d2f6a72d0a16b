"""Reads a user's texts, and pairs of texts, from a file; samples them; and recognizes them by short digests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertserve.export.errors import CheckpointError
from bertserve.export.input_fields import read_input
from bertserve.service.bundle.manifest import TextSplit

MIN_TEXTS = 16
JSON_LINES = (".jsonl", ".ndjson")
PAIR_FIELDS = (("text", "text_pair"), ("question", "context"))
HASH_BYTES = 4  # of a text in the manifest: 1,000 texts take 5 KB, and one of 1,000 others is mistaken for one of them with 0.02 %

TextOrPair = str | tuple[str, str]
Item = TypeVar("Item")


def read_texts(path: Path, purpose: str = "calibration") -> list[TextOrPair]:
    """Returns the texts of a file, each once: one per line, or those of JSON Lines, which can be pairs.

    Args:
        path: The file; JSON Lines where its name ends so.
        purpose: What its texts are for, for the error.

    Raises:
        CheckpointError: The file cannot be read, or holds fewer than `MIN_TEXTS` different texts.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the {purpose} texts `{path}` cannot be read: {error}.") from error
    texts: list[TextOrPair] = [line for line in lines if line.strip()]
    if path.suffix.lower() in JSON_LINES:
        texts = [_read_json(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    first: dict[str, TextOrPair] = {}
    for text in texts:
        first.setdefault(_normalized(text), text)
    different = list(first.values())
    if len(different) < MIN_TEXTS:
        raise CheckpointError(
            f"`{path}` holds {len(different)} different texts, and {purpose} needs {MIN_TEXTS} at least, one per line; some hundred are better."
        )
    return different


def _read_json(path: Path, number: int, line: str) -> TextOrPair:
    """Returns the text or pair of one line of JSON Lines.

    Raises:
        CheckpointError: It holds neither.
    """
    try:
        document = json.loads(line)
        value: Any = read_input(document) if isinstance(document, dict) else None
    except ValueError as error:
        raise CheckpointError(f"`{path}` line {number}: {error}") from error
    if isinstance(value, dict):
        pair: Any = next(((value[first], value[second]) for first, second in PAIR_FIELDS if value.keys() == {first, second}), None)
        value = value["text"] if value.keys() == {"text"} else pair
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, str) and part.strip() for part in parts):
        raise CheckpointError(
            f'`{path}` line {number} holds neither a text nor a pair of texts; give {{"text": ...}}, {{"text": ..., "text_pair": ...}} or '
            '{"question": ..., "context": ...}.'
        )
    text: TextOrPair = value
    return text


def refuse_overlap(seen: Collection[TextOrPair], unseen: Collection[TextOrPair], seen_path: Path, unseen_path: Path) -> None:
    """Refuses files that share texts; white space does not tell texts apart.

    Raises:
        CheckpointError: They do; the message says how many.
    """
    shared = len({*map(_normalized, seen)} & {*map(_normalized, unseen)})
    if shared:
        raise CheckpointError(
            f"`{seen_path}` and `{unseen_path}` share {shared} texts, and int8 must be judged on texts that it was not calibrated on; remove "
            "them from one of the files, or leave out --validation, and texts of the calibration file are held out."
        )


def sample(items: Sequence[Item], count: int) -> list[Item]:
    """Returns at most so many of the items, in order: one of each of as many equal parts, at a fixed random place.

    Items at equal distances would all be of one class where the classes take turns.
    """
    if len(items) <= count:
        return list(items)
    starts = np.arange(count + 1) * len(items) // count
    return [items[place] for place in np.random.default_rng(0).integers(starts[:-1], starts[1:])]


def mixed(items: Sequence[Item], block: int) -> list[Item]:
    """Returns the items with each block of neighbors in a fixed random order, so that a pattern such as one line per class is broken."""
    rng = np.random.default_rng(0)
    places = [start + place for start in range(0, len(items), block) for place in rng.permutation(min(block, len(items) - start))]
    return [items[place] for place in places]


def split_digest(texts: Iterable[TextOrPair]) -> TextSplit:
    """Returns the entry of a manifest that recognizes these texts."""
    hashes = list(map(text_hash, texts))
    return TextSplit(texts=len(hashes), hashes=base64.b64encode(b"".join(hashes)).decode())


def hashes_of(split: TextSplit) -> list[bytes]:
    """Returns the hash of each text that an entry of a manifest recognizes, in order."""
    joined = base64.b64decode(split.hashes)
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def text_hash(text: TextOrPair) -> bytes:
    """Returns the short hash of a text or pair."""
    return hashlib.sha256(_normalized(text).encode()).digest()[:HASH_BYTES]


def _normalized(text: TextOrPair) -> str:
    """Returns a text, or both of a pair, with runs of white space as one space."""
    return "\x00".join(" ".join(part.split()) for part in ((text,) if isinstance(text, str) else text))
