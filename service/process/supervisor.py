"""Supervisor: several worker processes that do the same. Knows processes, pipes and signals; nothing of HTTP, models or metrics.

Workers are forked from a process that has one thread and has not loaded onnxruntime: threads do not survive a fork, so each worker makes its
own sessions.

    worker ───── pipe ──────► supervisor   first: that it is ready, or why its start failed; then messages of any kind;
                                           SIGHUP says: I got this signal, which is for all
    supervisor ─ pipe ──────► worker       messages of any kind; None says: finish what you have, and end; SIGHUP: read the secrets again
    worker ───── heartbeat ─► supervisor   in shared memory: when its event loop last turned

A worker's pipe ends when the supervisor is killed, so no worker is left behind. This is our own supervisor, and not gunicorn's or uvicorn's,
because those share neither the listener's counts nor the metrics' folder, start workers one by one without saying when all are ready, and cut
off what a stopping worker has admitted.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from bertserve.service.errors import StartError, plural
from bertserve.service.process import systemd

logger = logging.getLogger("bertserve.supervisor")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# of one worker in a row: before all are ready the service ends then, and later it waits before each further one
MOST_FAILED_STARTS = 3
RETRY_S, MOST_RETRY_S = 1.0, 60.0
# After the shutdown timeout a worker joins its inference threads (1 s) and sends what was produced (5 s); one that still runs then hangs.
MARGIN_S = 8

# A worker that has not turned its event loop for so long answers no request; bodies of 8 MiB take it a tenth of a second. With the
# start of another one, of four small models, it is replaced within five seconds.
HUNG_S = 2.0
CHECK_S = 0.2
PAUSED_S = 0.5

# Loading may take minutes, where engines are built; once one worker has loaded, the others need not take much longer than it did.
START_S = 60.0
START_FACTOR = 10.0

# What a worker does, with its index and its pipe to the supervisor.
Work = Callable[[int, Connection], None]


@dataclass(slots=True)
class _Worker:
    """A worker process.

    Attributes:
        index: Its place; another process takes it when this one dies.
        process: The process.
        pipe: The supervisor's end of its pipe.
        started: `time.monotonic()` at its start.
        ready: Whether it has said that it is ready.
        hung_up: Whether SIGHUP came while it was not.
        hung: Whether it was killed because it hung.
        error: Why its start failed, if it said so.
    """

    index: int
    process: ForkProcess
    pipe: Connection
    started: float
    ready: bool = False
    hung_up: bool = False
    hung: bool = False
    error: StartError | None = None


class Supervisor:
    """Keeps a number of workers running until it is told to stop.

    Attributes:
        on_message: Called with each message of a worker after its first.
    """

    def __init__(
        self,
        work: Work,
        *,
        workers: int,
        shutdown_timeout_s: float,
        heartbeats: MutableSequence[int],
        on_ready: Callable[[Any], None],
        on_end: Callable[[int, str | None], None],
        on_stop: Callable[[], None] = lambda: None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates a supervisor; `run` it.

        Args:
            work: Called in each worker; returns when the pipe has ended, or None came through it, and all is done.
            workers: How many.
            shutdown_timeout_s: Seconds that a worker may take to finish what it has.
            heartbeats: By index the `time.monotonic_ns()` at which a worker's event loop last turned, in memory that all share.
            on_ready: Called once, with the first message of a worker, when all of them are ready.
            on_end: Called with the index of each worker that has ended, and why it has to be replaced: `ended` by itself, or `hung` and was
                killed; None while the service stops.
            on_stop: Called once, when the workers are told to stop: what they inherited need not stay open here.
            on_hangup: Called on each SIGHUP, to this process or to a worker. All workers are told then; one that is not ready once it is.
        """
        self.on_message: Callable[[Any], None] = lambda _: None
        self._work = work
        self._count = workers
        self._shutdown_timeout_s = shutdown_timeout_s
        self._heartbeats = heartbeats
        self._on_ready = on_ready
        self._on_end = on_end
        self._on_stop = on_stop
        self._on_hangup = on_hangup
        self._longest_start_s: float | None = None
        self._workers: list[_Worker] = []
        self._announced = False
        self._failed_starts = [0] * workers  # by index, since its last worker was ready
        self._due: dict[int, float] = {}  # index -> `time.monotonic()` at which another worker starts in its place
        self._failure: StartError | None = None
        self._stopping = False
        self._stop_began = 0.0  # `time.monotonic()`
        self._deadline: float | None = None
        self._checked = time.monotonic()
        self._watchdog = systemd.Watchdog()

    def run(self) -> None:
        """Runs the workers; returns once SIGINT or SIGTERM has stopped them all. Another SIGINT ends them at once.

        Raises:
            StartError: At the first start a worker could not start, or died MOST_FAILED_STARTS times before it was ready; or later all of
                them did.
        """
        self._signals, told = socket.socketpair()
        told.setblocking(False)
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)  # before the handlers, which would drop a signal that comes earlier
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the number comes through the descriptor
        try:
            for index in range(self._count):
                self._start(index)
            while self._workers or self._due:
                self._watchdog.beat()
                self._react()
        finally:
            self._kill()
            signal.set_wakeup_fd(-1)
            self._signals.close()
            told.close()
        if self._announced:
            logger.info("shutdown finished after %.1f s", time.monotonic() - self._stop_began)
        if self._failure is not None:
            raise self._failure

    def _start(self, index: int) -> None:
        pipe, worker_end = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=self._enter, args=(index, worker_end, pipe), name=f"worker-{index}")
        # a signal between the fork and the worker's own handlers would be told to the supervisor twice, and to the worker never
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        except OSError as error:
            raise StartError(f"cannot start a worker process ({error.strerror}); lower --workers.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        worker_end.close()  # so that the next worker does not inherit it, and this one's end is the pipe's
        self._workers.append(_Worker(index, process, pipe, time.monotonic()))

    def _enter(self, index: int, pipe: Connection, supervisor_end: Connection) -> None:
        """Runs in the worker."""
        for inherited in (supervisor_end, *(worker.pipe for worker in self._workers)):
            inherited.close()  # else these pipes would not end with the supervisor
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; while models load, the supervisor says what to do
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            self._work(index, pipe)
        except StartError as error:
            with suppress(OSError):  # the supervisor was killed
                pipe.send(error)
            sys.exit(1)

    def send(self, index: int, message: Any) -> None:
        """Sends a message to a worker that is ready. One that does not read is killed: to wait for it would stop the supervisor."""
        worker = next((worker for worker in self._workers if worker.index == index), None)
        if worker is None or not worker.ready or worker.pipe.closed:
            return
        if select.select([], [worker.pipe], [], 0)[1]:
            with suppress(OSError):  # it has just ended
                worker.pipe.send(message)
        else:
            logger.error("worker %d, process %d, does not read its messages and is killed", index, worker.process.pid)
            worker.process.kill()
            worker.hung = True

    def _react(self) -> None:
        """Waits until something happens, and does what it asks for."""
        pipes = [worker.pipe for worker in self._workers if not worker.pipe.closed]
        happened = wait([self._signals, *pipes, *(worker.process.sentinel for worker in self._workers)], CHECK_S)
        self._kill_hung()
        if self._deadline is not None and time.monotonic() > self._deadline:
            logger.error(
                "%s did not stop within the shutdown timeout and %d more seconds: they are killed",
                plural(len(self._workers), "worker"),
                MARGIN_S,
            )
            self._kill()
            self._deadline = None
        if self._signals in happened:
            for number in self._signals.recv(64):
                self._on_signal(number)
        for worker in [worker for worker in self._workers if worker.pipe in happened]:
            self._read(worker)
        for worker in [worker for worker in self._workers if worker.process.sentinel in happened]:
            self._reap(worker)
        self._start_due()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._hang_up()
        elif not self._stopping:
            self._stop()
        elif number == signal.SIGINT:  # as uvicorn: someone at the keyboard has lost patience; SIGTERM may come twice by accident
            self._kill()

    def _hang_up(self) -> None:
        if self._stopping:
            return
        self._on_hangup()
        for worker in self._workers:
            worker.hung_up = not worker.ready
            self.send(worker.index, signal.SIGHUP)

    def _read(self, worker: _Worker) -> None:
        """Reads the messages that a worker has sent."""
        try:
            while not worker.pipe.closed and worker.pipe.poll():
                message = worker.pipe.recv()
                if worker.ready and message is signal.SIGHUP:
                    self._hang_up()
                elif worker.ready:
                    self.on_message(message)
                elif isinstance(message, StartError):
                    worker.error = message
                else:
                    self._on_first_message(worker, message)
        except (EOFError, OSError):
            worker.pipe.close()

    def _on_first_message(self, worker: _Worker, message: Any) -> None:
        worker.ready = True
        self._heartbeats[worker.index] = time.monotonic_ns()
        self._longest_start_s = max(self._longest_start_s or 0, time.monotonic() - worker.started)
        if worker.hung_up:
            self.send(worker.index, signal.SIGHUP)
        self._failed_starts[worker.index] = 0
        if self._announced:
            logger.info("worker %d restarted as process %d", worker.index, worker.process.pid)
        elif len(self._workers) == self._count and all(other.ready for other in self._workers):
            self._announced = True
            self._on_ready(message)

    def _reap(self, worker: _Worker) -> None:
        """Puts another process in the place of a worker that ended, unless that is hopeless or not wanted."""
        self._read(worker)  # it may say why it ended
        worker.process.join()
        self._workers.remove(worker)
        worker.pipe.close()
        to_replace = None if self._stopping else "hung" if worker.hung else "ended"
        self._on_end(worker.index, to_replace)
        if self._stopping:
            return
        if worker.error is not None and not self._announced:
            self._fail(worker.error)
            return
        why = f": {worker.error}" if worker.error is not None else ""
        logger.error("worker %d, process %d, ended with code %s%s", worker.index, worker.process.pid, worker.process.exitcode, why)
        if worker.ready:
            self._due[worker.index] = time.monotonic()
        else:
            self._retry(worker.index, worker.error or StartError(f"worker {worker.index} ended before it was ready."))

    def _retry(self, index: int, error: StartError) -> None:
        """Starts a worker later whose start failed, or ends the service where no worker is left that could serve."""
        self._failed_starts[index] += 1
        failed = self._failed_starts[index]
        # once all were ready, those that still are serve on
        if (min(self._failed_starts) if self._announced else failed) >= MOST_FAILED_STARTS:
            self._fail(error)
        elif failed < MOST_FAILED_STARTS:
            self._due[index] = time.monotonic()
        else:
            wait_s = min(RETRY_S * 2.0 ** (failed - MOST_FAILED_STARTS), MOST_RETRY_S)
            self._due[index] = time.monotonic() + wait_s
            logger.error("worker %d failed to start %d times in a row; the next attempt is in %.0f s", index, failed, wait_s)

    def _start_due(self) -> None:
        """Starts the workers whose time has come; one that cannot even be forked is tried again."""
        for index in [index for index, at in self._due.items() if at <= time.monotonic()]:
            if self._due.pop(index, None) is None:  # the service stops because of the one before
                return
            try:
                self._start(index)
            except StartError as error:
                logger.error("worker %d cannot be started: %s", index, error)
                self._retry(index, error)

    def _kill_hung(self) -> None:
        """Kills workers whose event loop stands still, or whose start does; `_reap` puts others in their place."""
        now = time.monotonic()
        missed_s, self._checked = now - self._checked - CHECK_S, now
        if missed_s > PAUSED_S:  # the supervisor stood still itself, and so perhaps did all: it has not watched them meanwhile
            for worker in self._workers:
                self._watch_from(worker, worker.started + missed_s)
        for worker in self._workers:
            silent_s = now - (self._heartbeats[worker.index] / 1e9 if worker.ready else worker.started)
            if silent_s > self._patience_s(worker) and worker.process.is_alive():
                what = "has hung" if worker.ready else "has been starting"
                logger.error("worker %d, process %d, %s for %.1f s and is killed", worker.index, worker.process.pid, what, silent_s)
                worker.process.kill()
                worker.hung = True
                self._watch_from(worker, now)  # it needs a moment to end, and is logged once

    def _watch_from(self, worker: _Worker, started: float) -> None:
        """Takes a worker for one that was heard of now, and whose start began then."""
        worker.started = started
        if worker.ready:
            self._heartbeats[worker.index] = time.monotonic_ns()

    def _patience_s(self, worker: _Worker) -> float:
        if worker.ready:
            return HUNG_S
        return math.inf if self._longest_start_s is None else max(START_S, START_FACTOR * self._longest_start_s)

    def _fail(self, error: StartError) -> None:
        self._failure = error
        self._stop()

    def _stop(self) -> None:
        """Tells all workers to finish what they have."""
        self._stopping = True
        self._stop_began = time.monotonic()
        systemd.notify("STOPPING=1")
        if self._announced:
            logger.info("shutdown started: up to %.0f s for %s", self._shutdown_timeout_s, plural(len(self._workers), "worker"))
        self._due.clear()
        self._deadline = time.monotonic() + self._shutdown_timeout_s + MARGIN_S
        self._on_stop()
        for worker in list(self._workers):
            if worker.ready:
                self.send(worker.index, None)
            else:  # it has nothing to finish, and reads its pipe only when its models are loaded
                worker.process.terminate()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
