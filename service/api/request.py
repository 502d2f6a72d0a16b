"""RequestContext: what the service knows about an HTTP request, for its response, logs, metrics and trace."""

import asyncio
import re
import time
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

REQUEST_KEY = "bertserve.request"  # scope key: the RequestContext, until the response is sent
TIMEOUT_HEADER = "x-request-timeout-ms"
_TIMEOUT = TIMEOUT_HEADER.encode()
_ADDRESS = re.compile("[0-9a-fA-F.:]+")


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request.

    Attributes:
        headers: The headers by name in lower case; the last one of several with the same name.
        id: The request id, from the header `x-request-id` or random.
        turns: Held while a large body or response of any request takes its turn.
        start: Start time in seconds of `time.perf_counter`.
        response_headers: Headers that every response to this request has.
        key: The name of its key; None before the check, and if the route needs no key.
        task: The task as a label of metrics; None unless the route runs models.
        model: The model's name as a label of metrics; None unless the route runs models.
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
    task: str | None = None
    model: str | None = None
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
        """Waits for a turn of the event loop in which no other large body or response is read or written."""
        async with self.turns:
            await asyncio.sleep(0)

    def read_timeout_s(self) -> float:
        """Returns the timeout of a request that runs models in seconds, after checks of its headers and its query.

        Raises:
            MalformedRequestError: A header that may occur only once occurs twice.
            InvalidValueError: The URL has a query, or the timeout header is not an allowed number of milliseconds.
            HttpError: The body is compressed.
        """
        if len(self.headers) < len(self.scope["headers"]):  # most requests have no header twice
            self.check_single(b"content-type", b"content-encoding", _TIMEOUT)
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

    def check_single(self, *names: bytes) -> None:
        """Refuses headers that occur twice, because a proxy can have used the other one.

        Raises:
            MalformedRequestError: A header with one of these names occurs more than once.
        """
        sent = [name for name, _ in self.scope["headers"]]
        for name in names:
            if sent.count(name) > 1:
                raise MalformedRequestError(
                    "the request has the header `{name}` {count} times; send it once.", name=name.decode(), count=sent.count(name)
                )

    def log_fields(self) -> dict[str, Any]:
        """Returns the fields of every log line about the request. Its path is the path of a route, never the caller's text."""
        address, _ = self.scope.get("client") or ("", 0)
        return {
            "request_id": self.id,
            "method": self.scope["method"],
            # the name of a loaded model is known
            "path": self.scope["path"] if self.model not in (None, UNKNOWN) else self.route_path or UNKNOWN,
            "client": address if _ADDRESS.fullmatch(address) else None,  # a proxy's header can have any text
            "task": self.task,
            "model": self.model,
            **({} if self.trace is None else {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}),
        }
