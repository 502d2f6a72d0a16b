"""The command `bert-serve serve`: it binds the socket, starts one process or several workers, and reports when the service is ready.

A supervising process does not import onnxruntime, whose threads do not survive a fork. Therefore `work`, which needs it, is imported
only in the process that loads models.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.service import __version__
from bertserve.service.errors import StartError, plural
from bertserve.service.models.workers import REASONS, Change, ReloadLog, WorkerContext
from bertserve.service.server import logs, systemd
from bertserve.service.server.preparation import SECRET_LOGS, Secrets, prepare
from bertserve.service.server.server import ABSENT, bind, shared_counts
from bertserve.service.server.supervisor import Supervisor
from bertserve.service.settings import Settings

if TYPE_CHECKING:
    from bertserve.service.server.work import Started


logger = logging.getLogger("bertserve")


def serve(settings: Settings, with_sources: Callable[[Settings], Settings]) -> None:
    """Serves until a signal stops it; `with_sources` adds the folders of the bundles that `--model` names to the settings.

    Raises:
        StartError: The service cannot start with these settings.
    """
    start = time.perf_counter()
    logs.configure_logging(settings.log_format)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # while models load; later the server or the supervisor handles it
    secrets = prepare(settings)
    if secrets.keys is None and not _is_loopback(settings.host):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: anyone who reaches this address can use the service. "
            "Set --api-key-file, or listen on 127.0.0.1 behind a proxy.",
            settings.host,
        )
    # bound before the models are loaded, so that a port in use is reported at once
    with bind(settings.host, settings.port) as listener, pid_file(settings.pid_file):
        settings = with_sources(settings)  # once, and before workers exist

        def on_ready(started: Started) -> None:
            _announce(settings, started, time.perf_counter() - start)

        if settings.workers > 1:
            _supervise(settings, listener, secrets, on_ready)
        else:
            from bertserve.service.server.work import work

            work(settings, listener, secrets, on_ready)
    _exit_if_threads_run()


def _exit_if_threads_run() -> None:
    """Ends the process at once if it would not wait for a thread, which may still load a model.

    Native code that returns to a finished interpreter aborts the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(0)


@contextmanager
def pid_file(path: Path | None) -> Iterator[None]:
    """Keeps the ID of this process in a file until the block ends.

    Raises:
        StartError: The file cannot be written.
    """
    if path is None:
        yield
        return
    try:
        path.write_text(f"{os.getpid()}\n", encoding="ascii")
    except OSError as error:
        raise StartError(f"cannot write --pid-file `{path}` ({error.strerror}); give another path.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _announce(settings: Settings, started: Started, seconds: float) -> None:
    """Prints the served models and the address, and notifies systemd."""
    address, models, threads = started
    chosen = plural(threads, "inference thread") + (f" in {settings.workers} workers" if settings.workers > 1 else "")
    ready = f"bertserve {__version__} listens on {address}, ready after {seconds:.2f} s with {chosen}; docs at {address}/docs"
    for model in models:
        print(logs.as_printed(f"  {model}", settings.log_format))
    print(logs.as_printed(ready, settings.log_format, address=address, ready_s=round(seconds, 2), threads=threads), flush=True)
    systemd.notify(f"READY=1\nSTATUS=listens on {address}")


def _supervise(settings: Settings, listener: socket.socket, secrets: Secrets, on_ready: Callable[[Started], None]) -> None:
    """Starts several workers that serve from one socket."""

    def on_all_ready(started: Started) -> None:
        secrets.reload()  # for workers that start later
        for index in range(settings.workers):
            supervisor.send(index, signal.SIGHUP)  # so all read them at the same time, also one that was replaced during the start
        on_ready(started)

    with shared_folder() as folder:
        workers = _Workers(settings, listener, secrets, folder)
        supervisor = Supervisor(
            workers.work,
            workers=settings.workers,
            shutdown_timeout_s=settings.pre_stop_delay_s + settings.shutdown_timeout_s,
            heartbeats=workers.shared.heartbeats,
            on_ready=on_all_ready,
            on_end=workers.on_end,
            on_stop=listener.close,
            on_hangup=workers.on_hangup,
        )
        workers.log = ReloadLog(settings.workers, supervisor.send)
        supervisor.on_message = workers.log.take
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)  # prometheus_client reads it at its first import, which is in the workers
        supervisor.run()


