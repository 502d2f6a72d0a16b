"""ErrorLog: a line for each request that failed, and for refusals, which come in thousands, one a second with their number.

No text of a caller reaches a log: an error is logged by its kind, an internal one with the places that it went through.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter

from service.http import errors

logger = logging.getLogger("bertserve.errors")

INTERVAL_S = 1.0
_REFUSALS = frozenset({"overloaded", "unavailable"})
_SERVER_ERROR = 500


class ErrorLog:
    """Logs errors of requests; used from one event loop."""

    def __init__(self) -> None:
        self._held: Counter[tuple[int, str]] = Counter()

    def write(self, error: Exception, request_id: str) -> None:
        """Logs the error of a request, or counts it where one of its kind was logged less than a second ago."""
        kind = errors.classify(error)
        if kind[1] not in _REFUSALS:
            self._log(error, kind, request_id)
        elif kind in self._held:
            self._held[kind] += 1
        else:
            self._held[kind] = 0
            self._log(error, kind, request_id)
            asyncio.get_running_loop().call_later(INTERVAL_S, self._release, kind)

    def _release(self, kind: tuple[int, str]) -> None:
        if more := self._held.pop(kind):
            logger.warning("%s %s: %d more within %.0f s", *kind, more, INTERVAL_S, extra={"status": kind[0], "error_type": kind[1]})

    def _log(self, error: Exception, kind: tuple[int, str], request_id: str) -> None:
        status, error_type = kind
        extra = {"request_id": request_id, "status": status, "error_type": error_type}
        if kind == errors.INTERNAL:
            places = " < ".join(
                f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
                for frame in traceback.extract_tb(error.__traceback__)[::-1]
            )
            logger.error("%s %s %s: %s", status, type(error).__name__, request_id, places, extra=extra)
        else:
            level = logging.ERROR if status >= _SERVER_ERROR and error_type not in _REFUSALS else logging.WARNING
            logger.log(level, "%s %s %s", status, error_type, request_id, extra=extra)
