"""ErrorLog: a line for each request that failed. Of refusals, and of many errors of callers, the first within a second and their number.

No text of a caller reaches a log: an error is logged by its template, an internal one with the places that it went through.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

from bertserve.service.errors import BertServeError
from bertserve.service.http import errors

logger = logging.getLogger("bertserve.errors")

INTERVAL_S = 1.0
# Lines of one kind of error within that time, beyond which they are counted: a caller must not fill the log.
MAX_REFUSALS, MAX_CALLER_ERRORS = 1, 20
_REFUSALS = frozenset({"overloaded", "unavailable"})
_SERVER_ERROR = 500


def _most_lines(kind: tuple[int, str]) -> int | None:
    """Returns how many lines of a kind of error are logged within a second; None for what the service itself fails at."""
    if kind[1] in _REFUSALS:
        return MAX_REFUSALS
    return MAX_CALLER_ERRORS if kind[0] < _SERVER_ERROR else None


class ErrorLog:
    """Logs errors of requests; used from one event loop."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[int, str]] = Counter()

    def write(self, error: Exception, request: Mapping[str, Any]) -> None:
        """Logs the error of a request, or counts it where many of its kind were logged within the last second.

        Args:
            error: What was raised.
            request: `request_id`, `method` and `path`, and what else the line says of the request.
        """
        kind = errors.classify(error)
        most = _most_lines(kind)
        if most is None:
            self._log(error, kind, request)
            return
        if kind not in self._seen:
            asyncio.get_running_loop().call_later(INTERVAL_S, self._release, kind)
        self._seen[kind] += 1
        if self._seen[kind] <= most:
            self._log(error, kind, request)

    def _release(self, kind: tuple[int, str]) -> None:
        more = self._seen.pop(kind) - (_most_lines(kind) or 0)
        if more > 0:
            logger.warning("%s %s: %d more within %.0f s", *kind, more, INTERVAL_S, extra={"status": kind[0], "error_type": kind[1]})

    def _log(self, error: Exception, kind: tuple[int, str], request: Mapping[str, Any]) -> None:
        status, error_type = kind
        extra = {**request, "status": status, "error_type": error_type}
        where = f"{request['request_id']} {request['method']} {request['path']}"
        if kind == errors.INTERNAL:
            places = " < ".join(
                f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
                for frame in traceback.extract_tb(error.__traceback__)[::-1]
            )
            logger.error("%s %s %s: %s", status, type(error).__name__, where, places, extra=extra)
        else:
            level = logging.ERROR if status >= _SERVER_ERROR and error_type not in _REFUSALS else logging.WARNING
            reason = errors.printable(error.for_log) if isinstance(error, BertServeError) else type(error).__name__
            logger.log(level, "%s %s %s: %s", status, error_type, where, reason, extra={**extra, "reason": reason})
