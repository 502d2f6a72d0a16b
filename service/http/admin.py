"""The routes beside inference: what there is and how it is, for people, probes and scrapers."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from service import __version__
from service.http.answers import check_ready, json_answer
from service.http.openapi import error_responses
from service.metrics import CONTENT_TYPE
from service.serving.build import AppState
from service.serving.model import Model
from service.tasks.catalog import TASKS

_NAMED = "/models/{name}"
_FOUND = error_responses(404)
_CHANGED = error_responses(403, 404, 422)


def router(state: AppState) -> APIRouter:
    """Returns all other routes."""
    routes = APIRouter(responses=error_responses())
    for spec in TASKS.values():
        _add_task(routes, state, spec.name, f"/{spec.path}")
    _add_models(routes, state)
    _add_operations(routes, state)
    return routes


def _add_task(routes: APIRouter, state: AppState, task: str, base: str) -> None:
    @routes.get(f"{base}/info", summary=f"The model that {base} uses", tags=["models"], responses=_FOUND)
    async def info() -> Response:
        return json_answer(_describe(state, state.registry.for_task(task)))

    @routes.get(f"{base}/health", summary=f"Whether {base} answers", tags=["health"], responses=_FOUND)
    async def health() -> Response:
        return _health(state.registry.for_task(task).ready)


def _add_models(routes: APIRouter, state: AppState) -> None:
    @routes.get("/models", summary="All loaded models", tags=["models"])
    async def models() -> Response:
        served = state.registry.models
        differing = await _differing(state)
        described = [_describe(state, model) | differing.get(name, {}) for name, model in served.items()]
        broken = [{"name": name, "broken": why} | differing.get(name, {}) for name, why in state.broken.items() if name not in served]
        elsewhere = [{"name": name} | workers for name, workers in differing.items() if name not in served and name not in state.broken]
        return json_answer(described + broken + elsewhere)

    @routes.get(_NAMED, summary="One model", tags=["models"], responses=_FOUND)
    @routes.get(f"{_NAMED}/info", summary="One model", tags=["models"], responses=_FOUND)
    async def model_info(name: str) -> Response:
        return json_answer(_describe(state, state.registry.get(name)) | (await _differing(state)).get(name, {}))

    @routes.post(
        f"{_NAMED}/load", summary="Load a model, or load it again as its folder has it now (admin key)", tags=["models"], responses=_CHANGED
    )
    @routes.post(
        f"{_NAMED}/reload", summary="The same: load a model again as its folder has it now (admin key)", tags=["models"], responses=_CHANGED
    )
    async def load(name: str) -> Response:
        return json_answer(_describe(state, await state.reloader.load(name)))

    @routes.post(f"{_NAMED}/unload", summary="Take a model out of service (admin key)", tags=["models"], responses=_CHANGED)
    async def unload(name: str) -> Response:
        await state.reloader.unload(name)
        return json_answer({"name": name, "unloaded": True})

    @routes.get(f"{_NAMED}/health", summary="Whether one model answers", tags=["health"], responses=_FOUND)
    async def model_health(name: str) -> Response:
        return _health(state.registry.get(name).ready)


async def _differing(state: AppState) -> dict[str, dict[str, Any]]:
    """Returns what each worker has of a model, under `workers` by its name, where they have not all the same."""
    differing = await asyncio.to_thread(state.reloader.differing)
    return {name: {"workers": workers} for name, workers in differing.items()}


def _add_operations(routes: APIRouter, state: AppState) -> None:
    @routes.get("/health/live", summary="Whether the process runs", tags=["health"])
    async def live() -> Response:
        return json_answer({"live": True})

    @routes.get("/health", summary="Whether requests are answered", tags=["health"])
    @routes.get("/health/ready", summary="Whether requests are answered", tags=["health"])
    @routes.get("/ping", summary="Whether requests are answered, as SageMaker asks", tags=["health"])
    async def ready() -> Response:
        return _health(state.scheduler.ready)

    @routes.get("/info", summary="Version, limits and models", tags=["models"])
    async def info() -> Response:
        return json_answer(
            {
                "name": "bertserve",
                "version": __version__,
                "limits": _limits(state) | dict(state.info),
                "worker": dict(state.worker),
                "machine": dict(state.machine),
                "models": {model.name: model.task for model in state.registry.models.values()},
            }
        )

    @routes.get("/metrics", summary="Prometheus metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        state.saturation.measure()
        # the workers' files are read, and a page of many series takes a while to write
        return Response(await asyncio.to_thread(state.metrics.page), headers={"content-type": CONTENT_TYPE})


def _limits(state: AppState) -> dict[str, int]:
    return {
        "max_inputs": state.limits.max_inputs,
        "max_chars": state.limits.max_chars,
        "max_body_bytes": state.max_body_bytes,
        "max_stream_jobs": state.max_stream_jobs,
        "timeout_ms": state.timeout_ms,
        "max_timeout_ms": state.max_timeout_ms,
    }


def _describe(state: AppState, model: Model) -> dict[str, Any]:
    manifest, graph = model.bundle.manifest, model.graph
    return {
        "name": model.name,
        "task": model.task,
        "endpoint": f"/{TASKS[model.task].path}",
        "endpoints": [f"/{TASKS[task].path}" for task in model.tasks],
        "default_of": [f"/{TASKS[task].path}" for task in state.registry.default_of(model)],
        **({"broken": state.broken[model.name]} if model.name in state.broken else {}),
        "labels": list(manifest.labels),
        "activation": manifest.activation,
        **({} if manifest.tokenizer.mask is None else {"mask_token": manifest.tokenizer.mask.token}),
        **({} if manifest.embedding is None else {"embedding": manifest.embedding.model_dump()}),
        **({"attention_heads": list(manifest.attention_heads)} if manifest.attention_heads else {}),
        "version": model.bundle.version,
        "provider": graph.provider,
        "provider_asked": state.machine.get("provider_asked", graph.provider),
        "precision": graph.precision,
        "graph": {
            "file": graph.file,
            "sha256": graph.identity[:12],
            "form": graph.form,
            "threads": state.machine.get("threads_per_run", 1),
            "idle": None
            if model.engines.solo is None
            else {"threads": model.engines.solo.threads, "min_tokens": model.engines.solo.min_tokens},
        },
        "batch_invariant": graph.batch_invariant,
        "limits": {"max_tokens": manifest.tokenizer.max_length, **_limits(state)},
        "figures": [figure.model_dump() for figure in manifest.figures],
        "evidence": graph.evidence.model_dump(),
        "source": manifest.source.model_dump(),
    }


def _health(ready: bool) -> Response:
    check_ready(ready)
    return json_answer({"ready": True, "live": True})
