"""InferenceThread: runs the batches of a scheduler, one after the other, and delivers their results."""

import logging
import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from bertserve.service.errors import DeviceLostError, EngineError, error_for_caller
from bertserve.service.scheduling.records import Item

if TYPE_CHECKING:
    from bertserve.service.scheduling.scheduler import Scheduler

logger = logging.getLogger("bertserve.scheduler")

# A run counts as hung after this many seconds, because it may read weights from a disk, and this many times its predicted seconds, which
# adapt to the speed of the machine.
MIN_HANG_S, HANG_FACTOR = 5, 20


class InferenceThread(threading.Thread):
    """An inference thread, and its batch, which the scheduler chooses under its lock.

    Attributes:
        batch: The items that run; empty while it waits.
        since: Start time of the batch.
        multi_threaded: Whether the batch may run on several threads.
        predicted_s: Predicted seconds from `since` to the end of the run.
        run_start: Start of the run in seconds of `Scheduler.second`; infinite while the thread waits or decodes.
        setup_calls: Functions that set up what libraries keep per thread; it calls one between two batches.
    """

    def __init__(self, scheduler: "Scheduler", name: str) -> None:
        """Creates a thread that has not started."""
        super().__init__(name=name, daemon=True)
        self._scheduler = scheduler
        self.batch: Sequence[Item] = ()
        self.since = 0.0
        self.multi_threaded = False
        self.predicted_s = 0.0
        self.run_start = inf
        self.setup_calls: list[Callable[[], object]] = []

    def run(self) -> None:
        """Runs batches until the scheduler stops or a run hangs. While it waits, it has no reference to a batch."""
        try:
            while self._scheduler.start_batch(self):
                if self.batch:
                    self._execute(self.batch, multi_threaded=self.multi_threaded)
                if self.setup_calls:
                    self._make_setup_call()
        except DeviceLostError as error:
            logger.critical("%s", error.message)
            self._scheduler.abort("the GPU failed, and the service must be restarted")
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: no request may wait for this thread forever
            # `_execute` and `deliver` handle errors of the work. After one of the scheduler itself, the queue may be inconsistent.
            logger.critical("an inference thread died of %s. This is a bug; the service must be restarted", type(error).__name__)
            self._scheduler.abort("an inference thread died, and the service must be restarted")

    def hangs(self, second: int) -> bool:
        """Returns whether its run hangs at this second."""
        return self.is_alive() and second - self.run_start >= max(MIN_HANG_S, HANG_FACTOR * self.predicted_s)

    def _make_setup_call(self) -> None:
        try:
            self.setup_calls[0]()
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of a setup call: without it, the first batches are slower
            logger.warning("%s: a setup call failed with %s", self.name, type(error).__name__)
        self.setup_calls.pop(0)  # after the call, because `on_each_thread` waits until none is left

    def _execute(self, batch: Sequence[Item], *, multi_threaded: bool = False) -> None:
        """Runs a batch, or a part of it, and delivers the results. A failed batch runs again in halves, so that one item fails."""
        scheduler, runner = self._scheduler, batch[0].request.runner
        self.predicted_s = scheduler.clock() - self.since + runner.seconds(len(batch), max(item.length for item in batch))
        try:
            self.run_start = scheduler.second
            results = runner.run([item.payload for item in batch], multi_threaded=multi_threaded)
            self.run_start = inf  # decoding does not count: each request limits its own, and a batch can end many requests
            if len(results) != len(batch):
                raise EngineError(
                    "the graph returned {rows} rows for {inputs} inputs. This is a bug.", rows=len(results), inputs=len(batch)
                )
        except DeviceLostError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of a batch: no error of a run may end the inference thread
            self.run_start = inf
            if len(batch) == 1:
                scheduler.end(batch[0].request, error_for_caller(error))
                return
            half = (len(batch) + 1) // 2
            for part in (batch[:half], batch[half:]):
                if open_items := [item for item in part if item.request in scheduler.queue.requests]:
                    self._execute(open_items)
            return
        for item, result in zip(batch, results, strict=True):
            scheduler.deliver(item, result)
