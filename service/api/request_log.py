"""The metrics, the access log line and the span of a request that has ended."""

import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from bertserve.service.api.request import RequestContext
from bertserve.service.metrics import UNKNOWN

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan

access_log = logging.getLogger("bertserve.access")

_INTERNAL, _UNAUTHORIZED = HTTPStatus.INTERNAL_SERVER_ERROR.value, HTTPStatus.UNAUTHORIZED  # in Python 3.11, each look-up is a call


def record(request: RequestContext, *, logs: bool) -> None:
    """Counts a request that has ended, logs it if `logs` is true, and ends its trace."""
    end = time.perf_counter()
    seconds = end - request.start
    status = request.status or _INTERNAL
    metrics = request.state.metrics
    metrics.http_requests_by_status(status).inc()
    if request.task is not None and request.model is not None:
        metrics.record_request(request.task, request.model, status, seconds)
    if request.key is not None or status == _UNAUTHORIZED:
        metrics.requests_by_key(request.key or UNKNOWN, status).inc()
    if logs:
        fields = _access_fields(request, status, seconds)
        line = "%s %s %s %s %.1f ms %s"
        access_log.info(line, fields["client"], fields["method"], fields["path"], status, seconds * 1000, request.id, extra=fields)
    if request.trace is not None:
        _end_trace(request.trace, end, request, status)


def _end_trace(trace: "RequestSpan", end: float, request: RequestContext, status: int) -> None:
    """Ends a request's span, with its attributes."""
    fields, method, route = request.log_fields(), request.scope["method"], request.route_path
    host, port = request.scope.get("server") or (None, None)
    attributes = {
        "http.request.method": method,
        "http.response.status_code": status,
        "http.route": route,
        "url.scheme": request.scope["scheme"],
        "url.path": fields["path"],
        "network.protocol.version": request.scope.get("http_version"),
        "server.address": host,
        "server.port": port,
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
