"""Large answers as JSON without keeping the event loop from its work: vectors are written one by one, with turns between.

A million numbers take a tenth of a second to write, wherever that is done, for the writer holds Python's lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_json

TURN_BYTES = 16384  # about 0.2 ms


async def render(value: Any) -> bytes:
    """Returns a value as JSON, giving the event loop a turn every so many bytes; a list of numbers is one piece, and so is a text."""
    parts: list[bytes] = []
    written = 0
    for part in _pieces(value):
        parts.append(part)
        written += len(part)
        if written >= TURN_BYTES:
            written = 0
            await asyncio.sleep(0)
    return b"".join(parts)


def _pieces(value: Any) -> Iterator[bytes]:
    """Yields the JSON of nested lists, a piece for each innermost one, or for each text in it."""
    if not (isinstance(value, list) and value and isinstance(value[0], list | str)):
        yield to_json(value)
        return
    for i, item in enumerate(value):
        yield b"," if i else b"["
        yield from _pieces(item)
    yield b"]"
