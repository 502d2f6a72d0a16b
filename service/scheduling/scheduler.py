"""Scheduler: runs a RequestQueue on the inference threads of a device. It uses threads and futures, but no models or ONNX.

A free thread takes the best batch without waiting for it to fill. Batches fill while all threads are busy. Every request ends exactly once:
answered, failed, expired or cancelled, whichever happens first under the lock.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum, auto
from functools import partial
from typing import Any

from bertserve.service.errors import EngineError, ExpiredError, UnavailableError, error_for_caller
from bertserve.service.scheduling.inference_thread import InferenceThread
from bertserve.service.scheduling.records import Batch, Item, ScheduledRequest
from bertserve.service.scheduling.request_queue import RequestQueue

logger = logging.getLogger("bertserve.scheduler")

POLL_INTERVAL_S = 0.02

# A run counts as hung after this many seconds, because it can read weights from a disk, and this many times its predicted seconds, which
# adapt to the speed of the machine.
MIN_HANG_S, HANG_FACTOR = 5, 20

# Calls a function that tokenizes a number of characters, now or on another thread; returns the future of such a call.
Submit = Callable[[int, Callable[[], None]], Future[None] | None]

EXPIRED = "the request's deadline passed while it waited; send less at once, or raise `x-request-timeout-ms` or the body's `timeout`."


class State(IntEnum):
    """The states of a scheduler, in order; it never returns to an earlier one."""

    NEW = auto()
    SERVING = auto()
    WITHDRAWN = auto()  # it serves, but is not ready, because it stops soon
    DRAINING = auto()  # it refuses new requests, and answers the others
    STOPPED = auto()  # it starts no more runs


class Scheduler:
    """Runs requests on as many threads as its queue expects. It must be started in an event loop.

    Requests come from that loop. Threads that tokenize, run batches or load models call it too.

    Attributes:
        queue: Its queue; only the scheduler changes it.
        clock: Returns monotonic seconds.
        failure: Why the process must be restarted: the device is lost, a thread has died, or as many runs have hung as there are threads.
    """

    def __init__(
        self,
        queue: RequestQueue,
        submit: Submit,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates a scheduler for an empty queue. It calls `submit` to tokenize a request, and `on_hang` for each run that hangs."""
        self.queue = queue
        self.clock = clock
        self._lock = threading.RLock()
        self._wakeup = threading.Condition(self._lock)
        self._completions: list[tuple[asyncio.Future[None], Exception | None]] = []  # futures that the event loop must resolve
        self._threads = [InferenceThread(self, f"inference-{i}") for i in range(queue.threads)]  # the threads whose run does not hang
        self._submit = submit
        self._hangs = 0
        self._on_hang = on_hang
        self._state = State.NEW
        self._ended_s = 0.0  # seconds of the batches that have ended
        self.failure: str | None = None

    @property
    def ready(self) -> bool:
        """Whether to send it work: it has started, does not stop soon, and has not failed."""
        return self._state is State.SERVING

    @property
    def wait_s(self) -> float:
        """Predicted seconds until a short request that arrives now starts."""
        with self._lock:
            return self.queue.wait_s(self.clock())

    @property
    def total_run_s(self) -> float:
        """Seconds of all batches up to now, in total; a run that hangs counts until its thread is replaced."""
        with self._lock:
            return self._ended_s + sum(self.clock() - batch.start for batch in self.queue.batches)

    def start(self) -> None:
        """Starts the inference threads, for requests from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.advance(State.SERVING)
        for thread in self._threads:
            thread.start()
        self.on_each_thread([])  # waits for the earlier calls

    def on_each_thread(self, setup_calls: Sequence[Callable[[], object]]) -> None:
        """Calls functions on each inference thread, to set up what libraries keep per thread; it returns after the calls.

        A thread makes one setup call between two batches. Before the start, this method does not wait, and `start` waits for the calls.
        """
        with self._lock:
            threads = list(self._threads)
            for thread in threads:
                thread.setup_calls += setup_calls
            self._wakeup.notify_all()
        for thread in threads:
            while thread.setup_calls and thread.is_alive() and self._state is not State.STOPPED:
                thread.join(POLL_INTERVAL_S)

    async def handle(self, request: ScheduledRequest) -> None:
        """Runs a new request until its work has no more items. Cancelling the coroutine closes the request.

        Raises:
            RefusedError: The queue is full, or the request would probably miss its deadline.
            ExpiredError: The deadline passed before its last item started.
            UnavailableError: The scheduler was stopping, or stopped, the device was lost, or a thread died before the request was done.
            EngineError: Its runner failed on an item, or hangs. Errors of its work are raised unchanged.
        """
        request.future, preparation = self._loop.create_future(), None
        with self._lock:
            if not State.SERVING <= self._state <= State.WITHDRAWN:
                raise self._unavailable_error()
            now = self.clock()
            self.queue.open(request, now)
        timer = self._loop.call_later(request.deadline - now, self._expire, request)
        try:
            preparation = self._submit(request.work.chars, partial(self._continue, request, request.work.prepare))
            await request.future
        finally:
            timer.cancel()
            if preparation is not None:
                preparation.cancel()
            if request in self.queue.requests:  # the caller was cancelled
                self.end(request)
            request.future = None  # its error refers to this frame; without the cycle, no garbage collection is needed to free texts

    def advance(self, state: State) -> None:
        """Changes to a state, unless a later one is reached."""
        with self._lock:
            self._state = max(self._state, state)

    async def stop(self, shutdown_timeout_s: float) -> int:
        """Ends the threads: refuses new requests, lets others finish for some seconds, and fails the rest; returns how many it fails."""
        self.advance(State.DRAINING)
        end = self._loop.time() + shutdown_timeout_s
        while self.queue.requests and self._state is State.DRAINING and self._loop.time() < end:
            await asyncio.sleep(POLL_INTERVAL_S)
        aborted = self.abort()
        # a run that exceeds the shutdown timeout cannot be interrupted; its thread is a daemon
        await asyncio.gather(*(asyncio.to_thread(thread.join, 1.0) for thread in self._threads))
        return aborted

    def next_batch(self, thread: InferenceThread) -> bool:
        """Ends a thread's batch, and waits for its next batch or a setup call; returns false if the thread must end."""
        with self._lock:
            if thread.batch:
                self._ended_s += self.clock() - thread.batch.start
                self.queue.batches.remove(thread.batch)
            while self._state is not State.STOPPED and thread in self._threads:
                thread.batch = self.queue.start_batch(self.clock())
                if thread.batch or thread.setup_calls:
                    if self.queue.queue_items:
                        self._wakeup.notify()  # an idle thread can now find an item to start
                    return True
                self._wakeup.wait()
        return False

    def deliver(self, item: Item, result: Any) -> None:
        """Records a result; after the last one, it continues the request."""
        with self._lock:
            results = self.queue.finish(item, result)
        if results:
            self._continue(item.request, partial(item.request.work.proceed, results))

    def _continue(self, request: ScheduledRequest, next_items: Callable[[], Sequence[Item]]) -> None:
        """Queues the next items of a request, or ends it; called on any thread."""
        try:
            items = next_items()
            with self._lock:
                if not items:
                    self.end(request)
                elif request in self.queue.requests:
                    now = self.clock()
                    if now >= request.deadline:  # the timer found no item that waits
                        raise ExpiredError(EXPIRED)
                    self.queue.put(request, items, now)
                    self._wakeup.notify(len(items))
        except BaseException as error:  # noqa: BLE001 - the boundary of a request: an error of its own code is its answer
            self.end(request, error_for_caller(error))

    def end(self, request: ScheduledRequest, error: Exception | None = None) -> None:
        """Ends a request with an error, or with success, unless it has ended; called from any thread. Its current runs continue."""
        with self._lock:
            if self.queue.close(request) and request.future is not None:
                self._completions.append((request.future, error))
                if len(self._completions) == 1:
                    self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        """Resolves the futures of all requests that have ended, with one wake-up of the event loop."""
        with self._lock:
            ended, self._completions = self._completions, []
        for future, error in ended:
            if future.done():  # its caller was cancelled
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _expire(self, request: ScheduledRequest) -> None:
        """Ends a request whose deadline has passed while it is tokenized, or items wait."""
        if request.waiting or not request.admitted:
            self.end(request, ExpiredError(EXPIRED))

    def abort(self, failure: str | None = None) -> int:
        """Fails all requests and starts no more runs; returns the number of requests. With a failure, the process must be restarted."""
        with self._lock:
            self.failure = self.failure or failure
            self.advance(State.STOPPED)
            requests = list(self.queue.requests)
            for request in requests:
                self.end(request, self._unavailable_error())  # an error each, because a stream adds the number of the line to its own
            self._wakeup.notify_all()
        return len(requests)

    def check_hung_runs(self) -> None:
        """Replaces the threads whose run hangs. It counts its calls, one per second, because a clock also runs during a suspension."""
        with self._lock:  # a run that ends meanwhile is either answered or replaced
            for thread in list(self._threads):
                run_s, batch = thread.count_second(), thread.batch
                if batch and thread.is_alive() and run_s >= max(MIN_HANG_S, HANG_FACTOR * batch.predicted_s):
                    self._replace_hung(thread, batch, run_s)

    def _replace_hung(self, thread: InferenceThread, batch: Batch, seconds: float) -> None:
        """Fails the requests of a run that hangs, and starts another thread. After as many hangs as threads, nothing can run."""
        self._threads.remove(thread)
        self._ended_s += self.clock() - batch.start
        self.queue.batches.remove(batch)
        thread.batch = None
        thread.setup_calls.clear()  # they refer to engines
        self._hangs += 1
        logger.error("%s hangs: a run has taken %d s, and the prediction was %.3f s", thread.name, seconds, batch.predicted_s)
        self._on_hang()
        for request in {item.request for item in batch.items}:
            error = EngineError(
                "a model run with this request has hung for {seconds:.0f} s; try again with other texts, and tell the operator.",
                seconds=seconds,
            )
            self.end(request, error)
        if self._hangs >= self.queue.threads:
            self.abort("since the start, as many runs have hung as there are inference threads")
        elif self._state is not State.STOPPED:
            self._threads.append(InferenceThread(self, f"inference-{len(self._threads) + self._hangs}"))
            self._threads[-1].start()

    def _unavailable_error(self) -> UnavailableError:
        reason = self.failure or "the service is stopping"
        return UnavailableError("{reason}; send the request to another instance, or try again later.", reason=reason)
