"""InferenceThread: runs the batches of a scheduler, one after the other, and delivers their results."""

import logging
import threading
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from bertserve.service.errors import DeviceLostError, EngineError, error_for_caller
from bertserve.service.scheduling.records import Batch, Item

if TYPE_CHECKING:
    from bertserve.service.scheduling.scheduler import Scheduler

logger = logging.getLogger("bertserve.scheduler")


class InferenceThread(threading.Thread):
    """An inference thread.

    Attributes:
        batch: Its batch, which the scheduler sets under its lock; None while it waits, and after its run has hung.
        setup_calls: Functions that set up what libraries keep per thread; it calls one between two batches.
    """

    def __init__(self, scheduler: "Scheduler", name: str) -> None:
        """Creates a thread that has not started."""
        super().__init__(name=name, daemon=True)
        self._scheduler = scheduler
        self.batch: Batch | None = None
        self.setup_calls: list[Callable[[], object]] = []
        self._second = 0  # calls of `count_second`
        self._run_start = inf  # start of the run in these seconds; infinite while the thread waits or decodes

    def run(self) -> None:
        """Runs batches until the scheduler stops or a run hangs. While it waits, it refers to no batch."""
        try:
            while self._scheduler.next_batch(self):
                if self.batch:
                    self._execute(self.batch.items, multi_threaded=self.batch.multi_threaded)
                if self.setup_calls:
                    self._make_setup_call()
        except DeviceLostError as error:
            logger.critical("%s", error.message)
            self._scheduler.abort("the GPU failed, and the service must be restarted")
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: otherwise requests would wait for this thread forever
            # `_execute` and `deliver` handle errors of the work. After an error of the scheduler itself, the queue can be inconsistent.
            logger.critical("an inference thread died of %s. This is a bug; the service must be restarted", type(error).__name__)
            self._scheduler.abort("an inference thread died, and the service must be restarted")

    def count_second(self) -> float:
        """Counts a second; returns the seconds that its run took before, or a negative number if nothing runs."""
        run_s = self._second - self._run_start
        self._second += 1
        return run_s

    def _make_setup_call(self) -> None:
        try:
            self.setup_calls[0]()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of a setup call: without it, the first batches are slower
            logger.warning("%s: a setup call failed with %s", self.name, type(error).__name__)
        self.setup_calls.pop(0)  # after the call, because `on_each_thread` waits until none is left

    def _execute(self, items: list[Item], *, multi_threaded: bool = False) -> None:
        """Runs the items of a batch, and delivers the results. If a run fails, its halves run again, so that one item fails."""
        scheduler, runner = self._scheduler, items[0].request.runner
        try:
            self._run_start = self._second
            results = runner.run(items, multi_threaded=multi_threaded)
            self._run_start = inf  # decoding does not count: each request limits its own, and a batch can end many requests
            if len(results) != len(items):
                raise EngineError(
                    "the graph returned {rows} rows for {inputs} inputs. This is a bug.", rows=len(results), inputs=len(items)
                )
        except DeviceLostError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of a run: an error of a run must not end the inference thread
            self._run_start = inf
            if len(items) == 1:
                scheduler.end(items[0].request, error_for_caller(error))
                return
            half = (len(items) + 1) // 2
            for part in (items[:half], items[half:]):
                if open_items := [item for item in part if item.request in scheduler.queue.requests]:
                    self._execute(open_items)
            return
        for item, result in zip(items, results, strict=True):
            scheduler.deliver(item, result)
