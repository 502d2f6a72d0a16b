"""Hostile connections: everything that one or a few of them send, hold or leave unread has a limit."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from typing import Any

import pytest
import trustme
from starlette.types import Receive, Scope, Send

from bertserve.service.server import connections
from bertserve.service.server.parsing import MAX_HEADERS
from served_socket import GET, answer, body_of, client, echo, everything, listening, until

CHUNKED = b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{"


async def refuse(_: Scope, __: Receive, send: Send) -> None:
    """An application that answers without reading the body."""
    await answer(send, b"no", status=401)


async def replies(sent: bytes, app: Any = echo) -> tuple[bytes, list[str]]:
    """Returns everything that the service sends back, and the reasons why it closed the connection."""
    async with listening(app) as served, client(served, sent) as (reader, _):
        return await everything(reader), served.ends


async def test_trailers_are_not_headers() -> None:
    """The application never sees them, because they arrive after access is decided."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        seen.append(list(scope["headers"]))
        await answer(send)

    trailers = b"authorization: Bearer b\r\nx-forwarded-for: 1.2.3.4\r\n"
    sent = CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n" + b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"

    received, ends = await replies(sent, app)
    assert (2, []) == (received.count(b"HTTP/1.1 200 "), ends)
    assert [[(b"host", b"test"), (b"transfer-encoding", b"chunked")], [(b"connection", b"close")]] == seen


@pytest.mark.parametrize(
    "framing",
    [
        b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 2000,
        b"2\r\n{}\r\n0\r\na: " + b"b" * 10_000,
        b"2\r\n{}\r\n0\r\n" + b"b" * 10_000,
        b"2;a=" + b"b" * 10_000,
        b"1;aaaaaaaaaaaaaaaa\r\n{\r\n" * 2000,
        b"0" * 10_000,
    ],
    ids=["trailers", "value", "name", "extension", "extensions", "zeros"],
)
async def test_trailers_and_chunk_extensions_have_a_limit(framing: bytes) -> None:
    """The limit is that of a request head, because no declared length covers these bytes."""
    received, ends = await replies(CHUNKED + framing)
    assert received.startswith(b"HTTP/1.1 431 "), received
    assert ["head_too_large"] == ends


async def test_many_small_chunks_form_one_body() -> None:
    body = b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n"
    received, _ = await replies(CHUNKED.replace(b"host: test", b"connection: close") + body)
    assert received.endswith(b"\r\n\r\n/ " + b"{" * 20_000 + b"\n")


@pytest.mark.parametrize(("more", "status"), [(0, b"200"), (1, b"431")])
async def test_the_number_of_headers_is_limited(more: int, status: bytes) -> None:
    received, _ = await replies(b"GET / HTTP/1.1\r\nconnection: close\r\n" + b"a:\r\n" * (MAX_HEADERS - 1 + more) + b"\r\n")
    assert received.startswith(b"HTTP/1.1 %s " % status)


async def test_empty_lines_before_a_request_have_a_limit() -> None:
    received, ends = await replies(b"\r\n" * 3000 + GET)
    assert (True, ["head_too_large"]) == (received.startswith(b"HTTP/1.1 431 "), ends)


async def test_a_streamed_response_to_http_1_0_is_not_chunked() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/known":
            await answer(send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for part in (b"one\n", b"two\n", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})

    received, _ = await replies(b"GET / HTTP/1.0\r\n\r\n", app)
    assert received.endswith(b"\r\n\r\none\ntwo\n")
    assert b"transfer-encoding" not in received
    received, _ = await replies(b"GET /known HTTP/1.0\r\n\r\n", app)
    assert received.endswith(b"\r\n\r\nok")
    assert b"content-length: 2\r\n" in received


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of a server and of a client that trusts it."""
    context, authority = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return context, trusting


async def test_an_upload_over_tls_to_a_slow_application_arrives() -> None:
    """Reading pauses while uvloop holds a read, whose last record of TLS is often incomplete."""
    context, trusting = tls_contexts()
    pieces = [b"x" * random.Random(i).randrange(1, 2**14 + 1) for i in range(200)]

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        received = 0
        while (message := await receive())["more_body"]:
            received += len(message["body"])
            await asyncio.sleep(0.002)
        await answer(send, b"%d" % (received + len(message["body"])))

    def upload(address: tuple[str, int]) -> bytes:
        length = sum(map(len, pieces))
        with trusting.wrap_socket(socket.create_connection(address, timeout=10), server_hostname="127.0.0.1") as client:
            client.sendall(b"POST / HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % length)
            for piece in pieces:
                client.sendall(piece)
            return client.recv(65536)

    async with listening(slow, context) as served:
        received = await asyncio.to_thread(upload, served.address)
    assert received.endswith(b"\r\n\r\n%d" % sum(map(len, pieces)))


async def test_bytes_after_an_early_response_get_no_second_response() -> None:
    """A client would take the second response for that of its next request."""
    async with listening(refuse) as served, client(served, HALF_BODY) as (reader, writer):
        await reader.readuntil(b"no")
        writer.write(b"x" * 99 + b"no request\r\n\r\n")
        assert b"" == await everything(reader)
        assert ["malformed"] == served.ends


async def test_a_response_is_sent_completely_before_a_refused_connection_ends() -> None:
    async def long(_: Scope, __: Receive, send: Send) -> None:
        await answer(send, b"a" * 2**24)

    async with listening(long) as served, client(served, GET) as (reader, writer):
        await reader.readline()
        (connection,) = served.protocols
        await until(lambda: connection.cycle.response_complete)
        writer.write(b"no HTTP\r\n\r\n")
        await until(lambda: served.ends == ["malformed"])
        connection.check(asyncio.get_running_loop().time() + connections.LINGER_S + 1)
        assert b"a" * 2**24 in await everything(reader)


@pytest.mark.parametrize("version", [b"HTTP/1.1\r\nconnection: close", b"HTTP/1.0"])
async def test_an_early_response_is_not_lost_if_the_connection_then_closes(version: bytes) -> None:
    """Some clients send the whole body first. If the service closed earlier, they would see a reset instead of the response."""
    head = b"POST / %s\r\ncontent-length: 4000000\r\n\r\n" % version
    async with listening(refuse) as served, client(served, head) as (reader, writer):
        await reader.readuntil(b"no")
        assert b"" == await reader.read()
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert not writer.is_closing()
