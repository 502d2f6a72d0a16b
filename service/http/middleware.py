"""RequestMiddleware: the one ASGI middleware. Gives each request its id, checks the key, turns errors into answers, counts and logs.

No text of a caller reaches a log: an error is logged by its kind, an internal one with the places it went through.
"""

from __future__ import annotations

import hmac
import logging
import random
import re
import time
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import UnauthorizedError
from service.http import errors
from service.metrics import UNKNOWN, Metrics

logger = logging.getLogger("bertserve.errors")
access = logging.getLogger("bertserve.access")

LABELS = "bertserve.labels"  # scope key: task and model of the request, for metrics and log; set by inference routes
REQUEST_ID = "bertserve.request_id"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_SERVER_ERROR = 500


class RequestMiddleware:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, api_key: str | None, access_log: bool) -> None:
        """Wraps an application.

        Args:
            app: The application.
            metrics: Where requests are counted.
            api_key: The key that callers must send, or None.
            access_log: Whether to log a line for each request.
        """
        self._app = app
        self._metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()
        self._access_log = access_log
        self._ids = random.Random()  # noqa: S311 - ids tell requests apart, they guard nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        asked = headers.get(b"x-request-id", b"")
        # not uuid4: reading the system's entropy gives up the GIL, and getting it back from busy lanes takes far longer
        request_id = asked if _REQUEST_ID.fullmatch(asked) else b"%032x" % self._ids.getrandbits(128)
        scope[REQUEST_ID] = request_id.decode()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            self._authorize(scope["path"], headers.get(b"authorization", b""))
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - the process boundary of a request
            _log(error, scope[REQUEST_ID])
            if status == 0:
                await errors.response(error, scope[REQUEST_ID])(scope, receive, send_with_id)
        finally:
            self._record(scope, status, time.perf_counter() - start)

    def _authorize(self, path: str, given: bytes) -> None:
        """Asks for the key, except for what probes and scrapers read."""
        open_to_all = path == "/metrics" or path.startswith("/health") or path.endswith("/health")
        scheme, _, key = given.partition(b" ")
        if self._api_key is None or open_to_all or (scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)):
            return
        raise UnauthorizedError("this service needs its API key: send the header `Authorization: Bearer <key>`.")

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        task, model = scope.get(LABELS, (None, None))
        if task is not None:
            self._metrics.requests_of(task, model, status).inc()
            if model != UNKNOWN:
                self._metrics.model(task, model).request_seconds.observe(seconds)
        if self._access_log:
            extra = {"request_id": scope[REQUEST_ID], "status": status, "ms": round(seconds * 1000, 2), "task": task, "model": model}
            access.info("%s %s %.1f ms %s/%s %s", scope["method"], status, seconds * 1000, task, model, scope[REQUEST_ID], extra=extra)


def _log(error: Exception, request_id: str) -> None:
    """Logs the kind of an error; of one that is not ours also the places it went through, never its message."""
    status, error_type = errors.classify(error)
    extra = {"request_id": request_id, "status": status, "error_type": error_type}
    if (status, error_type) == errors.INTERNAL:
        places = " < ".join(
            f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
            for frame in traceback.extract_tb(error.__traceback__)[::-1]
        )
        logger.error("%s %s %s: %s", status, type(error).__name__, request_id, places, extra=extra)
    else:
        level = logging.ERROR if status >= _SERVER_ERROR else logging.WARNING
        logger.log(level, "%s %s %s", status, error_type, request_id, extra=extra)
