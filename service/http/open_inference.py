"""The routes of the Open Inference Protocol other than `infer`: metadata, probes, statistics and the model repository."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from bertserve.service import __version__
from bertserve.service.api_keys import Access
from bertserve.service.errors import InvalidValueError, MalformedRequestError
from bertserve.service.http.admin import audited
from bertserve.service.http.inference import read_raw
from bertserve.service.http.middleware import HEADERS
from bertserve.service.http.openapi import endpoints, error_responses
from bertserve.service.http.responses import check_ready, json_answer, probed
from bertserve.service.http.throttled import Throttled
from bertserve.service.serving.build import AppState
from bertserve.service.serving.model import Model
from bertserve.service.wire.open_inference import check_version
from bertserve.service.wire.reading import parse_json, show
from bertserve.service.wire.tensor_forms import config, metadata
from bertserve.service.wire.unknown_fields import check_names

# Names of the supported extensions in the specification and in Triton; `tensors` is the form of token ids in the metadata of a model.
EXTENSIONS = ("binary_tensor_data", "classification", "model_configuration", "model_repository", "parameters", "statistics", "tensors")
MAX_BODY_BYTES = 65536
_FOUND = error_responses(404)
_MODEL = "/v2/models/{name}"
_REPOSITORY = "/v2/repository/models/{name}"


class IndexBody(BaseModel):
    """Body of a request for the index of models; it may be empty."""

    ready: Annotated[bool, Field(description="Return only models that are served.")] = False


class ChangeBody(BaseModel):
    """Body of a request that changes a model; it may be empty."""

    parameters: Annotated[
        dict[str, Any] | None, Field(description="For `unload`: `unload_dependents`, which has no effect. For `load`: none.")
    ] = None


def routers(state: AppState) -> list[APIRouter]:
    """Returns the routes, with one router for each access."""
    probes, models, changes = (
        endpoints(access, responses=error_responses(), tags=["open inference"]) for access in (Access.PROBE, Access.KEY, Access.ADMIN)
    )
    _add_server(probes, models, state)
    _add_models(probes, models, state)
    _add_repository(models, changes, state)
    return [probes, models, changes]


def _add_server(probes: APIRouter, routes: APIRouter, state: AppState) -> None:
    @routes.get("/v2/", include_in_schema=False)
    @routes.get("/v2", summary="Name, version and extensions of the service")
    async def server() -> Response:
        return json_answer({"name": "bertserve", "version": __version__, "extensions": list(EXTENSIONS)})

    @probes.get("/v2/health/live", summary="Liveness: the process runs")
    async def live() -> Response:
        return json_answer({"live": True})

    @probes.get("/v2/health/ready", summary="Readiness: requests are answered")
    async def ready() -> Response:
        check_ready(state.scheduler.ready)
        return json_answer({"ready": True, "live": True})


def _add_models(probes: APIRouter, models: APIRouter, state: AppState) -> None:
    totals = Throttled(state.metrics.totals)  # each run reads the files of all workers

    async def statistics_of(models: list[Model]) -> Response:
        by_model = await totals()
        return json_answer({"model_stats": [_of_model(model, by_model.get(model.name, {})) for model in models]})

    # before the routes of a model, so that `stats` is not taken for a model's name
    @models.get("/v2/models/stats", summary="Statistics of all models")
    async def all_statistics() -> Response:
        return await statistics_of(list(state.registry.models.values()))

    def find(name: str, version: str | None = None) -> Model:
        model = state.registry.get(name)
        check_version(name, model.bundle.version, version)
        return model

    def add(suffix: str, summary: str, answer: Callable[[Model], Awaitable[Response]]) -> None:
        @models.get(f"{_MODEL}{suffix}", summary=summary, responses=_FOUND)
        async def served(name: str) -> Response:
            return await answer(find(name))

        @models.get(f"{_MODEL}/versions/{{version}}{suffix}", summary=f"{summary}, if it has this version", responses=_FOUND)
        async def of_version(name: str, version: str) -> Response:
            return await answer(find(name, version))

    async def described(model: Model) -> Response:
        return json_answer(metadata(model.name, model.bundle.version, model.bundle.manifest, model.graph))

    @probes.get(f"{_MODEL}/ready", summary="Readiness of a model", responses=_FOUND)
    async def ready(name: str) -> Response:
        return _ready(probed(lambda: find(name)))

    @probes.get(f"{_MODEL}/versions/{{version}}/ready", summary="Readiness of a model, if it has this version", responses=_FOUND)
    async def ready_of_version(name: str, version: str) -> Response:
        return _ready(probed(lambda: find(name, version)))

    async def configured(model: Model) -> Response:
        return json_answer(config(model.name, model.bundle.manifest, max_rows=state.limits.max_inputs))

    async def statistics(model: Model) -> Response:
        return await statistics_of([model])

    add("", "Inputs and outputs of a model", described)
    add("/config", "Configuration of a model, in Triton's format", configured)
    add("/stats", "Statistics of a model", statistics)


def _ready(model: Model) -> Response:
    check_ready(model.ready)
    return json_answer({"name": model.name, "ready": True})


def _add_repository(models: APIRouter, changes: APIRouter, state: AppState) -> None:
    codes = (400, 408, 413, 415, 422)

    @models.post(
        "/v2/repository/index", summary="All models with their states", responses=error_responses(*codes), openapi_extra=_takes(IndexBody)
    )
    async def index(request: Request) -> Response:
        body = await _body(request, IndexBody)
        ready = body.get("ready") or False
        if not isinstance(ready, bool):
            raise InvalidValueError("`ready` is {ready}; it must be true or false.", ready=show(ready))
        served = state.registry.models
        ready_models = [{"name": name, "version": model.bundle.version, "state": "READY", "reason": ""} for name, model in served.items()]
        broken = [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": why} for name, why in state.broken.items() if name not in served
        ]
        return json_answer(ready_models if ready else ready_models + broken)

    changed, takes = error_responses(*codes, 403, 404), _takes(ChangeBody)

    @changes.post(
        f"{_REPOSITORY}/load", summary="Load or reload a model from its folder (admin key)", responses=changed, openapi_extra=takes
    )
    async def load(name: str, request: Request) -> Response:
        _check_parameters(await _body(request, ChangeBody), ())
        await audited(state, request.scope, name, state.reloader.load(name))
        return json_answer({})

    @changes.post(f"{_REPOSITORY}/unload", summary="Unload a model (admin key)", responses=changed, openapi_extra=takes)
    async def unload(name: str, request: Request) -> Response:
        _check_parameters(await _body(request, ChangeBody), ("unload_dependents",))
        await audited(state, request.scope, name, state.reloader.unload(name))
        return json_answer({})


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """Returns the OpenAPI description of an optional body."""
    return {"requestBody": {"required": False, "content": {"application/json": {"schema": body.model_json_schema()}}}}


async def _body(request: Request, model: type[BaseModel]) -> Mapping[str, Any]:
    """Returns the JSON object of a body, which may be empty; it has no keys other than the fields of `model`.

    Raises:
        MalformedRequestError: The body is not a JSON object.
        InvalidValueError: The body has another key.
    """
    raw = await read_raw(request.receive, request.scope[HEADERS], MAX_BODY_BYTES)
    value = parse_json(raw) if raw.strip() else {}
    if not isinstance(value, dict):
        raise MalformedRequestError("the body is {value}; send a JSON object, or none.", value=show(value))
    check_names(value, list(model.model_fields), "the body")
    return value


def _check_parameters(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidValueError("`parameters` is {parameters}; it must be an object.", parameters=show(parameters))
    check_names(parameters, names, "`parameters`")


def _of_model(model: Model, totals: Mapping[str, float]) -> dict[str, Any]:
    """Returns the statistics of a model since the start, summed over all workers and tasks.

    As perf_analyzer expects, the three parts of `compute` cover answered requests; a run that several requests shared counts once.
    """

    def part(count: str, *seconds: str) -> dict[str, int]:
        return {"count": int(totals.get(count, 0)), "ns": int(sum(totals.get(name, 0) for name in seconds) * 1e9)}

    answered = "queue_seconds_count"
    parts = ("queue_seconds_sum", "tokenize_seconds_sum", "inference_seconds_sum", "decode_seconds_sum")
    nothing = {"count": 0, "ns": 0}
    return {
        "name": model.name,
        "version": model.bundle.version,
        "inference_count": int(totals.get("batch_rows_sum", 0)),
        "execution_count": int(totals.get("batch_rows_count", 0)),
        "inference_stats": {
            "success": part(answered, *parts),
            "fail": part("requests_failed"),
            "queue": part(answered, parts[0]),
            "compute_input": part(answered, parts[1]),
            "compute_infer": part(answered, parts[2]),
            "compute_output": part(answered, parts[3]),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
    }
