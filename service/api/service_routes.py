"""The routes that run no models: probes, metrics, and the description and the change of the loaded models."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from bertserve.service import __version__
from bertserve.service.api.formats.open_inference import metadata
from bertserve.service.api.formats.openai import error_object
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

T = TypeVar("T")
audit_log = logging.getLogger("bertserve.audit")


def service_routes(state: AppState) -> list[GuardedRoute]:
    """Returns the routes."""
    endpoints = _Endpoints(state)
    paths = {spec.name: spec.path for spec in TASKS.values()}
    probe = partial(GuardedRoute, access=Access.PROBE, tags=["health"])
    info = partial(GuardedRoute, access=Access.KEY, tags=["models"])
    openai_info = partial(info, error_format=error_object)
    change = partial(GuardedRoute, access=Access.ADMIN, tags=["models"], methods=["POST"])
    protocol = ["open inference"]
    return [
        *(probe(f"/{path}/health", partial(endpoints.task_health, task), summary=f"Readiness of /{path}") for task, path in paths.items()),
        probe("/health", endpoints.ready, summary="Readiness: requests are answered"),
        probe("/health/ready", endpoints.ready, summary="Readiness: requests are answered"),
        probe("/health/live", endpoints.live, summary="Liveness: the process runs"),
        probe("/ping", endpoints.ready, summary="Readiness, for SageMaker"),
        probe("/models/{name}/health", endpoints.model_health, summary="Readiness of one model"),
        probe("/v2/health/ready", endpoints.ready, summary="Readiness: requests are answered", tags=protocol),
        probe("/v2/health/live", endpoints.live, summary="Liveness: the process runs", tags=protocol),
        probe("/v2/models/{name}/ready", endpoints.model_health, summary="Readiness of a model", tags=protocol),
        probe("/metrics", endpoints.metrics, access=Access.METRICS, summary="Prometheus metrics", response_class=PlainTextResponse),
        *(info(f"/{path}/info", partial(endpoints.task_info, task), summary=f"Default model of /{path}") for task, path in paths.items()),
        info("/info", endpoints.info, summary="Version, limits, machine and models"),
        info("/models", endpoints.models, summary="All loaded models, in brief"),
        info("/models/{name}", endpoints.model_info, summary="One model in detail"),
        info("/models/{name}/info", endpoints.model_info, summary="One model in detail"),
        info("/v2", endpoints.server, summary="Name and version of the service", tags=protocol),
        info("/v2/", endpoints.server, include_in_schema=False),
        info("/v2/models/{name}", endpoints.model_metadata, summary="Inputs and outputs of a model", tags=protocol),
        openai_info("/v1/models", endpoints.openai_models, summary="All models, in OpenAI's format"),
        openai_info("/v1/models/{name}", endpoints.openai_model, summary="One model, in OpenAI's format"),
        change("/models/{name}/load", endpoints.load, summary="Load or reload a model from its folder (admin key)"),
        change("/models/{name}/reload", endpoints.load, summary="Load or reload a model from its folder (admin key)"),
        change("/models/{name}/unload", endpoints.unload, summary="Unload a model (admin key)"),
    ]


class _Endpoints:
    """The functions of the routes. They respond with JSON, except for the metrics."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._settings = state.settings
        self._registry = state.registry
        self._scheduler = state.scheduler
        self._cpu = cpu_name()
        self._created = int(time.time())  # OpenAI's clients show it; the creation time of a model is unknown

    async def live(self) -> Response:
        return _json({"live": True})

    async def ready(self) -> Response:
        return self._health()

    async def model_health(self, name: str) -> Response:
        return self._health(name)

    async def task_health(self, task: str) -> Response:
        return self._health(self._registry.defaults.get(task, ""))

    async def metrics(self) -> Response:
        self._state.monitor.measure()
        # a page reads the files of all workers, and a page with many series takes a while to write
        return Response(await asyncio.to_thread(self._state.metrics.render), headers={"content-type": CONTENT_TYPE_LATEST})

    async def info(self) -> Response:
        settings, queue = self._settings, self._scheduler.queue
        gpu = None if self._state.provider == "cpu" else settings.model_dump(include={"device_id", "gpu_mem_limit_mib", "cuda_graphs"})
        return _json(
            {
                "name": "bertserve",
                "version": __version__,
                "limits": {**self._limits(self._registry.models.values()), "threads": self._state.total_threads},
                "worker": {
                    "index": self._state.worker_index,
                    "workers": settings.workers,
                    "pid": os.getpid(),
                    "max_queue_tokens": queue.max_queue_tokens,
                    "threads": queue.threads,
                },
                "machine": {
                    "cpu": self._cpu,
                    "onnxruntime": sessions.VERSION,
                    "requested_provider": settings.provider,
                    "provider": self._state.provider,
                    "gpu": gpu,
                },
                "models": {model.name: model.task for model in self._registry.models.values()},
            }
        )

    async def server(self) -> Response:
        return _json({"name": "bertserve", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def models(self) -> Response:
        served = self._registry.models
        described = [self._summary(model) for model in served.values()]
        broken = [{"name": name, "broken": why} for name, why in self._registry.broken.items() if name not in served]
        # one model per line, for people
        return Response(b"[%s]\n" % b",\n ".join(map(to_json, described + broken)), media_type="application/json")

    async def model_info(self, name: str) -> Response:
        return _json(self._describe(self._registry.get(name)))

    async def task_info(self, task: str) -> Response:
        return _json(self._describe(self._registry.for_task(task)))

    async def model_metadata(self, name: str) -> Response:
        return _json(metadata(self._registry.get(name)))

    async def openai_models(self) -> Response:
        served = self._registry.models.values()
        data = [self._describe_for_openai(model) for model in served]
        return _json({"object": "list", "data": data, "models": [model.name for model in served]})

    async def openai_model(self, name: str) -> Response:
        return _json(self._describe_for_openai(self._registry.get(name)))

    async def load(self, name: str, request: Request) -> Response:
        return _json(self._describe(await self._audit(request.scope, name, self._state.reloader.load)))

    async def unload(self, name: str, request: Request) -> Response:
        await self._audit(request.scope, name, self._state.reloader.unload)
        return _json({"name": name, "unloaded": True})

    async def _audit(self, scope: Scope, name: str, change: Callable[[str], Awaitable[T]]) -> T:
        """Changes a model, and logs the key, the action and the outcome.

        Raises:
            HttpError: The service has several workers.
        """
        action = scope["route"].path.rpartition("/")[2]
        outcome = "cancelled"
        is_known = self._is_known(name)
        try:
            if self._settings.workers > 1:
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
            model = name if is_known or self._is_known(name) else UNKNOWN
            context: RequestContext = scope[REQUEST_KEY]
            context.model = model
            fields = {**context.log_fields(), "key": context.key, "action": action, "outcome": outcome}
            audit_log.info("%s of the model %s by the key %s: %s", action, model, context.key, outcome, extra=fields)

    def _is_known(self, name: str) -> bool:
        return name in self._registry.models or name in self._registry.broken

    def _summary(self, model: Model) -> dict[str, Any]:
        return {
            "name": model.name,
            "task": model.task,
            "endpoints": [f"/{TASKS[task].path}" for task in model.tasks],
            "default_of": [f"/{TASKS[task].path}" for task in self._registry.default_of(model)],
            **({"broken": self._registry.broken[model.name]} if model.name in self._registry.broken else {}),
            "version": model.bundle.version,
            "provider": model.graph.provider,
            "precision": model.graph.precision,
            "max_tokens": model.bundle.manifest.tokenizer.max_length,
        }

    def _describe(self, model: Model) -> dict[str, Any]:
        manifest, graph, engines = model.bundle.manifest, model.graph, model.engines
        return {
            **self._summary(model),
            "endpoint": f"/{TASKS[model.task].path}",
            "labels": list(manifest.labels),
            "activation": manifest.activation,
            **({} if manifest.tokenizer.mask is None else {"mask_token": manifest.tokenizer.mask.token}),
            **({} if manifest.embedding is None else {"embedding": manifest.embedding.model_dump()}),
            **({"attention_heads": list(manifest.attention_heads)} if manifest.attention_heads else {}),
            "requested_provider": self._settings.provider,
            "graph": {
                "file": graph.file,
                "sha256": graph.identity[:12],
                "description": graph.description,
                "multi_threaded_run": {"threads": engines.threads, "min_tokens": engines.min_tokens} if engines.threads > 1 else None,
            },
            "batch_invariant": graph.batch_invariant,
            **({} if graph.calibration is None else {"calibration": graph.calibration.model_dump()}),
            "limits": {"max_tokens": manifest.tokenizer.max_length, **self._limits([model])},
            "metrics": [metric.model_dump() for metric in manifest.metrics],
            "validation": graph.validation.model_dump(),
            "source": manifest.source.model_dump(),
        }

    def _describe_for_openai(self, model: Model) -> dict[str, Any]:
        """Returns a model as OpenAI's clients read it; clients of KServe's V1 protocol use the same path, and read the last three keys."""
        kserve_keys = {"task": model.task, "name": model.name, "ready": self._scheduler.ready}
        return {"id": model.name, "object": "model", "created": self._created, "owned_by": "bertserve", **kserve_keys}

    def _limits(self, models: Iterable[Model]) -> dict[str, Any]:
        """Returns the limits of requests to these models."""
        names = {name for name in Settings.model_fields if name.startswith("max_") or name == "timeout_ms"}
        return self._settings.model_dump(include=names) | {
            "max_batch_tokens": max((model.max_batch_tokens for model in models), default=None)
        }

    def _health(self, name: str | None = None) -> Response:
        """Returns the response to a probe, of the service or of a model.

        Raises:
            HttpError: The model is not loaded. Probes need no key, so the message names no models.
            UnavailableError: Requests are not answered.
        """
        if name is not None and name not in self._registry.models:
            raise HttpError(HTTPStatus.NOT_FOUND, "no such model is loaded; GET /models lists the models.")
        if not self._scheduler.ready:
            raise UnavailableError(
                "not ready: shutting down, the GPU failed, an inference thread died, or as many runs have hung as there are threads."
            )
        return _json({"ready": True, "live": True})


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
