"""Thin handlers: body to task requests, a model's prediction to a response. Everything else is asked of others."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from service import __version__
from service.api import bodies, reading
from service.api.disconnect import unless_disconnected
from service.api.edge import LABELS
from service.api.reading import Limits
from service.api.rendering import render
from service.api.schemas import ErrorBody
from service.errors import BertServeError, ClientGoneError, ContentEncodingError, InvalidValueError, TooLargeError, UnavailableError
from service.metrics import CONTENT_TYPE, UNKNOWN, Metrics
from service.model import Model, Prediction
from service.registry import Registry
from service.scheduler import Scheduler
from service.tasks import answer, classify, embed, fill_mask, ner, rerank, similarity, zero_shot

PATHS: Mapping[str, str] = {
    classify.TASK: "classify",
    ner.TASK: "ner",
    answer.TASK: "answer",
    fill_mask.TASK: "fill-mask",
    embed.TASK: "embed",
    similarity.TASK: "similarity",
    rerank.TASK: "rerank",
    zero_shot.TASK: "zero-shot",
}
TIMEOUT_HEADER = "x-request-timeout-ms"
NAMED = "/models/{name}"


@dataclass(frozen=True, slots=True)
class Service:
    """What the handlers serve from; made by the composition root.

    Attributes:
        registry: The loaded models.
        scheduler: The lanes that they run on.
        metrics: Where everything is counted.
        limits: What a request may measure.
        max_body_bytes: Bytes of a body.
        timeout_ms: Deadline of a request that names none.
        max_timeout_ms: Longest deadline that a request may name.
        info: More facts for `/info`: queue and batch limits, lanes.
        worker: And of the process that answers: which of how many, and its share of the limits.
        machine: And of what it runs on: the CPU's model, the execution provider asked for and the one that there is, threads.
    """

    registry: Registry
    scheduler: Scheduler
    metrics: Metrics
    limits: Limits
    max_body_bytes: int
    timeout_ms: int
    max_timeout_ms: int
    info: Mapping[str, Any]
    worker: Mapping[str, int] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


class Inference:
    """An inference path as a plain ASGI application.

    FastAPI would solve dependencies, open exit stacks and match the path twice for each request. `documented` describes these
    paths to it.
    """

    def __init__(self, service: Service, task: str) -> None:
        self._service = service
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        response = await _predict(self._service, Request(scope, receive), self._task, scope["path_params"].get("name"))
        await response(scope, receive, send)


def inference(service: Service) -> list[Route]:
    """Returns the routes that run models."""
    tasks = [Route(f"/{path}", Inference(service, task), methods=["POST"]) for task, path in PATHS.items()]
    return [*tasks, Route(NAMED, Inference(service, UNKNOWN), methods=["POST"])]


def documented() -> Sequence[BaseRoute]:
    """Returns the same routes with what OpenAPI says of them; they are never run."""
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


def router(service: Service) -> APIRouter:
    """Returns all other routes."""
    routes = APIRouter()
    for task, path in PATHS.items():
        _add_task(routes, service, task, f"/{path}")
    _add_models(routes, service)
    _add_operations(routes, service)
    return routes


def _add_task(routes: APIRouter, service: Service, task: str, base: str) -> None:
    @routes.get(f"{base}/info", summary=f"The model that {base} uses", tags=["models"])
    async def info() -> Response:
        return _json(_describe(service, service.registry.for_task(task)))

    @routes.get(f"{base}/health", summary=f"Whether {base} answers", tags=["health"])
    async def health() -> Response:
        return _health(service.registry.for_task(task).ready)


def _add_models(routes: APIRouter, service: Service) -> None:
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


def _add_operations(routes: APIRouter, service: Service) -> None:
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


async def _predict(service: Service, request: Request, task: str, name: str | None) -> Response:
    """Answers an inference request of a task's endpoint, or of the named model's."""
    scope = request.scope
    scope[LABELS] = (task, UNKNOWN)
    named = None if name is None else service.registry.get(name)
    task = task if named is None else named.task
    scope[LABELS] = (task, UNKNOWN if named is None else named.name)
    raw = await _read(request, service.max_body_bytes)
    if named is not None and (wanted := bodies.asked(task, raw)) != task:
        task = wanted
        scope[LABELS] = (task, named.name)
        service.registry.for_task(task, named.name)
    body = reading.read(task, raw, service.limits)
    if named is not None and body.model not in (None, named.name):
        raise InvalidValueError(f"`model` is `{(body.model or '')[:64]}`, but the path names `{named.name}`; leave one of them out.")
    model = named or service.registry.for_task(task, body.model)
    scope[LABELS] = (task, model.name)
    timeout_s = _timeout_ms(service, request) / 1000
    requests = body.requests(model.bundle.manifest)
    try:
        prediction = await unless_disconnected(model.predict(requests, timeout_s=timeout_s, task=task), request.receive)
    except BertServeError as error:
        error.name_input(many=body.is_list, subject=body.subject)
        raise
    result = body.shape(prediction.results, request.headers.get("user-agent", ""))
    return _answer(model, await render(result) if body.large else to_json(result), prediction)


def _answer(model: Model, content: bytes, prediction: Prediction) -> Response:
    timings = prediction.timings
    warnings = list(prediction.warnings)
    headers = {
        "x-model": model.name,
        "server-timing": f"tokenize;dur={timings.tokenize_s * 1000:.3f}, queue;dur={timings.queue_s * 1000:.3f}, "
        f"inference;dur={timings.inference_s * 1000:.3f}, decode;dur={timings.decode_s * 1000:.3f}",
    }
    if prediction.truncated:
        some = ", ".join(f"inputs[{index}]" for index in prediction.truncated[:10])
        headers["x-truncated"] = str(len(prediction.truncated))
        warnings.append(
            f"truncation; {len(prediction.truncated)} of {len(prediction.results)} inputs cut to the model's "
            f"{model.bundle.manifest.tokenizer.max_length} tokens: {some}{', ...' if len(prediction.truncated) > 10 else ''}"
        )
    response = Response(content, headers=headers, media_type="application/json")
    for warning in dict.fromkeys(warnings):
        response.headers.append("x-hf-warning", warning)  # a line each, as the official client reads them
    return response


async def _read(request: Request, limit: int) -> bytes:
    """Reads the body, giving up as soon as it is over the limit.

    Raises:
        ContentEncodingError: The body is compressed.
        TooLargeError: It is over the limit.
        ClientGoneError: The client hung up while sending.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ContentEncodingError(f"the body's content encoding is `{encoding[:32]}`; send it uncompressed.")
    declared = request.headers.get("content-length", "0")
    size, chunks = int(declared) if declared.isdigit() else 0, []
    if size <= limit:
        size = 0
        try:
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    break
        except ClientDisconnect as error:
            raise ClientGoneError("the client closed the connection while it sent the body.") from error
    if size > limit:
        raise TooLargeError(f"the body has {size} bytes or more and {limit} are allowed; send less at once, or raise --max-body-bytes.")
    return b"".join(chunks)


def _timeout_ms(service: Service, request: Request) -> int:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return service.timeout_ms
    if not (re.fullmatch("[0-9]{1,9}", given) and 1 <= int(given) <= service.max_timeout_ms):
        raise InvalidValueError(
            f"the header `{TIMEOUT_HEADER}` is `{given[:32]}`; it must be a whole number from 1 to {service.max_timeout_ms}."
        )
    return int(given)


def _limits(service: Service) -> dict[str, int]:
    return {
        "max_inputs": service.limits.max_inputs,
        "max_chars": service.limits.max_chars,
        "max_body_bytes": service.max_body_bytes,
        "timeout_ms": service.timeout_ms,
        "max_timeout_ms": service.max_timeout_ms,
    }


def _describe(service: Service, model: Model) -> dict[str, Any]:
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
            "sha256": graph.sha256[:12],
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
