"""Utilization: measures the queue, and how busy inference threads and event loop are, once per second and for each scrape."""

from __future__ import annotations

import asyncio
import time

from bertserve.service.metrics import Metrics
from bertserve.service.scheduling.scheduler import Scheduler

MEASURE_INTERVAL_S = 1.0


class Utilization:
    """Measures one process; used only from its event loop."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self._total_run_s = 0.0
        self._loop_s = 0.0

    def start(self) -> None:
        """Starts regular measurements in the running event loop. Their delay is also the delay of other callbacks of the loop."""
        self._loop_s = time.thread_time()
        self._task = asyncio.get_running_loop().create_task(self._measure_regularly())

    def stop(self) -> None:
        """Stops the regular measurements."""
        self._task.cancel()

    def measure(self) -> None:
        """Measures the queue and the busy time since the last call; it must be called in the thread of the event loop."""
        total_run_s = self._scheduler.total_run_s
        self._metrics.thread_busy.inc(total_run_s - self._total_run_s)
        self._total_run_s = total_run_s
        loop_s = time.thread_time()
        self._metrics.loop_cpu.inc(loop_s - self._loop_s)
        self._loop_s = loop_s
        self._metrics.queue_items.set(self._scheduler.queue.queue_items)
        self._metrics.queue_tokens.set(self._scheduler.queue.held_tokens)
        self._metrics.ready_workers.set(self._scheduler.ready)

    async def _measure_regularly(self) -> None:
        while True:
            due = time.monotonic() + MEASURE_INTERVAL_S
            await asyncio.sleep(MEASURE_INTERVAL_S)
            self._metrics.loop_lag.observe(max(time.monotonic() - due, 0.0))
            self.measure()
