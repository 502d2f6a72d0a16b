"""Several workers on one socket: gunicorn's arbiter starts, watches and replaces them. Each runs the server of a single process.

The arbiter does not import onnxruntime, whose threads do not survive a fork. On SIGHUP the workers read keys and models again. gunicorn
would stop them before their successors are ready, and a broken bundle would then stop the service.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from gunicorn.arbiter import Arbiter
from gunicorn.config import Config
from gunicorn.systemd import sd_notify
from gunicorn.workers.base import Worker
from prometheus_client.multiprocess import mark_process_dead

from bertserve.service.errors import StartError
from bertserve.service.metrics import Metrics
from bertserve.service.settings import Settings

logger = logging.getLogger("bertserve.workers")

POLL_S = 0.5  # between two readings of the reports of workers
HUNG_S = 20  # a worker whose event loop has not run for this time is replaced
RETRY_S = 1.0  # pause after a worker that cannot start
MARGIN_S = 8  # after the shutdown timeout, a worker joins its inference threads and sends the last responses


def run_workers(settings: Settings, listener: socket.socket, work: Callable[..., int], on_ready: Callable[[Any], None]) -> None:
    """Runs `work` in several workers until a signal stops them; `on_ready` is called once, when all are ready.

    Raises:
        StartError: A worker cannot start, and no other one serves.
    """
    # the disk of a container may be slow or read-only
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - the folder is private
    with tempfile.TemporaryDirectory(prefix="bert-serve-", dir=parent) as folder:
        arbiter = _Arbiter(settings, listener, work, on_ready, Path(folder))
        try:
            arbiter.run()
        except SystemExit as end:
            if os.getpid() != arbiter.pid:  # the end of a worker
                os._exit(end.code)  # type: ignore[arg-type]
            if arbiter.failure is not None:
                raise arbiter.failure from None
            if end.code:
                raise


class _Arbiter(Arbiter):  # type: ignore[misc]  # gunicorn has no types
    SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

    def __init__(
        self, settings: Settings, listener: socket.socket, work: Callable[..., int], on_ready: Callable[[Any], None], folder: Path
    ) -> None:
        self.work, self.folder = work, folder
        self.process_ids = RawArray("q", settings.workers)
        self.metrics = Metrics(folder, "arbiter")
        self.failure: StartError | None = None
        self.all_were_ready = False
        self._on_ready = on_ready
        self.cfg = Config()
        self.cfg.set("workers", settings.workers)
        self.cfg.set("worker_class", _Worker)
        self.cfg.set("worker_tmp_dir", str(folder))
        self.cfg.set("timeout", HUNG_S)
        self.cfg.set("graceful_timeout", int(settings.pre_stop_delay_s + settings.shutdown_timeout_s) + MARGIN_S)
        self.cfg.set("child_exit", _Arbiter.on_exit)
        self.cfg.set("control_socket_disable", True)
        self.cfg.set("loglevel", "warning")
        super().__init__(self)  # it is also gunicorn's application, so that the workers can use it
        self.LISTENERS = [listener]
        self.log.error_log.handlers.clear()
        self.log.error_log.propagate = True

    def start(self) -> None:
        """Replaces gunicorn's method, which tells systemd READY=1 before the workers are ready."""
        self.pid = os.getpid()
        self.init_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def wait_for_signals(self, timeout: float = POLL_S) -> list[int]:
        """Also reads the reports of the workers, because gunicorn calls it in each turn of its loop."""
        signals: list[int] = super().wait_for_signals(POLL_S)
        sd_notify("WATCHDOG=1", logger)
        for worker in self.WORKERS.values():
            if worker.report is None and worker.report_reader.poll():
                worker.report = worker.report_reader.recv()
                worker.is_ready = isinstance(worker.report, tuple)
                if self.all_were_ready and worker.is_ready:
                    logger.info("worker %d restarted as process %d", worker.index, worker.pid)
                elif sum(other.is_ready for other in self.WORKERS.values()) == self.num_workers:
                    self.all_were_ready = True
                    self._on_ready(worker.report)
        return signals

    def on_exit(self, worker: _Worker) -> None:
        mark_process_dead(worker.index, str(self.folder))  # type: ignore[no-untyped-call]
        self.process_ids[worker.index] = 0
        if not self.LISTENERS:  # the service stops
            return
        self.metrics.workers_replaced.labels("hung" if worker.aborted else "ended").inc()
        if not worker.is_ready:
            error = worker.report or StartError(f"worker {worker.index} ended before it was ready; the log may say why.")
            if not any(other.is_ready for other in self.WORKERS.values()):
                self.failure = error
                raise StopIteration  # gunicorn stops
            logger.error("a worker cannot start: %s", error)
            time.sleep(RETRY_S)

    def handle_hup(self) -> None:
        """Passes SIGHUP on. gunicorn's own reload stops the old workers before the new ones are ready."""
        self.kill_workers(signal.SIGHUP)

    def handle_term(self) -> None:
        sd_notify("STOPPING=1", logger)
        super().handle_term()

    handle_int = handle_term  # a SIGINT after it stops the workers at once


class _Worker(Worker):  # type: ignore[misc]
    app: _Arbiter
    report: Any = None  # what `on_ready` takes, or a StartError
    is_ready = False

    def __init__(self, *arguments: Any) -> None:
        """Runs in the arbiter, before the fork."""
        super().__init__(*arguments)
        self.index = min({*range(self.app.num_workers)} - {worker.index for worker in self.app.WORKERS.values()})
        self.report_reader, self._report_writer = Pipe(duplex=False)

    def init_process(self) -> None:
        """Serves until the worker is stopped. gunicorn's method would load a WSGI application."""
        self.booted = True  # gunicorn stops the service if a worker fails that has not booted
        # SIGHUP until models are loaded; SIGINT, because a terminal sends it to all processes, and the arbiter decides
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, lambda *_: os._exit(0))  # gunicorn sends it to stop at once
        faulthandler.enable()  # for SIGABRT, which gunicorn sends to a worker that hangs
        os.environ.pop("NOTIFY_SOCKET", None)
        arbiter = self.app
        arbiter.process_ids[self.index] = os.getpid()
        metrics = Metrics(arbiter.folder, self.index, arbiter.process_ids)
        try:
            code = arbiter.work(self._report_writer.send, index=self.index, metrics=metrics, beat=self._beat)
        except StartError as error:
            self._report_writer.send(error)
        else:
            sys.exit(code)

    def _beat(self) -> None:
        """Tells the arbiter that the event loop runs; without an arbiter, the worker stops."""
        self.notify()
        if os.getppid() != self.ppid:
            signal.raise_signal(signal.SIGTERM)
