"""Watchdog: notices runs that hang. Ticks on the event loop while there is work; knows threads and runs, nothing of what they compute.

A run cannot be interrupted. So a run that hangs is logged and counted, and its requests fail after their deadlines. Readiness follows from the
number of threads that hang (`hung`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from bertserve.service.errors import EngineError
from bertserve.service.scheduling.inference_thread import InferenceThread, Run
from bertserve.service.scheduling.scheduled_request import ScheduledRequest

logger = logging.getLogger("bertserve.watchdog")

# A run can take so many times its prediction. Predictions follow the machine, so a slow machine does not matter.
HUNG_RATIO = 20.0
# A run is never taken for hung before: a page of weights from a disk, or a throttled core, takes its time. Not the first run of a
# shape: on a CPU it is none slower, and graphs whose shapes are planned ran each of them at load.
HUNG_FLOOR_S = 2.0
# Nothing is predicted for tokenizing and decoding. The largest request takes five seconds of a core, and several times as long if other
# processes or other threads of this one use the core too.
UNPREDICTED_FLOORS = 15
TICKS_OF_FLOOR = 10
# After its deadline a request waits so long for a run that hangs; then it is failed.
OVERDUE_S = 5.0


class Watchdog:
    """Looks at all inference threads once a tick.

    Time is counted in ticks, not read from a clock: a process that was stopped, or a machine that stood still, has not watched a run
    meanwhile, and finds nothing hung when it continues.
    """

    def __init__(
        self,
        threads: Sequence[InferenceThread],
        *,
        clock: Callable[[], float],
        pending: Collection[ScheduledRequest],
        fail: Callable[[ScheduledRequest, Exception], None],
        on_hang: Callable[[], None],
        floor_s: float = HUNG_FLOOR_S,
    ) -> None:
        """Creates a watchdog that sleeps.

        Args:
            threads: What to watch.
            clock: The scheduler's, for deadlines.
            pending: The requests that an inference thread may take at any time, always the present ones.
            fail: Ends a request with an error, unless it has ended already.
            on_hang: Called once for each run that hangs.
            floor_s: Least seconds after which a run hangs; UNPREDICTED_FLOORS times that where nothing was predicted.
        """
        self.hung = 0
        self._threads = threads
        self._clock = clock
        self._pending = pending
        self._fail = fail
        self._on_hang = on_hang
        self._floor_s = floor_s
        self._tick_s = floor_s / TICKS_OF_FLOOR
        self._timer: asyncio.TimerHandle | None = None

    @property
    def all_hung(self) -> bool:
        """Whether no inference thread is left that would end what it runs."""
        return self.hung > 0 and self.hung == len(self._threads)

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ticks from now on, until a tick finds no request and no run."""
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._tick, loop)

    def sleep(self) -> None:
        """Ticks no more until it is woken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._pending or any(thread.run is not None for thread in self._threads):
            self.wake(loop)
        self.look()

    def look(self) -> None:
        """Judges every thread's run, one tick after the last time."""
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
                hung += 1
                self._end_overdue(run)
        self.hung = hung

    def _patience_s(self, run: Run) -> float:
        return max(self._floor_s, HUNG_RATIO * run.predicted_s) if run.predicted_s else UNPREDICTED_FLOORS * self._floor_s

    def end_hung(self) -> None:
        """Fails the requests in runs that hang, because nothing waits for them any more."""
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
