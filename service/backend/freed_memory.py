"""Returns freed memory to the system, which glibc otherwise keeps for the process."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable

# Memory is returned to the system at most once in so many seconds: each time takes tens of milliseconds.
RETURN_S = 0.2


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # TypeError: of Windows
        return None


_malloc_trim = _find_malloc_trim()


class FreedMemory:
    """Calls glibc's `malloc_trim` in a thread, at most once in `RETURN_S` seconds. Without glibc it does nothing.

    A tokenizer makes several small objects per token. When a text of 200,000 characters is done, they leave holes of 50 MB in the heap of
    its thread, which glibc keeps.
    """

    def __init__(self) -> None:
        """Starts without a pending call."""
        self._lock = threading.Lock()
        self._is_due = False
        self._last = -math.inf

    def return_soon(self) -> None:
        """Calls it now, or as soon as `RETURN_S` seconds have passed since the last call."""
        with self._lock:
            if self._is_due or _malloc_trim is None:
                return
            self._is_due = True
        timer = threading.Timer(max(self._last + RETURN_S - time.monotonic(), 0.0), self._return)
        timer.daemon = True
        timer.start()

    def _return(self) -> None:
        with self._lock:
            self._is_due = False  # what is freed from now on is for the next time
            self._last = time.monotonic()
        assert _malloc_trim is not None
        _malloc_trim(0)


return_freed_memory = FreedMemory().return_soon  # the heap belongs to the process, so there is one
