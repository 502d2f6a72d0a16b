"""PreparePool: tokenizes long texts on threads of its own, before they enter the queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bertserve.service.errors import EXPIRED, ExpiredError, RefusedError

# Maximum characters of the calls that run or wait: about five seconds of work on one thread.
MAX_PREPARE_CHARS = 2**24


class PreparePool:
    """Threads that tokenize texts, in order of arrival; used from one event loop.

    Attributes:
        chars: Characters of the calls that run or wait.
    """

    def __init__(self, threads: int, check: Callable[[], None]) -> None:
        """Creates a pool that calls `check` before each call; its threads start with the first calls."""
        self.chars = 0
        self._check = check
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    async def run(self, tokenize: Callable[[], Any], chars: int, timeout_s: float) -> Any:
        """Calls a function on a thread of the pool. A call that has begun continues if the coroutine is cancelled.

        Raises:
            RefusedError: With this call, the calls that run or wait would have too many characters.
            ExpiredError: The call has not ended after `timeout_s` seconds.
        """
        if self.chars and self.chars + chars > MAX_PREPARE_CHARS:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self.chars,
                limit=MAX_PREPARE_CHARS,
                reason="queue_full",
                retry_after_s=1.0,
            )

        def call() -> Any:
            self._check()
            return tokenize()

        self.chars += chars
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._executor, call)
        except TimeoutError as error:
            raise ExpiredError(EXPIRED) from error
        finally:
            self.chars -= chars

    def stop(self) -> None:
        """Lets the threads end after their calls."""
        self._executor.shutdown(wait=False)
