"""Preparer: tokenizes requests before the queue: short texts on the event loop, long ones on prepare threads."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bertserve.service.errors import ExpiredError, RefusedError
from bertserve.service.scheduling.records import Item
from bertserve.service.scheduling.scheduler import EXPIRED, POLL_INTERVAL_S, Scheduler, State
from bertserve.service.text.tokenizer import INLINE_CHARS

# Maximum characters of the requests that are tokenized on prepare threads or wait for them: about five seconds of work on one thread.
MAX_PREPARE_CHARS = 2**24


class Preparer:
    """Tokenizes requests for a scheduler; used from one event loop.

    Attributes:
        prepare_chars: Characters of the requests that are tokenized on prepare threads or wait for them.
    """

    def __init__(self, scheduler: Scheduler, *, prepare_threads: int = 1) -> None:
        """Creates a preparer, whose threads start with the first long texts."""
        self.prepare_chars = 0
        self._scheduler = scheduler
        self._prepare_pool = ThreadPoolExecutor(prepare_threads, thread_name_prefix="prepare")

    async def prepare(self, tokenize: Callable[[], Sequence[Item]], chars: int, timeout_s: float) -> Sequence[Item]:
        """Calls `tokenize` for a request that has arrived now and has this many characters, and returns its result.

        Long texts are tokenized on a prepare thread, in order of arrival. A call that has begun continues if the coroutine is cancelled.

        Raises:
            RefusedError: The queue is full, the request would expire, or the texts that wait to be tokenized have too many characters.
            ExpiredError: The call has not ended after `timeout_s` seconds.
            UnavailableError: The scheduler is stopping, or has failed.
            BertServeError: As raised by `tokenize`.
        """
        self._scheduler.check_arrival(timeout_s)
        if chars <= INLINE_CHARS:
            return tokenize()  # a round trip to a thread takes longer
        if self.prepare_chars and self.prepare_chars + chars > MAX_PREPARE_CHARS:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self.prepare_chars,
                limit=MAX_PREPARE_CHARS,
                reason="queue_full",
                retry_after_s=1.0,
            )

        def call() -> Sequence[Item]:
            # after a stop, waiting calls fail with this error; if they were cancelled, clients would seem to have left
            self._scheduler.check_running()
            return tokenize()

        self.prepare_chars += chars
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._prepare_pool, call)
        except TimeoutError as error:
            raise ExpiredError(EXPIRED) from error
        finally:
            self.prepare_chars -= chars

    async def stop(self, shutdown_timeout_s: float) -> int:
        """Tokenizes the texts of admitted requests, then stops the scheduler; returns how many requests it fails."""
        end = time.monotonic() + shutdown_timeout_s
        self._scheduler.advance(State.DRAINING)
        while self.prepare_chars and time.monotonic() < end:
            await asyncio.sleep(POLL_INTERVAL_S)
        failed = await self._scheduler.stop(max(end - time.monotonic(), 0.0))
        self._prepare_pool.shutdown(wait=False)
        return failed
