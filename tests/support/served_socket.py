"""LimitedProtocol on a real socket around any ASGI application, in process: for tests of connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from bertserve.service.api import error_responses
from bertserve.service.errors import BertServeError
from bertserve.service.server.limits import LimitedProtocol
from bertserve.service.server.serve import configure
from bertserve.service.settings import Settings
from support.http_messages import get

LIMITS = {"keep_alive_s": 5, "header_timeout_s": 10.0, "max_header_bytes": 4096}
GET = get(start=b"GET / HTTP/1.1")


@dataclass
class SocketServer:
    """A server and its connections.

    Attributes:
        address: Host and port.
        connections: The open connections.
        protocols: The protocols of all connections, including closed ones, in order of arrival.
    """

    address: tuple[str, int]
    connections: set[Any]
    protocols: list[LimitedProtocol] = field(default_factory=list)


def refuse(error: BertServeError, _: bool) -> Response:
    response = error_responses.error_response(error, "refused")
    response.headers.update({"x-request-id": "refused", "connection": "close"})
    return response


@asynccontextmanager
async def listening(app: ASGIApp, **limits: Any) -> AsyncIterator[SocketServer]:
    """Serves an application until the block ends."""
    loop = asyncio.get_running_loop()
    config = configure(app, Settings(**LIMITS | limits), refuse)
    config.load()
    config.loaded_app = app
    state = ServerState()
    socket_server = SocketServer(("", 0), state.connections)

    def protocol() -> LimitedProtocol:
        socket_server.protocols.append(config.http_protocol_class(config, state, {}, loop))
        return socket_server.protocols[-1]

    listener = socket.create_server(("127.0.0.1", 0))
    socket_server.address = listener.getsockname()
    server = await loop.create_server(protocol, sock=listener)
    try:
        yield socket_server
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.close()


@asynccontextmanager
async def client(server: SocketServer, request: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """Returns all bytes until the end of the stream or a reset."""
    stream = b""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            stream += data
    return stream


async def body_of(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def answer(send: Send, body: bytes = b"ok", status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(send, scope["path"].encode() + b" " + await body_of(receive) + b"\n")
