"""Errors as responses and as log lines.

A log line never contains a caller's text. It shows the template of the error; for an internal error, it shows the places in the traceback.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from bertserve.service.body.json_text import to_json
from bertserve.service.errors import BertServeError, status_and_type, traceback_places

logger = logging.getLogger("bertserve.errors")

LOG_INTERVAL_S = 1.0
# Maximum log lines per error type within the interval; further errors are only counted, so that a caller cannot fill the log. For
# refusals it is one, because a refused caller tries again. Faults of this service (status 500) are always logged.
MAX_LINES = 20
_REFUSALS = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
# Takes the status, the error type and the message of an error; returns the status and `error` of its response.
ErrorFormat = Callable[[int, str, str], tuple[int, Any]]


def error_text(status: int, error_type: str, message: str) -> tuple[int, str]:
    """Returns the status and the message: the service's own format."""
    return status, message


def error_response(error: Exception, request_id: str, error_format: ErrorFormat = error_text) -> Response:
    """Returns the response to a request that failed; the text of an error that is not a BertServeError stays internal."""
    status, error_type = status_and_type(error)
    message, headers = "internal error. This is a bug; the log of the service has the details under this request id.", {}
    if isinstance(error, BertServeError):
        message, headers = printable(error.message), {**error.headers}
    status, formatted = error_format(status, error_type, message)
    fields = {"error": formatted, "error_type": error_type, "request_id": request_id}
    return Response(to_json(fields), status_code=status, headers=headers, media_type="application/json")


def printable(message: str) -> str:
    """Returns a message on one line. A caller's text in it cannot act on a terminal: control and bidirectional characters are escaped."""
    if message.isprintable():
        return message
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in message)


class ErrorLog:
    """Logs errors of requests; it belongs to one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def write(self, error: Exception, request: Mapping[str, Any]) -> None:
        """Logs the error of a request, or only counts it if many errors of its type were logged within the last second.

        `request` gives the `request_id`, `method`, `path` and further fields of the log line.
        """
        status, error_type = status_and_type(error)
        if error_type not in self._counts:
            asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._release, status, error_type)
        self._counts[error_type] += 1
        if self._counts[error_type] > _max_lines(status):
            return
        fields = {**request, "status": status, "error_type": error_type}
        if isinstance(error, BertServeError):
            fields["reason"] = reason = printable(error.for_log)
        else:
            error_type, reason = type(error).__name__, traceback_places(error)
        is_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE
        where = f"{request['request_id']} {request['method']} {request['path']}"
        logger.log(logging.ERROR if is_fault else logging.WARNING, "%s %s %s: %s", status, error_type, where, reason, extra=fields)

    def _release(self, status: int, error_type: str) -> None:
        if (rest := self._counts.pop(error_type) - _max_lines(status)) > 0:
            fields = {"status": status, "error_type": error_type}
            logger.warning("%s %s: %d more within %.0f s", status, error_type, rest, LOG_INTERVAL_S, extra=fields)


def _max_lines(status: int) -> float:
    return math.inf if status == HTTPStatus.INTERNAL_SERVER_ERROR else 1 if status in _REFUSALS else MAX_LINES