class _Workers:
    """The shared state of the workers, and the supervisor's callbacks for them."""

    log: ReloadLog

    def __init__(self, settings: Settings, listener: socket.socket, secrets: Secrets, folder: Path) -> None:
        self._settings, self._listener, self._secrets, self._folder = settings, listener, secrets, folder
        self._supervisor_id = os.getpid()
        self.shared = WorkerContext(
            workers=settings.workers,
            folder=folder,
            connections=shared_counts(settings.workers),
            heartbeats=shared_counts(settings.workers),
            process_ids=shared_counts(settings.workers, 0),
            replaced=shared_counts(len(REASONS), 0),
        )

    def work(self, index: int, pipe: Connection) -> None:
        """Serves requests; it is the function of a worker."""
        logs.configure_logging(self._settings.log_format, worker=index)
        for name in SECRET_LOGS:  # the supervisor reads the same files at the same time, and logs the result once
            logging.getLogger(name).disabled = True
        os.environ.pop(systemd.SOCKET, None)  # only the supervisor reports to systemd
        reserve(self._folder, index)
        from bertserve.service.server.work import work

        def on_ready(started: Started) -> None:
            with suppress(OSError):  # the supervisor was killed; the end of the pipe will stop this worker
                pipe.send(started)

        self.shared.process_ids[index] = os.getpid()
        context = replace(self.shared, index=index, tell=pipe.send, before=self.log.reports.get(index))
        work(self._settings, self._listener, self._secrets, on_ready, context=context, pipe=pipe)
        if os.getppid() != self._supervisor_id:  # it was killed and cannot remove the folder
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_end(self, index: int, reason: str | None) -> None:
        """Records the end of a worker and the reason of its replacement."""
        self.log.on_end(index, stopping=reason is None)
        forget(self._folder, index)
        self.shared.connections[index], self.shared.process_ids[index] = ABSENT, 0
        if reason is not None:
            self.shared.replaced[REASONS.index(reason)] += 1

    def on_hangup(self) -> None:
        """Reads the secrets again, for workers that start later, and makes all workers refresh their models."""
        self._secrets.reload()
        self.log.take(Change("refresh"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


metrics_logger = logging.getLogger("bertserve.metrics")

# bytes per kind of metric, enough for about 45 pairs of model and task; prometheus_client doubles a file that is full
SIZES = {"histogram": 2**20, "counter": 2**18, "gauge_livesum": 2**16, "gauge_livemax": 2**16}

PREFIX = "bertserve-"
MEMORY = "/dev/shm"  # noqa: S108 - tempfile creates a folder in it that only this user can read


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Creates a folder and holds its lock until it removes the folder at the end. Processes that are forked meanwhile hold the lock too.

    Raises:
        StartError: The folder cannot be created.
    """
    # the file system of a container may be read-only
    parent = MEMORY if os.access(MEMORY, os.W_OK) else tempfile.gettempdir()
    remove_abandoned(Path(parent))
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
    except OSError as error:
        raise StartError(
            f"--workers needs a folder for metrics, and it cannot be created ({error.strerror}); set TMPDIR to a writable folder."
        ) from error
    with folder as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks: other processes cannot lock the file either
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user's services whose supervisor and workers were killed: they would occupy memory forever."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, was removed meanwhile, or is in use
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # an empty folder may be so new that it is not locked yet
                if os.fstat(descriptor).st_uid == os.getuid() and os.listdir(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def reserve(folder: Path, index: int) -> None:
    """Creates the files of a worker before prometheus_client is imported, or reuses those of the worker that it replaces.

    If the files do not fit, the metrics of this worker stay in its memory and are missing from `/metrics`. The folder of all workers'
    files is also in PROMETHEUS_MULTIPROC_DIR.
    """
    created: list[Path] = []
    try:
        for kind, size in SIZES.items():
            path = _path(folder, kind, index)
            target = path
            if not path.exists():
                target = path.with_suffix(".new")  # other workers read every file of the folder, and this one is empty at first
                created += [target, path]
            with target.open("ab") as file:
                # prometheus_client may have made the file longer without reserving the blocks
                os.posix_fallocate(file.fileno(), 0, max(size, os.fstat(file.fileno()).st_size))
            target.rename(path)
    except OSError as error:
        for path in created:
            path.unlink(missing_ok=True)
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        metrics_logger.error(
            "cannot write this worker's metrics (%s): they are missing from /metrics; it needs %d bytes.",
            error.strerror,
            sum(SIZES.values()),
        )


def forget(folder: Path, index: int) -> None:
    """Removes the gauges of a worker that has ended, but keeps its counters. It does not import prometheus_client: workers are forks."""
    for kind in SIZES:
        if kind.startswith("gauge_live"):
            _path(folder, kind, index).unlink(missing_ok=True)


def _path(folder: Path, kind: str, index: int) -> Path:
    """Returns the path that prometheus_client uses for a process identifier."""
    return folder / f"{kind}_{index}.db"
