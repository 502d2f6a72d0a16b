"""LimitedProtocol: uvicorn's HTTP protocol with limits on the size and time of a request's head, and with one request at a time."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertserve.service.errors import BertServeError, HttpError, MalformedRequestError, UnavailableError
from bertserve.service.server.transport import LINGER_S, ResponseTransport
from bertserve.service.settings import Settings

_TOO_LONG = "URL and headers, or trailers and chunk extensions, exceed {limit} bytes; send less; the operator can raise --max-header-bytes."
IDLE, HEAD, BODY = range(3)  # the part that the parser reads: nothing between two requests, a head, or a body


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A subclass sets these attributes.

    Attributes:
        settings: Contains `max_header_bytes`, which also limits chunk extensions and trailers, and `header_timeout_s`.
        refuse: Called with the error and whether to count and log it (the application never sees the request); returns the response.
    """

    settings: Settings
    refuse: Callable[[BertServeError, bool], Response]
    transport: ResponseTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wraps the transport, and starts the timer for the first head."""
        super().connection_made(transport)
        self.transport = ResponseTransport(transport)
        self._stage, self._bytes_left = IDLE, self.settings.max_header_bytes
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer, which would keep the connection in memory."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses bytes; responds to an invalid or too large head with its error."""
        if self.transport.is_closing():
            return
        self._bytes_left -= len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # the parser has not read the body: it gets the head again, without `Upgrade`
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self.parser, self._bytes_left = httptools.HttpRequestParser(self), self.settings.max_header_bytes
            self.data_received(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, headers) + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__  # the error of a callback, which the parser wraps
            self._refuse(cause if isinstance(cause, BertServeError) else MalformedRequestError("not a valid HTTP/1.1 request."))
        else:
            if self._bytes_left < 0:
                self._refuse(HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG, limit=self.settings.max_header_bytes))
            elif self._stage == HEAD and self.timeout_keep_alive_task is None:
                self._start_timer()

    def on_message_begin(self) -> None:
        """Begins a head; refuses a request that was sent before the response to the last one."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise MalformedRequestError("pipelined request refused.")
        self._stop_timer()
        self._stage = HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Checks a complete head, and starts the application."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.max_header_bytes:
            raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LONG, limit=self.settings.max_header_bytes)
        # uvicorn would cut a fragment off, and a proxy might not: the two would see different paths
        if self.parser.get_http_version() not in ("1.1", "1.0") or self.parser.get_method() == b"CONNECT" or b"#" in self.url:
            raise MalformedRequestError("only HTTP/1.1 and HTTP/1.0 are supported, without CONNECT, and without `#` in the target.")
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_headers_complete()
        self.transport.holds_head = self.parser.get_method() != b"HEAD"  # no body follows the response to HEAD
        self.headers = []  # ignores trailers, because the application decides access by the headers
        self._stage, self._bytes_left = BODY, self._bytes_left + size

    def on_body(self, body: bytes) -> None:
        """Passes on a part of a body. Chunks can contain as many bytes of framing as of data."""
        self._bytes_left = min(self._bytes_left + 2 * len(body), self.settings.max_header_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Passes on the end of a request, and expects the next head."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._stage, self._bytes_left = IDLE, self.settings.max_header_bytes

    def shutdown(self) -> None:
        """Ends the connection after the current response; a client that sends a body gets status 503."""
        if self._stage == BODY:
            self._refuse(UnavailableError("the service is stopping; send the request to another instance, or try again later."))
        else:
            self.loop.call_later(LINGER_S, super().shutdown)

    def _start_timer(self) -> None:
        limit = self.settings.header_timeout_s
        error = HttpError(HTTPStatus.REQUEST_TIMEOUT, "the request line and headers were not complete within {limit:g} s.", limit=limit)
        self.timeout_keep_alive_task = self.loop.call_later(limit, self._refuse, error)

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
            self.transport.send(self.refuse(error, self._stage == HEAD))
        if self._stage == BODY:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
