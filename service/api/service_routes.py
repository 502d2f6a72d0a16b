"""The routes that run no models: probes, metrics, and the description and the change of the loaded models."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from http import HTTPStatus
from typing import Any

from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from bertserve.service import __version__
from bertserve.service.api.request import REQUEST_KEY, RequestContext
from bertserve.service.api.routing import GuardedRoute
from bertserve.service.app_state import AppState
from bertserve.service.auth import Access
from bertserve.service.body.json_text import to_json
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import cpu_name
from bertserve.service.errors import HttpError, UnavailableError, status_and_type
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.model import Model
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS

audit_log = logging.getLogger("bertserve.audit")
_cpu_name = cache(cpu_name)


def json_route(path: str, value: Callable[..., Any], summary: str, **options: Any) -> GuardedRoute:
    """Returns a route that answers with a value as JSON; `value` takes the AppState, and the parameters of the path by name."""

    async def endpoint(request: Request) -> Response:
        return Response(to_json(value(request.scope[REQUEST_KEY].state, **request.path_params)), media_type="application/json")

    return GuardedRoute(path, endpoint, summary=summary, **options)


probe_route = partial(json_route, access=Access.PROBE, tags=["health"])
info_route = partial(json_route, access=Access.KEY, tags=["models"])


def service_routes() -> list[GuardedRoute]:
    """Returns the routes."""
    change = partial(GuardedRoute, endpoint=change_model, access=Access.ADMIN, tags=["models"], methods=["POST"])
    paths = {spec.name: spec.path for spec in TASKS.values()}
    return [
        *(probe_route(f"/{path}/health", partial(_task_readiness, task=task), f"Readiness of /{path}") for task, path in paths.items()),
        probe_route("/health", readiness, "Readiness: requests are answered"),
        probe_route("/health/ready", readiness, "Readiness: requests are answered"),
        probe_route("/health/live", lambda _: {"live": True}, "Liveness: the process runs"),
        probe_route("/ping", readiness, "Readiness, for SageMaker"),
        probe_route("/models/{name}/health", readiness, "Readiness of one model"),
        GuardedRoute(
            "/metrics", metrics_page, access=Access.METRICS, summary="Prometheus metrics", response_class=PlainTextResponse, tags=["health"]
        ),
        *(info_route(f"/{path}/info", partial(_describe_default, task=task), f"Default model of /{path}") for task, path in paths.items()),
        info_route("/info", service_info, "Version, limits, machine and models"),
        GuardedRoute("/models", list_models, access=Access.KEY, summary="All loaded models, in brief", tags=["models"]),
        info_route("/models/{name}", _describe, "One model in detail"),
        info_route("/models/{name}/info", _describe, "One model in detail"),
        change("/models/{name}/load", summary="Load or reload a model from its folder (admin key)"),
        change("/models/{name}/reload", summary="Load or reload a model from its folder (admin key)"),
        change("/models/{name}/unload", summary="Unload a model (admin key)"),
    ]


def _task_readiness(state: AppState, task: str) -> dict[str, bool]:
    return readiness(state, state.registry.defaults.get(task, ""))


def _describe_default(state: AppState, task: str) -> dict[str, Any]:
    return _describe(state, state.registry.for_task(task).name)


def readiness(state: AppState, name: str | None = None) -> dict[str, bool]:
    """Returns the response of a service that is ready and serves the model of this name.

    Raises:
        HttpError: The model is not loaded. Probes need no key, so the message names no models.
        UnavailableError: Requests are not answered.
    """
    if name is not None and name not in state.registry.models:
        raise HttpError(HTTPStatus.NOT_FOUND, "no such model is loaded; GET /models lists the models.")
    if not state.scheduler.ready:
        raise UnavailableError(
            "not ready: shutting down, the GPU failed, an inference thread died, or as many runs have hung as there are threads."
        )
    return {"ready": True, "live": True}


async def metrics_page(request: Request) -> Response:
    """Responds with the metrics of all workers."""
    state: AppState = request.scope[REQUEST_KEY].state
    state.monitor.measure()
    # a page reads the files of all workers, and a page with many series takes a while to write
    return Response(await asyncio.to_thread(state.metrics.render), headers={"content-type": CONTENT_TYPE_LATEST})


async def list_models(request: Request) -> Response:
    """Responds with all models, one per line, for people."""
    state: AppState = request.scope[REQUEST_KEY].state
    described = [_summary(state, model) for model in state.registry.models.values()]
    described += [{"name": name, "broken": why} for name, why in state.registry.broken.items() if name not in state.registry.models]
    return Response(b"[%s]\n" % b",\n ".join(map(to_json, described)), media_type="application/json")


def service_info(state: AppState) -> dict[str, Any]:
    """Returns the version, the limits, the machine and the models."""
    settings, queue, served = state.settings, state.scheduler.queue, state.registry.models.values()
    return {
        "name": "bertserve",
        "version": __version__,
        "limits": {**_limits(settings, served), "threads": state.total_threads},
        "worker": {
            "index": state.worker_index,
            "workers": settings.workers,
            "pid": os.getpid(),
            "max_queue_tokens": queue.max_queue_tokens,
            "threads": queue.threads,
        },
        "machine": {
            "cpu": _cpu_name(),
            "onnxruntime": sessions.VERSION,
            "requested_provider": settings.provider,
            "provider": state.provider,
            "gpu": None if state.provider == "cpu" else settings.model_dump(include={"device_id", "gpu_mem_limit_mib", "cuda_graphs"}),
        },
        "models": {model.name: model.task for model in served},
    }


async def change_model(request: Request, name: str) -> Response:
    """Loads or unloads a model, as the end of the path says, and logs the key, the action and the outcome.

    Raises:
        HttpError: The service has several workers.
    """
    context: RequestContext = request.scope[REQUEST_KEY]
    state, action = context.state, request.scope["route"].path.rpartition("/")[2]
    known, outcome = {*state.registry.models, *state.registry.broken}, "cancelled"
    try:
        if state.settings.workers > 1:
            raise HttpError(
                HTTPStatus.CONFLICT,
                "a request reaches only one of several workers; change the models folder, and send SIGHUP to the service.",
            )
        if action == "unload":
            await state.reloader.unload(name)
            result: dict[str, Any] = {"name": name, "unloaded": True}
        else:
            result = _describe(state, (await state.reloader.load(name)).name)
        outcome = "done"
        return Response(to_json(result), media_type="application/json")
    except Exception as error:
        outcome = status_and_type(error)[1]
        raise
    finally:
        # an unknown name is text of the caller, which must not reach the log
        context.model_label = name if name in known | {*state.registry.models, *state.registry.broken} else UNKNOWN
        fields = {**context.log_fields(), "key": context.key, "action": action, "outcome": outcome}
        audit_log.info("%s of the model %s by the key %s: %s", action, context.model_label, context.key, outcome, extra=fields)


def _summary(state: AppState, model: Model) -> dict[str, Any]:
    broken = state.registry.broken.get(model.name)
    return {
        "name": model.name,
        "task": model.task,
        "endpoints": [f"/{TASKS[task].path}" for task in model.tasks],
        "default_of": [f"/{TASKS[task].path}" for task in state.registry.list_default_tasks(model)],
        **({} if broken is None else {"broken": broken}),
        "version": model.bundle.version,
        "provider": model.graph.provider,
        "precision": model.graph.precision,
        "max_tokens": model.bundle.manifest.tokenizer.max_length,
    }


def _describe(state: AppState, name: str) -> dict[str, Any]:
    model = state.registry.get(name)
    manifest, graph, engines = model.bundle.manifest, model.graph, model.engines
    return {
        **_summary(state, model),
        "endpoint": f"/{TASKS[model.task].path}",
        "labels": list(manifest.labels),
        "activation": manifest.activation,
        **({} if manifest.tokenizer.mask is None else {"mask_token": manifest.tokenizer.mask.token}),
        **({} if manifest.embedding is None else {"embedding": manifest.embedding.model_dump()}),
        **({"attention_heads": list(manifest.attention_heads)} if manifest.attention_heads else {}),
        "requested_provider": state.settings.provider,
        "graph": {
            "file": graph.file,
            "sha256": graph.identity[:12],
            "description": graph.description,
            "multi_threaded_run": {"threads": engines.threads, "min_tokens": engines.min_tokens} if engines.threads > 1 else None,
        },
        "batch_invariant": graph.batch_invariant,
        **({} if graph.calibration is None else {"calibration": graph.calibration.model_dump()}),
        "limits": {"max_tokens": manifest.tokenizer.max_length, **_limits(state.settings, [model])},
        "metrics": [metric.model_dump() for metric in manifest.metrics],
        "validation": graph.validation.model_dump(),
        "source": manifest.source.model_dump(),
    }


def _limits(settings: Settings, served: Iterable[Model]) -> dict[str, Any]:
    """Returns the limits of requests to these models."""
    names = {name for name in Settings.model_fields if name.startswith("max_") or name == "timeout_ms"}
    return settings.model_dump(include=names) | {"max_batch_tokens": max((model.max_batch_tokens for model in served), default=None)}
