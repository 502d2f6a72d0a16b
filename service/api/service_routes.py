"""The routes that run no models: probes, metrics, and the description and the change of the loaded models."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from bertserve.service import __version__
from bertserve.service.api.formats.open_inference import metadata
from bertserve.service.api.formats.openai import error_object
from bertserve.service.api.request import REQUEST_KEY, RequestContext
from bertserve.service.api.routing import guarded_router
from bertserve.service.app_state import AppState
from bertserve.service.auth import Access
from bertserve.service.body.json_text import to_json
from bertserve.service.engine import sessions
from bertserve.service.engine.hardware import cpu_name
from bertserve.service.errors import HttpError, NotFoundError, UnavailableError, status_and_type
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.model import Model
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.task_spec import TaskSpec

T = TypeVar("T")
audit_log = logging.getLogger("bertserve.audit")
_NAMED = "/models/{name}"


def create_service_routers(state: AppState) -> list[APIRouter]:
    """Returns the routers: one for each access, and one more for the models in OpenAI's format."""
    return [_probe_router(state), _info_router(state), _openai_router(state), _admin_router(state), _metrics_router(state)]


def _probe_router(state: AppState) -> APIRouter:
    router = guarded_router(Access.PROBE, tags=["health"])

    @router.get("/v2/health/live", summary="Liveness: the process runs", tags=["open inference"])
    @router.get("/health/live", summary="Liveness: the process runs")
    async def live() -> Response:
        return _json({"live": True})

    @router.get("/health", summary="Readiness: requests are answered")
    @router.get("/health/ready", summary="Readiness: requests are answered")
    @router.get("/v2/health/ready", summary="Readiness: requests are answered", tags=["open inference"])
    @router.get("/ping", summary="Readiness, for SageMaker")
    async def ready() -> Response:
        return _health(state)

    @router.get(f"{_NAMED}/health", summary="Readiness of one model")
    @router.get("/v2/models/{name}/ready", summary="Readiness of a model", tags=["open inference"])
    async def model_health(name: str) -> Response:
        return _health(state, name)

    def add_task(spec: TaskSpec) -> None:
        @router.get(f"/{spec.path}/health", summary=f"Readiness of /{spec.path}")
        async def task_health() -> Response:
            return _health(state, state.registry.defaults.get(spec.name, ""))

    for spec in TASKS.values():
        add_task(spec)
    return router


def _info_router(state: AppState) -> APIRouter:
    router = guarded_router(Access.KEY, tags=["models"])
    cpu = cpu_name()

    @router.get("/info", summary="Version, limits, machine and models")
    async def info() -> Response:
        return _json(_describe_service(state, cpu))

    @router.get("/v2/", include_in_schema=False)
    @router.get("/v2", summary="Name and version of the service", tags=["open inference"])
    async def server() -> Response:
        return _json({"name": "bertserve", "version": __version__, "extensions": ["binary_tensor_data"]})

    @router.get("/models", summary="All loaded models, in brief")
    async def models() -> Response:
        served = state.registry.models
        described = [_summary(state, model) for model in served.values()]
        broken = [{"name": name, "broken": why} for name, why in state.registry.broken.items() if name not in served]
        # one model per line, for people
        return Response(b"[%s]\n" % b",\n ".join(map(to_json, described + broken)), media_type="application/json")

    @router.get(_NAMED, summary="One model in detail")
    @router.get(f"{_NAMED}/info", summary="One model in detail")
    async def model_info(name: str) -> Response:
        return _json(_describe(state, state.registry.get(name)))

    @router.get("/v2/models/{name}", summary="Inputs and outputs of a model", tags=["open inference"])
    async def model_metadata(name: str) -> Response:
        return _json(metadata(state.registry.get(name)))

    def add_task(spec: TaskSpec) -> None:
        @router.get(f"/{spec.path}/info", summary=f"Default model of /{spec.path}")
        async def task_info() -> Response:
            return _json(_describe(state, state.registry.for_task(spec.name)))

    for spec in TASKS.values():
        add_task(spec)
    return router


def _openai_router(state: AppState) -> APIRouter:
    router = guarded_router(Access.KEY, error_format=error_object, tags=["models"])
    created = int(time.time())  # OpenAI's clients show it; the creation time of a model is unknown

    def describe(model: Model) -> dict[str, Any]:
        """Returns a model as OpenAI's clients read it; clients of KServe's V1 protocol use the same path, and read the last three keys."""
        kserve_keys = {"task": model.task, "name": model.name, "ready": state.scheduler.ready}
        return {"id": model.name, "object": "model", "created": created, "owned_by": "bertserve", **kserve_keys}

    @router.get("/v1/models", summary="All models, in OpenAI's format")
    async def models() -> Response:
        served = state.registry.models.values()
        return _json({"object": "list", "data": [describe(model) for model in served], "models": [model.name for model in served]})

    @router.get("/v1/models/{name}", summary="One model, in OpenAI's format")
    async def model(name: str) -> Response:
        return _json(describe(state.registry.get(name)))

    return router


