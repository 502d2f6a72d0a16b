"""A keep-alive HTTP/1.1 connection with at most one request in flight.

A request must cost little processor time, which the service under test needs. Therefore the connection is an asyncio protocol without
streams. httptools parses the responses; only the status and the headers `server-timing` and `retry-after` are kept.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser


class Response(NamedTuple):
    """The end of a request.

    Attributes:
        outcome: HTTP status, or the kind of the failure, such as `closed` or `malformed`.
        ended: Time when the response was complete or the failure was known, on the clock of `time.perf_counter`.
        server_timing: Value of the header `server-timing`, empty if there is none.
        retry_after: Whether the response has a time for a retry.
    """

    outcome: int | str
    ended: float
    server_timing: bytes = b""
    retry_after: bool = False


class Connection(asyncio.Protocol):
    """A connection to a target.

    Attributes:
        open: Whether it can send another request.
    """

    def __init__(self) -> None:
        self.open = False
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[Response] | None = None  # of the request in flight
        self._complete = False
        self._server_timing = b""
        self._retry_after = False

    def request(self, content: bytes) -> asyncio.Future[Response]:
        """Sends a request over the open connection. If the result is cancelled, the connection must be closed."""
        assert self._transport is not None, "the connection must be open"
        self._complete = self._retry_after = False
        self._server_timing = b""
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        return self._response

    def abort(self, reason: str = "closed") -> None:
        """Closes the connection immediately; the request in flight ends with `reason`."""
        self.open = False
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        """Parses a part of a response; most responses arrive in one part."""
        if self._response is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.abort("malformed")
            return
        if self._complete:
            self._end(self._parser.get_status_code())
            if not self.open:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request in flight."""
        self.open = False
        self._transport = None
        self._end("closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handles a header; called by the parser."""
        name = name.lower()
        if name == b"server-timing":
            self._server_timing = b", ".join(filter(None, (self._server_timing, value.lower())))
        elif name == b"retry-after":
            self._retry_after = True

    def on_message_complete(self) -> None:
        """Handles the end of a response, but skips interim responses; called by the parser."""
        self._complete = self._parser.get_status_code() >= 200
        self.open = self._parser.should_keep_alive()

    def _end(self, outcome: int | str) -> None:
        """Ends the request in flight, if there is one."""
        if self._response is not None and not self._response.done():  # it is done if it was cancelled
            self._response.set_result(Response(outcome, time.perf_counter(), self._server_timing, self._retry_after))
        self._response = None
