"""Limits of connections: size and time of heads, trailers, upgrades, unread bodies, pipelining, and how a connection ends."""

import asyncio
import gc
import json
import socket
import struct
import weakref
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from bertserve.service.api.receiving import until_disconnect
from bertserve.service.errors import HttpError
from bertserve.service.server import transport
from support import until
from support.http_messages import CHUNKED, H2C, LAST_CHUNK, chunk, head, post
from support.served_socket import GET, answer, body_of, client, echo, everything, listening

CHUNKED_HEAD = head(CHUNKED, path=b"/")
HALF_BODY = post(body=b"{", length=100, path=b"/")


async def refuse(_: Scope, __: Receive, send: Send) -> None:
    """An application that answers without reading the body."""
    await answer(send, b"no", status=401)


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def replies(head: bytes, app: Any = echo, **limits: float) -> bytes:
    """Returns everything that the service sends back until it closes the connection."""
    async with listening(app, **limits) as server, client(server, head) as (reader, _):
        return await everything(reader)


def assert_refused(response: bytes, status: int, error_type: str) -> None:
    """Asserts that all that was received is one error, in the usual shape, that closes the connection."""
    head, _, body = response.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    error = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % status), response
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(body))
    assert (error["error_type"], error["request_id"]) == (error_type, headers["x-request-id"])
    assert sorted(error) == ["error", "error_type", "request_id"]


