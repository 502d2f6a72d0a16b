"""Scheduler: the lanes of a device around a Backlog. Knows threads and futures; nothing of models, texts or ONNX.

A lane is a thread that takes the best batch there is, runs it with the function that came with the work, and delivers.
No timer holds a batch back: while the lanes are busy the next batch gathers. Every job ends exactly once: answered,
failed, expired or cancelled, whichever closes it first under the lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from service.errors import EngineError, ExpiredError, UnavailableError
from service.scheduling.backlog import Backlog
from service.scheduling.concurrency import PeakConcurrency
from service.scheduling.job import Cost, Entry, Job, Shape, exact
from service.scheduling.mailbox import Mailbox

logger = logging.getLogger("bertserve.scheduler")


@dataclass(frozen=True, slots=True)
class Stage:
    """Work of a job, and what to do when all of it is done.

    Attributes:
        work: Tokens and payload of each entry; without any the stage is finished at once.
        run: Payloads of one batch -> one result each, in order. Called on a lane.
        finish: Results of all entries, in order -> the job's value, or its next Stage. Called on a lane.
        key: What may share a batch; None for entries that run alone. All work of a key has the same `run` and `run_solo`.
        cost: Predicted seconds of a batch of `rows` padded to `length`.
        keep_estimate: Whether the job goes on holding its estimate of admission, because its real cost is not known yet.
        shape: Rows and longest tokens of a batch -> what it is run at, or None where it has too many rows.
        run_solo: The same as `run` with several threads, for a solo run: one beside which no other runs or waits.
    """

    work: Sequence[tuple[int, Any]]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    finish: Callable[[Sequence[Any]], Any]
    key: Hashable | None
    cost: Cost
    keep_estimate: bool = False
    shape: Shape = exact
    run_solo: Callable[[Sequence[Any]], Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's value, with the seconds that it waited and that its longest run took."""

    value: Any
    queue_s: float
    run_s: float


