"""Scheduler: the lanes of a device around a Backlog. Knows threads and futures; nothing of models, texts or ONNX.

A lane is a thread that takes the best batch there is, runs it with the function that came with the work, and delivers.
No timer holds a batch back: while the lanes are busy the next batch gathers. Every job ends exactly once: answered,
failed, expired or cancelled, whichever closes it first under the lock.
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
from typing import Any

from bertserve.service.errors import EngineError, ExpiredError, UnavailableError
from bertserve.service.scheduling.backlog import Backlog, predicted_s
from bertserve.service.scheduling.concurrency import PeakConcurrency
from bertserve.service.scheduling.job import Entry, Job
from bertserve.service.scheduling.lane import Lane, Run
from bertserve.service.scheduling.mailbox import Mailbox
from bertserve.service.scheduling.share import Share
from bertserve.service.scheduling.stage import JobResult, Stage, skip_empty
from bertserve.service.scheduling.watchdog import HUNG_FLOOR_S, Watchdog

logger = logging.getLogger("bertserve.scheduler")

LEAST_TIMER_S = 1e-3
# A thread that waits for the interpreter gets it after so long. With Python's own 5 ms, which lanes and event loop need several times for a
# request, a loop that is flooded with cheap requests kept short texts waiting for up to a second.
SWITCH_S = 5e-4


def _forgotten(results: Sequence[Any]) -> None:
    """Stands for the end of a job that has ended."""


def _clear_frames(error: BaseException) -> None:
    """Clears the locals of the frames of an error and of its causes: they keep texts and tokens until the caller has the answer."""
    cleared: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        if (each := pending.pop()) is not None and each not in cleared:
            cleared.append(each)
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]


@dataclass(slots=True)
class _Ticket:
    """What a submitted job waits with: the future to resolve, the stage it is in and the timer of its deadline."""

    future: asyncio.Future[JobResult]
    stage: Stage
    timer: asyncio.TimerHandle | None = None  # set before anything waits


class Scheduler:
    """Runs jobs on a fixed number of lanes. Start it in an event loop, and submit from that loop only."""

    def __init__(
        self,
        backlog: Backlog,
        *,
        lanes: int,
        solo_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[int, int], None] = lambda entries, tokens: None,
        on_hang: Callable[[], None] = lambda: None,
        hung_floor_s: float = HUNG_FLOOR_S,
    ) -> None:
        """Creates a scheduler; `start` starts it.

        Args:
            backlog: An empty backlog, used by nobody else.
            lanes: Batches that run at once.
            solo_threads: Threads of a stage's `run_solo`. It is used while all that wants to run, now and of late, could have as many
                threads on as many cores as there are lanes; a single run always may.
            clock: Monotonic seconds.
            observe: Called with the entries and tokens in the queue whenever they have changed.
            on_hang: Called for each run that hangs.
            hung_floor_s: Least seconds after which a run hangs.
        """
        self._backlog = backlog
        self._lane_count = lanes
        self._clock = clock
        self._observe = observe
        self._condition = threading.Condition()
        self._solo_threads = solo_threads
        self._waiting_lanes = 0
        self._running = 0
        self._concurrency = PeakConcurrency()
        self._callers = PeakConcurrency()
        self._withdrawn = False
        self._stopping = False
        self._stopped = False
        self._dead = False
        self._submitted: set[Job] = set()
        self._lanes: list[Lane] = []
        self._watchdog = Watchdog(
            self._lanes, clock=clock, pending=lambda: bool(self._submitted), fail=self._fail, on_hang=on_hang, floor_s=hung_floor_s
        )

    @property
    def ready(self) -> bool:
        """Whether work should be sent to it: started, not about to stop, every lane alive, and one at least that does not hang."""
        return self._accepts and not self._withdrawn

    @property
    def max_queue_tokens(self) -> int:
        """Most tokens that admitted jobs may hold together."""
        return self._backlog.max_queue_tokens

    @property
    def wait_s(self) -> float:
        """Predicted seconds until a request that comes now starts: what is admitted and has not run, over all lanes."""
        with self._condition:
            now = self._clock()
            return self._backlog.wait_s(now, self._busy_s(now))

    @property
    def busy_s(self) -> float:
        """Seconds that its lanes had a batch, up to now and summed."""
        now = self._clock()
        return sum(lane.busy_s(now) for lane in self._lanes)

    @property
    def _accepts(self) -> bool:
        return bool(self._lanes) and not self._stopping and not self._dead and not self._watchdog.all_hung

    def withdraw(self) -> None:
        """Says that it is not ready any more, and goes on accepting work until `stop`."""
        self._withdrawn = True

    def start(self) -> None:
        """Starts the lanes, for submissions from the running event loop."""
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._ended = self._loop.create_future()  # of a job that has ended; what comes late for it is dropped
        self._ended.cancel()
        for i in range(self._lane_count):
            lane = Lane()
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=f"lane-{i}", daemon=True)
            self._lanes.append(lane)
        for lane in self._lanes:
            lane.thread.start()

    def admit(self, *, tokens: int, seconds: float, timeout_s: float, entries: int = 1, share: Share | None = None) -> Job:
        """Admits a request by its estimated cost and entries, within a share; the caller must pass the job to `run`, or `close` it.

        Raises:
            TooLargeError: It is larger than the queue.
            RefusedError: It does not fit now, or would expire before it could start.
            UnavailableError: The scheduler is stopping, a lane died, or all of them hang.
        """
        with self._condition:
            if not self._accepts:
                raise self._unavailable()
            now = self._clock()
            self._callers.record(1 + len(self._submitted), now)
            self._backlog.lanes = max(1, self._lane_count - self._watchdog.hung)
            busy_s = self._busy_s(now)
            job = self._backlog.admit(
                tokens=tokens, seconds=seconds, deadline=now + timeout_s, now=now, busy_s=busy_s, entries=entries, share=share
            )
            self._changed()
            return job

    def _busy_s(self, now: float) -> float:
        """Returns the predicted seconds until all runs of now have ended, summed; 0 where a lane is free."""
        if self._running < self._lane_count:
            return 0.0
        runs = [run for lane in self._lanes if (run := lane.run) is not None and not run.hung]
        return sum(max(run.started + run.predicted_s - now, 0.0) for run in runs)

    def close(self, job: Job) -> bool:
        """Ends an admitted job; true if it was open. What of it runs already runs on, and its result is dropped."""
        with self._condition:
            self._submitted.discard(job)
            closed = self._backlog.close(job)
            self._changed()
            return closed

    async def run(self, job: Job, stage: Stage) -> JobResult:
        """Runs an admitted job, stage by stage. Cancelling the coroutine closes the job.

        Raises:
            ExpiredError: The deadline passed before its last entry started.
            UnavailableError: The scheduler stopped, or a lane died, before it was done.
            InvalidValueError: An entry is over the budget of a batch.
            EngineError: The run function failed on an entry of this job, or hangs. Whatever else it raises comes out as it is.
        """
        self._watchdog.wake(self._loop)
        future: asyncio.Future[JobResult] = self._loop.create_future()
        job.owner = ticket = _Ticket(future, stage)
        self._watch_deadline(job, ticket)
        try:
            if not isinstance(value := skip_empty(stage), Stage):
                self.close(job)
                return JobResult(value, 0.0, 0.0)
            with self._condition:
                if self._stopped or self._dead:
                    raise self._unavailable()
                self._submitted.add(job)
                self._put(job, value)
            return await future  # whoever resolved it has closed the job
        except BaseException:
            self.close(job)
            raise
        finally:
            if ticket.timer is not None:
                ticket.timer.cancel()
            # the queue may keep the job until its deadline: its answer and its texts go now; a run of a cancelled one looks up its functions
            ticket.future, ticket.stage = self._ended, replace(ticket.stage, work=(), finish=_forgotten)

    async def stop(self, grace_s: float) -> int:
        """Refuses new jobs, lets submitted ones finish for `grace_s` seconds, fails what is left and ends the lanes.

        Where all lanes hang nothing would finish, and the grace is left out. What is in a run that hangs fails as that, for to send it
        again may hang another lane.

        Returns:
            The number of jobs that were left.
        """
        with self._condition:
            self._stopping = True
            pending = [job.owner.future for job in self._submitted]
        if pending:
            await asyncio.wait(pending, timeout=0 if self._watchdog.all_hung else grace_s)
        with self._condition:
            self._stopped = True
            left = len(self._submitted)
            self._condition.notify_all()
        self._watchdog.end_hung()
        self._fail_all(self._unavailable())
        self._watchdog.sleep()
        # a run that outlasts the grace cannot be interrupted; its thread is a daemon
        ending = [lane.thread for lane in self._lanes if (run := lane.run) is None or not run.hung]
        await asyncio.gather(*(asyncio.to_thread(thread.join, 1.0) for thread in ending))
        sys.setswitchinterval(self._switch_s)
        return left

    def _serve(self, lane: Lane) -> None:
        """Runs batches until the scheduler stops: what a thread does."""
        try:
            while self._serve_one(lane):
                pass
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: whatever it was, nobody may wait for this lane for ever
            # not the work's, which `_execute` and `_settle` answer: our own. The backlog may be half changed, and no lane can go on with it
            logger.critical("a lane died of %s; the service must be restarted", type(error).__name__)
            self._dead = True
            self._fail_all(self._unavailable())

    def _serve_one(self, lane: Lane) -> bool:
        """Runs one batch; false when the scheduler has stopped. A frame of its own, so that a lane that waits keeps nothing of its last one."""
        if (taken := self._next_batch()) is None:
            return False
        batch, solo = taken
        start = self._clock()
        lane.busy = (busy_s := lane.busy[0], start)
        self._execute(lane, batch, held=batch, solo=solo)
        lane.busy = (busy_s + self._clock() - start, None)
        lane.run = None
        return True

    def _next_batch(self) -> tuple[list[Entry], bool] | None:
        """Blocks until there is a batch; None when the scheduler has stopped.

        Returns:
            The batch, and whether it may be a solo run.
        """
        with self._condition:
            while not self._stopped:
                now = self._clock()
                self._close_expired(now)
                if batch := self._backlog.take(now, last_lane=self._keeps_last_lane(now)):
                    self._changed()
                    if self._waiting_lanes and self._backlog.queue_entries:
                        self._condition.notify()  # it found nothing that it might take, and perhaps may now
                    solo = self._may_run_solo(now)
                    self._running += 1  # here, under the lock: a lane that takes the next batch must see this one
                    return batch, solo
                self._waiting_lanes += 1
                self._condition.wait()
                self._waiting_lanes -= 1
            return None

    def _keeps_last_lane(self, now: float) -> bool:
        """Returns whether a job that runs leaves this lane to others: no other lane is free for them, and of late there were some."""
        return self._lane_count > 1 and not self._waiting_lanes and self._callers.peak(now) > 1

    def _may_run_solo(self, now: float) -> bool:
        self._concurrency.record(1 + self._running + self._backlog.queue_entries, now)
        peak = self._concurrency.peak(now)
        return peak == 1 or peak * self._solo_threads <= self._lane_count

    def _execute(self, lane: Lane, batch: list[Entry], *, held: Sequence[Entry], solo: bool = False, is_last: bool = True) -> None:
        """Runs a batch, or a part of the one that is held, and delivers; what fails takes nobody with it.

        Args:
            lane: The lane that runs it.
            batch: What to run.
            held: The whole batch.
            solo: Whether it may be a solo run.
            is_last: Whether the lane takes its next batch as soon as this is delivered.
        """
        start = self._clock()
        lane.run = Run(held, predicted_s(batch), start)
        try:
            results = self._run(batch, solo)
        except BaseException as error:  # noqa: BLE001 - the batch boundary: nothing that a run raises may end the lane, not a panic either
            if len(batch) == 1:
                self._fail(batch[0].job, error)
            else:
                self._execute_in_halves(lane, batch, held, is_last)
            return
        lane.run = Run(held, 0.0, self._clock())  # what follows is no part of the prediction
        for entry, result in zip(batch, results, strict=True):
            self._settle(entry, result, is_last=is_last and entry is batch[-1])

    def _execute_in_halves(self, lane: Lane, batch: list[Entry], held: Sequence[Entry], is_last: bool) -> None:
        """Runs what a failed batch still owes someone again, so that only the guilty entry fails, or what is too much for the memory."""
        half = (len(batch) + 1) // 2
        for part in (batch[:half], batch[half:]):
            if wanted := [entry for entry in part if entry.job.open]:
                with self._condition:
                    self._running += 1
                self._execute(lane, wanted, held=held, is_last=is_last and part[-1] is batch[-1])

    def _run(self, batch: list[Entry], solo: bool) -> Sequence[Any]:
        stage = batch[0].job.owner.stage  # all work of a key has the same run functions
        run = stage.run_solo if solo and stage.run_solo is not None else stage.run
        try:
            results: Sequence[Any] = run([entry.payload for entry in batch])
        finally:
            with self._condition:
                self._running -= 1
        if len(results) != len(batch):
            raise EngineError(
                "a batch of {batch_count} gave {results_count} results. This is a bug.", batch_count=len(batch), results_count=len(results)
            )
        return results

    def _settle(self, entry: Entry, result: Any, *, is_last: bool) -> None:
        """Records a result; finishes the job, or starts its next stage, when it was the last one.

        Work that may start now wakes a waiting lane, unless this lane delivers nothing more (`is_last`) and takes it at once.
        """
        job = entry.job
        with self._condition:
            if not self._backlog.finish(entry, result):
                if job.waiting and not job.running and not is_last:
                    self._condition.notify()  # a lane may have left the rest of the job to others while this entry ran
                return
            results = job.results
        start = self._clock()
        try:
            value = skip_empty(job.owner.stage.finish(results))
            job.finish_s += self._clock() - start
            if isinstance(value, Stage):
                with self._condition:
                    self._put(job, value, own=is_last)  # this lane takes one itself, sooner than another wakes up
                return
        except BaseException as error:  # noqa: BLE001 - the batch boundary again: what a job's own code raises is that job's answer
            self._fail(job, error)
            return
        runs_s = start - job.arrived - job.wait_s
        self._resolve(job, JobResult(value, job.queued_s, runs_s, job.predicted_wait_s, job.wait_s))

    def _put(self, job: Job, stage: Stage, *, own: bool = False) -> None:
        """Queues a stage and wakes a waiting lane for each entry, but for the one that the calling lane takes itself (`own`)."""
        if not job.open:
            return
        job.owner.stage, job.delay_s, job.expires = stage, stage.delay_s, stage.expires
        if job.share is not None:
            self._backlog.expect_answer(job, stage.answer_bytes)
        self._backlog.put(
            job,
            stage.key,
            stage.work,
            stage.cost,
            self._clock(),
            keep_estimate=stage.keep_estimate,
            reserve=stage.reserve,
            shape=stage.shape,
        )
        self._changed()
        if self._waiting_lanes:
            self._condition.notify(min(self._waiting_lanes, len(stage.work) - own))

    def _watch_deadline(self, job: Job, ticket: _Ticket) -> None:
        ticket.timer = self._loop.call_later(max(job.deadline - self._clock(), LEAST_TIMER_S), self._expire, job, ticket)

    def _expire(self, job: Job, ticket: _Ticket) -> None:
        """Ends what waits past its deadline; comes again until the job's own has passed by the scheduler's clock."""
        now = self._clock()
        if now < job.deadline:  # uvloop's timers count whole milliseconds and fire up to one early
            self._watch_deadline(job, ticket)
            return
        with self._condition:
            self._close_expired(now)

    def _close_expired(self, now: float) -> None:
        for job in self._backlog.expire(now):
            self._submitted.discard(job)
            error = ExpiredError(
                "the request's deadline passed while it waited; allow more time with `x-request-timeout-ms`, or send less at once."
            )
            self._mailbox.post(job.owner.future, None, error)
            self._changed()

    def _resolve(self, job: Job, value: JobResult | None, error: Exception | None = None) -> None:
        """Delivers a job's outcome, unless it has ended already."""
        if self.close(job):
            self._mailbox.post(job.owner.future, value, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        """Delivers what a job failed of, in words where the error has none."""
        _clear_frames(error)
        if isinstance(error, MemoryError):
            error = EngineError("the service has not enough memory for the request; send less at once, or give the service more.")
        elif not isinstance(error, Exception):  # a panic of a native library, or an exit; no future takes those
            logger.error("work of a request ended with %s, which is no error of a request", type(error).__name__)
            error = EngineError("the request's work ended with {name}. This is a bug.", name=type(error).__name__)
        self._resolve(job, None, error)

    def _fail_all(self, error: UnavailableError) -> None:
        for job in list(self._submitted):
            self._resolve(job, None, error)

    def _unavailable(self) -> UnavailableError:
        if self._dead:
            return UnavailableError("a lane died and the service must be restarted. This is a bug.")
        if self._watchdog.all_hung:
            return UnavailableError("all lanes hang in runs that do not end; send the request to another instance, or try again later.")
        return UnavailableError("the service is stopping; send the request to another instance, or try again later.")

    def _changed(self) -> None:
        try:
            self._observe(self._backlog.queue_entries, self._backlog.queue_tokens)
        except Exception as error:  # noqa: BLE001 - a number on a page is worth no request, and no lane
            logger.error("the length of the queue could not be counted: %s", type(error).__name__)
