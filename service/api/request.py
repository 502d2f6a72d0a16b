"""RequestContext: what the service knows about an HTTP request, for its response, logs, metrics and trace."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope, Send

from bertserve.service.errors import CallerValue, MalformedRequestError
from bertserve.service.metrics import UNKNOWN

if TYPE_CHECKING:
    from bertserve.service.app_state import AppState
    from bertserve.service.models.model import Model
    from bertserve.service.models.request_progress import Prediction
    from bertserve.service.tracing import RequestSpan

REQUEST_KEY = "bertserve.request"  # scope key: the RequestContext, until the response is sent
TIMEOUT_HEADER = "x-request-timeout-ms"
# control characters, invalid UTF-8, and the segments `.` and `..`: a proxy can interpret such a path in another way
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f-\x9f\ufffd]|/\.\.?(?:/|\Z)")
_ADDRESS = re.compile("[0-9a-fA-F.:]+")
_ENCODED_SLASH = re.compile(rb"%(?:2f|5c)", re.IGNORECASE)


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request.

    Attributes:
        scope: Its ASGI scope.
        sender: Sends messages to the client.
        headers: The headers by name in lower case; the last one of several with the same name.
        id: The request id, from the header `x-request-id` or random.
        state: The models, metrics, settings, keys and limits.
        start: Start time in seconds of `time.perf_counter`.
        response_headers: Headers that every response to this request has.
        key: The name of its key; None before the check, and if the route needs no key.
        task: The task as a label of metrics; None unless the route runs models.
        model: The model's name as a label of metrics; None unless the route runs models.
        prediction: The result, if a model has answered.
        trace: Its trace, if it is traced.
        status: The status of the response; 0 before it is sent.
    """

    scope: Scope
    sender: Send
    headers: dict[bytes, bytes]
    id: str
    state: AppState
    start: float = field(default_factory=time.perf_counter)
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    key: str | None = None
    task: str | None = None
    model: str | None = None
    prediction: Prediction | None = None
    trace: RequestSpan | None = None
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
    def route(self) -> str | None:
        """The path of the matched route, with `{name}` for a model's name; None if no route matched."""
        return getattr(self.scope.get("route"), "path", None)

    @property
    def named_model(self) -> Model:
        """The model that the path names.

        Raises:
            NotFoundError: No such model is loaded.
        """
        return self.state.registry.get(self.scope["path_params"]["name"])

    def check_path(self) -> None:
        """Refuses a path that a proxy can have interpreted in another way.

        Raises:
            MalformedRequestError: The path has a control character, an encoded slash or backslash, a dot segment, or invalid UTF-8.
        """
        path, raw = self.scope["path"], self.scope.get("raw_path") or b""
        if _AMBIGUOUS.search(path) is not None or (b"%" in raw and _ENCODED_SLASH.search(raw) is not None):
            raise MalformedRequestError(
                "the path `{path}` has a control character, an encoded slash, a dot segment or bytes that are not UTF-8; send "
                "the plain path, see /docs.",
                path=CallerValue(path),
            )

    def log_fields(self) -> dict[str, Any]:
        """Returns the fields of every log line about the request. Its path is the path of a route, never the caller's text."""
        address, _ = self.scope.get("client") or ("", 0)
        return {
            "request_id": self.id,
            "method": self.scope["method"],
            # the name of a loaded model is known
            "path": self.scope["path"] if self.model not in (None, UNKNOWN) else self.route or UNKNOWN,
            "client": address if _ADDRESS.fullmatch(address) else None,  # a proxy's header can have any text
            "task": self.task,
            "model": self.model,
            **({} if self.trace is None else {"trace_id": self.trace.trace_id, "span_id": self.trace.span_id}),
        }
