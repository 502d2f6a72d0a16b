"""RequestParser: parses requests from the bytes of a connection, with limits on their size. It knows only the routes of probes.

A connection is in one of six stages and handles one request at a time: the bytes after a request stay unparsed until it is answered.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bertserve.service.api import auth, errors
from bertserve.service.errors import BertServeError, HeadTooLargeError, MalformedRequestError, Sent, UnavailableError
from bertserve.service.server.connections import Connections

FULL = "the service has too many connections; try again later; the operator can raise --max-connections."
STOPPING = "the service is stopping; send the request to another instance, or try again later."
_ids = random.Random()  # noqa: S311 - ids only tell requests apart, they protect nothing


def rendered(error: BertServeError | None = None, default_headers: list[tuple[bytes, bytes]] | None = None, path: str = "") -> bytes:
    """Returns the bytes of a response that closes the connection; without an error, it says that there are too many connections."""
    request_id = f"{_ids.getrandbits(128):032x}"
    response = errors.response(error or UnavailableError(FULL), request_id, path)
    headers = [*(default_headers or ()), *response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)


def unchunked(app: ASGIApp) -> ASGIApp:
    """Returns an application that answers without chunked encoding. Only uvicorn's protocol may call it."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]  # uvicorn's state of the request
        unknown_length = False

        async def send_unchunked(message: Message) -> None:
            nonlocal unknown_length
            if message["type"] == "http.response.start":
                unknown_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unknown_length:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif unknown_length and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))  # so that uvicorn takes the body for complete
            await send(message)

        await app(scope, receive, send_unchunked)

    return run


PIECE_BYTES = 4096  # with chunks of one byte they take about 0.5 ms to parse
_EMPTY_LINE = b"\r\n\r\n"


class _RejectedError(Exception):
    """Stops parsing. The parser replaces it by an error of its own if a callback raises it."""


class PieceCutter:
    """Cuts reads into pieces that end, at the latest, at the end of a head or of a chunked body.

    Both end with an empty line, and the parser accepts only CRLF as a line end. An empty line in the data of a chunk makes two pieces,
    which the parser reads like one piece.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Creates it, before the first byte."""
        self._last = b""  # the last bytes of the previous piece, up to three, if they may belong to an empty line

    def end(self, data: bytes, start: int) -> int:
        """Returns the end of the piece that begins at `start`. The caller must consume the piece: the next call continues after it."""
        if self._last:
            across = (self._last + data[start : start + 3]).find(_EMPTY_LINE)
            if across >= 0:
                end = start + across + 4 - len(self._last)
                self._last = b""
                return end
        position = data.find(_EMPTY_LINE, start, start + PIECE_BYTES)
        if position >= 0:
            self._last = b""
            return position + 4
        end = min(start + PIECE_BYTES, len(data))
        self._last = (self._last + data[max(start, end - 3) : end])[-3:]
        return end


class ReadControl(FlowControl):
    """uvicorn's flow control that can hold back reading; otherwise each `receive` of an application would resume it.

    Attributes:
        held: Whether enough bytes are read and not yet parsed.
    """

    held = False

    def resume_reading(self) -> None:
        """Resumes reading, unless it is held back."""
        if self.read_paused and not self.held:
            super().resume_reading()


_METRICS = auth.METRICS.encode()
_PROBES = frozenset(path.encode() for path in (*auth.PROBES, auth.METRICS))  # answered even if no other connection is accepted

HANDSHAKE, WAITING, HEAD, BODY, COMPLETE, ENDING = range(6)
"""Stages: not yet connected, no byte of a request, half a head, half a body, a request to answer, about to close."""

# Bytes of a body, or behind a request, that wait for the application. A connection with more reads nothing, so it keeps at most these and
# one read: READ_BYTES, or with TLS TLS_READ_BYTES.
MAX_UNREAD_BYTES = 2**14
MAX_HEADERS = 128  # each needs 150 bytes of memory, and each search for a header reads the others
PARSE_S = 0.0005  # seconds to parse the data of one connection before others get a turn; at least two pieces are parsed
CHUNK_FRAME = 12  # bytes of the size of the largest chunk and of its two line ends
_VERSIONS = frozenset({"1.1", "1.0"})
_HEAD_TOO_LARGE = (
    "the request line and headers have more than {limit} bytes; send fewer headers; the operator can raise --max-header-bytes."
)
_TRAILERS_TOO_LARGE = "the trailers and chunk extensions of the body have more than {limit} bytes; send none."


class _Trailers(list[Any]):
    """Drops the trailers after a body. The service does not use them, and has already checked the caller by the headers."""

    def append(self, _: Any) -> None:
        """Drops a header."""


