"""RequestMiddleware: the only ASGI middleware. It sets request ids, checks paths, turns errors into answers, counts and logs."""

from __future__ import annotations

import ipaddress
import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bertserve.service.api import errors
from bertserve.service.api.auth import AUTH, CALLER, METRICS, PROBES, Authenticator, Caller
from bertserve.service.api.errors import ErrorLog
from bertserve.service.api_keys import Access
from bertserve.service.errors import INTERNAL, MalformedRequestError, RefusedError, Sent
from bertserve.service.metrics import UNKNOWN, Metrics

if TYPE_CHECKING:
    from bertserve.service.models.work import Prediction
    from bertserve.service.tracing.trace import Trace
    from bertserve.service.tracing.tracer import Attributes, Tracer


access_log = logging.getLogger("bertserve.access")

LABELS = "bertserve.labels"  # scope key: task and model of the request, for metrics and log; inference routes set it
PREDICTION = "bertserve.prediction"  # scope key: the prediction of the model
REQUEST_ID = "bertserve.request_id"
ERROR_LOG = "bertserve.error_log"  # scope key: the ErrorLog of the application
HEADERS = "bertserve.headers"  # scope key: the request's headers by name in lower case; the last one of several with the same name
TRACE = "bertserve.trace"  # scope key: the request's trace, if it has one
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_INTERNAL, _ = INTERNAL
_UNAUTHORIZED = 401
_UNTRACED = PROBES | {METRICS}
# control characters, invalid UTF-8, and the segments `.` and `..`: a proxy may interpret such a path in another way
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]|/\.\.?(?:/|\Z)")
_ENCODED_SLASH = re.compile(rb"%(?:2f|5c)", re.IGNORECASE)


class RequestMiddleware:
    """Wraps the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        auth: Authenticator,
        log_access: bool,
        log_probes: bool = False,
        root_path: str = "",
        tracer: Tracer | None = None,
        sends_request_id: bool = True,
    ) -> None:
        """Wraps an application.

        Args:
            app: The application.
            metrics: Counts requests.
            auth: Routes use it to check their callers.
            log_access: Whether to log a line for each request that is not a probe or a scrape.
            log_probes: Whether to log probes and scrapes too.
            root_path: Path prefix that a proxy may have kept.
            tracer: Gets a span for each request except probes and scrapes.
            sends_request_id: Whether it adds the header `x-request-id`; a server around the application may add it instead.
        """
        self._app = app
        self._metrics = metrics
        self._auth = auth
        self._log_access = log_access
        self._log_probes = log_probes
        self._root_path = root_path
        self._tracer = tracer
        self._sends_request_id = sends_request_id
        self._errors = ErrorLog()
        self._ids = random.Random()  # noqa: S311 - ids only tell requests apart, they protect nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        root_path = self._root_path or scope.get("root_path", "")  # the configured one, or that of a server that mounts the application
        scope["root_path"] = ""  # otherwise the router would remove it a second time
        if root_path and f"{scope['path']}/".startswith(f"{root_path}/"):
            scope["path"] = scope["path"][len(root_path) :] or "/"
        scope[AUTH], scope[ERROR_LOG] = self._auth, self._errors
        headers = scope[HEADERS] = dict(scope["headers"])
        client_request_id = headers.get(b"x-request-id", b"")
        # not uuid4: it reads the system's entropy and releases the GIL, and with busy threads it takes long to get the GIL back
        request_id = client_request_id if _REQUEST_ID.fullmatch(client_request_id) else b"%032x" % self._ids.getrandbits(128)
        scope[REQUEST_ID] = request_id.decode()
        own_headers = [(b"x-request-id", request_id)] if self._sends_request_id else []
        trace = None
        if self._tracer is not None and scope["path"] not in _UNTRACED:
            trace = scope[TRACE] = self._tracer.begin(_method(scope), scope["headers"], _attributes_of_request(scope), start)
            # tells the caller its trace in a header that scripts of a page can read; `traceresponse` is only a draft
            own_headers.append((b"server-timing", b'traceparent;desc="%s"' % trace.traceparent.encode()))
        status = 0
        refused: str | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *own_headers]
                await send(message)
                status = message["status"]  # only now, because the server may refuse to send these headers
                return
            await send(message)

        try:
            _check_path(scope)
            await self._app(scope, receive, send_with_id)
        except Exception as raised:  # noqa: BLE001 - the process boundary of a request
            error = scope.get(errors.REFUSAL, raised)
            self._errors.write(error, of_request(scope))
            refused = error.key if isinstance(error, RefusedError) else None
            if status == 0:
                await errors.response(error, scope[REQUEST_ID], scope["path"])(scope, receive, send_with_id)
            del error  # its traceback refers to this frame, so the name would keep the body in memory until a garbage collection
        finally:
            end = time.perf_counter()
            caller: Caller | None = scope.get(CALLER)
            self._record(scope, status or _INTERNAL, end - start, refused if caller is None else caller.name)
            if trace is not None:
                _end(trace, end, scope, status or _INTERNAL)
            scope.pop(PREDICTION, None)  # an idle connection keeps the scope of its last request

    def _record(self, scope: Scope, status: int, seconds: float, key: str | None) -> None:
        self._metrics.answers(status).inc()
        task, model = scope.get(LABELS, (None, None))
        if task is not None:
            self._metrics.requests_of(task, model, status).inc()
            if model != UNKNOWN:
                self._metrics.model(task, model).request_seconds.observe(seconds)
        if key is not None or status == _UNAUTHORIZED:
            self._metrics.requests_by_key(key or UNKNOWN, status).inc()
        if self._log_access and (self._log_probes or not _is_probe(scope)):
            fields = _fields(scope, status, seconds, key)
            line = "%s %s %s %s %.1f ms %s"
            access_log.info(
                line, fields["client"], scope["method"], fields["path"], status, seconds * 1000, scope[REQUEST_ID], extra=fields
            )


def _check_path(scope: Scope) -> None:
    """Refuses a path that a proxy may have interpreted in another way.

    Raises:
        MalformedRequestError: The path has a control character, an encoded slash or backslash, a dot segment, or invalid UTF-8.
    """
    raw = scope.get("raw_path") or b""
    if _AMBIGUOUS.search(scope["path"]) is not None or (b"%" in raw and _ENCODED_SLASH.search(raw) is not None):
        raise MalformedRequestError(
            "the path `{path}` has a control character, an encoded slash, a dot segment or bytes that are not UTF-8; send "
            "the plain path, see /docs.",
            path=Sent(scope["path"]),
        )


def recorded_trace(scope: Scope) -> Trace | None:
    """Returns the trace of a request, if it is recorded."""
    trace: Trace | None = scope.get(TRACE)
    return trace if trace is not None and trace.recorded else None


# field of a log line -> attribute of a span
_ATTRIBUTES = {
    "request_id": "bertserve.request_id",
    "path": "url.path",
    "client": "client.address",
    "task": "bertserve.task",
    "model": "bertserve.model",
}


def _end(trace: Trace, end: float, scope: Scope, status: int) -> None:
    """Ends a request's span, with the attributes that are known by then."""
    fields, route = of_request(scope), _route(scope)
    attributes: dict[str, str | int | float | bool] = {
        attribute: value for field, attribute in _ATTRIBUTES.items() if (value := fields[field]) is not None
    }
    attributes["http.response.status_code"] = status
    if route is not None:
        attributes["http.route"] = route
    if status >= _INTERNAL:
        attributes["error.type"] = str(status)
    name = _method(scope) if route is None else f"{_method(scope)} {route}"
    trace.tracer.end(trace, end, name=name, attributes=attributes, failed=status >= _INTERNAL)


