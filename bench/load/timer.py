"""An alarm of an event loop that goes off within microseconds; the loop's own timers have a resolution of a millisecond.

On Linux it is a timer file descriptor of the kernel, elsewhere the loop's timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

_MONOTONIC = 1
_ABSOLUTE = 1
_Spec = ctypes.c_long * 4  # interval in seconds and nanoseconds, then the time itself


class PreciseTimer:
    """Calls back once for each `set`, on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Makes an alarm that is not set.

        Args:
            loop: The loop that calls back.
            callback: What it calls.
        """
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._file = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None)
            self._file = self._libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            loop.add_reader(self._file, self._ring)

    def set(self, at: float) -> None:
        """Sets the time to call back at, on the clock of `time.perf_counter`; a time gone by is now."""
        if self._file < 0:
            self._handle = self._loop.call_later(max(at - time.perf_counter(), 0), self._callback)
            return
        # perf_counter is CLOCK_MONOTONIC on Linux; all zero would disarm the timer
        at_ns = max(int(at * 1e9), 1)
        self._libc.timerfd_settime(self._file, _ABSOLUTE, _Spec(0, 0, at_ns // 10**9, at_ns % 10**9), None)

    def close(self) -> None:
        """Calls back no more."""
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set again since it went off
            os.read(self._file, 8)
        self._callback()
