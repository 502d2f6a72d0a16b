"""Several workers on one socket: their parent process starts, watches and replaces them. Each runs the server of a single process.

The parent imports neither onnxruntime nor numpy, whose threads do not survive a fork. It blocks signals, and takes them in its loop.
"""

import logging
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from bertserve.service.errors import StartError
from bertserve.service.metrics import Metrics
from bertserve.service.process import sd_notify
from bertserve.service.server.worker_process import WorkerProcess
from bertserve.service.settings import Settings

logger = logging.getLogger("bertserve.workers")

SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
POLL_S = 0.2  # the parent looks at the workers after each signal, and after this time without one
HUNG_S = 20  # a worker whose event loop has not run for this time is replaced
RETRY_S = 1.0  # pause after a worker that cannot start
MARGIN_S = 8  # after the shutdown timeout, a worker joins its inference threads and sends the last responses


class Workers:
    """Runs `work` in several workers; `on_ready` is called once, when all are ready."""

    def __init__(self, settings: Settings, listener: socket.socket, work: Callable[..., int], on_ready: Callable[[Any], None]) -> None:
        self._settings = settings
        self._listener = listener
        self._work = work
        self._on_ready = on_ready
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - disks of containers can be slow or read-only
        self._folder = tempfile.TemporaryDirectory(prefix="bert-serve-", dir=parent, ignore_cleanup_errors=True)
        self._metrics = Metrics(Path(self._folder.name), "parent")
        self._workers: dict[int, WorkerProcess] = {}  # the workers by index
        self._process_ids = RawArray("q", settings.workers)  # 0 for a missing worker
        self._were_ready = False
        self._start_at, self._kill_at = 0.0, math.inf  # when missing workers are started, and when workers that do not stop are killed

    def run(self) -> None:
        """Keeps the workers running until a signal has stopped them.

        Raises:
            StartError: A worker cannot start, and no other one serves.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if SIGCHLD is ignored, the system keeps no exit codes
        with self._folder:
            while self._workers or self._kill_at == math.inf:
                if time.monotonic() >= self._start_at and self._kill_at == math.inf:
                    for index in set(range(self._settings.workers)) - self._workers.keys():
                        work = partial(self._work, self._settings)
                        worker = self._workers[index] = WorkerProcess(index, work, Path(self._folder.name), self._process_ids)
                        worker.start()
                sd_notify("WATCHDOG=1")
                received = signal.sigtimedwait(SIGNALS, POLL_S)
                for worker in list(self._workers.values()):
                    self._check(worker, is_poll=received is None)
                self._handle(received.si_signo if received else 0)

    def _check(self, worker: WorkerProcess, *, is_poll: bool) -> None:
        code = worker.exitcode  # first, because a process that has ended sends no more messages
        if worker.read_messages():
            if self._were_ready:
                logger.info("worker %d restarted as process %d", worker.index, worker.pid)
            elif sum(other.started is not None for other in self._workers.values()) == self._settings.workers:
                self._were_ready = True
                self._settings = self._settings.model_copy(update={"skip_broken": True})  # for replacements, as in a reload
                self._on_ready(worker.started)
        if code is not None:
            self._on_end(worker, code)
        elif is_poll and worker.silent_s > HUNG_S:
            worker.kill()  # SIGABRT has not ended it, for example because it is stopped
        elif is_poll:
            worker.silent_s += POLL_S  # counted here, so that a pause of all processes does not count as a hang
            if worker.silent_s > HUNG_S:
                logger.error("worker %d (process %d) hangs: its event loop has not run for %d s", worker.index, worker.pid, HUNG_S)
                worker.send_signal(signal.SIGABRT)

    def _on_end(self, worker: WorkerProcess, code: int) -> None:
        del self._workers[worker.index]
        self._process_ids[worker.index] = 0
        mark_process_dead(worker.index, self._folder.name)  # type: ignore[no-untyped-call]
        if code not in (0, -signal.SIGTERM):
            end = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code} ({signal.strsignal(-code)})"
            logger.error("worker %d (process %d) %s", worker.index, worker.pid, end)
        if self._kill_at < math.inf:
            return
        self._metrics.workers_replaced.labels("hung" if worker.silent_s > HUNG_S else "ended").inc()
        if worker.started is None:
            error = worker.error or StartError(f"worker {worker.index} ended before it was ready; the log may say why.")
            if all(other.started is None for other in self._workers.values()):
                self._signal_all(signal.SIGKILL)
                raise error
            logger.error("worker %d cannot start: %s", worker.index, error)
            self._start_at = time.monotonic() + RETRY_S

    def _handle(self, number: int) -> None:
        is_stopping = self._kill_at < math.inf
        if number == signal.SIGHUP:
            self._signal_all(signal.SIGHUP)
        elif number in (signal.SIGINT, signal.SIGTERM) and not is_stopping:
            sd_notify("STOPPING=1")
            self._listener.close()  # otherwise a client could connect after the last worker has stopped, and wait
            self._kill_at = time.monotonic() + self._settings.pre_stop_delay_s + self._settings.shutdown_timeout_s + MARGIN_S
            self._signal_all(signal.SIGTERM)
        if time.monotonic() > self._kill_at or (number == signal.SIGINT and is_stopping):
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers.values():
            worker.send_signal(number)