@dataclass(slots=True)
class _Ticket:
    """What a submitted job waits with: the future to resolve and the stage it is in."""

    future: asyncio.Future[JobResult]
    stage: Stage


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
    ) -> None:
        """Creates a scheduler; `start` starts it.

        Args:
            backlog: An empty backlog, used by nobody else.
            lanes: Batches that run at once.
            solo_threads: Threads of a stage's `run_solo`. It is used while all that wants to run, now and of late, could have as many
                threads on as many cores as there are lanes; a single run always may.
            clock: Monotonic seconds.
            observe: Called with the entries and tokens in the queue whenever they have changed.
        """
        self._backlog = backlog
        self._lanes = lanes
        self._clock = clock
        self._observe = observe
        self._condition = threading.Condition()
        self._solo_threads = solo_threads
        self._waiting_lanes = 0
        self._running = 0
        self._concurrency = PeakConcurrency()
        self._withdrawn = False
        self._stopping = False
        self._stopped = False
        self._dead = False
        self._submitted: set[Job] = set()
        self._threads: list[threading.Thread] = []

    @property
    def ready(self) -> bool:
        """Whether work should be sent to it: started, not about to stop, and every lane alive."""
        return self._accepts and not self._withdrawn

    @property
    def _accepts(self) -> bool:
        return bool(self._threads) and not self._stopping and not self._dead

    def withdraw(self) -> None:
        """Says that it is not ready any more, and goes on accepting work until `stop`."""
        self._withdrawn = True

    def start(self) -> None:
        """Starts the lanes, for submissions from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._threads = [threading.Thread(target=self._lane, name=f"lane-{i}", daemon=True) for i in range(self._lanes)]
        for thread in self._threads:
            thread.start()

    def admit(self, *, tokens: int, seconds: float, timeout_s: float) -> Job:
        """Admits a request by its estimated cost; the caller must pass the job to `run`, or `close` it.

        Raises:
            TooLargeError: It is larger than the queue.
            RefusedError: It does not fit now, or would expire before it could start.
            UnavailableError: The scheduler is stopping, or a lane died.
        """
        with self._condition:
            if not self._accepts:
                raise self._unavailable()
            now = self._clock()
            job = self._backlog.admit(tokens=tokens, seconds=seconds, deadline=now + timeout_s, now=now)
            self._changed()
            return job

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
            EngineError: The run function failed on an entry of this job. Whatever else it raises comes out as it is.
        """
        future: asyncio.Future[JobResult] = self._loop.create_future()
        job.owner = _Ticket(future, stage)
        timer = self._loop.call_later(max(job.deadline - self._clock(), 0), self._expire)
        try:
            if not isinstance(value := _skip_empty(stage), Stage):
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
            timer.cancel()

    async def stop(self, grace_s: float) -> int:
        """Refuses new jobs, lets submitted ones finish for `grace_s` seconds, fails what is left and ends the lanes.

        Returns:
            The number of jobs that were left.
        """
        with self._condition:
            self._stopping = True
            pending = [job.owner.future for job in self._submitted]
        if pending:
            await asyncio.wait(pending, timeout=grace_s)
        with self._condition:
            self._stopped = True
            left = len(self._submitted)
            self._condition.notify_all()
        self._fail_all(self._unavailable())
        # a run that outlasts the grace cannot be interrupted; its thread is a daemon
        await asyncio.gather(*(asyncio.to_thread(thread.join, 1.0) for thread in self._threads))
        return left

    def _lane(self) -> None:
        try:
            while (taken := self._next_batch()) is not None:
                batch, solo = taken
                self._execute(batch, solo=solo)
        except BaseException as error:  # noqa: BLE001 - the boundary of a thread: whatever it was, nobody may wait for this lane for ever
            logger.critical("a lane died of %s; the service must be restarted", type(error).__name__)
            self._dead = True
            self._fail_all(self._unavailable())

    def _next_batch(self) -> tuple[list[Entry], bool] | None:
        """Blocks until there is a batch; None when the scheduler has stopped.

        Returns:
            The batch, and whether it may be a solo run.
        """
        with self._condition:
            while not self._stopped:
                now = self._clock()
                self._close_expired(now)
                if batch := self._backlog.take(now):
                    self._changed()
                    solo = self._may_run_solo(now)
                    self._running += 1  # here, under the lock: a lane that takes the next batch must see this one
                    return batch, solo
                self._waiting_lanes += 1
                self._condition.wait()
                self._waiting_lanes -= 1
            return None

    def _may_run_solo(self, now: float) -> bool:
        self._concurrency.record(1 + self._running + self._backlog.queue_entries, now)
        peak = self._concurrency.peak(now)
        return peak == 1 or peak * self._solo_threads <= self._lanes

    def _execute(self, batch: list[Entry], *, solo: bool = False) -> None:
        start = self._clock()
        try:
            results = self._run(batch, solo)
        except Exception as error:  # noqa: BLE001 - the batch boundary: a failing batch must not end the lane
            if len(batch) == 1:
                self._resolve(batch[0].job, None, error)
                return
            for entry in batch:  # one by one, so that only the guilty one fails
                with self._condition:
                    self._running += 1
                self._execute([entry])
            return
        run_s = self._clock() - start
        for entry, result in zip(batch, results, strict=True):
            self._settle(entry, result, run_s)

    def _run(self, batch: list[Entry], solo: bool) -> Sequence[Any]:
        stage = batch[0].job.owner.stage  # all work of a key has the same run functions
        run = stage.run_solo if solo and stage.run_solo is not None else stage.run
        try:
            results: Sequence[Any] = run([entry.payload for entry in batch])
        finally:
            with self._condition:
                self._running -= 1
        if len(results) != len(batch):
            raise EngineError(f"a batch of {len(batch)} gave {len(results)} results. This is a bug.")
        return results

    def _settle(self, entry: Entry, result: Any, run_s: float) -> None:
        """Records a result; finishes the job, or starts its next stage, when it was the last one."""
        job = entry.job
        with self._condition:
            if not self._backlog.finish(entry, result, run_s):
                return
            results = job.results
        try:
            value = _skip_empty(job.owner.stage.finish(results))
            if isinstance(value, Stage):
                with self._condition:
                    self._put(job, value, own=1)  # this lane takes one itself, sooner than another wakes up
                return
        except Exception as error:  # noqa: BLE001 - the batch boundary again: what a job's own code raises is that job's answer
            self._resolve(job, None, error)
            return
        self._resolve(job, JobResult(value, job.queued_s, job.run_s))

    def _put(self, job: Job, stage: Stage, *, own: int = 0) -> None:
        job.owner.stage = stage
        self._backlog.put(job, stage.key, stage.work, stage.cost, self._clock(), keep_estimate=stage.keep_estimate, shape=stage.shape)
        self._changed()
        if self._waiting_lanes:
            self._condition.notify(min(self._waiting_lanes, len(stage.work) - own))

    def _expire(self) -> None:
        with self._condition:
            self._close_expired(self._clock())

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

    def _fail_all(self, error: UnavailableError) -> None:
        for job in list(self._submitted):
            self._resolve(job, None, error)

    def _unavailable(self) -> UnavailableError:
        if self._dead:
            return UnavailableError("a lane died and the service must be restarted. This is a bug.")
        return UnavailableError("the service is stopping; send the request to another instance, or try again later.")

    def _changed(self) -> None:
        self._observe(self._backlog.queue_entries, self._backlog.queue_tokens)


def _skip_empty(value: Any) -> Any:
    """Returns the next stage that has work, or the final value."""
    while isinstance(value, Stage) and not value.work:
        value = value.finish([])
    return value
