"""CoalescingTransport: the head and the body of a response in one write. Knows bytes, no HTTP but how a head ends."""

from __future__ import annotations

import asyncio
import select
from typing import Any

_HEADS = tuple(b"HTTP/1.1 %d" % digit for digit in (2, 3, 4, 5))  # not 100: the client sends its body only after it
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux only; elsewhere poll still reports errors and resets
_END_OF_HEAD = b"\r\n\r\n"


class CoalescingTransport(asyncio.Transport):
    """A transport that holds the head of a response until the next write, or until the response is complete.

    uvicorn writes head and body separately: two system calls, and two packets that wake the client twice.

    Attributes:
        written: Bytes that the transport was given so far.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        """Wraps a transport."""
        super().__init__()
        self._transport = transport
        self._held = b""
        self.written = 0
        self._slow_since: float | None = None  # when the time began in which the client must take enough of what is unsent
        self._taken = 0  # bytes that it had taken by then

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns what the transport knows of its connection."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Returns whether the connection is closed, or about to be."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Stops reading."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Goes on reading."""
        self._transport.resume_reading()

    def write(self, data: Any) -> None:
        """Writes bytes; a closed transport ignores them, as asyncio's own does and uvloop's does not."""
        if not self._held and data.startswith(_HEADS) and data.endswith(_END_OF_HEAD):
            self._held = bytes(data)
            return
        data, self._held = self._held + data, b""
        if data and not self._transport.is_closing():
            self.written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        """Closes the transport once all is written."""
        self.flush()
        self._transport.close()

    def can_write_eof(self) -> bool:
        """Returns whether the sending half alone can be closed; with TLS it cannot."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """Closes the sending half once all is written."""
        self.flush()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        """Closes the transport at once; what is not yet written is lost."""
        self._held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Returns the bytes that the client has yet to take."""
        return self._transport.get_write_buffer_size()

    def is_taken_slowly(self, now: float, timeout_s: float, min_rate: float) -> bool:
        """Returns whether the client takes what is written at less than a rate. To be called about once a second.

        Args:
            now: The loop's time in seconds.
            timeout_s: Seconds for which the client may be slower.
            min_rate: Bytes per second.
        """
        unsent = self.get_write_buffer_size()
        if not unsent:
            self._slow_since = None
            return False
        taken = self.written - unsent
        if self._slow_since is not None:
            waited = now - self._slow_since
            if waited <= timeout_s:
                return False
            if taken - self._taken < waited * min_rate:
                return True
        self._slow_since, self._taken = now, taken
        return False

    def peer_closed(self) -> bool:
        """Returns whether the peer has closed or reset the connection, also while reading is paused and the event loop does not notice."""
        if self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), _PEER_CLOSED)
        return bool(poll.poll(0))

    def flush(self) -> None:
        """Writes the head that is held, if there is one."""
        if self._held:
            self.write(b"")
