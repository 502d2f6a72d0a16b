"""`bert-serve serve`: it binds the socket and starts one serving process, or several workers.

A serving process loads the models, and answers requests until it is stopped. The parent of workers imports neither onnxruntime nor numpy,
whose threads do not survive a fork. Therefore the modules that need them are imported only in the process that loads models.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp

from bertserve.service import __version__
from bertserve.service.auth import Authenticator
from bertserve.service.errors import BertServeError, SettingsError, StartError
from bertserve.service.logs import background_logging, configure_logging
from bertserve.service.messages import plural
from bertserve.service.metrics import Metrics
from bertserve.service.process import check_requirements, load_certificate, raise_file_limit, read_keys, sd_notify
from bertserve.service.settings import Settings, to_address

if TYPE_CHECKING:
    from bertserve.service.api.application import Application
    from bertserve.service.app_state import AppState

logger = logging.getLogger("bertserve")

LAST_RESPONSES_S = 5  # time for clients to read responses, after the scheduler has stopped
OnReady = Callable[[tuple[list[str], int]], None]  # takes a line for each model, and the number of inference threads of all workers


def serve(settings: Settings, with_sources: Callable[[Settings], Settings]) -> NoReturn:
    """Serves until a signal stops it, and exits; `with_sources` adds the folders of the bundles that `--model` names to the settings.

    Raises:
        StartError: The service cannot start with these settings.
    """
    start = time.perf_counter()
    configure_logging(settings.log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until models are loaded
    raise_file_limit()
    check_requirements(settings)
    auth = read_keys(settings)
    if not auth.requires_key and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: anyone who reaches this address can use the service. "
            "Set --api-key-file, or listen on 127.0.0.1 behind a proxy.",
            settings.host,
        )
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))  # before the models are loaded, so that a port in use is reported at once
        except OSError as error:
            reason = f"cannot listen on {to_address(settings.host, settings.port)} ({error.strerror})"
            raise StartError(f"{reason}; choose another --host or --port.") from error
        settings = with_sources(settings)  # once, and before workers exist
        on_ready, run = partial(_announce, settings, listener, start), partial(serve_models, listener, auth)
        if settings.workers > 1:
            from bertserve.service.server.workers import Workers

            Workers(settings, listener, run, on_ready).run()
            code = 0
        else:
            code = run(settings, on_ready)
    sys.stdout.flush()
    os._exit(code)  # native code of a daemon thread that returns to a finished interpreter would abort the process


def _announce(settings: Settings, listener: socket.socket, start: float, started: tuple[list[str], int]) -> None:
    """Prints the served models and the address, and notifies systemd."""
    models, thread_count = started
    address = f"{'http' if settings.tls_cert is None else 'https'}://{to_address(*listener.getsockname()[:2])}"
    seconds = time.perf_counter() - start
    threads = plural(thread_count, "inference thread") + (f" in {settings.workers} workers" if settings.workers > 1 else "")
    listens = f"bertserve {__version__} listens on {address}, ready after {seconds:.2f} s with {threads}; docs at {address}/docs"
    lines: list[tuple[str, dict[str, Any]]] = [(f"  {model}", {}) for model in models]
    lines.append((listens, {"address": address, "ready_s": round(seconds, 2)}))
    for line, details in lines:
        fields = {"level": "INFO", "logger": "bertserve", "pid": os.getpid(), "message": line, **details}
        fields["time"] = datetime.now(UTC).isoformat()
        print(json.dumps(fields) if settings.log_format == "json" else line, flush=True)
    sd_notify(f"READY=1\nSTATUS=listens on {address}")


def serve_models(
    listener: socket.socket,
    auth: Authenticator,
    settings: Settings,
    on_ready: OnReady,
    *,
    index: int = 0,
    metrics: Metrics | None = None,
    beat: Callable[[], None] = lambda: sd_notify("WATCHDOG=1"),
) -> int:
    """Loads the models and serves them on a bound socket until it is stopped; `on_ready` is called when the server accepts connections.

    SIGHUP reads the keys, the certificate and the models again. One of several workers gets an index, metrics and its own `beat`, which is
    called once per second while the event loop runs; by default it resets systemd's watchdog. Returns the exit code: 1 if the inference
    threads have failed.
    """
    from bertserve.service.api.application import Application
    from bertserve.service.build import build

    if settings.workers > 1:
        configure_logging(settings.log_format, index)
    state = build(settings, auth, index=index, metrics=metrics, beat=beat)
    with background_logging():
        Server(Application(state), state, on_ready).run([listener])
        if state.tracer is not None:
            state.tracer.close()
        if state.scheduler.failure:
            logger.critical("the service ends: %s", state.scheduler.failure)
    return int(state.scheduler.failure is not None)


class Server(uvicorn.Server):
    """uvicorn with an orderly shutdown: a connection closes after each admitted request has its response, or an error of this service."""

    def __init__(self, app: "Application", state: "AppState", on_ready: OnReady) -> None:
        """Configures uvicorn; `serve_models` describes the arguments."""
        super().__init__(configure(app, state.settings, app.refuse))
        self._state = state
        self._on_ready = on_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. A second SIGINT ends the process at once, for an impatient user; SIGTERM can come twice by accident."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(0)  # does not wait for log lines
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        gc.collect()
        gc.freeze()  # the loaded objects stay, so later collections need not visit them
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._start_reload)
        self._state.auth.reload()  # a key can have been removed while the models were loaded
        self._on_ready((self._state.registry.describe(), self._state.total_threads))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # it was blocked while the models were loaded

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reports not ready, drains, then closes the listener and the connections.

        uvicorn itself would close the listener first, and cancel handlers. Here, probes see `/health/ready` fail, late requests get status
        503 with an error of this service, and a connection closes only after a response.
        """
        began, delay_s, timeout_s = time.monotonic(), self._state.settings.pre_stop_delay_s, self._state.settings.shutdown_timeout_s
        sd_notify("STOPPING=1")
        count = plural(len(self.server_state.tasks), "request")
        logger.info("shutdown started: not ready for %.0f s, then up to %.0f s for %s in progress", delay_s, timeout_s, count)
        self._state.withdraw()
        await asyncio.sleep(delay_s)
        self.server_state.default_headers.append((b"connection", b"close"))  # closes the connection after every later response
        if aborted := await self._state.stop(timeout_s):
            logger.warning("at the shutdown timeout, %s aborted", plural(aborted, "request"))
        assert sockets
        late_connections = self._accept_waiting(sockets[0])
        await super().shutdown(sockets)
        await asyncio.gather(*late_connections, return_exceptions=True)
        logger.info("shutdown finished after %.1f s", time.monotonic() - began)

    def _accept_waiting(self, listener: socket.socket) -> list[asyncio.Task[Any]]:
        """Serves the connections that wait for the listener: the system would reset them when it closes."""
        protocol = partial(self.config.http_protocol_class, self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]
        loop, tasks = asyncio.get_running_loop(), []
        with suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                tasks.append(loop.create_task(loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)))
        return tasks

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop; uvicorn calls it ten times per second."""
        return await super().on_tick(counter) or self._state.scheduler.failure is not None

    def _start_reload(self) -> None:
        self._state.auth.reload()
        if self.config.ssl is not None:
            try:
                # first into another context, because a failed load can leave only one of the files
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.config.ssl):
                    load_certificate(context, self._state.settings)
                logger.info("reloaded the certificate")
            except SettingsError as error:
                logger.error("cannot reload the certificate: %s", error)
        self._refresh = asyncio.create_task(self._state.reloader.refresh())  # the loop itself keeps no reference to a task


def configure(app: ASGIApp, settings: Settings, refuse: Callable[[BertServeError, bool], Response]) -> uvicorn.Config:
    """Returns uvicorn's configuration; LimitedProtocol describes `refuse`."""
    from bertserve.service.server.limits import LimitedProtocol

    return uvicorn.Config(
        app,
        loop="uvloop",
        http=type("Protocol", (LimitedProtocol,), {"settings": settings, "refuse": staticmethod(refuse)}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.forwarded_allow_ips),  # proxies that can set the client's address
        forwarded_allow_ips=list(map(str, settings.forwarded_allow_ips)),
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=LAST_RESPONSES_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
