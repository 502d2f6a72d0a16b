"""Utilization: tells the metrics how busy the inference threads and the event loop are. Looks twice a second, and whenever somebody asks; no request pays for it."""

from __future__ import annotations

import asyncio
import time

from bertserve.service.metrics import Metrics
from bertserve.service.scheduling.scheduler import Scheduler

INTERVAL_S = 0.5


class Utilization:
    """Looks at one process; used from its event loop alone."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        """Creates it.

        Args:
            scheduler: Of the inference threads.
            metrics: Where it is counted.
        """
        self._scheduler = scheduler
        self._metrics = metrics
        self._busy_s = 0.0
        self._loop_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Looks from now on, as the running event loop finds the time: how late it is, is what the loop's callers wait too."""
        self._loop_s = time.thread_time()
        self._look_again()

    def stop(self) -> None:
        """Looks no more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def measure(self) -> None:
        """Counts what was busy since the last time, this thread as the loop's."""
        busy_s = self._scheduler.busy_s
        # an inference thread that ends its run meanwhile may be seen a moment too late, and is then counted the next time
        if busy_s > self._busy_s:
            self._metrics.thread_busy.inc(busy_s - self._busy_s)
            self._busy_s = busy_s
        if self._loop_s is not None:
            loop_s = time.thread_time()
            self._metrics.loop_cpu.inc(loop_s - self._loop_s)
            self._loop_s = loop_s
        self._metrics.ready_workers.set(self._scheduler.ready)

    def _look_again(self) -> None:
        due = time.monotonic() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look, due)

    def _look(self, due: float) -> None:
        self._metrics.loop_lag.observe(max(time.monotonic() - due, 0.0))
        self.measure()
        self._look_again()
