"""Monitor: measures and watches the service once per second."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from bertserve.service.engine.freed_memory import return_freed_memory
from bertserve.service.metrics import Metrics
from bertserve.service.scheduling.scheduler import Scheduler

logger = logging.getLogger("bertserve.monitor")

TICK_S = 1.0  # one second, because `check_hung_runs` counts ticks as seconds


class Monitor:
    """Runs once per second: a heartbeat, metrics of the queue, threads and event loop, and hung runs. It also returns freed memory."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics, beat: Callable[[], None]) -> None:
        """Creates a monitor. It calls `beat` once per second while the event loop runs, also while the scheduler drains."""
        self._scheduler = scheduler
        self._metrics = metrics
        self._beat = beat
        self._total_run_s = 0.0
        self._loop_s = 0.0
        self._ticking: asyncio.Task[None] | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Starts the monitor in the running event loop, and the thread that returns freed memory."""
        self._loop_s = time.thread_time()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        threading.Thread(target=return_freed_memory, args=(self._stopped,), name="freed-memory", daemon=True).start()

    def stop(self) -> None:
        """Stops the monitor."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._stopped.set()

    def measure(self) -> None:
        """Measures the queue, and the busy time of inference threads and event loop since the last call."""
        scheduler, metrics = self._scheduler, self._metrics
        total_run_s, loop_s = scheduler.total_run_s, time.thread_time()
        metrics.thread_busy.inc(total_run_s - self._total_run_s)
        metrics.loop_cpu.inc(loop_s - self._loop_s)
        self._total_run_s, self._loop_s = total_run_s, loop_s
        metrics.queue_items.set(scheduler.queue.queue_items)
        metrics.queue_tokens.set(scheduler.queue.total_held_tokens)
        metrics.ready_workers.set(scheduler.ready)

    async def _tick(self) -> None:
        """Runs once per second. Its delay is also the delay of other callbacks of the event loop."""
        while True:
            try:
                self._beat()  # before the first sleep, because the parent of a worker watches it from its first beat
                self.measure()
                self._scheduler.check_hung_runs()
            except Exception as error:  # noqa: BLE001 - such as a thread that cannot start; later hangs must be found too
                logger.error("the monitor failed with %s; it continues", type(error).__name__)
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag.observe(max(time.monotonic() - due, 0.0))
