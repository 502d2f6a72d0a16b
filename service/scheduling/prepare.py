"""PreparePool: a bounded pool of threads that tokenize long texts before they enter the queue."""

from __future__ import annotations

import asyncio
import threading
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
        self._lock = threading.Lock()  # of `_chars`
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or runs."""
        return self._chars > 0

    async def run(self, tokenize: Callable[[], object], chars: int) -> None:
        """Calls a function on a thread. If the coroutine is cancelled, a call that has begun continues, and counts until its end.

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
        self._add(chars)
        call = self._pool.submit(self._call, tokenize)
        try:
            await asyncio.wrap_future(call)
        finally:  # a call that has begun continues without its caller
            call.add_done_callback(lambda _: self._add(-chars))

    def _add(self, chars: int) -> None:
        with self._lock:
            self._chars += chars

    def _call(self, tokenize: Callable[[], object]) -> None:
        if self._closed:
            raise UnavailableError("the service is stopping; send the request to another instance, or try again later.")
        tokenize()

    def close(self) -> None:
        """Ends the threads after their calls; requests that wait for a thread fail."""
        self._closed = True
        self._pool.shutdown(wait=False)  # cancelled futures would look like clients that have left
