"""Pipelined requests are answered in order, and their memory is bounded."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress

import pytest
from starlette.types import Receive, Scope, Send

from bertserve.service.process.parsing import MAX_UNREAD_BYTES
from bertserve.service.process.protocol import HttpProtocol
from bertserve.service.process.reads import READ_BYTES
from served_socket import GET, Listening, answer, client, echo, everything, listening, until


def posted(path: bytes, body: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body)


def chunked(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (path, len(body), body)


def held(served: Listening) -> int:
    """Returns the number of bytes that the first connection has read but not parsed."""
    return len(served.protocols[0]._unparsed) - served.protocols[0]._start


async def test_a_connection_has_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand requests arrive in one packet. The second is parsed only after the first is answered."""
    heads = 0
    complete = HttpProtocol.on_headers_complete

    def count(self: HttpProtocol) -> None:
        nonlocal heads
        heads += 1
        complete(self)

    monkeypatch.setattr(HttpProtocol, "on_headers_complete", count)
    entered, gate = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await gate.wait()
        await answer(send)

    async with listening(app) as served, client(served, GET * 1000) as (reader, _):
        await entered.wait()
        await asyncio.sleep(0.05)
        assert 1 == heads
        gate.set()
        assert b"ok" * 1000 == re.sub(rb"HTTP/1.1 200 OK\r\n.*?\r\n\r\n", b"", await reader.readexactly(1000 * 40), flags=re.DOTALL)


async def test_unparsed_bytes_are_bounded() -> None:
    """The bound holds for any amount of requests, and while the application polls for a disconnect."""
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        watch = asyncio.create_task(receive())
        while not gate.is_set():
            watch.cancel()
            watch = asyncio.create_task(receive())
            await asyncio.sleep(0.002)
        watch.cancel()
        await answer(send)

    async with listening(app) as served, client(served, GET * 500_000):
        await until(lambda: bool(served.protocols) and held(served) > MAX_UNREAD_BYTES)
        await asyncio.sleep(0.1)
        assert held(served) <= MAX_UNREAD_BYTES + READ_BYTES
        gate.set()


@pytest.mark.parametrize("head", [GET, b"GET / HTTP/1.1\r\ncontent-length: 10000000\r\n\r\n"], ids=["requests", "body"])
async def test_a_read_is_bounded(head: bytes) -> None:
    """The service keeps at most one read beyond the limit, however much a client sends at once."""
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()

    async with listening(app) as served, client(served, head) as (_, writer):
        await until(lambda: bool(served.protocols) and served.protocols[0].cycle is not None)
        (connection,) = served.protocols
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        with suppress(BlockingIOError):  # until the system's buffers are full, before the event loop reads
            while True:
                os.write(writer.get_extra_info("socket").fileno(), GET * 1000)
        await until(lambda: connection.flow.read_paused)
        await asyncio.sleep(0.05)
        assert MAX_UNREAD_BYTES < held(served) + len(connection.cycle.body) <= MAX_UNREAD_BYTES + READ_BYTES
        gate.set()


@pytest.mark.parametrize("size", [1, 7, 60, 100_000])
async def test_requests_of_all_kinds_are_answered_in_order(size: int) -> None:
    """Packets split the requests at any byte. The requests have bodies of known length, chunked bodies, no body, or ask for an upgrade."""
    upgrade = b"POST /d HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc"
    sent = b"".join(
        (posted(b"/a", b"1\r\n\r\n2"), chunked(b"/b", b"3\r\n\r\n4"), GET, posted(b"/c"), upgrade, b"\r\n\r\n", posted(b"/e", b"x" * 500))
    )

    async with listening(echo) as served, client(served) as (reader, writer):
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            if size < 100:
                await asyncio.sleep(0)
        writer.write(b"GET /last HTTP/1.1\r\nconnection: close\r\n\r\n")
        bodies = re.split(rb"HTTP/1.1 200 OK\r\n.*?\r\n\r\n", await everything(reader), flags=re.DOTALL)
    assert [
        b"",
        b"/a 1\r\n\r\n2\n",
        b"/b 3\r\n\r\n4\n",
        b"/ \n",
        b"/c \n",
        b"/d abc\n",
        b"/e " + b"x" * 500 + b"\n",
        b"/last \n",
    ] == bodies


async def test_a_disconnect_is_reported_to_the_current_request() -> None:
    entered, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        entered.set()
        if (await receive())["type"] == "http.disconnect":
            told.set()

    async with listening(app) as served:
        async with client(served, GET * 3):
            await entered.wait()
        await told.wait()


async def test_complete_requests_before_a_malformed_one_are_answered() -> None:
    async with listening(echo) as served, client(served, posted(b"/a") + posted(b"/b") + b"NONSENSE\r\n\r\n") as (reader, _):
        assert [b"/a", b"/b"] == re.findall(rb"\n(/\w)", await everything(reader))
        assert ["malformed"] == served.ends
