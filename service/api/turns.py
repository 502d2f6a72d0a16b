"""Turns: reads and writes large bodies and answers one at a time, so that the event loop serves others between them."""

from __future__ import annotations

import asyncio

# Bytes of a body or an answer from which it waits for its turn: many can come at once, and each takes up to 0.04 s of the event loop.
LARGE_BYTES = 2**17


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Waits for a turn of the loop in which no other large body or answer is read or written."""
        async with self._lock:
            await asyncio.sleep(0)
