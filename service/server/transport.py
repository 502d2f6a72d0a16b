"""ResponseTransport: the transport of a connection to a client."""

import asyncio
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

LINGER_S = 0.5  # time for a client to read its last response, and during shutdown to send the rest of a head
_CONTINUE = b"HTTP/1.1 100 "  # not yet a response: the client then sends its body


class ResponseTransport(asyncio.Transport):
    """A transport that sends the head of a response in one packet with its body, and that closes in two steps.

    Two packets would cost the service and its client one more system call and wake-up each.

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

    def send(self, response: Response) -> None:
        """Writes a whole response."""
        head = STATUS_LINE[response.status_code] + b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self._transport.write(head + b"\r\n" + bytes(response.body))

    def close(self) -> None:
        """Closes the sending half, and soon the connection: closing it with unread bytes would discard the response."""
        if not self.is_closing():
            self.write(b"")
            self._closing = True
            if self._transport.can_write_eof():  # plain sockets only, not TLS
                self._transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
