"""PreparePool: a bounded pool of threads that tokenize long texts before they enter the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bertserve.service.errors import RefusedError, UnavailableError

# Characters of the requests in the pool: about five seconds of work on one thread.
MAX_CHARS_IN_POOL = 2**24


class PreparePool:
    """Tokenizes requests in order of arrival; it is used from the event loop."""

    def __init__(self, threads: int) -> None:
        """Creates a pool; its threads start with the first requests."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._chars = 0
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a request is in the pool."""
        return self._chars > 0

    async def run(self, tokenize: Callable[[], object], chars: int) -> None:
        """Calls a function on a thread. If the coroutine is cancelled, a call that has begun still ends.

        Raises:
            RefusedError: The requests in the pool have too many characters.
            UnavailableError: The pool was closed before the call.
        """
        if self._chars and self._chars + chars > MAX_CHARS_IN_POOL:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self._chars,
                limit=MAX_CHARS_IN_POOL,
                reason="queue_full",
                retry_after_s=1.0,
            )
        self._chars += chars
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._call, tokenize)
        finally:
            self._chars -= chars

    def _call(self, tokenize: Callable[[], object]) -> None:
        if self._closed:
            raise UnavailableError("the service is stopping; send the request to another instance, or try again later.")
        tokenize()

    def close(self) -> None:
        """Ends the threads after their calls; requests that wait for a thread fail."""
        self._closed = True
        self._pool.shutdown(wait=False)  # cancelled futures would look like clients that have left
