"""Application: the outermost ASGI application. It runs models itself; FastAPI serves all other routes.

FastAPI's telemetry, body limit, exit stacks and dependencies take two fifths of the event loop's time for a short text
(bench/results/2026-11-21-with-memory-arena.md).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bertserve.service.api import error_responses
from bertserve.service.api.call import JSON_LENGTH_HEADER
from bertserve.service.api.error_responses import ErrorFormat, ErrorLog
from bertserve.service.api.fastapi_app import create_fastapi
from bertserve.service.api.formats import openai
from bertserve.service.api.jsonl import LINES_TYPES, LineStream
from bertserve.service.api.receiving import LARGE_BYTES, read_body, take_turn, until_disconnect
from bertserve.service.api.request import REQUEST_KEY, TIMEOUT_HEADER, RequestContext
from bertserve.service.api.routing import InferenceRoute, RouteTable
from bertserve.service.app_state import AppState
from bertserve.service.errors import (
    BertServeError,
    CallerValue,
    HttpError,
    InvalidValueError,
    MalformedRequestError,
    RefusedError,
    UnavailableError,
)
from bertserve.service.metrics import UNKNOWN

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan

access_log = logging.getLogger("bertserve.access")

_TIMEOUT = TIMEOUT_HEADER.encode()
_ENCODING_HEADERS = {b"content-encoding", b"transfer-encoding"}
_SINGLE_HEADERS = {b"content-type", b"content-encoding", _TIMEOUT, JSON_LENGTH_HEADER}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_INTERNAL, _UNAUTHORIZED = HTTPStatus.INTERNAL_SERVER_ERROR.value, HTTPStatus.UNAUTHORIZED  # in Python 3.11, each look-up is a call
_EXPOSED = ("x-request-id", "x-model", "server-timing", "x-truncated", "x-windows", "x-hf-warning", "retry-after")


class Application:
    """Serves every request: sets its id, finds its route, turns errors into responses, counts and logs."""

    def __init__(self, state: AppState, *, sends_request_id: bool = True) -> None:
        """Creates the application; its inference threads run from startup to shutdown.

        Args:
            state: The models, metrics, settings, keys and limits.
            sends_request_id: Whether the application adds the header `x-request-id`; a server around it may add it instead.
        """
        self._state, self._sends_request_id = state, sends_request_id
        self._fastapi = create_fastapi(state)
        self._routes = RouteTable(self._fastapi.routes)
        self._errors = ErrorLog()
        self._turns = asyncio.Lock()
        self._ids = random.Random()  # noqa: S311 - ids only tell requests apart, they protect nothing
        self._open = 0  # requests to models without a complete response
        self._open_by_key: Counter[str | None] = Counter()  # the same by the name of the key
        self._app: ASGIApp = self._respond
        # outside of the check of keys, because a browser sends its preflight request without a key
        if origins := state.settings.cors_origin:
            exposed = (*_EXPOSED, JSON_LENGTH_HEADER.decode())
            self._app = CORSMiddleware(
                self._respond, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._fastapi(scope, receive, send)
            return
        request = scope[REQUEST_KEY] = self._begin(scope, send)
        try:
            await self._app(scope, receive, request.send)
        finally:
            self._record(request)
            del scope[REQUEST_KEY]  # it refers to the scope, which an idle connection keeps

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Responds to a request, in any case."""
        request: RequestContext = scope[REQUEST_KEY]
        try:
            request.check_path()
            route = self._routes.match(scope)
            request.key = self._state.auth.check(route.access, scope["headers"])
            if isinstance(route, InferenceRoute):
                await self._serve(route, request, receive, send)
            else:
                await self._fastapi(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - the process boundary of a request
            if isinstance(error, HttpError):
                request.key = error.values.get("key", request.key)  # a known key without the right
            self._errors.write(error, request.log_fields())
            if request.status == 0:
                await error_responses.response(error, request.id, _error_format(scope))(scope, receive, send)

    def refuse(self, error: BertServeError, is_counted: bool) -> Response:
        """Returns the response to what the server refuses before its end; counts and logs it if the application never sees the request."""
        request_id = f"{self._ids.getrandbits(128):032x}"
        if is_counted:
            self._state.metrics.http_requests_by_status(error.status).inc()
            self._errors.write(error, {"request_id": request_id, "method": "-", "path": "-"})
        response = error_responses.response(error, request_id)
        response.headers.update({"x-request-id": request_id, "connection": "close"})
        return response

    def _begin(self, scope: Scope, send: Send) -> RequestContext:
        # the configured path, or the path at which another application mounts this one
        root_path = self._state.settings.root_path or scope.get("root_path", "")
        scope["root_path"] = ""  # the router would remove it a second time
        if root_path and f"{scope['path']}/".startswith(f"{root_path}/"):
            scope["path"] = scope["path"][len(root_path) :] or "/"
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"")
        # not uuid4: it reads the system's entropy and releases the GIL, and with busy threads it takes long to get the GIL back
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else b"%032x" % self._ids.getrandbits(128)
        request = RequestContext(scope, send, headers, request_id.decode(), self._state)
        if self._sends_request_id:
            request.response_headers.append((b"x-request-id", request_id))
        tracer = self._state.tracer
        if tracer is not None and not self._routes.is_probe(scope):
            trace = request.trace = tracer.start_request_span(scope["headers"], request.start)
            # tells the caller its trace in a header that scripts of a page can read; `traceresponse` is only a draft
            request.response_headers.append((b"server-timing", b'traceparent;desc="%s"' % trace.traceparent.encode()))
        return request

    async def _serve(self, route: InferenceRoute, request: RequestContext, receive: Receive, send: Send) -> None:
        """Answers a request that runs models, if there is room for it."""
        state, scope = self._state, request.scope
        if self._open >= state.settings.max_concurrent:
            raise UnavailableError(
                "{count} requests are open, and --max-concurrent allows no more; send the request again later, or to another replica.",
                count=self._open,
            )
        max_per_key = state.settings.max_concurrent_per_key
        if max_per_key is not None and self._open_by_key[request.key] >= max_per_key:
            raise RefusedError(
                "the key `{key}` has {count} open requests, and --max-concurrent-per-key allows no more; wait for an answer before the "
                "next request.",
                key=request.key,
                count=max_per_key,
                reason="key",
                retry_after_s=1,
            )
        self._open += 1
        self._open_by_key[request.key] += 1
        try:
            content_type = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            is_stream = route.streams and content_type in LINES_TYPES
            if not is_stream:  # each line of a stream counts as a request
                request.task, request.model = route.task or UNKNOWN, UNKNOWN
            repeats_headers = len(request.headers) < len(scope["headers"])
            # most requests skip this call
            if repeats_headers or scope["query_string"] or not _ENCODING_HEADERS.isdisjoint(request.headers):
                _check_headers(request)
            timeout_header = request.headers.get(_TIMEOUT)
            timeout_s = state.settings.timeout_ms / 1000 if timeout_header is None else self._parse_timeout(timeout_header)
            model = request.named_model if scope["path_params"] else None
            if is_stream:
                await LineStream(route, request, timeout_s, self._errors, self._turns).respond(receive, send)
                return
            if model is not None:
                request.task, request.model = model.task, model.name
            raw = await read_body(receive, request.headers, limit=state.settings.max_body_bytes, timeout_s=state.settings.body_timeout_s)
            if len(raw) > LARGE_BYTES:
                await take_turn(self._turns)
            call = route.read_call(raw, request)
            del raw  # the body is not needed during inference
            request.task, request.model = call.task, call.model.name
            trace = request.trace if request.trace is not None and request.trace.is_recording else None
            prediction, body, tail = await until_disconnect(call.answer(self._turns, timeout_s, trace=trace), receive)
            request.prediction = prediction
            await send({"type": "http.response.start", "status": 200, "headers": call.headers(prediction, len(body), len(tail))})
            await send({"type": "http.response.body", "body": body + tail})
        finally:
            self._open -= 1
            self._open_by_key[request.key] -= 1

    def _parse_timeout(self, header: bytes) -> float:
        """Returns the seconds in the header with the deadline.

        Raises:
            InvalidValueError: It is not a number of milliseconds that is allowed.
        """
        if not (re.fullmatch(b"[0-9]{1,9}", header) and 1 <= int(header) <= self._state.settings.max_timeout_ms):
            raise InvalidValueError(
                "the header `{timeout_header}` is `{value}`; it must be a whole number from 1 to {max_timeout_ms}.",
                timeout_header=TIMEOUT_HEADER,
                value=CallerValue(header.decode("latin-1")),
                max_timeout_ms=self._state.settings.max_timeout_ms,
            )
        return int(header) / 1000

    def _record(self, request: RequestContext) -> None:
        """Counts and logs a request that has ended, and ends its trace."""
        end, status, metrics = time.perf_counter(), request.status or _INTERNAL, self._state.metrics
        seconds = end - request.start
        metrics.http_requests_by_status(status).inc()
        if request.task is not None and request.model is not None:
            metrics.requests_of(request.task, request.model, status).inc()
            if request.model != UNKNOWN:
                metrics.model(request.task, request.model).request_seconds.observe(seconds)
        if request.key is not None or status == _UNAUTHORIZED:
            metrics.requests_by_key(request.key or UNKNOWN, status).inc()
        settings = self._state.settings
        if settings.access_log and not self._routes.is_probe(request.scope):
            fields = _access_fields(request, status, seconds)
            line = "%s %s %s %s %.1f ms %s"
            access_log.info(line, fields["client"], fields["method"], fields["path"], status, seconds * 1000, request.id, extra=fields)
        if request.trace is not None:
            _end_trace(request.trace, end, request, status)


