"""Endpoint: the outermost ASGI application. It runs models itself; FastAPI answers all other requests.

FastAPI's telemetry, body limit, exit stacks and dependencies take two fifths of the event loop's time for a short text
(bench/results/2026-11-21-with-memory-arena.md).
"""

from __future__ import annotations

import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import QueryParams
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from bertserve.service.api import errors
from bertserve.service.api.auth import METRICS, PROBES, Authenticator
from bertserve.service.api.call import Content, Incoming
from bertserve.service.api.errors import ErrorLog
from bertserve.service.api.jsonl import MEDIA_TYPES, LineStream
from bertserve.service.api.request import REQUEST, TIMEOUT_HEADER, Request, check_encoding, read_body, until_disconnect
from bertserve.service.api.responses import answer_headers
from bertserve.service.api.routes import InferenceRoute, Route
from bertserve.service.api_keys import Access
from bertserve.service.errors import (
    INTERNAL,
    BertServeError,
    InvalidValueError,
    MalformedRequestError,
    RefusedError,
    Sent,
    UnavailableError,
)
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.build import AppState
from bertserve.service.tasks.json_text import to_json

if TYPE_CHECKING:
    from bertserve.service.tracing.trace import Trace

access_log = logging.getLogger("bertserve.access")

_TIMEOUT = TIMEOUT_HEADER.encode()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_INTERNAL, _ = INTERNAL
_UNAUTHORIZED = 401
_UNTRACED = PROBES | {METRICS}
# field of a log line -> attribute of a span
_ATTRIBUTES = {
    "request_id": "bertserve.request_id",
    "path": "url.path",
    "client": "client.address",
    "task": "bertserve.task",
    "model": "bertserve.model",
}


