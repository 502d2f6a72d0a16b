"""Supervisor: runs several equal worker processes. It uses processes, pipes and signals, but no HTTP, models or metrics.

Workers are forked from a process that has one thread and has not loaded onnxruntime, because threads do not survive a fork. So each worker
creates its own sessions.

    worker ───── pipe ──────► supervisor   first: ready, or the error of the start; then messages of any kind;
                                           SIGHUP means: this worker got the signal, which is for all workers
    supervisor ─ pipe ──────► worker       messages of any kind; None means: finish and end; SIGHUP means: read the secrets again;
                                           models are refreshed by a message
    worker ───── heartbeat ─► supervisor   in shared memory: time of the last turn of the event loop

A worker's pipe closes when the supervisor is killed, so no worker is left behind. gunicorn's and uvicorn's supervisors are not suitable:
they share neither the listener's counts nor the folder of metrics, do not report when all workers are ready, and abort
admitted requests of a stopping worker.
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
from collections import deque
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from bertserve.service.errors import StartError, plural
from bertserve.service.server import systemd

logger = logging.getLogger("bertserve.supervisor")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Failed starts of one worker in a row: before all workers were ready, the service then ends; later it waits before each new attempt.
MOST_FAILED_STARTS = 3
RETRY_S, MOST_RETRY_S = 1.0, 60.0
# After the shutdown timeout, a worker joins its inference threads (1 s) and sends finished answers (5 s); if it still runs then, it hangs.
MARGIN_S = 8

# A worker whose event loop has not turned for this time answers no request; a request blocks it for 0.25 s at most. A hung worker with four
# small models is replaced within five seconds, including the start of the new one.
HUNG_S = 2.0
CHECK_S = 0.2
PAUSED_S = 0.5

# The first start may take minutes, if TensorRT engines are built; after it, others should not take much longer.
START_S = 60.0
START_FACTOR = 10.0

# The function of a worker; its arguments are the worker's index and its pipe to the supervisor.
Work = Callable[[int, Connection], None]


@dataclass(slots=True)
class _Worker:
    """A worker process.

    Attributes:
        index: Its position; its successor gets the same one.
        process: The process.
        pipe: The supervisor's end of the pipe.
        started: `time.monotonic()` at its start.
        ready: Whether it has reported that it is ready.
        hung_up: Whether SIGHUP came before it was ready.
        hung: Whether it was killed because it hung.
        error: The error of its start, if it reported one.
        unsent: Messages for it that wait until it has read earlier ones.
    """

    index: int
    process: ForkProcess
    pipe: Connection
    started: float
    ready: bool = False
    hung_up: bool = False
    hung: bool = False
    error: StartError | None = None
    unsent: deque[Any] = field(default_factory=deque)


class Supervisor:
    """Keeps a number of workers running until it is stopped; `on_message` is called with each message of a worker after its first."""

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
        """Creates a supervisor; `run` starts it.

        Args:
            work: Called in each worker; returns when the pipe has closed or delivered None, and all open requests are finished.
            workers: Number of workers.
            shutdown_timeout_s: Seconds for a worker to finish its open requests.
            heartbeats: By index, the `time.monotonic_ns()` of the last turn of a worker's event loop, in shared memory.
            on_ready: Called once, with the first message of a worker, when all workers are ready.
            on_end: Called with the index of each worker that has ended, and the reason to replace it: `ended` by itself, or `hung` and was
                killed; None during shutdown.
            on_stop: Called once, when the workers are told to stop: this process can then close what they inherited.
            on_hangup: Called on each SIGHUP, to this process or to a worker. All workers get the signal, as soon as they are ready.
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
        self._failed_starts = [0] * workers  # by index, since the worker was last ready
        self._due: dict[int, float] = {}  # index -> `time.monotonic()` at which its next worker starts
        self._failure: StartError | None = None
        self._stopping = False
        self._stop_began = 0.0  # `time.monotonic()`
        self._deadline: float | None = None
        self._checked = time.monotonic()
        self._watchdog = systemd.SystemdWatchdog()

    def run(self) -> None:
        """Runs the workers; returns once SIGINT or SIGTERM has stopped them all. A second SIGINT kills them.

        Raises:
            StartError: During the first start, a worker failed to start, or ended MOST_FAILED_STARTS times before it was ready; or later,
                all workers did.
        """
        self._signals, wakeup_socket = socket.socketpair()
        wakeup_socket.setblocking(False)
        signal.set_wakeup_fd(wakeup_socket.fileno(), warn_on_full_buffer=False)  # before the handlers, which would drop an earlier signal
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the number is read from the descriptor
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
            wakeup_socket.close()
        if self._announced:
            logger.info("shutdown finished after %.1f s", time.monotonic() - self._stop_began)
        if self._failure is not None:
            raise self._failure

    def _start(self, index: int) -> None:
        pipe, worker_end = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=self._enter, args=(index, worker_end, pipe), name=f"worker-{index}")
        # otherwise a signal between the fork and the worker's own handlers would reach the supervisor twice, and the worker never
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        except OSError as error:
            raise StartError(f"cannot start a worker process ({error.strerror}); lower --workers.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        worker_end.close()  # so that the next worker does not inherit it, and the pipe closes with this worker
        self._workers.append(_Worker(index, process, pipe, time.monotonic()))

    def _enter(self, index: int, pipe: Connection, supervisor_end: Connection) -> None:
        """Runs in the worker."""
        for inherited in (supervisor_end, *(worker.pipe for worker in self._workers)):
            inherited.close()  # otherwise these pipes would not close with the supervisor
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; while models load, the supervisor decides
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            self._work(index, pipe)
        except StartError as error:
            with suppress(OSError):  # the supervisor was killed
                pipe.send(error)
            sys.exit(1)

    def send(self, index: int, message: Any) -> None:
        """Sends a message to a worker that is ready. Messages wait for a worker that reads slowly, in their order.

        One that reads nothing has no heartbeat either, because both are done by its event loop. So it is killed before many wait.
        """
        worker = next((worker for worker in self._workers if worker.index == index), None)
        if worker is None or not worker.ready:
            return
        if message is not signal.SIGHUP or signal.SIGHUP not in worker.unsent:  # the waiting one will read the newest secrets too
            worker.unsent.append(message)
        self._flush(worker)

    def _flush(self, worker: _Worker) -> None:
        """Sends the messages of a worker that its pipe has room for: the supervisor must not wait for a worker."""
        with suppress(OSError):  # it has just ended
            while worker.unsent and not worker.pipe.closed and select.select([], [worker.pipe], [], 0)[1]:
                worker.pipe.send(worker.unsent.popleft())

    def _react(self) -> None:
        """Waits for the next event and handles it."""
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
        for worker in self._workers:
            self._flush(worker)
        self._start_due()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._hang_up()
        elif not self._stopping:
            self._stop()
        elif number == signal.SIGINT:  # like uvicorn, for an impatient user; SIGTERM may come twice by accident
            self._kill()

    def _hang_up(self) -> None:
        if self._stopping:
            return
        self._on_hangup()
        for worker in self._workers:
            worker.hung_up = not worker.ready
            self.send(worker.index, signal.SIGHUP)

    def _read(self, worker: _Worker) -> None:
        """Reads the messages of a worker."""
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
        """Replaces a worker that has ended, unless the service stops or its start has failed too often."""
        self._read(worker)  # the last message may have the reason of its end
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
        """Schedules a new start after a failed one, or stops the service if no worker is left that could serve."""
        self._failed_starts[index] += 1
        failed = self._failed_starts[index]
        # once all workers were ready, the remaining ones continue to serve
        if (min(self._failed_starts) if self._announced else failed) >= MOST_FAILED_STARTS:
            self._fail(error)
        elif failed < MOST_FAILED_STARTS:
            self._due[index] = time.monotonic()
        else:
            wait_s = min(RETRY_S * 2.0 ** (failed - MOST_FAILED_STARTS), MOST_RETRY_S)
            self._due[index] = time.monotonic() + wait_s
            logger.error("worker %d failed to start %d times in a row; the next attempt is in %.0f s", index, failed, wait_s)

    def _start_due(self) -> None:
        """Starts the workers that are due; a failed fork is tried again."""
        for index in [index for index, at in self._due.items() if at <= time.monotonic()]:
            if self._due.pop(index, None) is None:  # an earlier failure has stopped the service
                return
            try:
                self._start(index)
            except StartError as error:
                logger.error("worker %d cannot be started: %s", index, error)
                self._retry(index, error)

    def _kill_hung(self) -> None:
        """Kills workers whose event loop or start hangs; `_reap` replaces them."""
        now = time.monotonic()
        missed_s, self._checked = now - self._checked - CHECK_S, now
        if missed_s > PAUSED_S:  # the supervisor was suspended itself, and perhaps all processes were: this time does not count
            for worker in self._workers:
                self._watch_from(worker, worker.started + missed_s)
        for worker in self._workers:
            silent_s = now - (self._heartbeats[worker.index] / 1e9 if worker.ready else worker.started)
            if silent_s > self._patience_s(worker) and worker.process.is_alive():
                state = "has hung" if worker.ready else "has been starting"
                logger.error("worker %d, process %d, %s for %.1f s and is killed", worker.index, worker.process.pid, state, silent_s)
                worker.process.kill()
                worker.hung = True
                self._watch_from(worker, now)  # it needs a moment to end, and must be logged only once

    def _watch_from(self, worker: _Worker, started: float) -> None:
        """Restarts the time measurement of a worker: its heartbeat is now, and its start began at `started`."""
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
        """Tells all workers to finish their open requests and to end."""
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
            else:  # it has no requests, and reads its pipe only after its models are loaded
                worker.process.terminate()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
