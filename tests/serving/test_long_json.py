"""A long response is serialized in short pieces, because orjson blocks the interpreter while it writes a piece."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from bertserve.service.text.filling import FilledText
from bertserve.service.wire import json_text
from bertserve.service.wire.json_text import PIECE_BYTES, fragment, json_pieces, to_json

ENTITY = {"entity_group": "PER", "score": 0.5, "word": "Ada\u00e9\n", "start": 0, "end": 3}
VECTORS = np.linspace(-1, 1, 512 * 384, dtype=np.float32).reshape(512, 384)
LONG_TEXT = "\u03b1 " * 10_000
FILLED = [{"score": 0.5, "sequence": FilledText(LONG_TEXT, str(number), " film\n")} for number in range(500)]
VALUES: dict[str, Any] = {
    "nothing": [],
    "an empty object": {},
    "empty lists": [[], {}, np.zeros(0, np.float32), np.zeros((2, 0), np.float32)],
    "a text": "good",
    "scalars": [1, None, True, np.float32(0.1), 0.1],
    "entities": [[ENTITY] * 5000, [], [ENTITY]],
    "no entities before many": [[], *[[ENTITY] * 100] * 300],
    "vectors": list(VECTORS),
    "a vector of each token": [VECTORS, VECTORS[:3]],
    "short and long texts in turn": [VECTORS[:1], VECTORS] * 3,
    "one long vector": [VECTORS.reshape(-1)],
    "vectors within objects": {"object": "list", "data": [{"index": i, "embedding": row} for i, row in enumerate(VECTORS)]},
    "numbers": {"outputs": [{"name": "scores", "data": VECTORS.reshape(-1).tolist()}]},
    "documents": [{"index": 0, "document": fragment(to_json({"text": "a" * 1000}))}] * 100,
    "long texts": [{"text": "\u4e2d" * 50_000}] * 30,
    "long texts with fillings": FILLED,
    "short texts with fillings": [{"sequence": FilledText("a ", "good", " film")}] * 5000,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_pieces_make_the_same_json(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest part is a text of 150 KB; text is written faster than numbers."""
    parts: list[int] = []

    def counted(part: Any) -> bytes:
        parts.append(len(written := to_json(part)))
        return written

    monkeypatch.setattr(json_text, "to_json", counted)
    pieces = list(json_pieces(value))
    whole = b"".join(pieces)

    assert to_json(value) == whole
    assert max(parts, default=0) < 2 * 10**5
    assert max(map(len, pieces)) <= max([PIECE_BYTES, *parts])
    assert len(pieces) <= 1 + 2 * len(whole) // PIECE_BYTES


def test_a_filled_text_is_written_as_its_string() -> None:
    assert b'["a \xc3\xa9\\n film"]' == to_json([FilledText("a ", "\u00e9\n", " film")])


def test_filled_texts_need_only_the_memory_of_their_json() -> None:
    """The answer alone has 15 MB; its texts as strings would have 20 MB, and orjson would add another 15 MB to them."""
    tracemalloc.start()
    try:
        length = sum(map(len, list(json_pieces(FILLED))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert length > 500 * 3 * 10_000
    assert peak < 1.25 * length
