"""Reads: connects sockets with limits on the size of each read, because a connection may keep what was read. It knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its arguments are those of asyncio's class of the same name

from bertserve.service.server.connections import ConnectionLimits

if TYPE_CHECKING:
    from bertserve.service.server.protocol import HttpProtocol

READ_BYTES = 2**17  # of one read; with a half of it, large bodies would take one and a half times as long to arrive
# Of one read with TLS: a connection with unparsed requests keeps such reads three times, in buffers of uvloop and OpenSSL and as bytes. Bodies of
# 2 MB arrive as fast as with 2**17, because decryption takes more time than a read.
TLS_READ_BYTES = 2**15
_read_buffer = memoryview(bytearray(READ_BYTES))  # of all connections: a read is copied before the next one


async def connect(protocol: HttpProtocol, connection: socket.socket, tls: ssl.SSLContext | None, limits: ConnectionLimits) -> None:
    """Connects a protocol to an accepted socket, as uvloop does, but with smaller reads. With TLS it returns after the handshake.

    uvloop itself reads up to 256,000 bytes. A connection may have to keep what was read, although it has more than enough. A smaller receive buffer
    of the system would limit it too, but also the rate of uploads over long distances.

    Args:
        protocol: The protocol.
        connection: The socket.
        tls: The certificate and its key, or None without TLS.
        limits: Time limits of the handshake and of the end of a TLS connection.

    Raises:
        OSError: The handshake failed, or took too long, or the client left.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        await loop.connect_accepted_socket(lambda: LimitedReads(protocol), connection)
        return
    connected = loop.create_future()
    encrypted = SSLProtocol(
        loop,
        protocol,
        tls,
        connected,
        server_side=True,
        ssl_handshake_timeout=limits.header_timeout_s,
        ssl_shutdown_timeout=limits.body_timeout_s,  # also limits the time to send what is left of an answer
    )
    transport, _ = await loop.connect_accepted_socket(lambda: LimitedTlsReads(encrypted, protocol), connection)
    try:
        await connected
    except BaseException:
        transport.abort()
        raise
    finally:
        del connected  # its exception refers to this frame, and such a cycle would wait for the garbage collector


class LimitedReads(asyncio.BufferedProtocol):
    """Passes what a transport reads to a protocol, at most READ_BYTES at a time. This costs a request less than a microsecond."""

    def __init__(self, protocol: Any) -> None:
        """Wraps a protocol."""
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handles a new connection."""
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles a closed connection."""
        self._protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for the next read."""
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handles a read."""
        self._protocol.data_received(bytes(_read_buffer[:nbytes]))

    def eof_received(self) -> None:
        """Handles the end of what the client sends."""
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Handles a client that reads more slowly than the service writes."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Handles a client that has read enough."""
        self._protocol.resume_writing()


class LimitedTlsReads(LimitedReads):
    """Passes what a transport reads to uvloop's protocol of TLS, at most TLS_READ_BYTES at a time.

    While a TLS connection closes, uvloop decrypts and drops all that still arrives, which a client can continue for long. So after TLS_READ_BYTES it
    reads no more, and the client must wait for the end.
    """

    def __init__(self, encrypted: Any, application: HttpProtocol) -> None:
        """Wraps uvloop's protocol, which has the protocol of the application."""
        super().__init__(encrypted)
        self._application = application
        self._late = 0  # bytes that arrived after the application had closed the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handles a new connection."""
        self._transport: Any = transport
        super().connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the first bytes of the buffer of the connection; the others stay untouched and take no memory."""
        buffer: memoryview = self._protocol.get_buffer(1)
        return buffer[:TLS_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Handles a read."""
        self._protocol.buffer_updated(nbytes)
        if self._application.closing:
            self._late += nbytes
            if self._late > TLS_READ_BYTES:
                self._transport.pause_reading()
