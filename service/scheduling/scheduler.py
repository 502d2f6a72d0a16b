"""Scheduler: runs a RequestQueue on the inference threads of a device. It uses threads and futures, but no models, texts or ONNX.

An inference thread takes the best batch, runs it with the function that belongs to the work, and delivers the results.
No timer delays a batch: while the inference threads are busy, the next batch fills up. Every request ends exactly once: answered,
failed, expired or cancelled, whichever happens first under the lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from bertserve.service.errors import EngineError, ExpiredError, UnavailableError
from bertserve.service.scheduling.inference_thread import BatchKind, CompletionQueue, InferenceThread, PeakConcurrency, Run, kind_of
from bertserve.service.scheduling.request_queue import PART_ITEMS, RequestQueue
from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest
from bertserve.service.scheduling.stage import RequestResult, Stage
from bertserve.service.scheduling.watchdog import HUNG_FLOOR_S, Watchdog

logger = logging.getLogger("bertserve.scheduler")

LEAST_TIMER_S = 1e-3
# Seconds until a thread that waits for the GIL asks for it. A request needs the GIL several times, and with Python's 5e-3 it would wait that
# long each time. With less than 1e-4, threads take the GIL from each other so often that short texts take 4 % longer.
SWITCH_S = 1e-4


def _forgotten(results: Sequence[Any]) -> None:
    """Replaces the functions of a request that has ended."""


def _forget(request: ScheduledRequest) -> None:
    """Frees the texts and tokens of an ended request at once; a run of it may still look up its functions."""
    if (ticket := request.owner) is not None:
        ticket.stage = replace(ticket.stage, work=(), finish=_forgotten)


def _clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames of an error and its causes, so that they do not keep texts and tokens in memory."""
    cleared: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        if (current := pending.pop()) is not None and current not in cleared:
            cleared.append(current)
            traceback.clear_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__]


@dataclass(slots=True)
class _Ticket:
    """The state of a running request: the future to resolve, the current stage and the timer of the deadline."""

    future: asyncio.Future[RequestResult]
    stage: Stage
    timer: asyncio.TimerHandle | None = None  # set before the request waits


