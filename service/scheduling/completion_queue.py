"""CompletionQueue: results from inference threads to waiting coroutines of one event loop, one wake-up per burst."""

from __future__ import annotations

import asyncio
import threading
from typing import Any


class CompletionQueue:
    """Sets results on futures of the loop that it was made in; a future that is done already is left alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []

    def post(self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
        """Delivers a result, or an error, from any thread. Wakes the loop only if no earlier post did already."""
        with self._lock:
            self._items.append((future, result, error))
            first = len(self._items) == 1
        if first:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for future, result, error in items:
            # its caller may have been cancelled since; setting it then would raise and lose the others
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
