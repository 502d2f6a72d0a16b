"""The routes that run models: a body becomes requests of a task, and a model's prediction a response."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import BertServeError, ClientGoneError, ContentEncodingError, InvalidValueError, TooLargeError
from service.http.answers import content_of
from service.http.auth import Endpoint
from service.http.disconnect import unless_disconnected
from service.http.error_log import ErrorLog
from service.http.large_bodies import SMALL_BYTES, LargeBodies
from service.http.lines import LineAnswerer
from service.http.middleware import LABELS, PREDICTION, REQUEST_ID, recorded_trace
from service.http.streaming import LineStream, is_stream
from service.metrics import UNKNOWN
from service.serving.build import AppState
from service.serving.model import Model
from service.serving.prediction import Prediction
from service.tasks.encoded import MAX_SPANS, ReadSpan
from service.wire.call import Content, Incoming
from service.wire.routes import Route

TIMEOUT_HEADER = "x-request-timeout-ms"


class InferenceEndpoint(Endpoint):
    """A route that runs models.

    FastAPI documents it, and names its method in a 405, but does not run it: FastAPI's telemetry, body limit, exit stacks and
    dependencies take two fifths of what a short text costs the event loop (bench/results/2026-11-21-with-memory-arena.md).
    """

    def __init__(self, route: Route, answer: Callable[[Route, Request], Coroutine[Any, Any, ASGIApp]], **description: Any) -> None:
        """Creates it.

        Args:
            route: The route.
            answer: Returns what answers a request of a route.
            **description: What OpenAPI says of it, as FastAPI takes it.
        """
        self.access = route.access
        self._answer = functools.partial(answer, route)
        super().__init__(route.path, self._answer, methods=["POST"], summary=route.summary, response_model=None, **description)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        answer = await self._answer(Request(scope, receive))
        await answer(scope, receive, send)


class DirectRoutes:
    """Matches posts to the routes that run models, in front of FastAPI, which gets everything else."""

    def __init__(self, routes: Sequence[InferenceEndpoint], otherwise: ASGIApp) -> None:
        """Takes the routes, among which a path of its own comes before one with a name in it.

        Args:
            routes: The routes that run models.
            otherwise: The application for all other requests, and for the lifespan.
        """
        self._fixed = {route.path: route for route in routes if "{" not in route.path}
        self._named = [route for route in routes if "{" in route.path]
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        app = self._match(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (app or self._otherwise)(scope, receive, send)

    def _match(self, scope: Scope) -> ASGIApp | None:
        """Returns what serves a request, after noting the route and its parameters in the scope as the router does."""
        fixed = self._fixed.get(scope["path"])
        if fixed is not None:
            scope["route"] = fixed
            scope["path_params"] = {}
            return fixed.handle
        for route in self._named:
            match, parameters = route.matches(scope)
            if match is Match.FULL:
                scope.update(parameters)
                return route.handle
        return None


class Inference:
    """Answers the requests of all routes that run models."""

    def __init__(self, state: AppState) -> None:
        """Answers from `state`."""
        self._state = state
        self._errors = ErrorLog()
        self._bodies = LargeBodies()

    async def answer(self, route: Route, request: Request) -> ASGIApp:
        """Returns the answer to a request of a route: a response, or what sends the answers to a stream of lines."""
        headers = _plain(request.scope["headers"])
        if route.streams and is_stream(headers.get("content-type", "")):
            stream = self._stream(request, headers, route)
            return lambda scope, receive, send: stream(send)
        return await self._respond(request, headers, route)

    async def _respond(self, request: Request, headers: Mapping[str, str], route: Route) -> Response:
        """Answers a request, in whose path a model may be named."""
        scope, registry = request.scope, self._state.registry
        scope[LABELS] = (route.task or UNKNOWN, UNKNOWN)
        path_params = scope["path_params"]
        named = registry.get(path_params["name"]) if path_params else None
        if named is not None:
            scope[LABELS] = (named.task, named.name)
        if scope["query_string"]:
            raise _no_query(request)
        raw = await read_raw(request, headers, self._state.max_body_bytes)
        limits, version = self._state.limits, path_params.get("version")
        incoming = Incoming(raw, headers, named, registry, limits, version, scope[REQUEST_ID])
        call = route.read(incoming) if len(raw) <= SMALL_BYTES else await self._bodies.read(route, incoming)
        model, body = call.model, call.body
        scope[LABELS] = (call.task, model.name)
        timeout_s = self._timeout_s(headers)
        if call.timeout_s is not None:
            timeout_s = self._checked(call.timeout_s)
        requests = body.requests(model.bundle.manifest)
        try:
            prediction = await unless_disconnected(
                model.predict(requests, timeout_s=timeout_s, task=call.task, spec=call.spec, trace=recorded_trace(scope)), request.receive
            )
        except BertServeError as error:
            error.name_input(many=body.is_list, subject=body.subject)
            raise
        scope[PREDICTION] = prediction
        return _response(model, await content_of(call, prediction), prediction)

    def _stream(self, request: Request, headers: Mapping[str, str], route: Route) -> LineStream:
        """Returns what answers a request of many lines; it counts as many requests, and not as one."""
        name = request.scope["path_params"].get("name")
        if name is not None:
            self._state.registry.get(name)
        if request.scope["query_string"]:
            raise _no_query(request)
        _check_encoding(headers)
        timeout_s = self._timeout_s(headers)

        def incoming(raw: bytes) -> Incoming[Model]:
            # the model is found for each line: it may be loaded again while the stream goes on
            named = None if name is None else self._state.registry.get(name)
            return Incoming(raw, headers, named, self._state.registry, self._state.limits, request_id=request.scope[REQUEST_ID])

        line = LineAnswerer(self._state, route, incoming, request.scope, self._errors, self._bodies, timeout_s=timeout_s)
        limits = self._state
        return LineStream(request.scope, request.receive, line.answer, max_jobs=limits.max_stream_jobs, max_bytes=limits.max_body_bytes)

    def _timeout_s(self, headers: Mapping[str, str]) -> float:
        given = headers.get(TIMEOUT_HEADER)
        if given is None:
            return self._state.timeout_ms / 1000
        if not (re.fullmatch("[0-9]{1,9}", given) and 1 <= int(given) <= self._state.max_timeout_ms):
            raise InvalidValueError(
                f"the header `{TIMEOUT_HEADER}` is `{given[:32]}`; it must be a whole number from 1 to {self._state.max_timeout_ms}."
            )
        return int(given) / 1000

    def _checked(self, timeout_s: float) -> float:
        """Returns a deadline that a body names."""
        if timeout_s * 1000 > self._state.max_timeout_ms:
            raise InvalidValueError(
                f"the timeout in the body is {timeout_s * 1000:.0f} ms, and {self._state.max_timeout_ms} ms are allowed; make it smaller."
            )
        return timeout_s


def _no_query(request: Request) -> InvalidValueError:
    """Returns the error of a query: what stands in it would silently do nothing."""
    name = next(iter(request.query_params), "")[:64]
    where = "name the model as `model` in the body, or by the path /models/NAME" if name == "model" else "put it into the body"
    return InvalidValueError(f"the address has the query parameter `{name}`, and this path takes none; {where}.")


def _response(model: Model, content: Content, prediction: Prediction) -> Response:
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
    if prediction.read:
        headers["x-windows"] = _windows(prediction.read)
    response = Response(
        content.data, headers={name: _escaped(value) for name, value in (headers | content.headers).items()}, media_type=content.media_type
    )
    for warning in dict.fromkeys(warnings):
        response.headers.append("x-hf-warning", _escaped(warning))  # a line each, as the official client reads them
    return response


def _windows(read: Sequence[ReadSpan]) -> str:
    """Returns what the model read of an input, such as `0-1843, 1310-2950`, with the name of the text where there are two."""
    spans = [f"{span.field}{'=' if span.field else ''}{span.start}-{span.end}" for span in read[:MAX_SPANS]]
    return ", ".join([*spans, "..."] if len(read) > MAX_SPANS else spans)


def _escaped(value: str) -> str:
    """Returns a header's value in printable ASCII, anything else as Python spells it: a vocabulary may have entries with newlines."""
    return value if value.isascii() and value.isprintable() else value.encode("unicode_escape").decode("ascii")


def _plain(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns headers by their names in lower case, the first one of each. Starlette's own are searched from the start at each look."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(headers))}


def _check_encoding(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ContentEncodingError(f"the body's content encoding is `{encoding[:32]}`; send it uncompressed.")
    if "content-length" not in headers:
        coding = headers.get("transfer-encoding", "chunked")
        if coding.lower() != "chunked":
            raise ContentEncodingError(
                f"the body's transfer encoding is `{coding[:32]}`; send it uncompressed, in chunks or with its length."
            )


async def read_raw(request: Request, headers: Mapping[str, str], limit: int) -> bytes:
    """Reads the body, giving up as soon as it is over the limit.

    Raises:
        ContentEncodingError: The body is compressed.
        TooLargeError: It is over the limit.
        ClientGoneError: The client hung up while sending.
    """
    _check_encoding(headers)
    declared = headers.get("content-length", "0")
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
