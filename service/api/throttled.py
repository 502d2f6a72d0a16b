"""Throttled: a costly function whose calls share runs, which limits its cost however often it is called."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

INTERVAL_S = 1.0
T = TypeVar("T")


class Throttled(Generic[T]):
    """Runs a function in a thread at most once per second.

    Calls between two runs wait for the next run and share its result. A result is never older than its call, so a caller who
    compares two results sees everything that happened between the calls.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Creates it; `function` is called in threads, one call at a time."""
        self._function = function
        self._next: asyncio.Task[T] | None = None
        self._started = -math.inf
        self._lock = asyncio.Lock()

    async def __call__(self) -> T:
        """Returns the result of a run that starts now or within a second."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)  # other callers need the result even if this caller is cancelled

    async def _run(self) -> T:
        loop = asyncio.get_running_loop()
        async with self._lock:
            await asyncio.sleep(max(self._started + INTERVAL_S - loop.time(), 0))
            self._next = None  # this run may miss events that happen from now on, so later calls need another run
            self._started = loop.time()
            return await asyncio.to_thread(self._function)
