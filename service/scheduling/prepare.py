"""PreparePool: a bounded pool of threads that tokenize long texts before they enter the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bertserve.service.errors import RefusedError, UnavailableError

# Characters of the requests in the pool: about five seconds of work on one thread.
MAX_CHARS_IN_POOL = 2**24


class PreparePool:
    """Runs the steps of requests in turn; it is used from the event loop."""

    def __init__(self, threads: int) -> None:
        """Creates a pool; its threads start with the first requests."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._chars = 0
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a request is in the pool."""
        return self._chars > 0

    async def run(self, step: Callable[[], bool], chars: int) -> None:
        """Calls a step on a thread until it returns true; other requests have turns between two steps.

        A step that has begun ends even if the coroutine is cancelled.

        Raises:
            RefusedError: The requests in the pool have too many characters.
            UnavailableError: The pool was closed before the last step.
        """
        if self._chars and self._chars + chars > MAX_CHARS_IN_POOL:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self._chars,
                limit=MAX_CHARS_IN_POOL,
                reason="queue_full",
                retry_after_s=1.0,
            )
        loop = asyncio.get_running_loop()
        self._chars += chars
        try:
            while not self._closed and not await loop.run_in_executor(self._pool, lambda: self._closed or step()):
                pass
        finally:
            self._chars -= chars
        if self._closed:
            raise UnavailableError("the service is stopping; send the request to another instance, or try again later.")

    def close(self) -> None:
        """Ends the threads after their steps; steps that wait do not start."""
        self._closed = True
        self._pool.shutdown(wait=False)  # cancelled futures would look like clients that have left
