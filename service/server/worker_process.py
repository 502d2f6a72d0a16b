"""The process of a worker: it serves until its parent process stops it or ends."""

import faulthandler
import logging
import os
import shutil
import signal
from collections.abc import Callable, MutableSequence
from multiprocessing import Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from bertserve.service.errors import StartError
from bertserve.service.metrics import Metrics


class WorkerProcess(ForkProcess):
    """A worker. `start` forks its process, which does `run`; the parent uses the other public methods and attributes."""

    def __init__(self, index: int, work: Callable[..., int], folder: Path, process_ids: MutableSequence[int]) -> None:
        """Creates a process that calls `work`. A replacement gets the same `index`. Its `Metrics` get `folder` and `process_ids`."""
        super().__init__(daemon=True)
        self.index, self._work, self._folder, self._process_ids = index, work, folder, process_ids
        self._parent_id = os.getpid()
        self._reader, self._writer = Pipe(duplex=False)  # sends heartbeats, which are None, and once `started` or `error`
        self.started: Any = None  # the argument of `on_ready`, once the worker is ready
        self.error: StartError | None = None  # the reason why it cannot start
        self.silent_s = float("-inf")  # seconds since the last heartbeat; the first one follows the load of the models

    def read_messages(self) -> bool:
        """Returns whether the worker has become ready since the last call."""
        was_ready = self.started is not None
        while self._reader.poll():
            message, self.silent_s = self._reader.recv(), 0.0
            if isinstance(message, StartError):
                self.error = message
            elif message is not None:
                self.started = message
        return self.started is not None and not was_ready

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.exitcode is None and self.pid is not None:
            os.kill(self.pid, number)

    def run(self) -> None:
        """Serves until the worker is stopped."""
        # SIGHUP waits until models are loaded; SIGINT stays blocked, because a terminal sends it to all processes, and the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        faulthandler.enable()  # prints the stacks of all threads at SIGABRT
        os.environ.pop("NOTIFY_SOCKET", None)
        self._process_ids[self.index] = os.getpid()
        metrics = Metrics(self._folder, self.index, self._process_ids)
        code = 0
        try:
            code = self._work(self._writer.send, index=self.index, metrics=metrics, beat=self._beat)
        except StartError as error:
            self._writer.send(error)
        except BaseException as error:  # noqa: BLE001 - the boundary of a process
            logging.getLogger("bertserve.workers").critical("worker %d ends because of %s. This is a bug", self.index, type(error).__name__)
            code = 1
        if os.getppid() != self._parent_id:
            shutil.rmtree(self._folder, ignore_errors=True)  # the parent was killed, and did not remove it
        os._exit(code)  # does not wait for threads

    def _beat(self) -> None:
        self._writer.send(None)
        if os.getppid() != self._parent_id:
            signal.raise_signal(signal.SIGTERM)
