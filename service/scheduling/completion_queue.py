"""CompletionQueue: passes the ends of requests from the inference threads to the event loop."""

from __future__ import annotations

import asyncio
import threading


class CompletionQueue:
    """Resolves futures of an event loop from any thread, and wakes the loop once for all that come until it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._ended: list[tuple[asyncio.Future[None], Exception | None]] = []

    def post(self, future: asyncio.Future[None], error: Exception | None) -> None:
        """Resolves a future soon."""
        with self._lock:
            self._ended.append((future, error))
            first = len(self._ended) == 1
        if first:
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for future, error in ended:
            if future.done():  # its caller was cancelled
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
