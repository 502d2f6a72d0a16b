"""What a span says of a request: the names of OpenTelemetry's HTTP conventions, and our own behind `bertserve.`. Nothing that a caller made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Scope

if TYPE_CHECKING:
    from bertserve.service.tracing.tracer import Attributes

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"})
_SERVER_ERROR = 500


def method(scope: Scope) -> str:
    """Returns the method, `_OTHER` for one that HTTP does not know."""
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def asked(scope: Scope) -> Attributes:
    """Returns the attributes of a request that nobody has looked at yet."""
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": method(scope),
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        host, port = scope["server"]
        attributes |= {"server.address": host} | ({} if port is None else {"server.port": port})
    return attributes


def answered(status: int, request: dict[str, str | None]) -> Attributes:
    """Returns the attributes of a request that has its answer.

    Args:
        status: Of the answer.
        request: What the log says of it: `request_id`, `path`, `route`, `client`, `task` and `model`.
    """
    names = {
        "request_id": "bertserve.request_id",
        "path": "url.path",
        "route": "http.route",
        "client": "client.address",
        "task": "bertserve.task",
        "model": "bertserve.model",
    }
    attributes: dict[str, str | int | float | bool] = {
        name: value for field, name in names.items() if (value := request.get(field)) is not None
    }
    attributes["http.response.status_code"] = status
    return attributes | ({"error.type": str(status)} if status >= _SERVER_ERROR else {})
