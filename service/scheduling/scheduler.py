"""Scheduler: runs a RequestQueue on the inference threads of a device. It uses threads and futures, but no models, texts or ONNX.

A free thread takes the best batch without waiting for it to fill. Batches fill while all threads are busy. Every request ends exactly once:
answered, failed, expired or cancelled, whichever happens first under the lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum, auto
from math import inf
from typing import Any

from bertserve.service.errors import EXPIRED, DeviceLostError, EngineError, ExpiredError, RefusedError, UnavailableError, error_for_caller
from bertserve.service.scheduling.records import InferenceThread, Item, ScheduledRequest, SizedPayloads
from bertserve.service.scheduling.request_queue import RECENT_S, RequestQueue

logger = logging.getLogger("bertserve.scheduler")

POLL_INTERVAL_S = 0.02

# Characters of the requests that are tokenized on prepare threads or wait for them: about five seconds of work on one thread.
MAX_PREPARE_CHARS = 2**24

# A run counts as hung after this many seconds, because it may read weights from a disk, and this many times its predicted seconds, which
# adapt to the speed of the machine.
MIN_HANG_S, HANG_FACTOR = 5, 20


class State(IntEnum):
    """What a scheduler does with requests; each state follows those above it."""

    NEW = auto()
    SERVING = auto()
    WITHDRAWN = auto()  # it serves, but is not ready, because it stops soon
    DRAINING = auto()  # it refuses new requests, and answers the others
    STOPPED = auto()  # it starts no more runs


class Scheduler:
    """Runs requests on as many threads as its queue expects. It must be started in an event loop, and used from that loop only.

    Attributes:
        queue: Its queue; only the scheduler changes it.
        clock: Returns monotonic seconds.
        multi_threads: Threads of a multi-threaded run. A run is multi-threaded if active and waiting runs, times this number, were at most
            `queue.threads` for the last `RECENT_S` seconds. A single run is not limited.
        failure: Why the process must be restarted: the device is lost, a thread has died, or as many runs have hung as there are threads.
    """

    def __init__(
        self,
        queue: RequestQueue,
        *,
        multi_threads: int = 1,
        prepare_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates a scheduler for an empty queue, with `prepare_threads` for long texts. It calls `on_hang` for each run that hangs."""
        self.queue = queue
        self.clock = clock
        self.multi_threads = multi_threads
        self._prepare_pool = ThreadPoolExecutor(prepare_threads, thread_name_prefix="prepare")  # its threads start with the first calls
        self._prepare_chars = 0
        self._lock = threading.RLock()
        self._wakeup = threading.Condition(self._lock)
        self._last_crowded = -inf  # last time at which the active and waiting runs were too many for multi-threaded runs
        self._completions: list[tuple[asyncio.Future[None], Exception | None]] = []  # futures that the event loop must resolve
        self._threads = [InferenceThread(self._thread_main, f"inference-{i}") for i in range(queue.threads)]  # without those that hang
        self._seconds = 0  # calls of `check_hung_runs`
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
            return self.queue.wait_s(self._remaining_s())

    @property
    def total_run_s(self) -> float:
        """Seconds of all batches up to now, in total; a run that hangs counts until its thread is replaced."""
        with self._lock:
            return self._ended_s + sum(self.clock() - thread.since for thread in self._threads if thread.batch)

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

    def check_arrival(self, timeout_s: float) -> None:
        """Checks whether a short request that arrives now would be admitted, before its texts are tokenized.

        Raises:
            RefusedError: The queue is full, or the request would expire before it could start.
            UnavailableError: The scheduler is stopping, the device is lost, an inference thread has died, or too many hang.
        """
        with self._lock:
            if not State.SERVING <= self._state <= State.WITHDRAWN:
                raise self._unavailable_error()
            self.queue.check_arrival(timeout_s, self._remaining_s())

    async def prepare(self, tokenize: Callable[[], SizedPayloads], chars: int, timeout_s: float) -> SizedPayloads:
        """Calls a function on a prepare thread, in order of arrival. A call that has begun continues if the coroutine is cancelled.

        Raises:
            RefusedError: The requests that are tokenized or wait for it have too many characters.
            ExpiredError: The call has not ended after `timeout_s` seconds.
            UnavailableError: The scheduler stopped before the call.
        """
        if self._prepare_chars and self._prepare_chars + chars > MAX_PREPARE_CHARS:
            raise RefusedError(
                "the texts that wait to be tokenized have {waiting_chars} characters, of {limit} that are allowed; try again later.",
                waiting_chars=self._prepare_chars,
                limit=MAX_PREPARE_CHARS,
                reason="queue_full",
                retry_after_s=1.0,
            )

        def call() -> SizedPayloads:
            if self._state is State.STOPPED:  # cancelled calls would look like clients that have left
                raise self._unavailable_error()
            return tokenize()

        self._prepare_chars += chars
        try:
            async with asyncio.timeout(timeout_s):
                return await self._loop.run_in_executor(self._prepare_pool, call)
        except TimeoutError as error:
            raise ExpiredError(EXPIRED) from error
        finally:
            self._prepare_chars -= chars

    async def run(self, request: ScheduledRequest, payloads: SizedPayloads) -> None:
        """Runs a request until its `proceed` returns no more items. Cancelling the coroutine closes the request.

        Args:
            request: A new request.
            payloads: Tokens and payload of each of its first items, at least one.

        Raises:
            RefusedError: The queue is full, or the request would probably miss its deadline.
            ExpiredError: The deadline passed before its last item started.
            UnavailableError: The scheduler stopped, the device was lost, or an inference thread died, before the request was done.
            EngineError: Its runner failed on an item, or hangs. Errors of `proceed` are raised unchanged.
        """
        request.future = self._loop.create_future()
        with self._lock:
            if self._state is State.STOPPED:
                raise self._unavailable_error()
            if (time_left_s := request.deadline - self.clock()) <= 0:
                raise ExpiredError(EXPIRED)
            self.queue.put(request, payloads, time_left_s, self._remaining_s())
            self._wakeup.notify(len(payloads))
        timer = self._loop.call_later(time_left_s, self._expire, request)
        try:
            await request.future
        finally:
            timer.cancel()
            if request in self.queue.requests:  # the caller was cancelled
                self._end(request)
            request.future = None  # its error refers to this frame; without the cycle, no garbage collection is needed to free texts

    def advance(self, state: State) -> None:
        """Changes to a state, unless a later one is reached."""
        with self._lock:
            self._state = max(self._state, state)

    async def stop(self, shutdown_timeout_s: float) -> int:
        """Ends the threads: refuses new requests, lets others finish for some seconds, and fails the rest; returns how many it fails."""
        self.advance(State.DRAINING)
        end = self._loop.time() + shutdown_timeout_s
        while (self.queue.requests or self._prepare_chars) and self._state is State.DRAINING and self._loop.time() < end:
            await asyncio.sleep(POLL_INTERVAL_S)
        aborted = self._abort()
        self._prepare_pool.shutdown(wait=False)
        # a run that exceeds the shutdown timeout cannot be interrupted; its thread is a daemon
        await asyncio.gather(*(asyncio.to_thread(thread.join, 1.0) for thread in self._threads))
        return aborted

    def _remaining_s(self) -> float:
        """Returns the predicted seconds until all current runs have ended, in total; 0 if an inference thread is free."""
        if not all(thread.batch for thread in self._threads):
            return 0.0
        now = self.clock()
        return sum(max(thread.since + thread.predicted_s - now, 0.0) for thread in self._threads)

    def _thread_main(self, thread: InferenceThread) -> None:
        """Runs batches until the scheduler stops or a run of the thread hangs; it is the function of a thread."""
        try:
            while self._run_next_batch(thread):
                pass
        except DeviceLostError as error:
            logger.critical("%s", error.message)
            self._abort("the GPU failed, and the service must be restarted")
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: no request may wait for this thread forever
            # `_execute` and `_deliver` handle errors of the work. After one of the scheduler itself, the queue may be inconsistent.
            logger.critical("an inference thread died of %s. This is a bug; the service must be restarted", type(error).__name__)
            self._abort("an inference thread died, and the service must be restarted")

    def _run_next_batch(self, thread: InferenceThread) -> bool:
        """Ends the last batch, and runs the next one or a setup call; returns whether to continue. Each call drops its references."""
        with self._lock:
            if thread.batch and thread in self._threads:
                self._ended_s += self.clock() - thread.since
            thread.batch = ()
            while True:
                if self._state is State.STOPPED or thread not in self._threads:
                    return False
                now = self.clock()
                long_runs = sum(bool(other.batch) and other.batch[0].request.is_long for other in self._threads)
                batch = self.queue.take(now, long_runs=long_runs) if self.queue.queue_items else []
                if batch or thread.setup_calls:
                    break
                self._wakeup.wait()
            if self.queue.queue_items:
                self._wakeup.notify()  # an idle thread may now find an item that it can start
            thread.batch, thread.since = batch, now
            runs = sum(bool(other.batch) for other in self._threads) + self.queue.queue_items
            if runs > 1 and runs * self.multi_threads > self.queue.threads:
                self._last_crowded = now
            multi_threaded = now - self._last_crowded > RECENT_S
        if batch:
            self._execute(thread, batch, multi_threaded=multi_threaded)
        if thread.setup_calls:
            try:
                thread.setup_calls[0]()
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of a setup call: without it, the first batches are slower
                logger.warning("%s: a setup call failed with %s", thread.name, type(error).__name__)
            thread.setup_calls.pop(0)  # after the call, because `on_each_thread` waits until none is left
        return True

    def _execute(self, thread: InferenceThread, batch: Sequence[Item], *, multi_threaded: bool = False) -> None:
        """Runs a batch, or a part of it, and delivers the results. A failed batch runs again in halves, so that one item fails."""
        runner = batch[0].request.runner
        thread.predicted_s = self.clock() - thread.since + runner.seconds(len(batch), max(item.length for item in batch))
        try:
            thread.run_start = self._seconds
            results = runner.run([item.payload for item in batch], multi_threaded=multi_threaded)
            thread.run_start = inf  # decoding does not count: each request limits its own, and a batch can end many requests
            if len(results) != len(batch):
                raise EngineError(
                    "the graph returned {rows} rows for {inputs} inputs. This is a bug.", rows=len(results), inputs=len(batch)
                )
        except DeviceLostError:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary of a batch: no error of a run may end the inference thread
            thread.run_start = inf
            if len(batch) == 1:
                self._end(batch[0].request, error_for_caller(error))
                return
            half = (len(batch) + 1) // 2
            for part in (batch[:half], batch[half:]):
                if open_items := [item for item in part if item.request in self.queue.requests]:
                    self._execute(thread, open_items)
            return
        for item, result in zip(batch, results, strict=True):
            self._deliver(item, result)

    def _deliver(self, item: Item, result: Any) -> None:
        """Records a result; after the last one, it continues the request."""
        request = item.request
        with self._lock:
            if not self.queue.finish(item, result):
                return
            results, proceed = request.results, request.proceed
        try:
            payloads = proceed(results)
            with self._lock:
                if payloads and request in self.queue.requests:
                    if self.clock() >= request.deadline:  # the timer found no item that waits
                        raise ExpiredError(EXPIRED)
                    self.queue.put_next(request, payloads)
                    self._wakeup.notify(len(payloads))
        except BaseException as error:  # noqa: BLE001 - the boundary of a batch: an error of a request's own code is that request's answer
            self._end(request, error_for_caller(error))
            return
        if not payloads:
            self._end(request)

    def _end(self, request: ScheduledRequest, error: Exception | None = None) -> None:
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
        """Ends a request whose deadline has passed while items wait."""
        if request.waiting:
            self._end(request, ExpiredError(EXPIRED))

    def _abort(self, failure: str | None = None) -> int:
        """Fails all requests and starts no more runs; returns the number of requests. With a failure, the process must be restarted."""
        with self._lock:
            self.failure = self.failure or failure
            self.advance(State.STOPPED)
            requests = list(self.queue.requests)
            for request in requests:
                self._end(request, self._unavailable_error())  # an error each, because a stream adds the number of the line to its own
            self._wakeup.notify_all()
        return len(requests)

    def check_hung_runs(self) -> None:
        """Replaces the threads whose run hangs. It counts its calls, one per second, because a clock also runs during a suspension."""
        with self._lock:  # a run that ends meanwhile is either answered or replaced
            for thread in [thread for thread in self._threads if thread.is_alive()]:
                seconds = self._seconds - thread.run_start
                if seconds >= max(MIN_HANG_S, HANG_FACTOR * thread.predicted_s):
                    self._replace_hung(thread, seconds)
            self._seconds += 1

    def _replace_hung(self, thread: InferenceThread, seconds: float) -> None:
        """Fails the requests of a run that hangs, and starts another thread. After as many hangs as threads, nothing can run."""
        self._threads.remove(thread)
        self._ended_s += self.clock() - thread.since
        thread.setup_calls.clear()  # they refer to engines
        self._hangs += 1
        logger.error("%s hangs: a run has taken %d s, and the prediction was %.3f s", thread.name, seconds, thread.predicted_s)
        self._on_hang()
        for request in {item.request for item in thread.batch}:
            error = EngineError(
                "a model run with this request has hung for {seconds:.0f} s; try again with other texts, and tell the operator.",
                seconds=seconds,
            )
            self._end(request, error)
        if self._hangs >= self.queue.threads:
            self._abort("since the start, as many runs have hung as there are inference threads")
        elif self._state is not State.STOPPED:
            self._threads.append(InferenceThread(self._thread_main, f"inference-{len(self._threads) + self._hangs}"))
            self._threads[-1].start()

    def _unavailable_error(self) -> UnavailableError:
        reason = self.failure or "the service is stopping"
        return UnavailableError("{reason}; send the request to another instance, or try again later.", reason=reason)