def _error_format(scope: Scope) -> ErrorFormat:
    """Returns the format of a request's errors: its route's or, if it has no route, that of the clients that would send its path."""
    if "route" in scope:
        return scope["route"].error_format
    return openai.error_object if scope["path"].startswith(openai.BASE_PATH) else error_responses.error_text


def _check_headers(request: RequestContext) -> None:
    """Checks the headers and the query of a request that runs models.

    Raises:
        MalformedRequestError: A header that may occur only once occurs twice.
        InvalidValueError: The URL has a query.
        HttpError: The body is compressed.
    """
    scope = request.scope
    names = [name for name, _ in scope["headers"]]
    for name in _SINGLE_HEADERS:
        if names.count(name) > 1:  # a proxy can have used the other one
            raise MalformedRequestError(
                "the request has the header `{name}` {count} times; send it once.", name=name.decode(), count=names.count(name)
            )
    if scope["query_string"]:
        raise InvalidValueError(
            "the URL has the query parameter `{name}`, but this path takes none; put it into the body.",
            name=CallerValue(next(iter(QueryParams(scope["query_string"])), "")),
        )
    for header, plain in ((b"content-encoding", b"identity"), (b"transfer-encoding", b"chunked")):
        if (encoding := request.headers.get(header, plain)).lower() != plain:
            raise HttpError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "the body's encoding is `{encoding}`; send it uncompressed.",
                encoding=CallerValue(encoding.decode("latin-1")),
            )


