"""What a process does that serves, alone or as one of several workers: it loads the models, and answers until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from starlette.types import ASGIApp

from bertserve.service.process.connections import ConnectionLimits, Connections
from bertserve.service.process.logs import background_logging
from bertserve.service.process.preparation import Secrets, max_connections
from bertserve.service.process.server import Server, Worker, configure
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.model import Model
from bertserve.service.serving.registry import Registry
from bertserve.service.serving.reloader import SharedReloader
from bertserve.service.serving.workers import SINGLE_WORKER, WorkerContext
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tracing.trace import tracer_to

Started = tuple[str, list[str]]  # the address, and a line for each model


def work(
    settings: Settings,
    listener: socket.socket,
    secrets: Secrets,
    on_ready: Callable[[Started], None],
    *,
    context: WorkerContext = SINGLE_WORKER,
    pipe: Connection | None = None,
) -> None:
    """Loads the models and serves them until told to stop.

    Args:
        settings: The settings.
        listener: The bound socket.
        secrets: Keys and certificate.
        on_ready: Called once connections are taken.
        context: Which worker this is.
        pipe: To the supervisor, where there is one.
    """
    tracer = tracer_to(settings.otlp_endpoint)  # here, and not before the workers are forked
    limits = _connection_limits(settings)  # before the models are loaded: it may be a wrong setting
    # FastAPI takes a sixth of a second to import, for which the models, whose runs need no interpreter, need not wait
    with ThreadPoolExecutor(1) as pool:
        pool.submit(import_module, "bertserve.service.http.app")
        state = build(settings, context, tracer)
    server = _server(settings, state, secrets, limits, on_ready, context, pipe)
    with background_logging():
        server.run([listener])
        if tracer is not None:
            tracer.close()


def _server(
    settings: Settings,
    state: AppState,
    secrets: Secrets,
    limits: ConnectionLimits,
    on_ready: Callable[[Started], None],
    context: WorkerContext,
    pipe: Connection | None,
) -> Server:
    models = [_line(state.registry, model) for model in state.registry.models.values()]
    config = configure(
        application(settings, state, secrets),
        keep_alive_s=settings.keep_alive_s,
        tls=secrets.tls,
        proxies=settings.forwarded_allow_ips,
    )
    refreshing: set[asyncio.Task[None]] = set()
    reloader = state.reloader

    def on_listen(address: str) -> None:
        on_ready((address, models))
        if isinstance(reloader, SharedReloader):
            reloader.report()

    def on_hangup() -> None:
        secrets.reload()
        if pipe is None:  # else the supervisor has asked all workers to refresh their models
            task = asyncio.ensure_future(reloader.refresh())
            refreshing.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(refreshing.discard)

    arguments: dict[str, Any] = {
        "scheduler": state.scheduler,
        "connections": Connections(limits, state.held_bytes, count=lambda reason: state.metrics.ends[reason].inc()),
        "shutdown_timeout_s": settings.shutdown_timeout_s,
        "pre_stop_delay_s": settings.pre_stop_delay_s,
        "on_listen": on_listen,
        "on_hangup": on_hangup,
    }
    if pipe is None or not isinstance(reloader, SharedReloader):
        return Server(config, **arguments)
    return Worker(
        config,
        **arguments,
        pipe=pipe,
        on_message=reloader.receive,
        counts=context.connections,
        heartbeats=context.heartbeats,
        index=context.index,
    )


def application(settings: Settings, state: AppState, secrets: Secrets, *, sends_request_id: bool = True) -> ASGIApp:
    """Returns the application of settings: what this process serves, and what a replica of another server serves.

    Args:
        settings: Who may call what, from where, and what is logged.
        state: What it answers from.
        secrets: The keys.
        sends_request_id: Whether answers get the header `x-request-id` here; a server around it may add it.
    """
    from bertserve.service.http.app import create_app
    from bertserve.service.http.auth import Authenticator

    auth = Authenticator(
        secrets.keys,
        admin_keys=secrets.admin_keys,
        public_health=settings.public_health,
        public_metrics=settings.public_metrics,
        max_concurrent_per_key=settings.max_concurrent_per_key,
    )
    return create_app(
        state,
        auth=auth,
        log_access=settings.access_log,
        root_path=settings.root_path,
        cors_origins=settings.cors_origin,
        sends_request_id=sends_request_id,
    )


def _line(registry: Registry, model: Model) -> str:
    """Returns what the start says of a model: also which endpoints use it where a request names none."""
    endpoints = ", ".join(f"/{TASKS[task].path}" for task in registry.default_of(model))
    return f"{model.name}: {model.task}, {model.graph.provider}/{model.graph.precision}" + (f", answers {endpoints}" if endpoints else "")


def _connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=max_connections(settings.max_connections),
        header_timeout_s=settings.header_timeout_s,
        max_header_bytes=settings.max_header_bytes,
        body_timeout_s=settings.body_timeout_s,
        min_body_rate=settings.min_body_rate,
    )
