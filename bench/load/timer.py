"""A timer of an event loop with a resolution of microseconds; the loop's own timers have one of a millisecond.

On Linux it is a timer file descriptor of the kernel, elsewhere the loop's own timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TimerSpec = ctypes.c_long * 4  # interval in seconds and nanoseconds, then the expiry in seconds and nanoseconds


class PreciseTimer:
    """Calls back once for each `set`, on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Creates a timer that is not set.

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
            self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            loop.add_reader(self._file, self._on_expired)

    def set(self, at: float) -> None:
        """Sets the time of the next call, on the clock of `time.perf_counter`; a time in the past calls at once."""
        if self._file < 0:
            self._handle = self._loop.call_later(max(at - time.perf_counter(), 0), self._callback)
            return
        # perf_counter is CLOCK_MONOTONIC on Linux; all zero would disarm the timer
        at_ns = max(int(at * 1e9), 1)
        self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, _TimerSpec(0, 0, at_ns // 10**9, at_ns % 10**9), None)

    def close(self) -> None:
        """Cancels the timer and frees its file descriptor."""
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _on_expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again after it expired
            os.read(self._file, 8)
        self._callback()
