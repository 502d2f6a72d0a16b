"""PreparePool: the threads that tokenize long texts before the queue."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from bertserve.service.errors import RefusedError
from bertserve.service.text.tokenizer import INLINE_CHARS

# Maximum characters of the requests that are tokenized on prepare threads or wait for them: about five seconds of work on one thread.
MAX_PREPARE_CHARS = 2**24


class PreparePool:
    """Prepare threads, which start with the first long texts."""

    def __init__(self, threads: int = 1) -> None:
        """Creates a pool of at most this many threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._lock = threading.Lock()
        self._chars = 0  # characters of the requests that are tokenized on the threads or wait for them

    def submit(self, chars: int, call: Callable[[], None]) -> Future[None] | None:
        """Calls a function that tokenizes a request of this many characters: for short texts now, for long ones on a thread, in order.

        Returns:
            The future of a call on a thread; cancelling it has no effect on a call that has begun.

        Raises:
            RefusedError: The requests on the threads are too long, in total.
        """
        if chars <= INLINE_CHARS:  # a round trip to a thread takes longer
            call()
            return None
        with self._lock:
            if self._chars and self._chars + chars > MAX_PREPARE_CHARS:
                raise RefusedError(
                    "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                    waiting_chars=self._chars,
                    limit=MAX_PREPARE_CHARS,
                    reason="queue_full",
                    retry_after_s=1.0,
                )
            self._chars += chars
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self._release(chars))
        return future

    def _release(self, chars: int) -> None:
        with self._lock:
            self._chars -= chars