class Endpoint:
    """Serves every request: sets its id, finds its route, turns errors into answers, counts and logs."""

    def __init__(
        self,
        state: AppState,
        fastapi: FastAPI,
        *,
        auth: Authenticator,
        log_access: bool = False,
        log_probes: bool = False,
        root_path: str = "",
        sends_request_id: bool = True,
    ) -> None:
        """Takes the routes that run models from `fastapi`, which answers all other requests.

        Args:
            state: The models, metrics and limits.
            fastapi: The application with all routes.
            auth: Checks callers.
            log_access: Whether to log a line for each request that is not a probe or a scrape.
            log_probes: Whether to log probes and scrapes too.
            root_path: Path prefix that a proxy may have kept.
            sends_request_id: Whether it adds the header `x-request-id`; a server around the application may add it instead.
        """
        self._state, self._fastapi, self._auth = state, fastapi, auth
        self._log_access, self._log_probes = log_access, log_probes
        self._root_path = root_path
        self._sends_request_id = sends_request_id
        routes = [route for route in fastapi.routes if isinstance(route, InferenceRoute)]
        # a fixed path has precedence over one with a name
        self._fixed = {route.path: route for route in routes if "{" not in route.path}
        self._named = [route for route in routes if "{" in route.path]
        self._errors = ErrorLog()
        self._ids = random.Random()  # noqa: S311 - ids only tell requests apart, they protect nothing
        self._open = 0  # requests to models without a complete answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._fastapi(scope, receive, send)
            return
        request = scope[REQUEST] = self._begin(scope, send)
        refused: str | None = None
        try:
            request.check_path()
            if (route := self._match(scope)) is None:
                await self._fastapi(scope, receive, request.send)
            else:
                await self._serve(route, request, receive)
        except Exception as error:  # noqa: BLE001 - the process boundary of a request
            self._errors.write(error, request.log_fields())
            refused = error.key if isinstance(error, RefusedError) else None
            if request.status == 0:
                await errors.response(error, request.id, scope["path"])(scope, receive, request.send)
        finally:
            self._record(request, refused if request.caller is None else request.caller.name)
            del scope[REQUEST]  # it refers to the scope, which an idle connection keeps

    def _begin(self, scope: Scope, send: Send) -> Request:
        root_path = self._root_path or scope.get("root_path", "")  # the configured one, or that of a server that mounts the application
        scope["root_path"] = ""  # otherwise the router would remove it a second time
        if root_path and f"{scope['path']}/".startswith(f"{root_path}/"):
            scope["path"] = scope["path"][len(root_path) :] or "/"
        headers = dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"")
        # not uuid4: it reads the system's entropy and releases the GIL, and with busy threads it takes long to get the GIL back
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else b"%032x" % self._ids.getrandbits(128)
        request = Request(scope, send, headers, request_id, auth=self._auth, error_log=self._errors)
        if self._sends_request_id:
            request.own_headers.append((b"x-request-id", request_id))
        tracer = self._state.tracer
        if tracer is not None and scope["path"] not in _UNTRACED:
            trace = request.trace = tracer.begin(request.method, scope["headers"], _attributes(request), request.start)
            request.recorded_trace = trace if trace.recorded else None
            # tells the caller its trace in a header that scripts of a page can read; `traceresponse` is only a draft
            request.own_headers.append((b"server-timing", b'traceparent;desc="%s"' % trace.traceparent.encode()))
        return request

    def _match(self, scope: Scope) -> InferenceRoute | None:
        """Returns the route of a request that runs models, and sets `route` and `path_params` as FastAPI's router does."""
        if scope["method"] != "POST":
            return None
        if (fixed := self._fixed.get(scope["path"])) is not None:
            scope["route"], scope["path_params"] = fixed, {}
            return fixed
        for route in self._named:
            match, parameters = route.matches(scope)
            if match is Match.FULL:
                scope.update(parameters)
                return route
        return None

    async def _serve(self, route: InferenceRoute, request: Request, receive: Receive) -> None:
        """Answers a request that runs models, if there is room for it and its caller may use it."""
        if self._open >= self._state.max_concurrent:
            raise UnavailableError(
                "{count} requests are open, and --max-concurrent allows no more; send it again, or to another replica.", count=self._open
            )
        request.caller = self._auth.enter(route.access, request.scope["headers"])
        self._open += 1
        try:
            if sum(name == b"content-type" for name, _ in request.scope["headers"]) > 1:  # a proxy may have read the other one
                raise MalformedRequestError("the request has several `Content-Type` headers; send one.")
            content_type = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            is_stream = route.wire.streams and content_type in MEDIA_TYPES
            if not is_stream:  # otherwise each line counts as a request
                request.task, request.model = route.wire.task or UNKNOWN, UNKNOWN
            if request.scope["query_string"]:
                raise _no_query(request.scope)
            check_encoding(request.headers)
            value = request.headers.get(_TIMEOUT)
            timeout_s = self._state.timeout_ms / 1000 if value is None else self._timeout_s(value)
            name = request.scope["path_params"].get("name")
            if is_stream:
                await LineStream(self._state, route.wire, request, name=name, timeout_s=timeout_s).answer(receive)
            else:
                await self._predict(route.wire, request, receive, name, timeout_s)
        finally:
            self._open -= 1
            if request.caller is not None:
                self._auth.leave(request.caller)

    async def _predict(self, route: Route, request: Request, receive: Receive, name: str | None, timeout_s: float) -> None:
        """Reads a request, runs its model and sends the answer; `name` is the model in the path, or None."""
        state = self._state
        named = None
        if name is not None:
            named = state.registry.get(name)
            request.task, request.model = named.task, named.name
        raw = await read_body(receive, request.headers, limit=state.max_body_bytes, timeout_s=state.body_timeout_s)
        call = route.read(Incoming(raw, request.headers, named, state.registry, state.limits, request.id))
        del raw  # the body is not needed during inference
        request.task, request.model = call.task, call.model.name
        try:
            prediction = await until_disconnect(
                call.model.predict(
                    call.body.requests(call.model.bundle.manifest),
                    timeout_s=timeout_s if call.timeout_s is None else self._checked(call.timeout_s),
                    task=call.task,
                    trace=request.recorded_trace,
                ),
                receive,
            )
        except BertServeError as error:
            error.name_input(many=call.body.is_list, subject=call.body.subject)
            raise
        request.prediction = prediction
        answer = call.answer(prediction)
        content = answer if isinstance(answer, Content) else Content(to_json(answer), "application/json", {})
        await request.answer(answer_headers(call, content, prediction), content.body)

    def _timeout_s(self, value: bytes) -> float:
        """Returns the seconds of the header with the deadline, after a check."""
        if not (re.fullmatch(b"[0-9]{1,9}", value) and 1 <= int(value) <= self._state.max_timeout_ms):
            raise InvalidValueError(
                "the header `{timeout_header}` is `{value}`; it must be a whole number from 1 to {max_timeout_ms}.",
                timeout_header=TIMEOUT_HEADER,
                value=Sent(value.decode("latin-1")),
                max_timeout_ms=self._state.max_timeout_ms,
            )
        return int(value) / 1000

    def _checked(self, timeout_s: float) -> float:
        """Returns the deadline from a body, after a check of its range."""
        if timeout_s * 1000 > self._state.max_timeout_ms:
            raise InvalidValueError(
                "the timeout in the body is {timeout_s:.0f} ms, and {max_timeout_ms} ms are allowed; make it smaller.",
                timeout_s=Sent(timeout_s * 1000),
                max_timeout_ms=self._state.max_timeout_ms,
            )
        return timeout_s

    def _record(self, request: Request, key: str | None) -> None:
        """Counts and logs a request that has ended, and ends its trace; `key` is the name of the caller's key."""
        end, status, metrics = time.perf_counter(), request.status or _INTERNAL, self._state.metrics
        seconds = end - request.start
        metrics.answers(status).inc()
        if request.task is not None and request.model is not None:
            metrics.requests_of(request.task, request.model, status).inc()
            if request.model != UNKNOWN:
                metrics.model(request.task, request.model).request_seconds.observe(seconds)
        if key is not None or status == _UNAUTHORIZED:
            metrics.requests_by_key(key or UNKNOWN, status).inc()
        if self._log_access and (self._log_probes or not _is_probe(request)):
            fields = _access_fields(request, status, seconds, key)
            line = "%s %s %s %s %.1f ms %s"
            method = request.scope["method"]
            access_log.info(line, fields["client"], method, fields["path"], status, seconds * 1000, request.id, extra=fields)
        if request.trace is not None:
            _end(request.trace, end, request, status)


