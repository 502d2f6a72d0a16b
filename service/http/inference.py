"""The paths that run models: body to task requests, a model's prediction to a response. Everything else is asked of others."""

from __future__ import annotations

import re

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import BertServeError, ClientGoneError, ContentEncodingError, InvalidValueError, TooLargeError
from service.http.disconnect import unless_disconnected
from service.http.middleware import LABELS, PREDICTION
from service.metrics import UNKNOWN
from service.serving.build import AppState
from service.serving.model import Model
from service.serving.prediction import Prediction
from service.tasks.catalog import TASKS
from service.wire.discriminator import requested_task
from service.wire.reading import read_body
from service.wire.rendering import to_json

TIMEOUT_HEADER = "x-request-timeout-ms"
MODELS = "/models"


class InferenceRouter:
    """Answers posts that run models, as a plain ASGI application in front of FastAPI, which gets everything else.

    FastAPI's telemetry, body limit, exit stacks, route matching and dependencies take two fifths of what a short text costs the
    event loop (bench/results/2026-11-21-with-memory-arena.md), and do nothing for these paths. `openapi.py` documents them to it.
    """

    def __init__(self, state: AppState, otherwise: ASGIApp) -> None:
        """Creates the router.

        Args:
            state: What to answer from.
            otherwise: The application for all other requests, and for the lifespan.
        """
        self._state = state
        self._otherwise = otherwise
        self._tasks = {f"/{spec.path}": name for name, spec in TASKS.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        task = name = None
        if scope["type"] == "http" and scope["method"] == "POST":
            task = self._tasks.get(scope["path"])
            if task is None:
                parent, _, last = scope["path"].rpartition("/")
                name = last if parent == MODELS else None
        if not task and not name:
            await self._otherwise(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive), task or UNKNOWN, name)
        await response(scope, receive, send)

    async def _answer(self, request: Request, task: str, name: str | None) -> Response:
        """Answers a request of a task's endpoint, or of the named model's."""
        scope, registry = request.scope, self._state.registry
        scope[LABELS] = (task, UNKNOWN)
        named = None if name is None else registry.get(name)
        if named is not None:
            task = named.task
            scope[LABELS] = (task, named.name)
        raw = await _read(request, self._state.max_body_bytes)
        if named is not None:
            task = requested_task(task, raw)
            scope[LABELS] = (task, named.name)
            registry.for_task(task, named.name)
        body = read_body(task, raw, self._state.limits)
        if named is not None and body.model not in (None, named.name):
            raise InvalidValueError(f"`model` is `{(body.model or '')[:64]}`, but the path names `{named.name}`; leave one of them out.")
        model = named or registry.for_task(task, body.model)
        scope[LABELS] = (task, model.name)
        timeout_s = self._timeout_s(request)
        requests = body.requests(model.bundle.manifest)
        try:
            prediction = await unless_disconnected(model.predict(requests, timeout_s=timeout_s, task=task), request.receive)
        except BertServeError as error:
            error.name_input(many=body.is_list, subject=body.subject)
            raise
        scope[PREDICTION] = prediction
        content = to_json(body.answer(prediction.results, request.headers.get("user-agent", "")))
        return _response(model, content, prediction)

    def _timeout_s(self, request: Request) -> float:
        given = request.headers.get(TIMEOUT_HEADER)
        if given is None:
            return self._state.timeout_ms / 1000
        if not (re.fullmatch("[0-9]{1,9}", given) and 1 <= int(given) <= self._state.max_timeout_ms):
            raise InvalidValueError(
                f"the header `{TIMEOUT_HEADER}` is `{given[:32]}`; it must be a whole number from 1 to {self._state.max_timeout_ms}."
            )
        return int(given) / 1000


def _response(model: Model, content: bytes, prediction: Prediction) -> Response:
    warnings = list(prediction.warnings)
    headers = {
        "x-model": model.name,
        "server-timing": f"tokenize;dur={prediction.tokenize_s * 1000:.3f}, queue;dur={prediction.queue_s * 1000:.3f}, "
        f"inference;dur={prediction.inference_s * 1000:.3f}, decode;dur={prediction.decode_s * 1000:.3f}",
    }
    if prediction.truncated:
        some = ", ".join(f"inputs[{index}]" for index in prediction.truncated[:10])
        headers["x-truncated"] = str(len(prediction.truncated))
        warnings.append(
            f"truncation; {len(prediction.truncated)} of {len(prediction.results)} inputs cut to the model's "
            f"{model.bundle.manifest.tokenizer.max_length} tokens: {some}{', ...' if len(prediction.truncated) > 10 else ''}"
        )
    response = Response(content, headers={name: _escaped(value) for name, value in headers.items()}, media_type="application/json")
    for warning in dict.fromkeys(warnings):
        response.headers.append("x-hf-warning", _escaped(warning))  # a line each, as the official client reads them
    return response


def _escaped(value: str) -> str:
    """Returns a header's value in printable ASCII, anything else as Python spells it: a vocabulary may have entries with newlines."""
    return value if value.isascii() and value.isprintable() else value.encode("unicode_escape").decode("ascii")


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
    declared = request.headers.get("content-length")
    if declared is None:
        declared, coding = "0", request.headers.get("transfer-encoding", "chunked")
        if coding.lower() != "chunked":
            raise ContentEncodingError(
                f"the body's transfer encoding is `{coding[:32]}`; send it uncompressed, in chunks or with its length."
            )
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
