"""InferenceThread: a thread and its run; CompletionQueue: results to the event loop; PeakConcurrency: how many runs wanted a core of late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bertserve.service.scheduling.scheduled_request import Item


@dataclass(slots=True, eq=False)
class Run:
    """One run of a batch, or of a part of one that has failed; or the decoding of what came of it.

    Attributes:
        held: All items of the batch, also those that run after this part or have run before it.
        predicted_s: Predicted seconds; 0 where nothing is predicted.
        started: Time at which it started.
        watched_s: Seconds that the watchdog has seen it run; the watchdog's own.
        hung: Whether the watchdog takes it for hung.
    """

    held: Sequence[Item]
    predicted_s: float
    started: float
    watched_s: float = 0.0
    hung: bool = False


@dataclass(slots=True, eq=False)
class InferenceThread:
    """A thread and its run.

    Attributes:
        handle: The thread itself; started by the scheduler.
        run: What it runs now; None while it waits. Another object for each run, so that who watches one never meets the next.
        busy: Seconds that it had a batch, of batches that have ended, and when the present one began; None while it waits. One object for
            both, so that who reads it from another thread gets two that belong together.
        long_step: Whether it has begun a step that takes long and cannot be interrupted.
    """

    handle: threading.Thread = field(init=False)
    run: Run | None = None
    busy: tuple[float, float | None] = (0.0, None)
    long_step: bool = False

    def busy_s(self, now: float) -> float:
        """Returns the seconds that it had a batch, up to now."""
        ended_s, since = self.busy
        return ended_s if since is None else ended_s + now - since


class CompletionQueue:
    """Sets results on futures of the loop that it was made in; a future that is done already is left alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []

    def post(self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
        """Delivers a result, or an error, from any thread. Wakes the loop only if no earlier post did already."""
        with self._lock:
            self._items.append((future, result, error))
            first = len(self._items) == 1
        if first:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for future, result, error in items:
            # its caller may have been cancelled since; setting it then would raise and lose the others
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


WINDOW_S = 1.0


class PeakConcurrency:
    """The most runs at once, running or waiting, over the last one to two windows.

    That nothing else runs now says little about the next few milliseconds: if texts arrive at random, a run on several cores soon shares them
    with another run, and both take longer. If nothing else has run for a second or more, this is likely to continue.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        """Starts with none.

        Args:
            window_s: Seconds of a window.
        """
        self._window_s = window_s
        self._window = 0
        self._now = 0
        self._before = 0

    def record(self, runs: int, now: float) -> int:
        """Counts that so many runs wanted a core at `now`, in seconds of a clock that never goes back; returns the peak."""
        window = int(now // self._window_s)
        if window != self._window:
            self._before = self._now if window == self._window + 1 else 0
            self._window, self._now = window, 0
        self._now = max(self._now, runs)
        return max(self._now, self._before)

    def peak(self, now: float) -> int:
        """Returns the most that were counted in this window and the one before."""
        return self.record(0, now)
