"""A keep-alive HTTP/1.1 connection with at most one request in flight.

A request must cost little processor time, which the service under test needs. Therefore the connection is an asyncio protocol without
streams. httptools parses the responses; only the status and the headers `server-timing` and `retry-after` are kept.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser


class RequestRecord(NamedTuple):
    """The end of a request. Each request has exactly one. Times are in seconds on the clock of `time.perf_counter`.

    Attributes:
        intended: Time when it was due; in a closed loop, when its connection was free.
        sent: Time when it was sent; if it was never sent, when it ended.
        ended: Time when its response was complete or its failure was known.
        outcome: HTTP status, or the kind of the failure: `timeout`, `closed`, `refused`, `unreachable`, `malformed`, `interrupted`.
        body_index: Index of its body in the target's bodies.
        server_timing: Value of the response's `server-timing` header, empty if there is none.
        retry_after: Whether the response has a time for a retry.
    """

    intended: float
    sent: float
    ended: float
    outcome: int | str
    body_index: int
    server_timing: bytes = b""
    retry_after: bool = False


class Connection(asyncio.Protocol):
    """A connection to a target."""

    def __init__(self) -> None:
        self.open = False  # whether it can send another request
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._in_flight: tuple[asyncio.Future[RequestRecord], float, float, int] | None = None  # as in `request`
        self._complete = False
        self._server_timing = b""
        self._retry_after = False

    def request(self, content: bytes, intended: float, sent: float, body_index: int) -> asyncio.Future[RequestRecord]:
        """Sends a request over the open connection, and returns its record. If that is cancelled, the connection must be closed."""
        assert self._transport is not None, "the connection must be open"
        self._complete = self._retry_after = False
        self._server_timing = b""
        record: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
        self._in_flight = record, intended, sent, body_index
        self._transport.write(content)
        return record

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
        if self._in_flight is None:
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
        if self._in_flight is None:
            return
        record, intended, sent, body_index = self._in_flight
        self._in_flight = None
        if not record.done():  # it is done if it was cancelled
            timing, retry = self._server_timing, self._retry_after
            record.set_result(RequestRecord(intended, sent, time.perf_counter(), outcome, body_index, timing, retry))
