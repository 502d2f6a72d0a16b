"""Pipelined requests are answered in order, and their memory is bounded."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.types import Receive, Scope, Send

from served_socket import GET, client, echo, everything, listening


def posted(path: bytes, body: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body)


def chunked(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (path, len(body), body)


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
