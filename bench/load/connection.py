"""A keep-alive HTTP/1.1 connection with at most one request in flight, and a timer with microsecond precision.

A request must cost little CPU time, which the service under test needs. Therefore the connection is an asyncio protocol with
callbacks, without streams or tasks. httptools parses the responses; only the status and the headers `server-timing` and
`retry-after` are kept. The stream that owns the connection decides which request is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

if TYPE_CHECKING:
    from bertserve.bench.load.stream import TargetStream

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_TimerSpec = ctypes.c_long * 4  # interval in seconds and nanoseconds, then the expiry in seconds and nanoseconds


class Connection(asyncio.Protocol):
    """A connection with its request in flight.

    Attributes:
        busy: Whether a request is in flight.
        intended: Time when that request was due, on the clock of `time.perf_counter`.
        sent: Time when it was sent.
        body_index: Index of its body in the target's bodies.
        closing: Whether the server closes the connection after this response.
        retry_after: Whether the response has a time for a retry.
    """

    def __init__(self, owner: TargetStream) -> None:
        self._owner = owner
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reason = "closed"
        self._headers_complete = False
        self._has_length = False  # of the body, by its header or by chunks; otherwise the body ends with the connection
        self._complete = False
        self._server_timing = b""
        self.busy = False
        self.closing = False
        self.retry_after = False
        self.intended = self.sent = 0.0
        self.body_index = 0

    def send(self, request: bytes, *, body_index: int, intended: float, now: float) -> None:
        """Sends a request. The owner is notified of its end exactly once."""
        assert self._transport is not None, "the connection must be open"
        self.busy = True
        self.body_index = body_index
        self.intended = intended
        self.sent = now
        self._headers_complete = self._has_length = self._complete = False
        self._server_timing = b""
        self.retry_after = False
        self._transport.write(request)

    def abort(self, reason: str) -> None:
        """Closes the connection at once; the request in flight ends with `reason`."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport."""
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
        # called after the parser, which would swallow the owner's exceptions
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
        """Handles a header; called by the parser."""
        name = name.lower()
        if name == b"server-timing":
            self._server_timing = b", ".join(filter(None, (self._server_timing, value.lower())))
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif name == b"retry-after":
            self.retry_after = True

    def on_headers_complete(self) -> None:
        """Handles the end of the headers; called by the parser."""
        self._headers_complete = True

    def on_message_complete(self) -> None:
        """Handles the end of a response, but skips interim responses; called by the parser."""
        self._complete = self._parser.get_status_code() >= 200
        self._headers_complete = self._complete
        self.closing = not self._parser.should_keep_alive()

    def _finish(self) -> None:
        self.busy = False
        self._owner.on_response(self, self._parser.get_status_code(), self._server_timing, time.perf_counter())


class PreciseTimer:
    """Calls a function once per `set`, on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Creates an inactive timer."""
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._file = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None)
            self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            loop.add_reader(self._file, self._on_expired)

    def set(self, at: float) -> None:
        """Sets the time of the next call, on the clock of `time.perf_counter`; a time in the past calls at once."""
        if self._file < 0:
            self._handle = self._loop.call_later(max(at - time.perf_counter(), 0), self._callback)
            return
        # perf_counter is CLOCK_MONOTONIC on Linux; a value of zero would disarm the timer
        at_ns = max(int(at * 1e9), 1)
        self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, _TimerSpec(0, 0, at_ns // 10**9, at_ns % 10**9), None)

    def close(self) -> None:
        """Cancels the timer and frees its file descriptor."""
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _on_expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again after it expired
            os.read(self._file, 8)
        self._callback()
