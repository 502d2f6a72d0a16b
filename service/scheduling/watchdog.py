"""Watchdog: detects runs that hang. It ticks on the event loop while there is work; it reads threads and runs, but no data of models.

A run cannot be interrupted. Therefore a run that hangs is logged and counted, and its requests fail after their deadlines. Readiness
depends on the number of threads that hang (`hung`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from bertserve.service.errors import EngineError
from bertserve.service.scheduling.inference_thread import BatchKind, InferenceThread, Run
from bertserve.service.scheduling.scheduled_request import ScheduledRequest

logger = logging.getLogger("bertserve.watchdog")

# Factor of its prediction after which a run counts as hung. Predictions adapt to the machine, so a slow machine does not matter.
HUNG_RATIO = 20.0
# Minimum time before a run counts as hung: reading weights from a disk, or a throttled core, can take some time. The first run of a
# shape is not an exception: it is as fast on a CPU, and graphs with planned shapes have run each of them at load.
HUNG_FLOOR_S = 2.0
# Tokenizing and decoding have no predictions. The slowest input takes 14 s of a core, and longer if other processes or other threads of
# this one use the core too.
UNPREDICTED_FLOORS = 15
TICKS_OF_FLOOR = 10
# A request in a hung run fails this many seconds after its deadline.
OVERDUE_S = 5.0


class Watchdog:
    """Checks all inference threads at each tick.

    Time is counted in ticks instead of read from a clock: if the process or the machine was suspended, no ticks occurred, so no run counts
    as hung when it continues.
    """

    def __init__(
        self,
        threads: Sequence[InferenceThread],
        *,
        count: int,
        clock: Callable[[], float],
        pending: Collection[ScheduledRequest],
        fail: Callable[[ScheduledRequest, Exception], None],
        on_hang: Callable[[], None],
        floor_s: float = HUNG_FLOOR_S,
    ) -> None:
        """Creates an inactive watchdog.

        Args:
            threads: The threads to check.
            count: Number of inference threads; with one, there are more threads, which continue if a long step hangs.
            clock: The scheduler's clock, for deadlines.
            pending: The open requests that an inference thread may take; the collection is always current.
            fail: Ends a request with an error, unless the request has already ended.
            on_hang: Called once for each run that hangs.
            floor_s: Minimum seconds after which a run counts as hung; UNPREDICTED_FLOORS times that for a run without a prediction.
        """
        self.hung = 0
        self.all_hung = False  # whether all inference threads hang, as of the last check
        self._threads, self._count = threads, count
        self._clock = clock
        self._pending = pending
        self._fail = fail
        self._on_hang = on_hang
        self._floor_s = floor_s
        self._tick_s = floor_s / TICKS_OF_FLOOR
        self._timer: asyncio.TimerHandle | None = None

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts ticking, until a tick finds no request and no run."""
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._tick, loop)

    def sleep(self) -> None:
        """Stops ticking until the next `wake`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._pending or any(thread.run is not None for thread in self._threads):
            self.wake(loop)
        self.look()

    def look(self) -> None:
        """Checks every thread's run, one tick after the last check."""
        hung = 0
        for thread in self._threads:
            if (run := thread.run) is None:
                continue
            run.watched_s += self._tick_s
            if not run.hung and run.watched_s >= self._patience_s(run):
                run.hung = True
                logger.error(
                    "%s hangs: a run has taken %.0f s, and the prediction was %.3f s", thread.handle.name, run.watched_s, run.predicted_s
                )
                self._on_hang()
            if run.hung:
                hung += thread.batch is not BatchKind.LONG_STEP or self._count == len(self._threads)
                self._end_overdue(run)
        self.hung = hung
        self.all_hung = hung >= self._count

    def _patience_s(self, run: Run) -> float:
        return max(self._floor_s, HUNG_RATIO * run.predicted_s) if run.predicted_s else UNPREDICTED_FLOORS * self._floor_s

    def end_hung(self) -> None:
        """Fails the requests in runs that hang, because no result will be awaited."""
        for thread in self._threads:
            if (run := thread.run) is not None and run.hung:
                for item in run.held:
                    self._end(item.request, run, "its inference thread was abandoned")

    def _end_overdue(self, run: Run) -> None:
        now = self._clock()
        for item in run.held:
            if now >= item.request.deadline + OVERDUE_S:
                self._end(item.request, run, "the request's deadline has passed")

    def _end(self, request: ScheduledRequest, run: Run, why: str) -> None:
        if request.open:
            error = EngineError(
                "a model run with this request has hung for {watched_s:.0f} s, and {why}; try again with other texts, "
                "and tell the operator if it happens again.",
                watched_s=run.watched_s,
                why=why,
            )
            self._fail(request, error)
