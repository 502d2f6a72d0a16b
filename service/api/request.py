"""RequestContext: the facts about an HTTP request that its response, metrics, log lines and trace need."""

import asyncio
import logging
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.datastructures import QueryParams
from starlette.types import Message, Scope, Send

from bertserve.service.app_state import AppState
from bertserve.service.errors import CallerValue, HttpError, InvalidValueError, MalformedRequestError
from bertserve.service.metrics import UNKNOWN
from bertserve.service.models.model import Model
from bertserve.service.models.request_progress import Prediction

if TYPE_CHECKING:
    from bertserve.service.tracing import RequestSpan

access_log = logging.getLogger("bertserve.access")

REQUEST_KEY = "bertserve.request"  # scope key: the RequestContext, until the response is sent
TIMEOUT_HEADER = "x-request-timeout-ms"
# bytes of a large body or response: reading or writing a larger one can block the event loop for up to 0.04 s
LARGE_BYTES = 2**17
_TIMEOUT = TIMEOUT_HEADER.encode()
JSON_LENGTH_HEADER = b"inference-header-content-length"  # in the Open Inference Protocol: bytes of JSON before binary tensors
_SINGLE = (b"content-type", b"content-encoding", _TIMEOUT, JSON_LENGTH_HEADER)
_ADDRESS = re.compile("[0-9a-fA-F.:]+")
_INTERNAL, _UNAUTHORIZED = HTTPStatus.INTERNAL_SERVER_ERROR.value, HTTPStatus.UNAUTHORIZED  # in Python 3.11, each look-up is a call


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request.

    Attributes:
        headers: The headers by name in lower case; the last one of several with the same name.
        id: The request id, from the header `x-request-id` or random.
        turns: The lock of `take_turn`, for all requests.
        start: Start time in seconds of `time.perf_counter`.
        response_headers: Headers of every response to this request.
        key: The name of its key; None before the check, and if the route needs no key.
        task_label: The task as a label of metrics; None unless the route runs models.
        model_label: The model's name as a label of metrics; None unless the route runs or changes models.
        status: The status of the response; 0 before it is sent.
    """

    scope: Scope
    sender: Send
    headers: dict[bytes, bytes]
    id: str
    state: AppState
    turns: asyncio.Lock
    start: float = field(default_factory=time.perf_counter)
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    key: str | None = None
    task_label: str | None = None
    model_label: str | None = None
    prediction: Prediction | None = None
    trace: "RequestSpan | None" = None
    status: int = 0

    async def send(self, message: Message) -> None:
        """Sends a message of the response, the first one with `response_headers`."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *self.response_headers]
            await self.sender(message)
            self.status = message["status"]  # only now, because the server can refuse to send these headers
        else:
            await self.sender(message)

    @property
    def route_path(self) -> str | None:
        """The path of the matched route, with `{name}` for a model's name; None if no route matched."""
        return getattr(self.scope.get("route"), "path", None)

    @property
    def named_model(self) -> Model:
        """The model that the path names.

        Raises:
            HttpError: No such model is loaded.
        """
        return self.state.registry.get(self.scope["path_params"]["name"])

    async def take_turn(self) -> None:
        """Waits before a large body is read or a large response is written: each pass of the event loop releases at most one request.

        So probes and other requests are answered between large bodies that arrive together.
        """
        async with self.turns:
            await asyncio.sleep(0)

    def check_head(self) -> None:
        """Checks the headers and the query of a request that runs models.

        Raises:
            MalformedRequestError: A header that the service reads occurs more than once: a proxy can have used another one.
            InvalidValueError: The URL has a query.
            HttpError: The body is compressed.
        """
        if len(self.headers) < len(self.scope["headers"]):  # most requests repeat no header
            sent = Counter(name for name, _ in self.scope["headers"])
            for name in _SINGLE:
                if sent[name] > 1:
                    raise MalformedRequestError(
                        "the request has the header `{name}` {count} times; send it once.", name=name.decode(), count=sent[name]
                    )
        if self.scope["query_string"]:
            raise InvalidValueError(
                "the URL has the query parameter `{name}`, but this path takes none; put it into the body.",
                name=CallerValue(next(iter(QueryParams(self.scope["query_string"])), "")),
            )
        for header, plain in ((b"content-encoding", b"identity"), (b"transfer-encoding", b"chunked")):
            if (encoding := self.headers.get(header)) is not None and encoding.lower() != plain:
                raise HttpError(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    "the body's encoding is `{encoding}`; send it uncompressed.",
                    encoding=CallerValue(encoding.decode("latin-1")),
                )

    def timeout_s(self) -> float:
        """Returns the seconds until the request must have started, from its header or else from the settings.

        Raises:
            InvalidValueError: The header is not an allowed number of milliseconds.
        """
        settings, milliseconds = self.state.settings, self.headers.get(_TIMEOUT)
        if milliseconds is None:
            return settings.timeout_ms / 1000
        if not (re.fullmatch(b"[0-9]{1,9}", milliseconds) and 1 <= int(milliseconds) <= settings.max_timeout_ms):
            raise InvalidValueError(
                "the header `{timeout_header}` is `{value}`; it must be a whole number from 1 to {max_timeout_ms}.",
                timeout_header=TIMEOUT_HEADER,
                value=CallerValue(milliseconds.decode("latin-1")),
                max_timeout_ms=settings.max_timeout_ms,
            )
        return int(milliseconds) / 1000

    def record_end(self, *, logs: bool) -> None:
        """Counts the request, which has ended, logs it if `logs` is true, and ends its trace."""
        end = time.perf_counter()
        seconds, status, metrics = end - self.start, self.status or _INTERNAL, self.state.metrics
        metrics.http_requests_by_status(status).inc()
        if self.task_label is not None and self.model_label is not None:
            metrics.record_request(self.task_label, self.model_label, status, seconds)
        if self.key is not None or status == _UNAUTHORIZED:
            metrics.requests_by_key(self.key or UNKNOWN, status).inc()
        if logs:
            names = () if self.prediction is None else ("tokenize_s", "queue_s", "inference_s", "decode_s")
            times = {f"{name.removesuffix('_s')}_ms": round(getattr(self.prediction, name) * 1000, 3) for name in names}
            fields = {**self.log_fields(), "status": status, "ms": round(seconds * 1000, 2), "key": self.key, **times}
            line = "%s %s %s %s %.1f ms %s"
            access_log.info(line, fields["client"], fields["method"], fields["path"], status, seconds * 1000, self.id, extra=fields)
        if self.trace is not None:
            self._end_trace(self.trace, end, status)

    def _end_trace(self, trace: "RequestSpan", end: float, status: int) -> None:
        fields, method, route = self.log_fields(), self.scope["method"], self.route_path
        host, port = self.scope.get("server") or (None, None)
        attributes = {
            "http.request.method": method,
            "http.response.status_code": status,
            "http.route": route,
            "url.scheme": self.scope["scheme"],
            "url.path": fields["path"],
            "network.protocol.version": self.scope.get("http_version"),
            "server.address": host,
            "server.port": port,
            "client.address": fields["client"],
            "error.type": str(status) if status >= _INTERNAL else None,
            "bertserve.queue_ms": None if self.prediction is None else self.prediction.queue_s * 1000,
            **{f"bertserve.{name}": fields[name] for name in ("request_id", "task", "model")},
        }
        known = {name: value for name, value in attributes.items() if value is not None}
        name = method if route is None else f"{method} {route}"
        trace.end(end, name=name, attributes=known, failed=status >= _INTERNAL)

    def log_fields(self) -> dict[str, Any]:
        """Returns the fields of every log line about the request. Its path is the path of a route, never the caller's text."""
        address, _ = self.scope.get("client") or ("", 0)
        return {
            "request_id": self.id,
            "method": self.scope["method"],
            # the name of a loaded model is known
            "path": self.scope["path"] if self.model_label not in (None, UNKNOWN) else self.route_path or UNKNOWN,
            "client": address if _ADDRESS.fullmatch(address) else None,  # a proxy's header can contain any text
            "task": self.task_label,
            "model": self.model_label,
            **({} if self.trace is None else {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}),
        }
