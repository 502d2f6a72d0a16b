"""LargeBodies: large bodies are read one at a time, with a turn of the event loop after each.

Parsing and validating a body of the largest size takes the event loop some 0.1 s. Many that are complete at the same time would be read
one after the other before anything else runs, until the supervisor takes the worker for hung.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bertserve.service.wire.call import Call, Incoming
from bertserve.service.wire.routes import Route

SMALL_BYTES = 2**16


class LargeBodies:
    """Reads bodies of all requests of a process."""

    def __init__(self) -> None:
        """Starts with none."""
        self._turn = asyncio.Lock()

    async def read(self, route: Route, incoming: Incoming[Any]) -> Call[Any]:
        """Returns what a request of a route asks for, as `route.read` does."""
        if len(incoming.raw) <= SMALL_BYTES:
            return route.read(incoming)
        async with self._turn:
            try:
                return route.read(incoming)
            finally:
                await asyncio.sleep(0)