def _admin_router(state: AppState) -> APIRouter:
    router = guarded_router(Access.ADMIN, tags=["models"])

    @router.post(f"{_NAMED}/reload", summary="Load or reload a model from its folder (admin key)")
    @router.post(f"{_NAMED}/load", summary="Load or reload a model from its folder (admin key)")
    async def load(name: str, request: Request) -> Response:
        return _json(_describe(state, await _audit(state, request.scope, name, state.reloader.load)))

    @router.post(f"{_NAMED}/unload", summary="Unload a model (admin key)")
    async def unload(name: str, request: Request) -> Response:
        await _audit(state, request.scope, name, state.reloader.unload)
        return _json({"name": name, "unloaded": True})

    return router


def _metrics_router(state: AppState) -> APIRouter:
    router = guarded_router(Access.METRICS, tags=["health"])

    @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        state.monitor.measure()
        # a page reads the files of all workers, and a page with many series takes a while to write
        return Response(await asyncio.to_thread(state.metrics.render), headers={"content-type": CONTENT_TYPE_LATEST})

    return router


async def _audit(state: AppState, scope: Scope, name: str, change: Callable[[str], Awaitable[T]]) -> T:
    """Makes a change of a model, and logs who made it and its outcome.

    Raises:
        HttpError: The service has several workers.
    """
    action = scope["route"].path.rpartition("/")[2]
    outcome = "cancelled"
    is_known = _is_known(state, name)
    try:
        if state.settings.workers > 1:
            raise HttpError(
                HTTPStatus.CONFLICT,
                "a request reaches only one of several workers; change the models folder, and send SIGHUP to the service.",
            )
        result = await change(name)
        outcome = "done"
        return result
    except Exception as error:
        outcome = status_and_type(error)[1]
        raise
    finally:
        # an unknown name is text of the caller, which must not reach the log
        model = name if is_known or _is_known(state, name) else UNKNOWN
        context: RequestContext = scope[REQUEST_KEY]
        context.model = model
        fields = {**context.log_fields(), "key": context.key, "action": action, "outcome": outcome}
        audit_log.info("%s of the model %s by the key %s: %s", action, model, context.key, outcome, extra=fields)


def _is_known(state: AppState, name: str) -> bool:
    return name in state.registry.models or name in state.registry.broken


def _describe_service(state: AppState, cpu: str) -> dict[str, Any]:
    settings, queue = state.settings, state.scheduler.queue
    return {
        "name": "bertserve",
        "version": __version__,
        "limits": {**_limits(state, state.registry.models.values()), "threads": state.total_threads},
        "worker": {
            "index": state.worker_index,
            "workers": settings.workers,
            "pid": os.getpid(),
            "max_queue_tokens": queue.max_queue_tokens,
            "threads": queue.threads,
        },
        "machine": {
            "cpu": cpu,
            "onnxruntime": sessions.VERSION,
            "requested_provider": settings.provider,
            "provider": state.provider,
            "gpu": None if state.provider == "cpu" else settings.model_dump(include={"device_id", "gpu_mem_limit_mib", "cuda_graphs"}),
        },
        "models": {model.name: model.task for model in state.registry.models.values()},
    }


def _summary(state: AppState, model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "task": model.task,
        "endpoints": [f"/{TASKS[task].path}" for task in model.tasks],
        "default_of": [f"/{TASKS[task].path}" for task in state.registry.default_of(model)],
        **({"broken": state.registry.broken[model.name]} if model.name in state.registry.broken else {}),
        "version": model.bundle.version,
        "provider": model.graph.provider,
        "precision": model.graph.precision,
        "max_tokens": model.bundle.manifest.tokenizer.max_length,
    }


def _describe(state: AppState, model: Model) -> dict[str, Any]:
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
        "limits": {"max_tokens": manifest.tokenizer.max_length, **_limits(state, [model])},
        "metrics": [metric.model_dump() for metric in manifest.metrics],
        "validation": graph.validation.model_dump(),
        "source": manifest.source.model_dump(),
    }


def _limits(state: AppState, models: Iterable[Model]) -> dict[str, Any]:
    """Returns the limits of requests to these models."""
    names = {name for name in Settings.model_fields if name.startswith("max_") or name == "timeout_ms"}
    return state.settings.model_dump(include=names) | {"max_batch_tokens": max((model.max_batch_tokens for model in models), default=None)}


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _health(state: AppState, name: str | None = None) -> Response:
    """Returns the response to a probe, of the service or of a model.

    Raises:
        NotFoundError: The model is not loaded. Probes need no key, so the message names no models.
        UnavailableError: Requests are not answered.
    """
    if name is not None and name not in state.registry.models:
        raise NotFoundError("no such model is loaded; GET /models lists the models.")
    if not state.scheduler.ready:
        raise UnavailableError(
            "not ready: shutting down, the GPU failed, an inference thread died, or as many runs have hung as there are threads."
        )
    return _json({"ready": True, "live": True})
