"""The routes beside inference: what there is and how it is, for people, probes and scrapers; and what OpenAPI says of all."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import RedirectResponse
from pydantic_core import to_json
from starlette.responses import Response
from starlette.routing import BaseRoute

from service import __version__
from service.errors import UnavailableError
from service.http.inference import NAMED, TIMEOUT_HEADER
from service.metrics import CONTENT_TYPE
from service.serving.build import AppState
from service.serving.model import Model
from service.wire import bodies
from service.wire.paths import PATHS
from service.wire.schemas import ErrorBody


def documented() -> Sequence[BaseRoute]:
    """Returns the routes of `inference` with what OpenAPI says of them; they are never run."""
    routes = APIRouter()

    async def endpoint() -> None:
        raise AssertionError("a route that only documents was run. This is a bug.")

    async def named(name: str) -> None:
        raise AssertionError("a route that only documents was run. This is a bug.")

    for task, path in PATHS.items():
        summary = f"Answer with the task's default model, or the one named in `model` ({task})"
        routes.post(f"/{path}", summary=summary, **_documented(task))(endpoint)
    routes.post(
        NAMED, summary="Answer with this model, in the form of its task or of another that the body asks for", **_documented(*PATHS)
    )(named)
    return routes.routes


def router(service: AppState) -> APIRouter:
    """Returns all other routes."""
    routes = APIRouter()
    for task, path in PATHS.items():
        _add_task(routes, service, task, f"/{path}")
    _add_models(routes, service)
    _add_operations(routes, service)
    return routes


def _add_task(routes: APIRouter, service: AppState, task: str, base: str) -> None:
    @routes.get(f"{base}/info", summary=f"The model that {base} uses", tags=["models"])
    async def info() -> Response:
        return _json(_describe(service, service.registry.for_task(task)))

    @routes.get(f"{base}/health", summary=f"Whether {base} answers", tags=["health"])
    async def health() -> Response:
        return _health(service.registry.for_task(task).ready)


def _add_models(routes: APIRouter, service: AppState) -> None:
    @routes.get("/models", summary="All loaded models", tags=["models"])
    async def models() -> Response:
        return _json([_describe(service, model) for model in service.registry.models.values()])

    @routes.get(NAMED, summary="One model", tags=["models"])
    @routes.get(f"{NAMED}/info", summary="One model", tags=["models"])
    async def model_info(name: str) -> Response:
        return _json(_describe(service, service.registry.get(name)))

    @routes.get(f"{NAMED}/health", summary="Whether one model answers", tags=["health"])
    async def model_health(name: str) -> Response:
        return _health(service.registry.get(name).ready)


def _add_operations(routes: APIRouter, service: AppState) -> None:
    @routes.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")

    @routes.get("/health/live", summary="Whether the process runs", tags=["health"])
    async def live() -> Response:
        return _json({"live": True})

    @routes.get("/health", summary="Whether requests are answered", tags=["health"])
    @routes.get("/health/ready", summary="Whether requests are answered", tags=["health"])
    async def ready() -> Response:
        return _health(service.scheduler.ready)

    @routes.get("/info", summary="Version, limits and models", tags=["models"])
    async def info() -> Response:
        return _json(
            {
                "name": "bertserve",
                "version": __version__,
                "limits": _limits(service) | dict(service.info),
                "worker": dict(service.worker),
                "machine": dict(service.machine),
                "models": {model.name: model.task for model in service.registry.models.values()},
            }
        )

    @routes.get("/metrics", summary="Prometheus metrics", tags=["health"])
    async def metrics() -> Response:
        return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE})


def _limits(service: AppState) -> dict[str, int]:
    return {
        "max_inputs": service.limits.max_inputs,
        "max_chars": service.limits.max_chars,
        "max_body_bytes": service.max_body_bytes,
        "timeout_ms": service.timeout_ms,
        "max_timeout_ms": service.max_timeout_ms,
    }


def _describe(service: AppState, model: Model) -> dict[str, Any]:
    manifest, graph = model.bundle.manifest, model.graph
    return {
        "name": model.name,
        "task": model.task,
        "endpoint": f"/{PATHS[model.task]}",
        "endpoints": [f"/{PATHS[task]}" for task in model.tasks],
        "labels": list(manifest.labels),
        "activation": manifest.activation,
        **({} if manifest.embedding is None else {"embedding": manifest.embedding.model_dump()}),
        "version": model.bundle.version,
        "provider": graph.provider,
        "provider_asked": service.machine.get("provider_asked", graph.provider),
        "precision": graph.precision,
        "graph": {
            "file": graph.file,
            "sha256": graph.identity[:12],
            "form": graph.form,
            "threads": service.machine.get("threads_per_run", 1),
            "idle": None
            if model.engines.idle is None
            else {"threads": model.engines.idle.threads, "min_tokens": model.engines.idle.min_tokens},
        },
        "batch_invariant": graph.batch_invariant,
        "limits": {"max_tokens": manifest.tokenizer.max_length, **_limits(service)},
        "figures": [figure.model_dump() for figure in manifest.figures],
        "evidence": graph.evidence.model_dump(),
        "source": manifest.source.model_dump(),
    }


def _health(ready: bool) -> Response:
    if not ready:
        raise UnavailableError("the service does not take requests: it is stopping, or a lane died.")
    return _json({"ready": True, "live": True})


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _documented(*tasks: str) -> dict[str, Any]:
    """Returns what OpenAPI needs of a route, of one task or several, that reads the raw request; the body's schema is added in app.py."""
    described = {
        200: {
            "model": functools.reduce(operator.or_, (bodies.RESPONSES[task] for task in tasks)),
            "description": "A result, or a list of them: one for each input.",
        },
        **{status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)},
    }
    references = [{"$ref": f"#/components/schemas/{bodies.BODIES[task].__name__}"} for task in tasks]
    parameter = {
        "name": TIMEOUT_HEADER,
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "Milliseconds until the request must have started.",
    }
    extra = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}},
        },
        "parameters": [parameter],
    }
    return {"tags": ["inference"], "responses": described, "openapi_extra": extra, "response_class": Response}
