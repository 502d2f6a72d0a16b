"""Preparer: tokenizes requests before the queue: short texts on the event loop, long ones on prepare threads."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bertserve.service.errors import ExpiredError, RefusedError
from bertserve.service.models.request_progress import RequestProgress
from bertserve.service.scheduling.records import Runner, ScheduledRequest, SizedPayloads
from bertserve.service.scheduling.scheduler import EXPIRED, POLL_INTERVAL_S, Scheduler, State
from bertserve.service.text.tokenizer import INLINE_CHARS

# Maximum characters of the requests that are tokenized on prepare threads or wait for them: about five seconds of work on one thread.
MAX_PREPARE_CHARS = 2**24


class Preparer:
    """Tokenizes requests and runs them on a scheduler; used from one event loop.

    Attributes:
        scheduler: The scheduler.
        prepare_chars: Characters of the requests that are tokenized on prepare threads or wait for them.
    """

    def __init__(self, scheduler: Scheduler, *, prepare_threads: int = 1) -> None:
        """Creates a preparer, whose threads start with the first long texts."""
        self.scheduler = scheduler
        self.prepare_chars = 0
        self._prepare_pool = ThreadPoolExecutor(prepare_threads, thread_name_prefix="prepare")

    async def run(self, runner: Runner, progress: RequestProgress, chars: int, timeout_s: float) -> None:
        """Tokenizes the inputs of a request, queues them, and waits for the results. `chars` are the characters to tokenize.

        Raises:
            RefusedError: The queue is full, too many characters wait to be tokenized, or the request would miss its deadline.
            ExpiredError: The deadline passed.
            TooLargeError: The request is larger than the queue, or its cost exceeds a limit.
            UnavailableError: The scheduler is stopping, or has failed.
            BertServeError: An input cannot be encoded or decoded, or its run failed.
        """
        scheduler = self.scheduler
        arrived = scheduler.clock()
        scheduler.check_arrival(timeout_s)
        # for a short text, a round trip to a thread takes longer than tokenizing
        payloads = progress.tokenize() if chars <= INLINE_CHARS else await self.tokenize_on_thread(progress.tokenize, chars, timeout_s)
        if payloads:
            request = ScheduledRequest(runner, progress.proceed, arrived, arrived + timeout_s, progress.held_tokens)
            await scheduler.run(request, payloads)

    async def tokenize_on_thread(self, tokenize: Callable[[], SizedPayloads], chars: int, timeout_s: float) -> SizedPayloads:
        """Calls a function on a prepare thread, in order of arrival. A call that has begun continues if the coroutine is cancelled.

        Raises:
            RefusedError: The requests that are tokenized or wait for it have too many characters.
            ExpiredError: The call has not ended after `timeout_s` seconds.
            UnavailableError: The scheduler stopped before the call.
        """
        if self.prepare_chars and self.prepare_chars + chars > MAX_PREPARE_CHARS:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self.prepare_chars,
                limit=MAX_PREPARE_CHARS,
                reason="queue_full",
                retry_after_s=1.0,
            )

        def call() -> SizedPayloads:
            # after a stop, waiting calls fail with this error; if they were cancelled, clients would seem to have left
            self.scheduler.check_running()
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
        self.scheduler.advance(State.DRAINING)
        while self.prepare_chars and time.monotonic() < end:
            await asyncio.sleep(POLL_INTERVAL_S)
        failed = await self.scheduler.stop(max(end - time.monotonic(), 0.0))
        self._prepare_pool.shutdown(wait=False)
        return failed