class Scheduler:
    """Runs requests on a fixed number of threads. It must be started in an event loop, and used from that loop only."""

    def __init__(
        self,
        queue: RequestQueue,
        *,
        threads: int,
        multi_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_hang: Callable[[], None] = lambda: None,
        hung_floor_s: float = HUNG_FLOOR_S,
    ) -> None:
        """Creates a scheduler; `start` starts it.

        Args:
            queue: An empty queue that nothing else uses.
            threads: Number of batches that run at the same time.
            multi_threads: Threads of a stage's `run_multi_threaded`. It is used if this many threads for each current and recent run are at
                most `threads`; a single run may always use it.
            clock: Returns monotonic seconds.
            on_hang: Called for each run that hangs.
            hung_floor_s: Minimum seconds after which a run counts as hung.
        """
        self._queue = queue
        self.max_queue_tokens = queue.max_queue_tokens
        self._thread_count = threads
        self._clock = clock
        self._lock = threading.RLock()
        self._waiting_threads = 0  # whose `waits` is true
        self._multi_threads = multi_threads
        self._running = 0
        self._concurrency = PeakConcurrency()
        self._callers = PeakConcurrency()
        self._withdrawn = False
        self._stopping = False
        self._stopped = False
        self._dead = False
        self._submitted: set[ScheduledRequest] = set()
        self._threads: list[InferenceThread] = []
        self._watchdog = Watchdog(
            self._threads,
            count=threads,
            clock=clock,
            pending=self._submitted,
            fail=self._fail,
            on_hang=self._note_hang,
            floor_s=hung_floor_s,
        )
        self._on_hang = on_hang

    @property
    def ready(self) -> bool:
        """Whether it accepts work: it has started and is not about to stop, all inference threads live, and at least one does not hang."""
        return self._accepts and not self._withdrawn

    @property
    def queued(self) -> tuple[int, int]:
        """Items and tokens in the queue."""
        return self._queue.queue_items, self._queue.queue_tokens

    @property
    def wait_s(self) -> float:
        """Predicted seconds until a request that arrives now starts: all admitted work that has not run, divided by the threads."""
        with self._lock:
            now = self._clock()
            return self._queue.wait_s(now, self._busy_s(now))

    @property
    def busy_s(self) -> float:
        """Seconds for which its threads have had a batch, up to now, in total; with one inference thread, three threads can have a batch."""
        now = self._clock()
        return sum(thread.busy_s(now) for thread in self._threads)

    @property
    def _accepts(self) -> bool:
        return bool(self._threads) and not self._stopping and not self._dead and not self._watchdog.all_hung

    def withdraw(self) -> None:
        """Reports not ready from now on, but accepts work until `stop`."""
        self._withdrawn = True

    def start(self) -> None:
        """Starts the inference threads, for submissions from the running event loop."""
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._loop = asyncio.get_running_loop()
        self._completions = CompletionQueue(self._loop)
        self._ended = self._loop.create_future()  # for an ended request; late results are dropped
        self._ended.cancel()
        # Three threads share the work of a single one, so that no request waits for a long step, and a quick one not even for a long run. Apart
        # from that, only one of them works, because two runs at the same time on one core are slower than one after the other.
        for i in range(self._thread_count if self._thread_count > 1 else 3):
            thread = InferenceThread(threading.Condition(self._lock))
            thread.handle = threading.Thread(target=self._serve, args=(thread,), name=f"inference-{i}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.handle.start()

    def admit(self, *, tokens: int, seconds: float, timeout_s: float, items: int = 1) -> ScheduledRequest:
        """Admits a request by its estimated cost and items; the caller must pass the request to `run`, or `close` it.

        Raises:
            TooLargeError: It is larger than the queue.
            RefusedError: The queue is full, or the request would expire before it could start.
            UnavailableError: The scheduler is stopping, an inference thread has died, or all of them hang.
        """
        with self._lock:
            if not self._accepts:
                raise self._unavailable()
            now = self._clock()
            self._callers.record(1 + len(self._submitted), now)
            self._queue.threads = max(1, self._thread_count - self._watchdog.hung)
            busy_s = self._busy_s(now)
            return self._queue.admit(tokens=tokens, seconds=seconds, deadline=now + timeout_s, now=now, busy_s=busy_s, items=items)

    def _busy_s(self, now: float) -> float:
        """Returns the predicted seconds until all current runs have ended, in total; 0 if an inference thread is free."""
        if self._running < self._thread_count:
            return 0.0
        runs = [run for thread in self._threads if (run := thread.run) is not None and not run.hung]
        return sum(max(run.started + run.predicted_s - now, 0.0) for run in runs)

    def close(self, request: ScheduledRequest) -> bool:
        """Ends an admitted request; returns true if it was open. Its current runs continue, and their results are dropped."""
        with self._lock:
            self._submitted.discard(request)
            if not self._queue.close(request):
                return False
            _forget(request)
            return True

    async def run(self, request: ScheduledRequest, stage: Stage) -> RequestResult:
        """Runs an admitted request, stage by stage. Cancelling the coroutine closes the request.

        Raises:
            ExpiredError: The deadline passed before its last item started.
            UnavailableError: The scheduler stopped, or an inference thread died, before the request was done.
            InvalidValueError: An item exceeds the maximum tokens of a batch.
            EngineError: The run function failed on an item of this request, or hangs. Its other errors are raised unchanged.
        """
        self._watchdog.wake(self._loop)
        future: asyncio.Future[RequestResult] = self._loop.create_future()
        request.owner = ticket = _Ticket(future, stage)
        self._watch_deadline(request, ticket)
        try:
            value: Any = stage
            while isinstance(value, Stage) and not value.work:
                value = value.finish([])
            if not isinstance(value, Stage):
                self.close(request)
                return RequestResult(value, 0.0, 0.0)
            self._put(request, value)
            return await future  # the code that resolved it has closed the request
        except BaseException:
            self.close(request)
            raise
        finally:
            if ticket.timer is not None:
                ticket.timer.cancel()
            # The queue may keep the request until its deadline, so its answer is dropped now. An error in the future refers to this frame;
            # without this cycle, texts and tokens are freed before the garbage collector runs.
            ticket.future = self._ended
            del future

    async def stop(self, shutdown_timeout_s: float) -> int:
        """Refuses new requests, lets others finish for `shutdown_timeout_s` seconds, fails the rest and ends the inference threads.

        If all inference threads hang, nothing would finish, so there is no wait. Requests in a hung run fail with the error of the hang,
        because a retry can hang another thread.

        Returns:
            The number of requests that were failed.
        """
        with self._lock:
            self._stopping = True
            pending = [request.owner.future for request in self._submitted]
        if pending:
            await asyncio.wait(pending, timeout=0 if self._watchdog.all_hung else shutdown_timeout_s)
        with self._lock:
            self._stopped = True
            aborted_count = len(self._submitted)
            self._wake(len(self._threads))
        self._watchdog.end_hung()
        self._fail_all(self._unavailable())
        self._watchdog.sleep()
        # a run that exceeds the shutdown timeout cannot be interrupted; its thread is a daemon
        ending = [thread.handle for thread in self._threads if (run := thread.run) is None or not run.hung]
        await asyncio.gather(*(asyncio.to_thread(thread.join, 1.0) for thread in ending))
        sys.setswitchinterval(self._switch_s)
        return aborted_count

    def _serve(self, thread: InferenceThread) -> None:
        """Runs batches until the scheduler stops; it is the function of a thread."""
        try:
            while self._serve_one(thread):
                pass
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: no request may wait for this thread forever
            # An error of the scheduler itself; `_execute` and `_settle` handle errors of the work. The queue may be inconsistent, so no
            # thread can continue.
            logger.critical("an inference thread died of %s; the service must be restarted", type(error).__name__)
            self._dead = True
            self._fail_all(self._unavailable())

    def _serve_one(self, thread: InferenceThread) -> bool:
        """Waits for a batch and runs it; returns false if the scheduler has stopped. Each call drops its references to the batch."""
        with self._lock:
            thread.batch = None
            while not self._stopped:
                now = self._clock()
                if expired := self._queue.expire(now):
                    self._end_expired(expired)
                if batch := self._take(thread, now):
                    break
                thread.waits = True
                self._waiting_threads += 1
                thread.condition.wait()
            else:
                return False
            thread.batch = kind_of(batch) if self._thread_count == 1 or batch[0].request.long_step else BatchKind.OTHER
            if self._waiting_threads and self._queue.queue_items:
                self._wake()  # another thread found no item that it could start, and this may have changed
            peak = self._concurrency.record(1 + self._running + self._queue.queue_items, now)
            multi_threaded = peak == 1 or peak * self._multi_threads <= self._thread_count
            self._running += 1  # under the lock, so that a thread that takes the next batch sees this run
        start = self._clock()
        thread.busy = (busy_s := thread.busy[0], start)
        self._execute(thread, batch, whole_batch=batch, multi_threaded=multi_threaded)
        thread.busy = (busy_s + self._clock() - start, None)
        thread.run = None
        return True

    def _take(self, thread: InferenceThread, now: float) -> list[Item]:
        """Takes the best batch that the thread may start now; empty if there is none."""
        if self._thread_count == 1:
            if self._threads[0].waits and self._queue.queue_items:
                self._wake()  # each thread that runs large batches keeps tens of megabytes, so the first one runs what it can
                return []
            kinds = self._current_kinds()
            if BatchKind.QUICK in kinds:
                return []
            return self._queue.take(now, allow_long_step=not kinds, quick_only=BatchKind.OTHER in kinds)
        # if no other thread is free, and other requests came recently, a request that already runs leaves this thread to them
        last_thread = not self._waiting_threads and self._callers.record(0, now) > 1
        # one of the threads must have no long step, because it cannot be interrupted
        batches = [each.batch for each in self._threads if (run := each.run) is None or not run.hung]
        allow_long_step = batches.count(BatchKind.LONG_STEP) < max(1, len(batches) - 1)
        return self._queue.take(now, last_thread=last_thread, allow_long_step=allow_long_step)

    def _current_kinds(self) -> set[BatchKind]:
        """Returns the kinds of all current batches, except those of runs that hang."""
        return {thread.batch for thread in self._threads if thread.batch is not None and ((run := thread.run) is None or not run.hung)}

    def _wake(self, count: int = 1) -> None:
        """Wakes at most `count` waiting threads, the first ones of all, if they may find work or must end."""
        if self._thread_count == 1 and not self._stopped:
            kinds = self._current_kinds()
            if BatchKind.QUICK in kinds or (BatchKind.OTHER in kinds and not self._queue.has_quick):
                return
        for thread in self._threads:
            if count > 0 and thread.waits:
                thread.waits = False
                self._waiting_threads -= 1
                thread.condition.notify()
                count -= 1

    def _execute(
        self, thread: InferenceThread, batch: list[Item], *, whole_batch: Sequence[Item], multi_threaded: bool = False, is_last: bool = True
    ) -> None:
        """Runs a batch, or a part of it, and delivers the results; a failure affects no other request.

        Args:
            thread: The thread that runs it.
            batch: The items to run.
            whole_batch: The batch as taken from the queue; `batch` can be a part of it.
            multi_threaded: Whether it may be a multi-threaded run.
            is_last: Whether the inference thread takes its next batch directly after this delivery.
        """
        predicted_s = batch[0].cost(len(batch), max(item.length for item in batch))
        thread.run = Run(whole_batch, predicted_s, self._clock())
        try:
            results = self._run(batch, multi_threaded)
        except BaseException as error:  # noqa: BLE001 - the boundary of a batch: no error of a run may end the inference thread
            if len(batch) == 1:
                self._fail(batch[0].request, error)
            else:
                self._execute_in_halves(thread, batch, whole_batch, is_last)
            return
        thread.run = Run(whole_batch, 0.0, self._clock())  # the prediction does not include the following steps
        for item, result in zip(batch, results, strict=True):
            self._settle(item, result, is_last=is_last and item is batch[-1])

    def _execute_in_halves(self, thread: InferenceThread, batch: list[Item], whole_batch: Sequence[Item], is_last: bool) -> None:
        """Runs the live items of a failed batch again in halves, so that only the faulty item fails, and a batch fits into memory."""
        half = (len(batch) + 1) // 2
        for part in (batch[:half], batch[half:]):
            if open_items := [item for item in part if item.request.open]:
                with self._lock:
                    self._running += 1
                self._execute(thread, open_items, whole_batch=whole_batch, is_last=is_last and part[-1] is batch[-1])

    def _run(self, batch: list[Item], multi_threaded: bool) -> Sequence[Any]:
        stage = batch[0].request.owner.stage  # all work of a key has the same run functions
        run = stage.run_multi_threaded if multi_threaded and stage.run_multi_threaded is not None else stage.run
        try:
            results: Sequence[Any] = run([item.payload for item in batch])
        finally:
            with self._lock:
                self._running -= 1
        if len(results) != len(batch):
            raise EngineError(
                "a batch of {batch_count} gave {results_count} results. This is a bug.", batch_count=len(batch), results_count=len(results)
            )
        return results

    def _settle(self, item: Item, result: Any, *, is_last: bool) -> None:
        """Records a result; after the last result of a stage, it starts the next stage or finishes the request.

        New work wakes a waiting thread, unless this thread delivers nothing more (`is_last`) and takes the work itself.
        """
        request = item.request
        with self._lock:
            if not self._queue.finish(item, result):
                if request.waiting and not request.running and not is_last:
                    self._wake()  # an inference thread may have left the rest of the request while this item ran
                return
            results = request.results
        start = self._clock()
        try:
            value = request.owner.stage.finish(results)
            while isinstance(value, Stage) and not value.work:
                value = value.finish([])
            request.finish_s += self._clock() - start
            if isinstance(value, Stage):
                self._put(request, value, own=is_last)  # this thread takes one item itself, sooner than another thread would wake up
                return
        except BaseException as error:  # noqa: BLE001 - the boundary of a batch: an error of a request's own code is that request's answer
            self._fail(request, error)
            return
        runs_s = start - request.arrived - request.wait_s
        outcome = RequestResult(value, request.queued_s, runs_s, request.predicted_wait_s, request.wait_s)
        if self.close(request):  # false if it has already ended
            self._completions.post(request.owner.future, outcome)

    def _put(self, request: ScheduledRequest, stage: Stage, *, own: bool = False) -> None:
        """Queues a stage and wakes a waiting thread for each item, except the item that the calling thread takes itself (`own`).

        Raises:
            UnavailableError: The scheduler has stopped, or an inference thread has died.
        """
        with self._lock:
            if not request.open:
                return
            if self._stopped or self._dead:
                raise self._unavailable()
            self._submitted.add(request)
            request.owner.stage, request.expires = stage, stage.expires
            request.delay_s, request.long_step = stage.delay_s, stage.long_step
            items = self._queue.put(
                request,
                stage.key,
                stage.work,
                stage.cost,
                self._clock(),
                keep_estimate=stage.keep_estimate,
                reserved_tokens=stage.reserved_tokens,
                shape=stage.shape,
            )
            if self._waiting_threads:
                self._wake(len(stage.work) - own)
        # between the parts, other threads and the event loop get the lock
        while part := list(islice(items, PART_ITEMS)):
            with self._lock:
                self._queue.put_part(request, part, self._clock())
                self._wake(len(self._threads))

    def _watch_deadline(self, request: ScheduledRequest, ticket: _Ticket) -> None:
        ticket.timer = self._loop.call_later(max(request.deadline - self._clock(), LEAST_TIMER_S), self._expire, request, ticket)

    def _expire(self, request: ScheduledRequest, ticket: _Ticket) -> None:
        """Ends items that have waited past their deadline. It runs again if the scheduler's clock has not reached the deadline."""
        now = self._clock()
        if now < request.deadline:  # uvloop's timers count whole milliseconds and fire up to one millisecond early
            self._watch_deadline(request, ticket)
            return
        with self._lock:
            self._end_expired(self._queue.expire(now))

    def _end_expired(self, requests: Sequence[ScheduledRequest]) -> None:
        """Fails requests that the queue has closed because their deadline has passed."""
        for request in requests:
            self._submitted.discard(request)
            _forget(request)
            error = ExpiredError(
                "the request's deadline passed while it waited; allow more time with `x-request-timeout-ms`, or send less at once."
            )
            self._completions.post(request.owner.future, None, error)

    def _reject(self, request: ScheduledRequest, error: Exception) -> None:
        """Delivers a request's error, unless the request has already ended."""
        if self.close(request):
            self._completions.post(request.owner.future, None, error)

    def _fail(self, request: ScheduledRequest, error: BaseException) -> None:
        """Delivers the error of a request; it replaces errors that have no message for callers."""
        _clear_frames(error)
        if isinstance(error, MemoryError):
            error = EngineError(
                "there is not enough memory for the request; send less at once; the operator can give the service more memory."
            )
        elif not isinstance(error, Exception):  # a panic of a native library, or an exit; futures do not accept these
            logger.error("a request failed with an unexpected %s", type(error).__name__)
            error = EngineError("the request's work ended with {name}. This is a bug.", name=type(error).__name__)
        self._reject(request, error)

    def _note_hang(self) -> None:
        """Wakes waiting threads, which may take items that were left to the thread that hangs."""
        with self._lock:
            self._wake(len(self._threads))
        self._on_hang()

    def _fail_all(self, error: UnavailableError) -> None:
        for request in list(self._submitted):
            self._reject(request, error)

    def _unavailable(self) -> UnavailableError:
        if self._dead:
            return UnavailableError("an inference thread died and the service must be restarted. This is a bug.")
        if self._watchdog.all_hung:
            return UnavailableError("all inference threads hang; send the request to another instance, or try again later.")
        return UnavailableError("the service is stopping; send the request to another instance, or try again later.")
