"""One keep-alive HTTP/1.1 connection with at most one request in flight; reads of an answer only what a load test needs.

Every request costs time that the service under test may be short of, so this is a protocol of callbacks: no streams, no
tasks, no header objects. What to send next is the owner's business.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast


class Owner(Protocol):
    """Who is told of what happens to a connection."""

    def on_response(self, connection: Connection, status: int, server_timing: bytes, now: float) -> None:
        """The answer is complete; the connection takes another request unless it `closing`."""
        ...

    def on_connection_lost(self, connection: Connection, kind: str | None) -> None:
        """The connection is gone; `kind` says why the request in flight, if any, has no answer."""
        ...


class Connection(asyncio.Protocol):
    """A connection and the request that it is busy with.

    Attributes:
        busy: Whether a request is in flight.
        intended: When that request was due, on the clock of `time.perf_counter`.
        sent: When it was sent.
        body_index: Which of the target's bodies it was.
        closing: Whether the server said that it closes after this answer.
    """

    __slots__ = (
        "_head",
        "_left",
        "_mode",
        "_owner",
        "_reason",
        "_status",
        "_timing",
        "_transport",
        "body_index",
        "busy",
        "closing",
        "intended",
        "sent",
    )

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._mode = "head"
        self._left = 0
        self._status = 0
        self._timing = b""
        self._reason = "closed"
        self.busy = False
        self.closing = False
        self.intended = self.sent = 0.0
        self.body_index = 0

    def send(self, request: bytes, *, body_index: int, intended: float, now: float) -> None:
        """Sends a request; the owner hears of its end exactly once."""
        assert self._transport is not None, "only an open connection is asked to send"
        self.busy = True
        self.body_index = body_index
        self.intended = intended
        self.sent = now
        self._transport.write(request)

    def abort(self, reason: str) -> None:
        """Closes at once; the request in flight ends for this reason."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Reads on; most answers come in one piece."""
        if not self.busy:
            self.abort("malformed")
        elif self._mode == "head":
            self._read_head(self._head + data if self._head else data)
        elif self._mode == "length":
            self._left -= len(data)
            if self._left <= 0:
                self._finish()
        elif self._mode == "chunked":
            self._head = (self._head + data)[-7:]
            if self._head == b"\r\n0\r\n\r\n":
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the request in flight."""
        self._transport = None
        if self.busy and self._mode == "close" and exc is None and self._reason == "closed":
            self._finish()
        busy, self.busy = self.busy, False
        self._owner.on_connection_lost(self, self._reason if busy else None)

    def _read_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._head = data
            return
        head = data[: end + 2].lower()
        try:
            self._status = int(head[9:12])
            at = head.find(b"\r\ncontent-length:")
            length = int(head[at + 17 : head.index(b"\r\n", at + 17)]) if at >= 0 else -1
        except ValueError:
            self.abort("malformed")
            return
        at = head.find(b"\r\nserver-timing:")
        self._timing = head[at + 16 : head.index(b"\r\n", at + 16)] if at >= 0 else b""
        self.closing = b"\r\nconnection: close\r\n" in head or head.startswith(b"http/1.0")
        rest = len(data) - end - 4
        if length >= 0 or self._status == 204:
            self._mode, self._left, self._head = "length", max(length, 0) - rest, b""
            if self._left <= 0:
                self._finish()
        elif b"\r\ntransfer-encoding: chunked\r\n" in head:
            self._mode, self._head = "chunked", b"\r\n"  # so that an empty body ends like any other
            self.data_received(data[end + 4 :])
        else:
            self._mode, self._head, self.closing = "close", b"", True

    def _finish(self) -> None:
        self._mode, self._head, self.busy = "head", b"", False
        self._owner.on_response(self, self._status, self._timing, time.perf_counter())
