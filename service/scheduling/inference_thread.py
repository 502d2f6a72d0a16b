"""InferenceThread: a thread and its run; CompletionQueue: delivers results to the event loop; PeakConcurrency: recent demand for cores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from bertserve.service.scheduling.scheduled_request import Item


@dataclass(slots=True, eq=False)
class Run:
    """A run of a batch, a run of a part of a failed batch, or the decoding of its results.

    Attributes:
        held: All items of the batch, including items that run before or after this part.
        predicted_s: Predicted seconds; 0 if there is no prediction.
        started: Time at which it started.
        watched_s: Seconds that the watchdog has observed the run; only the watchdog changes it.
        hung: Whether the watchdog has found that the run hangs.
    """

    held: Sequence[Item]
    predicted_s: float
    started: float
    watched_s: float = 0.0
    hung: bool = False


class BatchKind(Enum):
    """What a thread does with its batch."""

    QUICK = auto()  # it runs quick requests only
    LONG_STEP = auto()  # a step that can take long, such as tokenizing a long text
    OTHER = auto()


def kind_of(batch: Sequence[Item]) -> BatchKind:
    """Returns the kind of a batch."""
    if batch[0].request.long_step:
        return BatchKind.LONG_STEP
    return BatchKind.QUICK if all(item.request.is_quick for item in batch) else BatchKind.OTHER


@dataclass(slots=True, eq=False)
class InferenceThread:
    """A thread and its run.

    Attributes:
        condition: Wakes it; all threads have the scheduler's lock.
        handle: The thread; the scheduler starts it.
        run: The current run; None while it waits. Each run is another object, so a reader of one run never sees values of the next.
        busy: Seconds of batches that have ended, and the start time of the current batch, None while it waits. Both are in one tuple,
            so that another thread reads two values that belong together.
        batch: The kind of its current batch; None while it waits. It changes only under the scheduler's lock.
        waits: Whether it waits for work and nothing has woken it yet. It changes only under the scheduler's lock.
    """

    condition: threading.Condition
    handle: threading.Thread = field(init=False)
    run: Run | None = None
    busy: tuple[float, float | None] = (0.0, None)
    batch: BatchKind | None = None
    waits: bool = False

    def busy_s(self, now: float) -> float:
        """Returns the seconds for which it has had a batch, up to now."""
        ended_s, since = self.busy
        return ended_s if since is None else ended_s + now - since


class CompletionQueue:
    """Sets results on futures of its event loop, and skips futures that are already done."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []

    def post(self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
        """Delivers a result or an error from any thread. It wakes the loop only if no earlier post has done so."""
        with self._lock:
            self._items.append((future, result, error))
            first = len(self._items) == 1
        if first:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for future, result, error in items:
            # a caller may have been cancelled; an exception here would lose the other results
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


WINDOW_S = 1.0


class PeakConcurrency:
    """The maximum number of runs at the same time, running or waiting, over the last one to two windows.

    An idle machine says little about the next few milliseconds: if texts arrive at random, a run on several cores soon shares them
    with another run, and both take longer. If nothing else has run for a second or more, this is likely to continue.
    """

    def __init__(self) -> None:
        """Starts with no runs."""
        self._window = 0
        self._now = 0
        self._before = 0

    def record(self, runs: int, now: float) -> int:
        """Records the number of runs that need a core at `now`, in seconds of a monotonic clock; returns the peak. 0 only reads it."""
        window = int(now // WINDOW_S)
        if window != self._window:
            self._before = self._now if window == self._window + 1 else 0
            self._window, self._now = window, 0
        self._now = max(self._now, runs)
        return max(self._now, self._before)
