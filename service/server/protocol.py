"""LimitedProtocol: uvicorn's HTTP protocol with limits on the size and time of a request's head, and with one request at a time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bertserve.service.api import error_responses
from bertserve.service.errors import BertServeError, HttpError, MalformedRequestError, UnavailableError

_TOO_LARGE = "the request has more than {limit} bytes besides its body; the operator can raise --max-header-bytes."
_TOO_SLOW = "the request line and headers were not complete within {limit:g} s."
_CONTINUE = b"HTTP/1.1 100 "  # not a response: the client then sends its body
LINGER_S = 0.5  # time for a client to read its last response, and during shutdown to send the rest of a head
IDLE, HEAD, BODY = range(3)  # what the parser reads: nothing between two requests, a head, or a body


class ResponseTransport(asyncio.Transport):
    """A transport that sends the head of a response in one packet with its body, and that closes in two steps.

    With two packets, a short request costs the service and its client a system call and a wake-up more each.

    Attributes:
        holds_head: Whether the next write is the head of a response, which waits for the body.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head = b""
        self._closing = False
        self.holds_head = False

    def is_closing(self) -> bool:
        """Returns whether the connection is closed or closing."""
        return self._closing or self._transport.is_closing()

    def write(self, data: Any) -> None:
        """Writes bytes, or keeps the head of a response until the next write."""
        if self.holds_head and not data.startswith(_CONTINUE):
            self._head, self.holds_head = data, False
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def close(self) -> None:
        """Closes the sending half, and soon the connection: closing it with unread bytes would discard the response."""
        if not self.is_closing():
            self.write(b"")
            self._closing = True
            if self._transport.can_write_eof():  # not with TLS
                self._transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A subclass sets the limits.

    Attributes:
        max_header_bytes: Maximum bytes of a request besides the data of its body: request line, headers, chunk extensions and trailers.
        header_timeout_s: Seconds until the first byte of a connection, and from the first byte of a head to its end.
        on_refusal: Counts and logs the error of a head, which never reaches the application; returns the id for the response.
    """

    max_header_bytes: int
    header_timeout_s: float
    on_refusal: Callable[[BertServeError], str]
    transport: ResponseTransport
    _stage = IDLE

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wraps the transport, and starts the timer for the first head."""
        super().connection_made(transport)
        self.transport = ResponseTransport(transport)
        self._room = self.max_header_bytes
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer, which would keep the connection in memory."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes; responds to an invalid or too large head with its error."""
        if self.transport.is_closing():
            return
        self._room -= len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # the parser has not read the body: it gets the head again, without `Upgrade`
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self.parser, self._room = httptools.HttpRequestParser(self), self.max_header_bytes
            self.data_received(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, headers) + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # the error of a callback, which the parser wraps
            self._refuse(cause if isinstance(cause, BertServeError) else MalformedRequestError("not a valid HTTP/1.1 request."))
        else:
            if self._room < 0:
                self._refuse(HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE, limit=self.max_header_bytes))
            elif self._stage == HEAD and self.timeout_keep_alive_task is None:
                self._start_timer()

    def on_message_begin(self) -> None:
        """Begins a head; refuses a request that was sent before the response to the last one."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise MalformedRequestError("pipelined; no client sees this error.")
        self._stop_timer()
        self._stage = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Checks a complete head, and starts the application."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE, limit=self.max_header_bytes)
        # uvicorn would cut a fragment off, and a proxy might not: the two would see different paths
        if self.parser.get_http_version() not in ("1.1", "1.0") or self.parser.get_method() == b"CONNECT" or b"#" in self.url:
            raise MalformedRequestError("only HTTP/1.1 and HTTP/1.0 are supported, without CONNECT, and without `#` in the target.")
        if self.parser.should_upgrade():
            return
        if self.timeout_keep_alive_task is not None:
            self._stop_timer()
        super().on_headers_complete()
        self.transport.holds_head = self.parser.get_method() != b"HEAD"  # for which no body follows
        self.headers = []  # for trailers, because the application decides access by the headers
        self._stage = BODY
        self._room += size

    def on_body(self, body: bytes) -> None:
        """Passes on a part of a body. Chunks may have as many bytes of framing as of data."""
        self._room = min(self._room + 2 * len(body), self.max_header_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Passes on the end of a request, and expects the next head."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._stage, self._room = IDLE, self.max_header_bytes

    def shutdown(self) -> None:
        """Ends the connection after the current response; a client that sends a body gets status 503."""
        if self._stage == BODY:
            self._refuse(UnavailableError("the service is stopping; send the request to another instance, or try again later."))
        else:
            self.loop.call_later(LINGER_S, super().shutdown)

    def _start_timer(self) -> None:
        error = HttpError(HTTPStatus.REQUEST_TIMEOUT, _TOO_SLOW, limit=self.header_timeout_s)
        self.timeout_keep_alive_task = self.loop.call_later(self.header_timeout_s, self._refuse, error)

    def _stop_timer(self) -> None:
        """Cancels the timer of a head, or uvicorn's own between two requests."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _refuse(self, error: BertServeError) -> None:
        """Sends an error unless a response has started, and closes the connection."""
        self._stop_timer()
        if self._stage == IDLE and self.cycle is not None and not self.cycle.response_complete:  # the request is answered first
            self.cycle.keep_alive = False
            return
        if self._stage != BODY or not self.cycle.response_started:
            request_id = self.on_refusal(error) if self._stage == HEAD else uuid.uuid4().hex
            response = error_responses.response(error, request_id)
            response.headers.update({"x-request-id": request_id, "connection": "close"})
            head = STATUS_LINE[response.status_code] + b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
            self.transport.write(head + b"\r\n" + bytes(response.body))
        if self._stage == BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
