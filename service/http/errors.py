"""One table, exception class to status and type, and one JSON shape for every error that reaches the application."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response

from bertserve.service import errors

# The first class in an exception's ancestry that stands here decides; a test holds the table complete.
TABLE: dict[type[errors.BertServeError], tuple[int, str]] = {
    errors.MalformedRequestError: (400, "malformed"),
    errors.UnauthorizedError: (401, "unauthorized"),
    errors.ForbiddenError: (403, "forbidden"),
    errors.NotFoundError: (404, "not_found"),
    errors.MethodNotAllowedError: (405, "method_not_allowed"),
    errors.SlowRequestError: (408, "too_slow"),
    errors.TooLargeError: (413, "too_large"),
    errors.ContentEncodingError: (415, "content_encoding"),
    errors.InvalidValueError: (422, "invalid_value"),
    errors.HeadTooLargeError: (431, "head_too_large"),
    errors.ClientGoneError: (499, "client_gone"),
    errors.RefusedError: (429, "overloaded"),
    errors.ExpiredError: (504, "expired"),
    errors.UnavailableError: (503, "unavailable"),
    errors.PartialChangeError: (500, "partial_change"),
    errors.EngineError: (500, "engine"),
}
INTERNAL = (500, "internal")
_OPENAI = "/v1/"  # below it are paths of OpenAI's API, whose clients read errors of that shape
_PREDICT = ":predict"  # but for these, which are KServe's
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_INVALID, _INVALID_IN_OPENAI = 422, 400  # what is a BadRequestError to its clients
_SERVER_ERROR = 500
REFUSAL = "bertserve.refusal"  # scope key: the error with which the protocol has answered a request whose body did not come to its end


def classify(error: Exception) -> tuple[int, str]:
    """Returns the status and the error type of an exception."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def has_openai_shape(path: str) -> bool:
    """Returns whether the errors of a path have the shape of OpenAI's API."""
    return path.startswith(_OPENAI) and not path.endswith(_PREDICT)


def response(error: Exception, request_id: str, path: str = "") -> Response:
    """Returns the answer to a request that failed.

    Args:
        error: Why it failed. The text of anything but a BertServeError stays inside.
        request_id: The request's id.
        path: The request's path, where it is known; the shape of the answer goes by it.
    """
    status, error_type = classify(error)
    message = "the service failed in a way it should not; the log has the details under this request id. This is a bug."
    if isinstance(error, errors.BertServeError):
        message = printable(error.message)
    fields: dict[str, Any] = {"error": message, "error_type": error_type, "request_id": request_id}
    if has_openai_shape(path):
        status = _INVALID_IN_OPENAI if status == _INVALID else status
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < _SERVER_ERROR else "server_error")
        fields["error"] = {"message": message, "type": kind, "param": None, "code": error_type}
    body = json.dumps(fields, ensure_ascii=False)
    headers = {}
    if isinstance(error, errors.RefusedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.UnavailableError):
        headers["Retry-After"] = "1"  # another instance may answer at once
    if isinstance(error, errors.MethodNotAllowedError):
        headers["Allow"] = error.allowed
    if isinstance(error, errors.UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def printable(message: str) -> str:
    """Returns a message on one line: what a caller sent may stand in it, and no control or bidirectional character of it may act on a terminal."""
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in message)