def _end_trace(trace: RequestSpan, end: float, request: RequestContext, status: int) -> None:
    """Ends a request's span, with its attributes."""
    fields, method, route = request.log_fields(), request.scope["method"], request.route
    attributes = {
        "http.request.method": method,
        "http.response.status_code": status,
        "http.route": route,
        "url.scheme": request.scope["scheme"],
        "url.path": fields["path"],
        "client.address": fields["client"],
        "error.type": str(status) if status >= _INTERNAL else None,
        "bertserve.queue_ms": None if request.prediction is None else request.prediction.queue_s * 1000,
        **{f"bertserve.{name}": fields[name] for name in ("request_id", "task", "model")},
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    name = method if route is None else f"{method} {route}"
    trace.end(end, name=name, attributes=known, failed=status >= _INTERNAL)


def _access_fields(request: RequestContext, status: int, seconds: float) -> dict[str, Any]:
    """Returns the fields of the access log line of a request."""
    names = () if request.prediction is None else ("tokenize_s", "queue_s", "inference_s", "decode_s")
    return {
        **request.log_fields(),
        "status": status,
        "ms": round(seconds * 1000, 2),
        "key": request.key,
        **{f"{name.removesuffix('_s')}_ms": round(getattr(request.prediction, name) * 1000, 3) for name in names},
    }
