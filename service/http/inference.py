"""An inference path: body to task requests, a model's prediction to a response. Everything else is asked of others."""

from __future__ import annotations

import re

from fastapi import Request
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.errors import BertServeError, ClientGoneError, ContentEncodingError, InvalidValueError, TooLargeError
from service.http.disconnect import unless_disconnected
from service.http.middleware import LABELS
from service.http.rendering import render
from service.metrics import UNKNOWN
from service.serving.build import AppState
from service.serving.model import Model, Prediction
from service.wire import bodies, reading
from service.wire.paths import PATHS

TIMEOUT_HEADER = "x-request-timeout-ms"
NAMED = "/models/{name}"


class Inference:
    """An inference path as a plain ASGI application.

    FastAPI would solve dependencies, open exit stacks and match the path twice for each request. `documented` describes these
    paths to it.
    """

    def __init__(self, service: AppState, task: str) -> None:
        self._service = service
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        response = await _predict(self._service, Request(scope, receive), self._task, scope["path_params"].get("name"))
        await response(scope, receive, send)


def inference(service: AppState) -> list[Route]:
    """Returns the routes that run models."""
    tasks = [Route(f"/{path}", Inference(service, task), methods=["POST"]) for task, path in PATHS.items()]
    return [*tasks, Route(NAMED, Inference(service, UNKNOWN), methods=["POST"])]


async def _predict(service: AppState, request: Request, task: str, name: str | None) -> Response:
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


def _timeout_ms(service: AppState, request: Request) -> int:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return service.timeout_ms
    if not (re.fullmatch("[0-9]{1,9}", given) and 1 <= int(given) <= service.max_timeout_ms):
        raise InvalidValueError(
            f"the header `{TIMEOUT_HEADER}` is `{given[:32]}`; it must be a whole number from 1 to {service.max_timeout_ms}."
        )
    return int(given)
