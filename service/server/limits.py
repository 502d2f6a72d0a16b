"""LimitedProtocol: uvicorn's HTTP protocol with limits on the size and time of a request's head, and with one request at a time."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from bertserve.service.api import errors
from bertserve.service.errors import BertServeError, HeadTooLargeError, MalformedRequestError, SlowRequestError, UnavailableError

MAX_HEADERS = 128
LINGER_S = 0.5  # time for a client to read its last answer, and during shutdown to send the rest of a head
_HEADS = tuple(b"HTTP/1.1 %d" % digit for digit in (2, 3, 4, 5))  # not 100, after which the client only sends its body
HEAD, BODY, ANSWER = range(3)  # stages of a connection: it waits for a head, reads a body, or answers a complete request


class JoinedWrites(asyncio.Transport):
    """A transport that writes the head of an answer in one packet with its body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Wraps a transport."""
        super().__init__()
        self._transport = transport
        self._head = b""
        self._closing = False

    def is_closing(self) -> bool:
        """Returns whether the connection is closed or closing."""
        return self._closing or self._transport.is_closing()

    def write(self, data: Any) -> None:
        """Writes bytes, but keeps the head of an answer until the next write or `flush`."""
        if not self._head and data.startswith(_HEADS):
            self._head = data
        elif not self._transport.is_closing():
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        """Writes the kept head, if any."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Closes the sending half, and soon the connection: closing it with unread bytes would discard the answer."""
        self.flush()
        if not self.is_closing():
            self._closing = True
            if self._transport.can_write_eof():
                self._transport.write_eof()
                asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
            else:  # TLS has no half-closed connections
                self._transport.close()


class LimitedProtocol(HttpToolsProtocol):
    """One connection; `limited` returns a subclass with other limits.

    Attributes:
        max_header_bytes: Maximum bytes of a request besides the data of its body: request line, headers, chunk extensions and trailers.
        header_timeout_s: Seconds until the first head of a connection must be complete, and each other head after its first byte.
    """

    max_header_bytes = 32768
    header_timeout_s = 10.0
    transport: JoinedWrites
    _stage = HEAD
    _again = b""  # the head of a request with `Upgrade`, without that header
    _timer: asyncio.TimerHandle | None = None  # for a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles a new connection."""
        super().connection_made(transport)
        self.transport = JoinedWrites(transport)
        self.headers = []
        self._room = self.max_header_bytes
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles a closed connection; its timer would keep it in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handles received bytes."""
        if self._stage == HEAD and len(data) > self._room > 0:  # the rest of the head must be in the first part
            data, rest = data[: self._room], data[self._room :]
            self.data_received(data)
            self.data_received(rest)
        elif not self.transport.is_closing():
            self._room -= len(data)
            try:
                self.parser.feed_data(data)
                if self._room < 0:
                    raise self._too_large()
            except httptools.HttpParserUpgrade as upgrade:
                head, self._again = self._again, b""
                self.parser, self._room = httptools.HttpRequestParser(self), self.max_header_bytes
                self.data_received(head + data[upgrade.args[0] :])
            except (httptools.HttpParserError, HeadTooLargeError) as error:
                self._refuse(error.__context__ or error)  # the error of a callback, or of the parser
            if self._timer is None and self._stage == HEAD and self._room < self.max_header_bytes:
                self._start_timer()

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        if self._stage == ANSWER:
            raise MalformedRequestError("pipelined; no client sees this error.")
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handles a complete head, and starts the application."""
        if self._room < 0 or len(self.headers) > MAX_HEADERS:
            raise self._too_large()
        method, version = self.parser.get_method(), self.parser.get_http_version()
        # uvicorn would cut a fragment off, and a proxy might not: the two would see different paths
        if version not in ("1.1", "1.0") or method == b"CONNECT" or b"#" in self.url:
            raise MalformedRequestError("only HTTP/1.1 and HTTP/1.0 are supported, without CONNECT, and without `#` in the target.")
        if self.parser.should_upgrade():  # the parser would not read the body
            headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self._again = b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version.encode(), headers)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().on_headers_complete()
        self.headers = []  # for trailers, because the application decides access by the headers
        self._stage = BODY

    def on_body(self, body: bytes) -> None:
        """Handles a part of a body. Chunks may have as many bytes of framing as of data."""
        self._room = min(self._room + 2 * len(body), self.max_header_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        if not self._again:
            super().on_message_complete()
            self._room = self.max_header_bytes
            self._stage = HEAD if self.cycle.response_complete else ANSWER

    def on_response_complete(self) -> None:
        """Handles an answered request."""
        self.transport.flush()  # an answer to HEAD has no body
        super().on_response_complete()
        if self._stage == ANSWER:
            self._stage = HEAD

    def shutdown(self) -> None:
        """Ends the connection after the current answer; a client that sends a body gets status 503."""
        if self._stage == BODY:
            self._refuse(UnavailableError("the service is stopping; send the request to another instance, or try again later."))
        else:
            self.loop.call_later(LINGER_S, super().shutdown)

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(
            "the request has more than {count} headers, or {limit} bytes besides its body; the operator can raise --max-header-bytes.",
            count=MAX_HEADERS,
            limit=self.max_header_bytes,
        )

    def _start_timer(self) -> None:
        error = SlowRequestError("the request line and headers were not complete within {limit:g} s.", limit=self.header_timeout_s)
        self._timer = self.loop.call_later(self.header_timeout_s, self._refuse, error)

    def _refuse(self, error: BaseException) -> None:
        """Sends an error unless an answer has started, and closes the connection."""
        if self._stage == ANSWER:  # the request is answered first
            self.cycle.keep_alive = False
            return
        if self._stage == HEAD or not self.cycle.response_started:
            request_id = uuid.uuid4().hex
            known = error if isinstance(error, BertServeError) else MalformedRequestError("not a valid HTTP/1.1 request.")
            response = errors.response(known, request_id)
            response.headers.update({"x-request-id": request_id, "connection": "close"})
            head = STATUS_LINE[response.status_code] + b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
            self.transport.write(head + b"\r\n" + bytes(response.body))
        if self._stage == BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def limited(max_header_bytes: int, header_timeout_s: float) -> type[LimitedProtocol]:
    """Returns a protocol with these limits, for the argument `http` of `uvicorn.Config`."""
    return type("LimitedProtocol", (LimitedProtocol,), {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s})