def _no_query(scope: Scope) -> InvalidValueError:
    """Returns the error for a query string, which would otherwise have no effect."""
    name = next(iter(QueryParams(scope["query_string"])), "")
    where = "set `model` in the body, or use the path /models/NAME" if name == "model" else "put it into the body"
    return InvalidValueError("the URL has the query parameter `{name}`, but this path takes none; {where}.", name=Sent(name), where=where)


def _attributes(request: Request) -> dict[str, str | int | float | bool]:
    """Returns the attributes of a span that are known when a request arrives; the sampler may use them."""
    scope = request.scope
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": request.method,
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        host, port = scope["server"]
        attributes |= {"server.address": host} | ({} if port is None else {"server.port": port})
    return attributes


def _end(trace: Trace, end: float, request: Request, status: int) -> None:
    """Ends a request's span, with the attributes that are known by then."""
    fields, route = request.log_fields(), request.route
    attributes: dict[str, str | int | float | bool] = {
        attribute: value for field, attribute in _ATTRIBUTES.items() if (value := fields[field]) is not None
    }
    attributes["http.response.status_code"] = status
    if route is not None:
        attributes["http.route"] = route
    if status >= _INTERNAL:
        attributes["error.type"] = str(status)
    name = request.method if route is None else f"{request.method} {route}"
    trace.tracer.end(trace, end, name=name, attributes=attributes, failed=status >= _INTERNAL)


def _is_probe(request: Request) -> bool:
    """Returns whether a request is a probe or a scrape of the metrics."""
    return getattr(request.scope.get("route"), "access", None) in (Access.PROBE, Access.METRICS)


def _access_fields(request: Request, status: int, seconds: float, key: str | None) -> dict[str, Any]:
    """Returns the fields of the access log line of a request."""
    names = () if request.prediction is None else ("tokenize_s", "queue_s", "inference_s", "decode_s")
    return {
        **request.log_fields(),
        "status": status,
        "ms": round(seconds * 1000, 2),
        "key": key,
        **{f"{name.removesuffix('_s')}_ms": round(getattr(request.prediction, name) * 1000, 3) for name in names},
    }
