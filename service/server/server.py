"""The serving process, a single one or one of several workers: it loads the models, and answers requests until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from bertserve.service.api.auth import Authenticator
from bertserve.service.errors import plural
from bertserve.service.metrics import Metrics
from bertserve.service.models.build import AppState, build
from bertserve.service.models.model import Model
from bertserve.service.server import systemd
from bertserve.service.server.limits import LimitedProtocol
from bertserve.service.server.logs import background_logging
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tracing.trace import tracer_to

logger = logging.getLogger("bertserve.server")

FLUSH_S = 5  # for clients to read their answers, after the scheduler has stopped
OnReady = Callable[[tuple[list[str], int]], None]  # takes a line for each model, and the inference threads of all workers


def work(
    settings: Settings,
    listener: socket.socket,
    auth: Authenticator,
    on_ready: OnReady,
    *,
    index: int = 0,
    metrics: Metrics | None = None,
    beat: Callable[[], None] = systemd.beat,
) -> int:
    """Loads the models and serves them on a bound socket until it is stopped; `on_ready` is called when the server accepts connections.

    SIGHUP reads the keys and the models again. One of several workers has an index, metrics and its own `beat`, which is called twice per
    second while the event loop runs. Returns the exit code: 1 if the inference threads have failed.
    """
    tracer = tracer_to(settings.otlp_endpoint)
    # importing FastAPI takes about 0.17 s; models can load at the same time, because their runs need no interpreter
    with ThreadPoolExecutor(1) as pool:
        pool.submit(import_module, "bertserve.service.api.endpoint")
        state = build(settings, index=index, metrics=metrics, tracer=tracer)
    with background_logging():
        Server(settings, state, auth, on_ready, beat).run([listener])
        if tracer is not None:
            tracer.close()
        if state.scheduler.is_broken:
            logger.critical("the service ends, because its inference threads hang, or one has died")
    return int(state.scheduler.is_broken)


class Server(uvicorn.Server):
    """uvicorn with an orderly shutdown: each admitted request gets its answer or an error of this service before its connection closes."""

    def __init__(self, settings: Settings, state: AppState, auth: Authenticator, on_ready: OnReady, beat: Callable[[], None]) -> None:
        """Configures uvicorn; `work` describes the arguments."""
        super().__init__(configure(application(settings, state, auth), settings))
        self._settings, self._state, self._auth, self._on_ready, self._beat = settings, state, auth, on_ready, beat

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops the server. A second SIGINT ends the process at once, for an impatient user; SIGTERM may come twice by accident."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(0)  # without waiting for log lines
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        gc.collect()
        gc.freeze()  # the loaded objects stay, so later collections need not visit them
        await super().startup(sockets)
        self._ticking = asyncio.create_task(self._tick())
        self._auth.reload()  # a key may have been removed while the models were loaded
        self._on_ready(([self._line(model) for model in self._state.registry.models.values()], self._state.total_threads))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(self._reload()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # it was blocked while the models were loaded

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reports not ready, drains, then closes the listener and the connections.

        uvicorn alone would close the listener first, and cancel handlers. Here, probes see `/health/ready` fail, late requests get status 503
        with an error of this service, and a connection closes only after an answer.
        """
        began, delay_s, timeout_s = time.monotonic(), self._settings.pre_stop_delay_s, self._settings.shutdown_timeout_s
        systemd.notify("STOPPING=1")
        count = plural(len(self.server_state.tasks), "request")
        logger.info("shutdown started: not ready for %.0f s, then up to %.0f s for %s in progress", delay_s, timeout_s, count)
        self._state.scheduler.withdraw()
        await asyncio.sleep(delay_s)
        self.server_state.default_headers.append((b"connection", b"close"))  # in all answers from now on
        if aborted := await self._state.scheduler.stop(timeout_s):
            logger.warning("at the shutdown timeout, %s aborted", plural(aborted, "request"))
        assert sockets
        late = self._accept_waiting(sockets[0])
        await super().shutdown(sockets)
        await asyncio.gather(*late, return_exceptions=True)
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

    async def _tick(self) -> None:
        """Reports that the event loop runs, also while the server drains."""
        while True:
            self._beat()
            self.should_exit |= self._state.scheduler.is_broken
            await asyncio.sleep(systemd.TICK_S)

    async def _reload(self) -> None:
        systemd.notify_reloading()
        self._auth.reload()
        await self._state.reloader.refresh()
        systemd.notify("READY=1")

    def _line(self, model: Model) -> str:
        """Returns the line about a model that is printed at startup; it includes the endpoints whose default it is."""
        endpoints = ", ".join(f"/{TASKS[task].path}" for task in self._state.registry.default_of(model))
        answers = f", answers {endpoints}" if endpoints else ""
        return f"{model.name}: {model.task}, {model.graph.name}{answers}"


def configure(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Returns uvicorn's configuration."""
    limits = {"max_header_bytes": settings.max_header_bytes, "header_timeout_s": settings.header_timeout_s}
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=type("Protocol", (LimitedProtocol,), limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.forwarded_allow_ips),  # which may set the client's address
        forwarded_allow_ips=list(settings.forwarded_allow_ips),
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def application(settings: Settings, state: AppState, auth: Authenticator, *, sends_request_id: bool = True) -> ASGIApp:
    """Returns the application for settings, to be served by this process or as a replica in another server.

    If `sends_request_id` is false, a server around the application adds the header `x-request-id` instead.
    """
    from bertserve.service.api.endpoint import Endpoint

    return Endpoint(
        state,
        auth=auth,
        log_access=settings.access_log,
        log_probes=settings.log_probes,
        root_path=settings.root_path,
        cors_origins=settings.cors_origin,
        sends_request_id=sends_request_id,
    )
