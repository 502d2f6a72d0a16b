"""Settings of glibc's memory: one heap per inference thread, and freed memory returns to the system. Other C libraries are not affected."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

# Delay until freed memory is returned to the system: the caller frees it after its request, and each call takes tens of milliseconds.
RETURN_S = 0.2
# Seconds of processor time; an idle service needs about 0.002 s per second.
WORK_S = 0.05

_ARENA_MAX = -8  # M_ARENA_MAX of mallopt


def _function(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # TypeError: on Windows
        return None


_malloc_trim = _function("malloc_trim")
_mallopt = _function("mallopt")


def limit_heaps(threads: int) -> None:
    """Limits the heaps of all threads that start later: one per inference thread, and two for the event loop and other threads.

    By default there are eight per core, and each keeps what its threads have freed: 30 MB after a run with 64 masks. With a single heap,
    inference threads and event loop would wait for each other: tokenizing took twice as long, and short texts 5 % longer.
    """
    if _mallopt is not None:
        _mallopt(_ARENA_MAX, threads + 2)


class FreedMemory:
    """Calls glibc's `malloc_trim` in a thread, `RETURN_S` seconds after the first request for it. Without glibc it does nothing.

    A tokenizer creates several small objects per token, and an answer with many candidates has several per candidate. After a text of
    200,000 characters or an answer of 9 MiB, they leave holes of 20 to 50 MB in the heap of their thread, which glibc keeps. It also keeps
    what a run has freed, in the heap of each thread.
    """

    def __init__(self) -> None:
        """Starts without a pending call."""
        self._lock = threading.Lock()
        self._is_due = False
        self._worked_s = time.process_time()

    def return_after_work(self) -> None:
        """Schedules the call if the process has used the processor for WORK_S since the last one. Call it once per second."""
        worked_s = time.process_time()
        if worked_s - self._worked_s > WORK_S:
            self._worked_s = worked_s
            self.return_soon()

    def return_soon(self) -> None:
        """Schedules the call in `RETURN_S` seconds, unless it is already scheduled."""
        with self._lock:
            if self._is_due or _malloc_trim is None:
                return
            self._is_due = True
        timer = threading.Timer(RETURN_S, self._return)
        timer.daemon = True
        timer.start()

    def _return(self) -> None:
        with self._lock:
            self._is_due = False  # memory that is freed from now on needs another call
        assert _malloc_trim is not None
        _malloc_trim(0)


freed_memory = FreedMemory()  # only one, because each call is for all heaps of the process
