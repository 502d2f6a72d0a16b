"""ErrorLog: a line for each request that failed, and for refusals, which come in thousands, one a second with their number.

No text of a caller reaches a log: an error is logged by its sentence without the values in it, an internal one with the places
that it went through.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

from service.errors import BertServeError
from service.http import errors
from service.http.sentence import sentence_of

logger = logging.getLogger("bertserve.errors")

INTERVAL_S = 1.0
_REFUSALS = frozenset({"overloaded", "unavailable"})
_SERVER_ERROR = 500


class ErrorLog:
    """Logs errors of requests; used from one event loop."""

    def __init__(self) -> None:
        self._held: Counter[tuple[int, str]] = Counter()

    def write(self, error: Exception, request: Mapping[str, Any]) -> None:
        """Logs the error of a request, or counts it where one of its kind was logged less than a second ago.

        Args:
            error: What was raised.
            request: `request_id`, `method` and `path`, and what else the line says of the request.
        """
        kind = errors.classify(error)
        if kind[1] not in _REFUSALS:
            self._log(error, kind, request)
        elif kind in self._held:
            self._held[kind] += 1
        else:
            self._held[kind] = 0
            self._log(error, kind, request)
            asyncio.get_running_loop().call_later(INTERVAL_S, self._release, kind)

    def _release(self, kind: tuple[int, str]) -> None:
        if more := self._held.pop(kind):
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
            reason = sentence_of(error) if isinstance(error, BertServeError) else type(error).__name__
            logger.log(level, "%s %s %s: %s", status, error_type, where, reason, extra={**extra, "reason": reason})
