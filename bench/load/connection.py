"""One keep-alive HTTP/1.1 connection with at most one request in flight. Responses are parsed by httptools.

A request must cost little CPU time, which the service under test may need. The connection is therefore an asyncio protocol with
callbacks, without streams or tasks, and it keeps only the status and two headers of a response, `server-timing` and `retry-after`. Its
owner decides what is sent next.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser


class Owner(Protocol):
    """Receives the events of a connection."""

    def on_response(self, connection: Connection, status: int, server_timing: bytes, now: float) -> None:
        """Handles a complete response. The connection takes another request, unless it is `closing`."""
        ...

    def on_connection_lost(self, connection: Connection, kind: str | None) -> None:
        """Handles the end of the connection; `kind` says why the request in flight, if any, has no response."""
        ...


class Connection(asyncio.Protocol):
    """A connection and the request that is in flight on it.

    Attributes:
        busy: Whether a request is in flight.
        intended: When that request was due, on the clock of `time.perf_counter`.
        sent: When it was sent.
        body_index: Index of its body among those of the target.
        closing: Whether the server closes the connection after this response.
        retry_after: Whether the response said when to come again.
    """

    __slots__ = (
        "_complete",
        "_has_length",
        "_headers_complete",
        "_owner",
        "_parser",
        "_reason",
        "_server_timing",
        "_transport",
        "body_index",
        "busy",
        "closing",
        "intended",
        "retry_after",
        "sent",
    )

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reason = "closed"
        self._headers_complete = False
        self._has_length = False  # of the body, by its header or by chunks; else it ends with the connection
        self._complete = False
        self._server_timing = b""
        self.busy = False
        self.closing = False
        self.retry_after = False
        self.intended = self.sent = 0.0
        self.body_index = 0

    def send(self, request: bytes, *, body_index: int, intended: float, now: float) -> None:
        """Sends a request. The owner is told of its end exactly once."""
        assert self._transport is not None, "only an open connection is asked to send"
        self.busy = True
        self.body_index = body_index
        self.intended = intended
        self.sent = now
        self._headers_complete = self._has_length = self._complete = False
        self._server_timing = b""
        self.retry_after = False
        self._transport.write(request)

    def abort(self, reason: str) -> None:
        """Closes the connection at once; the request in flight ends with this reason."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parses a part of a response; most responses arrive in one part."""
        if not self.busy:
            self.abort("malformed")
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.abort("malformed")
            return
        # the owner is called after the parser, which would swallow the owner's exceptions
        if self._complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request in flight."""
        self._transport = None
        if self.busy and exc is None and self._reason == "closed" and self._headers_complete and not self._has_length:
            self.closing = True
            self._finish()
        busy, self.busy = self.busy, False
        self._owner.on_connection_lost(self, self._reason if busy else None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header."""
        name = name.lower()
        if name == b"server-timing":
            self._server_timing = b", ".join(filter(None, (self._server_timing, value.lower())))
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif name == b"retry-after":
            self.retry_after = True

    def on_headers_complete(self) -> None:
        """Called by the parser after the last header."""
        self._headers_complete = True

    def on_message_complete(self) -> None:
        """Called by the parser after the body, and after an interim response, which is skipped."""
        self._complete = self._parser.get_status_code() >= 200
        self._headers_complete = self._complete
        self.closing = not self._parser.should_keep_alive()

    def _finish(self) -> None:
        self.busy = False
        self._owner.on_response(self, self._parser.get_status_code(), self._server_timing, time.perf_counter())
