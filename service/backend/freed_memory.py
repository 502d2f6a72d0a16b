"""What glibc does with freed memory: one heap for all threads, and memory that returns to the system. Other C libraries are left as they are."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

# Seconds until freed memory is returned to the system: the caller frees it after it has asked, and each call takes tens of milliseconds.
RETURN_S = 0.2

_ARENA_MAX = -8  # M_ARENA_MAX of mallopt


def _function(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # TypeError: of Windows
        return None


_malloc_trim = _function("malloc_trim")
_mallopt = _function("mallopt")


def share_one_heap() -> None:
    """Makes all threads that start from now on use one heap.

    By default each thread keeps what it has freed. A run of 64 masks frees 30 MB, and the next one in another thread cannot use them.
    """
    if _mallopt is not None:
        _mallopt(_ARENA_MAX, 1)


class FreedMemory:
    """Calls glibc's `malloc_trim` in a thread, `RETURN_S` seconds after the first request for it. Without glibc it does nothing.

    A tokenizer makes several small objects per token, and an answer of many candidates has several per candidate. When a text of 200,000
    characters or an answer of 9 MiB is done, they leave holes of 20 to 50 MB in the heap of their thread, which glibc keeps.
    """

    def __init__(self) -> None:
        """Starts without a pending call."""
        self._lock = threading.Lock()
        self._is_due = False

    def return_soon(self) -> None:
        """Calls it in `RETURN_S` seconds, unless it is due already."""
        with self._lock:
            if self._is_due or _malloc_trim is None:
                return
            self._is_due = True
        timer = threading.Timer(RETURN_S, self._return)
        timer.daemon = True
        timer.start()

    def _return(self) -> None:
        with self._lock:
            self._is_due = False  # what is freed from now on is for the next time
        assert _malloc_trim is not None
        _malloc_trim(0)


return_freed_memory = FreedMemory().return_soon  # the heap belongs to the process, so there is one
