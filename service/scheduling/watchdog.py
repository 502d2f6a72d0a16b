"""Watchdog: detects runs that hang. It ticks on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from bertserve.service.scheduling.scheduled_request import Item

# Factor of its prediction after which a run counts as hung. Predictions adapt to the machine, so a slow machine does not matter.
HUNG_RATIO = 20.0
# Minimum seconds before a run counts as hung: reading weights from a disk, or decoding, which takes up to about one second.
HUNG_FLOOR_S = 5.0
TICKS_OF_FLOOR = 10


@dataclass(slots=True, eq=False)
class InferenceThread:
    """An inference thread and its batch, which changes only under the scheduler's lock.

    Attributes:
        handle: The thread.
        batch: The items that run; empty while it waits.
        predicted_s: Predicted seconds of the run.
        since: Start time of the run.
        busy_s: Seconds of all earlier runs.
        ticks: Ticks of the watchdog since the run, or the decoding of one of its items, began.
        hung: Whether its run hangs: another thread has taken its place, and it ends after the run.
        steps: Functions that it calls before or after its next batches, one at a time.
    """

    handle: threading.Thread = field(init=False)
    batch: Sequence[Item] = ()
    predicted_s: float = 0.0
    since: float = 0.0
    busy_s: float = 0.0
    ticks: int = 0
    hung: bool = False
    steps: deque[Callable[[], object]] = field(default_factory=deque)


class Watchdog:
    """Checks all inference threads at each tick.

    It counts ticks instead of reading a clock: if the process was suspended, no ticks occurred, so no run counts as hung when it continues.
    """

    def __init__(self, threads: Collection[InferenceThread], on_hang: Callable[[InferenceThread, float], None], floor_s: float) -> None:
        """Creates a stopped watchdog; `on_hang` gets a thread whose run hangs, and for how many seconds."""
        self._threads = threads
        self._on_hang = on_hang
        self._floor_s = floor_s
        self._tick_s = floor_s / TICKS_OF_FLOOR

    def start(self) -> None:
        """Ticks in the running event loop."""
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Stops ticking."""
        self._timer.cancel()

    def _tick(self) -> None:
        self.start()
        self.look()

    def look(self) -> None:
        """Checks every run, one tick after the last check."""
        for thread in list(self._threads):
            if thread.batch and not thread.hung:
                thread.ticks += 1
                seconds = thread.ticks * self._tick_s
                if seconds >= max(self._floor_s, HUNG_RATIO * thread.predicted_s):
                    self._on_hang(thread, seconds)