@pytest.mark.parametrize(
    ("head", "status", "error_type"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 4096, 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 40_000 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /" + b"x" * 4096 + b" HTTP/1.1\r\n\r\n", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 6000 + b"\r\n", 431, "head_too_large"),
        (CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"2\r\n{}\r\n0\r\na: " + b"b" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n" + b"b" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"2;a=" + b"b" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"1;aaaaaaaaaaaaaaaa\r\n{\r\n" * 2000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"0" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"1\r\n{\r\n" * 20_000, 431, "head_too_large"),
        (head(*H2C, CHUNKED, path=b"/") + b"2;a=" + b"b" * 10_000, 431, "head_too_large"),
        (CHUNKED_HEAD + b"nonsense\r\n", 400, "malformed"),
        (CHUNKED_HEAD + b"2\r\n{}\r\nnonsense\r\n", 400, "malformed"),
        (b"NONSENSE\r\n\r\n", 400, "malformed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("piece", [997, 2**20])
async def test_a_request_over_a_limit_is_refused(head: bytes, status: int, error_type: str, piece: int) -> None:
    """It can arrive in one read or in many. The client gets one error, and the end of the connection."""
    async with listening(echo) as server, client(server) as (reader, writer):
        for start in range(0, len(head), piece):
            writer.write(head[start : start + piece])
            await asyncio.sleep(0)
        assert_refused(await everything(reader), status, error_type)


@pytest.mark.parametrize("head", [b"", b"GET /", b"\r\n", b"GET / HTTP/1.1\r\nhost"])
async def test_a_head_that_is_not_complete_in_time_is_refused(head: bytes) -> None:
    assert_refused(await replies(head, header_timeout_s=0.1), 408, "too_slow")


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100, b"NONSENSE\r\n\r\n"])
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_closed_connection_is_freed(head: bytes, end: str) -> None:
    """The timer of its head would keep it in memory for seconds, and a client can open thousands of connections in that time."""
    async with listening(echo) as server:
        async with client(server, head) as (_, writer):
            await until(lambda: bool(server.protocols))
            await asyncio.sleep(0.01)
            if end == "reset":
                reset_on_close(writer)
        await until(lambda: not server.connections)
        connection = weakref.ref(server.protocols.pop())
        gc.collect()
        assert connection() is None


async def test_a_refused_connection_has_no_timer() -> None:
    """It would write a second error behind the end of the stream, while the client can still read the first one."""
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with listening(echo, header_timeout_s=0.5) as server, client(server, b"NONSENSE\r\n\r\n") as (reader, _):
        assert_refused(await everything(reader), 400, "malformed")
        await asyncio.sleep(0.6)
    assert failures == []


async def test_a_head_that_arrives_slowly_gets_no_more_time() -> None:
    async with listening(echo, header_timeout_s=0.2) as server, client(server) as (reader, writer):
        response = asyncio.create_task(everything(reader))
        for byte in GET * 10:
            if response.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        assert_refused(await response, 408, "too_slow")


async def test_the_largest_head_is_read() -> None:
    """Its size is 4096 bytes, and the first read also has a body of more bytes than the limit."""
    head = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 10000\r\nx: "
    head += b"x" * (4096 - len(head) - 4) + b"\r\n\r\n"
    assert (await replies(head + b"y" * 10_000)).endswith(b"\r\n\r\n/ " + b"y" * 10_000 + b"\n")
    assert_refused(await replies(head.replace(b"x: ", b"x: " + b"x" * 99) + b"y" * 10_000), 431, "head_too_large")


async def test_trailers_are_not_headers() -> None:
    """The application never sees them, because they arrive after access is decided."""
    headers_of_requests: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        headers_of_requests.append(list(scope["headers"]))
        await answer(send)

    trailers = b"authorization: Bearer b\r\nx-forwarded-for: 1.2.3.4\r\n"
    async with listening(app) as server, client(server, CHUNKED_HEAD + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n") as (reader, writer):
        await reader.readuntil(b"ok")
        writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        await reader.readuntil(b"ok")
    assert headers_of_requests == [[(b"host", b"t"), (b"transfer-encoding", b"chunked")], [(b"connection", b"close")]]


async def test_chunks_can_have_as_much_framing_as_data() -> None:
    body = b"8\r\n{\r\n0\r\n\r\n\r\n" * 20_000 + b"0\r\n\r\n"
    response = await replies(head(b"connection: close", CHUNKED, path=b"/") + body)
    assert response.endswith(b"\r\n\r\n/ " + b"{\r\n0\r\n\r\n" * 20_000 + b"\n")


async def test_an_expected_continue_is_sent_when_the_body_is_read() -> None:
    head = b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\nconnection: close\r\n\r\n"
    async with listening(echo) as server, client(server, head) as (reader, writer):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await everything(reader)).endswith(b"\r\n\r\n/ {}\n")


async def test_a_body_that_is_no_longer_valid_during_its_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no second answer within the first one. The application learns of it before the connection is closed."""
    monkeypatch.setattr(transport, "LINGER_S", 100)
    disconnect = asyncio.Event()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            continue
        disconnect.set()

    async with listening(app) as server, client(server, CHUNKED_HEAD) as (reader, writer):
        await reader.readuntil(b"first")
        writer.write(b"nonsense\r\n")
        assert await everything(reader) == b"\r\n"
        await disconnect.wait()


@pytest.mark.parametrize("version", [b"HTTP/1.1\r\nconnection: close", b"HTTP/1.0"])
async def test_an_early_response_is_not_lost_if_the_connection_then_closes(version: bytes) -> None:
    """Some clients send the whole body first. If the service closed earlier, they would see a reset instead of the response."""
    head = b"POST / %s\r\ncontent-length: 4000000\r\n\r\n" % version
    async with listening(refuse) as server, client(server, head) as (reader, writer):
        await reader.readuntil(b"no")
        assert await reader.read() == b""
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert not writer.is_closing()


async def test_the_rest_of_a_body_after_an_early_response_is_dropped() -> None:
    async with listening(refuse) as server, client(server, HALF_BODY) as (reader, writer):
        await reader.readuntil(b"no")
        writer.write(b"x" * 99 + HALF_BODY)
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("end", ["close", "reset", "half"])
async def test_a_lost_connection_cancels_its_request(end: str) -> None:
    """A client that closes only its sending half has left too."""
    error_types: list[str] = []
    start = asyncio.Event()

    async def work() -> None:
        start.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        try:
            await until_disconnect(work(), receive)
        except HttpError as error:
            error_types.append(error.error_type)

    async with listening(app) as server, client(server, GET) as (_, writer):
        await start.wait()
        if end == "half":
            writer.write_eof()
        elif end == "reset":
            reset_on_close(writer)
        if end != "half":
            writer.close()
        await until(lambda: not server.connections and bool(error_types))


async def test_each_head_has_its_own_time() -> None:
    """An idle connection stays open for the keep-alive time, and then closes without further bytes. Half a second head is refused."""
    async with listening(echo, header_timeout_s=0.4, keep_alive_s=2) as server, client(server, GET) as idle, client(server, GET) as half:
        for reader, _ in (idle, half):
            await reader.readuntil(b"/ \n")
        await asyncio.sleep(0.5)
        idle[1].write(GET)
        half[1].write(GET[:20])
        await idle[0].readuntil(b"/ \n")
        assert_refused(await everything(half[0]), 408, "too_slow")
        assert await everything(idle[0]) == b""
        idle[1].close()
        await until(lambda: not server.connections)


async def test_shutdown_answers_what_has_arrived() -> None:
    """Half a body gets 503. Half a head is answered if the rest comes soon, otherwise dropped: the client knows that nothing has begun."""
    async with (
        listening(echo) as server,
        client(server, HALF_BODY) as (body, _),
        client(server, GET[:9]) as (head, _),
        client(server, GET[:9]) as (late, writer),
    ):
        await until(lambda: len(server.connections) == 3 and any(c.cycle is not None for c in server.protocols))
        for connection in server.protocols:
            connection.shutdown()
        writer.write(GET[9:])
        assert_refused(await everything(body), 503, "unavailable")
        assert await everything(head) == b""
        assert (await everything(late)).endswith(b"/ \n")


async def test_an_answer_arrives_in_one_piece() -> None:
    async with listening(echo) as server, client(server) as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            assert (await reader.read(65536)).endswith(b"\r\n\r\n/ \n")


REQUESTS = {
    post(path=b"/a", body=b"1\r\n\r\n2"): b"/a 1\r\n\r\n2\n",
    head(CHUNKED, path=b"/b") + chunk(b"3\r\n\r\n4") + LAST_CHUNK: b"/b 3\r\n\r\n4\n",
    b"\r\n\r\n" + GET: b"/ \n",
    post(path=b"/c", body=b""): b"/c \n",
    post(*H2C, path=b"/d", body=b"abc"): b"/d abc\n",
    head(*H2C, CHUNKED, path=b"/e") + chunk(b"ab") + chunk(b"c") + LAST_CHUNK: b"/e abc\n",
    post(path=b"/f", body=b"x" * 500): b"/f " + b"x" * 500 + b"\n",
}


@pytest.mark.parametrize("size", [1, 7, 60, 100_000])
async def test_requests_of_all_kinds_are_answered_on_one_connection(size: int) -> None:
    """Packets split the requests at any byte. The requests have bodies of known length, chunked bodies, no body, or ask for an upgrade."""
    async with listening(echo) as server, client(server) as (reader, writer):
        for request, expected in REQUESTS.items():
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                if size < 100:
                    await asyncio.sleep(0)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(len(expected)) == expected


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("behind", [*REQUESTS, b"NONSENSE\r\n\r\n", bytes(100)])
@pytest.mark.parametrize("at_once", [True, False])
async def test_only_the_first_of_several_requests_is_answered(request_: bytes, behind: bytes, at_once: bool) -> None:
    entry, answers = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(receive)
        entry.set()
        await answers.wait()
        await answer(send, scope["path"].encode() + b" " + body + b"\n")

    async with listening(app) as server, client(server, request_ + behind * at_once) as (reader, writer):
        await entry.wait()
        if not at_once:
            writer.write(behind)
            await asyncio.sleep(0.01)
        answers.set()
        response = await everything(reader)
    assert response.count(b"HTTP/1.1 ") == 1
    assert response.endswith(b"\r\n\r\n" + REQUESTS[request_])
