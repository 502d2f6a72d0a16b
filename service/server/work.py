"""The serving process, a single one or one of several workers: it loads the models, and answers requests until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from starlette.types import ASGIApp

from bertserve.service.metrics import Metrics
from bertserve.service.models.build import AppState, build
from bertserve.service.models.model import Model
from bertserve.service.models.registry import Registry
from bertserve.service.server import systemd
from bertserve.service.server.logs import background_logging
from bertserve.service.server.preparation import Secrets
from bertserve.service.server.server import Server, configure
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tracing.trace import tracer_to

Started = tuple[str, list[str], int]  # the address, a line for each model, and the inference threads of all workers


def work(
    settings: Settings,
    listener: socket.socket,
    secrets: Secrets,
    on_ready: Callable[[Started], None],
    *,
    index: int = 0,
    metrics: Metrics | None = None,
    beat: Callable[[], bool] | None = None,
) -> None:
    """Loads the models and serves them on a bound socket until it is stopped; `on_ready` is called when the server accepts connections.

    A worker has an index and metrics. While its event loop runs, it calls `beat` once per second; it stops if that returns False, and if its
    inference threads died or all hang.
    """
    tracer = tracer_to(settings.otlp_endpoint)
    # importing FastAPI takes about 0.17 s; models can load at the same time, because their runs need no interpreter
    with ThreadPoolExecutor(1) as pool:
        pool.submit(import_module, "bertserve.service.api.endpoint")
        state = build(settings, index=index, metrics=metrics, tracer=tracer)
    models = [_line(state.registry, model) for model in state.registry.models.values()]
    refreshing: set[asyncio.Task[None]] = set()

    def on_listen(address: str) -> None:
        secrets.reload()  # a key may have been removed while the models were loaded
        on_ready((address, models, state.totals["threads"]))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # it was blocked while the models were loaded

    def on_hangup() -> None:
        secrets.reload()
        task = asyncio.ensure_future(refresh())
        refreshing.add(task)  # the reference is needed, because the loop keeps no task alive
        task.add_done_callback(refreshing.discard)

    async def refresh() -> None:
        systemd.notify_reloading()
        await state.reloader.refresh()
        systemd.notify("READY=1")

    async def notify() -> None:
        if beat is not None and not (beat() and state.scheduler.ready):
            server.should_exit = True

    config = configure(
        application(settings, state, secrets),
        keep_alive_s=settings.keep_alive_s,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        tls=None if secrets.certificate is None else secrets.certificate.context,
        proxies=settings.forwarded_allow_ips,
    )
    config.callback_notify, config.timeout_notify = notify, 1
    server = Server(
        config,
        scheduler=state.scheduler,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        pre_stop_delay_s=settings.pre_stop_delay_s,
        on_listen=on_listen,
        on_hangup=on_hangup,
    )
    with background_logging():
        server.run([listener])
        if tracer is not None:
            tracer.close()


def application(settings: Settings, state: AppState, secrets: Secrets, *, sends_request_id: bool = True) -> ASGIApp:
    """Returns the application for settings, to be served by this process or as a replica in another server.

    If `sends_request_id` is false, a server around the application adds the header `x-request-id` instead.
    """
    from bertserve.service.api.auth import Authenticator
    from bertserve.service.api.endpoint import Endpoint

    auth = Authenticator(
        secrets.keys,
        admin_keys=secrets.admin_keys,
        public_health=settings.public_health,
        public_metrics=settings.public_metrics,
    )
    return Endpoint(
        state,
        auth=auth,
        log_access=settings.access_log,
        log_probes=settings.log_probes,
        root_path=settings.root_path,
        cors_origins=settings.cors_origin,
        sends_request_id=sends_request_id,
    )


def _line(registry: Registry, model: Model) -> str:
    """Returns the line about a model that is printed at startup; it includes the endpoints whose default it is."""
    endpoints = ", ".join(f"/{TASKS[task].path}" for task in registry.default_of(model))
    return f"{model.name}: {model.task}, {model.graph.provider}/{model.graph.precision}" + (f", answers {endpoints}" if endpoints else "")