def of_request(scope: Scope) -> dict[str, Any]:
    """Returns the fields of every log line about a request. Its path is the path of a route, never the caller's text."""
    task, model = scope.get(LABELS, (None, None))
    route = _route(scope)
    # the name of a loaded model is known, but the version in a path may be unchecked
    is_path_known = model not in (None, UNKNOWN) and "{version}" not in (route or "")
    return {
        "request_id": scope[REQUEST_ID],
        "method": scope["method"],
        "path": scope["path"] if is_path_known else route or UNKNOWN,
        "client": _address(scope),
        "task": task,
        "model": model,
        **({"trace_id": scope[TRACE].trace_id, "span_id": scope[TRACE].span_id} if TRACE in scope else {}),
    }


def _is_probe(scope: Scope) -> bool:
    """Returns whether a request is a probe or a scrape of the metrics."""
    return getattr(scope.get("route"), "access", None) in (Access.PROBE, Access.METRICS)


def _route(scope: Scope) -> str | None:
    """Returns the path of the matched route, with `{name}` for a model's name; None if no route matched."""
    return getattr(scope.get("route"), "path", None)


def _address(scope: Scope) -> str | None:
    """Returns the caller's address; None if a proxy's header has another text, which may be anything."""
    address, _ = scope.get("client") or ("", 0)
    if "%" in address:  # the zone of an IPv6 address may be any text
        return None
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return None


def _fields(scope: Scope, status: int, seconds: float, key: str | None) -> dict[str, Any]:
    """Returns the fields of the access log line of a request."""
    prediction: Prediction | None = scope.get(PREDICTION)
    names = () if prediction is None else ("tokenize_s", "queue_s", "inference_s", "decode_s")
    return {
        **of_request(scope),
        "status": status,
        "ms": round(seconds * 1000, 2),
        "key": key,
        **{f"{name.removesuffix('_s')}_ms": round(getattr(prediction, name) * 1000, 3) for name in names},
    }


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})


def _method(scope: Scope) -> str:
    """Returns the method, or `_OTHER` if HTTP does not define it."""
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def _attributes_of_request(scope: Scope) -> Attributes:
    """Returns the attributes that are known when a request arrives."""
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": _method(scope),
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        host, port = scope["server"]
        attributes |= {"server.address": host} | ({} if port is None else {"server.port": port})
    return attributes
