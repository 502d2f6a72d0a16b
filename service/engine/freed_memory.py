"""Settings of glibc's memory: one heap per inference thread, and freed memory returns to the system. Other C libraries are not affected."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

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
    """Calls glibc's `malloc_trim` after each `WORK_S` of processor time. Without glibc it does nothing.

    A tokenizer creates several small objects per token. They leave holes of 20 to 50 MB in the heap of their thread, which glibc keeps. It
    also keeps what a run has freed.
    """

    def __init__(self) -> None:
        """Starts with the processor time so far."""
        self._worked_s = time.process_time()

    def return_after_work(self) -> None:
        """Calls it on a thread, because it takes tens of milliseconds. Call this once per second."""
        worked_s = time.process_time()
        if _malloc_trim is not None and worked_s - self._worked_s > WORK_S:
            self._worked_s = worked_s
            threading.Thread(target=_malloc_trim, args=(0,), daemon=True).start()
