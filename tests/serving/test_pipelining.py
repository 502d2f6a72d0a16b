"""Of pipelined requests only the first one is answered; then the connection closes."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from served_socket import GET, answer, body_of, client, echo, everything, listening


def posted(path: bytes, body: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%s" % (path, len(body), body)


def chunked(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (path, len(body), body)


def upgrading(path: bytes, framed: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n%s" % (path, framed)


REQUESTS = {
    posted(b"/a", b"1\r\n\r\n2"): b"/a 1\r\n\r\n2\n",
    chunked(b"/b", b"3\r\n\r\n4"): b"/b 3\r\n\r\n4\n",
    b"\r\n\r\n" + GET: b"/ \n",
    posted(b"/c"): b"/c \n",
    upgrading(b"/d", b"content-length: 3\r\n\r\nabc"): b"/d abc\n",
    upgrading(b"/e", b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"): b"/e abc\n",
    posted(b"/f", b"x" * 500): b"/f " + b"x" * 500 + b"\n",
}


@pytest.mark.parametrize("size", [1, 7, 60, 100_000])
async def test_requests_of_all_kinds_are_answered_on_one_connection(size: int) -> None:
    """Packets split the requests at any byte. The requests have bodies of known length, chunked bodies, no body, or ask for an upgrade."""
    async with listening(echo) as served, client(served) as (reader, writer):
        for sent, expected in REQUESTS.items():
            for start in range(0, len(sent), size):
                writer.write(sent[start : start + size])
                if size < 100:
                    await asyncio.sleep(0)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert expected == await reader.readexactly(len(expected))


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("behind", [*REQUESTS, b"NONSENSE\r\n\r\n", bytes(100)])
@pytest.mark.parametrize("at_once", [True, False])
async def test_only_the_first_of_several_requests_is_answered(request_: bytes, behind: bytes, at_once: bool) -> None:
    """The others can arrive with it, or while it is answered."""
    entered, answers = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        entered.set()
        await answers.wait()
        await answer(send, scope["path"].encode() + b" " + body + b"\n")

    async with listening(app) as served, client(served, request_ + behind * at_once) as (reader, writer):
        await entered.wait()
        if not at_once:
            writer.write(behind)
            await asyncio.sleep(0.01)
        answers.set()
        received = await everything(reader)
    assert 1 == received.count(b"HTTP/1.1 ")
    assert received.endswith(b"\r\n\r\n" + REQUESTS[request_])