_TRAILERS = _Trailers()


class RequestParser(HttpToolsProtocol):
    """The parsing half of a connection.

    Attributes:
        surplus: Whether it exceeds the number of connections: it may send one request, a probe.
    """

    flow: ReadControl
    surplus = False

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Creates the protocol as uvicorn does; `server_state.connections` are `Connections`."""
        super().__init__(config, server_state, app_state, _loop)
        self._open = cast("Connections", server_state.connections)
        self._limits = self._open.limits
        self._now = self.loop.time
        self._stage = HANDSHAKE
        self._since = self._now()  # start of the wait for the current or the next request
        self._cutter = PieceCutter()
        self._unparsed, self._start = b"", 0  # bytes after the current request, and the position where they begin
        self._received = 0  # bytes of the current request so far
        self._framing = 0  # bytes of a chunked body other than data and minimal chunk frames: extensions and trailers
        self._body_left = 0  # bytes until the end of a body of known length
        self._refusal: tuple[BertServeError, str] | None = None
        self._read_again = b""  # the head of a request with `Upgrade`, without that header

    def data_received(self, data: bytes) -> None:
        """Handles received bytes."""
        if self._stage == ENDING or self._dropped(data):  # it reads on only when its turn comes, because reading and decrypting take time
            self.flow.pause_reading()
            self._open.eager.add(self.flow.resume_reading)
        elif self._unparsed or self._stage == COMPLETE:
            self._unparsed, self._start = self._unparsed[self._start :] + data, 0
            self._hold_reading()
        elif self._open.may_parse(len(data)):
            self._parse(data, 0)
        else:
            self._unparsed, self._start = data, 0
            if self._body_left:  # it takes microseconds, so it need not wait behind chunks
                self.loop.call_soon(self._parse_on, False)
            else:
                is_short = self._stage == WAITING and len(data) <= PIECE_BYTES
                (self._open.short if is_short else self._open.unparsed).add(partial(self._parse_on, False))
            self._hold_reading()

    def _dropped(self, data: bytes) -> bool:
        """Parses and drops bytes of a body that is already answered; returns false if they may be anything else."""
        if self._body_left <= len(data) or not self.cycle.response_complete or self._unparsed:
            return False
        self._received += len(data)
        self._body_left -= len(data)
        self.parser.feed_data(data)
        return True

    def _parse(self, data: bytes, start: int, *, behind_an_answer: bool = False) -> None:
        """Parses received bytes up to the end of a request; the rest waits until the request is answered.

        Args:
            data: The received bytes.
            start: Position of the first byte that is not yet parsed.
            behind_an_answer: Whether the bytes were received before a request was answered. If they are not HTTP, the connection closes
                without an answer, which a client whose body was too long would take for the answer to its next request.
        """
        until = 0.0
        behind_an_answer = behind_an_answer or (self._stage == BODY and self.cycle.response_complete)
        try:
            while start < len(data) and self._stage < COMPLETE:
                if self._body_left:
                    end = min(start + self._body_left, len(data))
                    self._received += end - start
                    self._body_left -= end - start
                    self.parser.feed_data(data[start:end])
                else:
                    end = self._parse_piece(data, start)
                start = end
                if start < len(data):
                    now = time.monotonic()
                    until = until or now + PARSE_S
                    if now > until:
                        break
        except (httptools.HttpParserError, _RejectedError):
            error, reason = self._refusal or (MalformedRequestError("not a valid HTTP/1.1 request."), "malformed")
            self._refuse(error, reason, answers=self._stage == BODY or not behind_an_answer)
            return
        if start < len(data):
            self._unparsed, self._start = data, start
            if self._stage < COMPLETE:
                self._open.unparsed.add(partial(self._parse_on, behind_an_answer))
            self._hold_reading()
        elif self._unparsed:
            self._unparsed = b""
            if self.flow.held:
                self.flow.held = False
                if self._stage != BODY or len(self.cycle.body) <= MAX_UNREAD_BYTES:
                    self.flow.resume_reading()

    def _parse_on(self, behind_an_answer: bool) -> None:
        """Continues parsing after a turn of the loop."""
        if self._unparsed and not self.transport.is_closing():
            self._parse(self._unparsed, self._start, behind_an_answer=behind_an_answer)

    def _hold_reading(self) -> None:
        """Stops reading if there are bytes to parse, or too many wait for an answer; otherwise reading continues to detect a close."""
        if self._stage < COMPLETE or len(self._unparsed) - self._start > MAX_UNREAD_BYTES:
            self.flow.held = True
            self.flow.pause_reading()
        elif self.flow.held:
            self.flow.held = False
            self.flow.resume_reading()

    def _parse_piece(self, data: bytes, start: int) -> int:
        """Parses at most a head, or a part of a chunked body, and returns the end of the parsed bytes."""
        end = self._cutter.end(data, start)
        self._received += end - start
        if self._stage == BODY:
            self._parse_chunks(data[start:end])
            return end
        if self._received > self._limits.max_header_bytes:
            self._reject(HeadTooLargeError(_HEAD_TOO_LARGE, limit=self._limits.max_header_bytes), "head_too_large")
        try:
            self.parser.feed_data(data[start:end])
        except httptools.HttpParserUpgrade:  # the parser would not read the following bytes as HTTP
            head, self._read_again = self._read_again, b""
            self.parser = httptools.HttpRequestParser(self)  # the old parser reads nothing after `connection: close`
            self.parser.feed_data(head)
        if self._stage == HEAD:
            self._check_headers()
        return end

    def _parse_chunks(self, piece: bytes) -> None:
        """Parses a part of a chunked body or of its trailers, and counts the bytes that are not data."""
        self._framing += len(piece)
        self.parser.feed_data(piece)
        self._framing = max(self._framing, 0)
        if self._framing > self._limits.max_header_bytes:
            self._reject(HeadTooLargeError(_TRAILERS_TOO_LARGE, limit=self._limits.max_header_bytes), "head_too_large")

    def _check_headers(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._reject(HeadTooLargeError("the request has more than {limit} headers; send fewer.", limit=MAX_HEADERS), "head_too_large")

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        super().on_message_begin()
        self._stage = HEAD
        self._since = self._now()
        self._framing = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handles a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Handles a complete head, and starts the application."""
        if len(self.headers) > MAX_HEADERS:
            self._check_headers()
        if self.parser.should_upgrade():
            self._read_again = self._without_upgrade()
            return
        if (version := self.parser.get_http_version()) not in _VERSIONS:
            self._reject(
                MalformedRequestError("HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0.", version=Sent(version)), "malformed"
            )
        if b"#" in self.url:  # uvicorn would cut it off, and a proxy might not: the two would see different paths
            self._reject(MalformedRequestError("the request target has a `#`; send only the path and the query."), "malformed")
        if self.surplus or self._open.stopping:
            self._check_path(self.url.partition(b"?")[0])
        if version == "1.0":  # such a connection has only one request
            self.app = unchunked(self.app)
        headers = dict(self.headers)
        if (length := headers.get(b"content-length")) is not None:
            self._body_left = int(length)
        if (expectation := headers.get(b"expect")) is not None:
            self.expect_100_continue = expectation.lower() == b"100-continue"
        super().on_headers_complete()
        self._stage = BODY
        self.headers = _TRAILERS
        if self.surplus or self._open.closing:
            self.cycle.keep_alive = False

    def _check_path(self, path: bytes) -> None:
        """Refuses a request that may not use a surplus connection, and counts refusals during shutdown."""
        is_probe = path in _PROBES
        if self.surplus and not (is_probe and (path != _METRICS or self._open.may_scrape(self))):
            self._reject(UnavailableError(FULL), "refused")
        if not is_probe:
            self.app = self._open.counting(self.config.loaded_app)

    def on_chunk_header(self) -> None:
        """Handles the size of a chunk."""
        self._framing -= CHUNK_FRAME

    def on_body(self, body: bytes) -> None:
        """Handles a part of a body."""
        self._framing -= len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > MAX_UNREAD_BYTES:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Handles the end of a request."""
        if self._read_again:
            return
        self._received = 0
        cycle = self.cycle
        if cycle.response_complete:
            self._stage = WAITING
            self._since = self._now()
        else:
            self._stage = COMPLETE
            cycle.more_body = False
            cycle.message_event.set()

    def _without_upgrade(self) -> bytes:
        """Returns the current head without the request for another protocol."""
        if self.parser.get_method() == b"CONNECT":
            self._reject(MalformedRequestError("CONNECT is not supported."), "malformed")
        headers = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode(), headers)

    def _reject(self, error: BertServeError, reason: str) -> None:
        """Stops parsing with an error. It is not raised itself: its traceback would refer to this object, which keeps it."""
        self._refusal = error, reason
        raise _RejectedError

    def _refuse(self, error: BertServeError, reason: str, *, answers: bool = True) -> None:
        """Closes a connection with an incomplete request; answers it first if `answers`."""
        raise NotImplementedError
