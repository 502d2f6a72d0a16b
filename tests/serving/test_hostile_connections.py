"""Hostile connections: everything that one or a few of them send, hold or leave unread has a limit."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from starlette.types import Receive, Scope, Send

from bertserve.service.http.responses import send_body
from bertserve.service.process import connections, parsing
from bertserve.service.process.connections import (
    GIL_EVERY_S,
    GIL_PAUSE_S,
    MIN_READ_BYTES,
    PROBE_RESERVE,
    TURN_BYTES,
    ConnectionLimits,
    GilPauses,
    Room,
)
from bertserve.service.process.parsing import MAX_HEADERS
from bertserve.service.process.protocol import CoalescingTransport, HttpProtocol
from bertserve.service.process.reads import READ_BYTES, TLS_READ_BYTES, LimitedTlsReads
from bertserve.service.process.server import Server, configure
from served_socket import GET, answer, body_of, client, echo, everything, listening, until

CHUNKED = b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
LIMITS = ConnectionLimits(max_connections=9, header_timeout_s=9, max_header_bytes=9, body_timeout_s=9, min_body_rate=9)
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


class Unread(asyncio.Transport):
    """A transport whose client takes as many bytes as the test says."""

    unsent = 0

    def write(self, data: Any) -> None:
        self.unsent += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unsent


@pytest.mark.parametrize(("per_second", "slow_after"), [(0, 31), (1, 31), (99, 31), (101, None)])
async def test_a_client_must_read_responses_at_the_minimum_rate(per_second: int, slow_after: int | None) -> None:
    raw = Unread()
    transport = CoalescingTransport(raw)
    transport.write(b"x" * 10_000)
    for second in range(80):
        if transport.is_read_slowly(second, 30, 100):
            assert second == slow_after
            return
        raw.unsent -= per_second
    assert slow_after is None


async def test_a_client_that_has_read_everything_is_not_slow() -> None:
    raw = Unread()
    transport = CoalescingTransport(raw)
    for second in range(0, 200, 20):
        transport.write(b"x" * 100)
        assert not transport.is_read_slowly(second, 30, 100)
        raw.unsent = 0
        assert not transport.is_read_slowly(second + 10, 30, 100)


async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers without reading the body, as for a wrong key."""
    await answer(send, status=401)


@pytest.mark.parametrize(("app", "begins"), [(echo, b"HTTP/1.1 503 "), (refusing, b"HTTP/1.1 401 ")], ids=["unanswered", "answered"])
async def test_a_connection_with_a_half_sent_body_is_evicted(monkeypatch: pytest.MonkeyPatch, app: Any, begins: bytes) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.02)
    monkeypatch.setattr(connections, "EXPENDABLE_AFTER_S", 0.02)

    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(listening(app, max_connections=2))
        first, _ = await stack.enter_async_context(client(served, HALF_BODY))
        await until(lambda: len(served.connections) == 1)
        await asyncio.sleep(0.01)  # the loop's clock has a resolution of 1 ms
        await stack.enter_async_context(client(served, HALF_BODY))
        await until(lambda: len(served.connections) == 2)
        served.connections.start()
        await until(lambda: served.connections.room() is Room.PLACE)
        received = await everything(first)
        assert (True, 1) == (received.startswith(begins), received.count(b"HTTP/1.1 "))
        assert ["evicted"] == served.ends


async def test_a_body_at_the_minimum_rate_is_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.01)
    monkeypatch.setattr(connections, "EXPENDABLE_AFTER_S", 0.01)

    sent = b"POST / HTTP/1.1\r\ncontent-length: 20000\r\n\r\n" + b"x" * 10_000
    async with listening(echo, max_connections=1, min_body_rate=1000) as served, client(served, sent) as (reader, writer):
        await until(lambda: len(served.connections) == 1)
        served.connections.start()
        await asyncio.sleep(0.1)
        assert served.connections.room() is not Room.PLACE
        writer.write(b"x" * 10_000)
        assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")


async def test_metrics_can_use_half_of_the_connections_for_probes() -> None:
    async with listening(echo) as served, AsyncExitStack() as stack:
        for _ in range(PROBE_RESERVE):
            await stack.enter_async_context(client(served))
        await until(lambda: len(served.protocols) == PROBE_RESERVE)
        allowed = [served.connections.may_scrape(connection) for connection in served.protocols]
        assert PROBE_RESERVE // 2 == sum(allowed)
        served.protocols[0].abort()
        await until(lambda: len(served.connections) == PROBE_RESERVE - 1)
        assert served.connections.may_scrape(served.protocols[-1])


@pytest.mark.parametrize("sent", [GET, HALF_BODY], ids=["request", "half a body"])
async def test_a_connection_with_an_unread_response_is_evicted(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """The connection is evicted even while the rest of the response waits to be written."""
    monkeypatch.setattr(connections, "SWEEP_S", 0.02)
    monkeypatch.setattr(connections, "EXPENDABLE_AFTER_S", 0.01)

    async def long(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % 2**24)]})
        await send_body(send, b"a" * 2**24)

    async with listening(long, max_connections=1) as served, client(served, sent) as (reader, _):
        await until(lambda: len(served.connections) == 1)
        (connection,) = served.protocols
        await until(lambda: bool(connection.transport.get_write_buffer_size()))
        assert served.connections.room() is not Room.PLACE
        served.connections.start()
        await until(lambda: served.connections.room() is Room.PLACE)
        assert ["evicted"] == served.ends
        assert len(await everything(reader)) < 2**24


async def test_a_client_that_leaves_before_its_refusal_causes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the loop that accepts waiting connections at shutdown."""

    class Reset(socket.socket):
        """A socket whose client has closed the connection."""

        def send(self, *_: Any) -> int:
            raise ConnectionResetError

    async with listening(echo) as served:
        monkeypatch.setattr(served.connections, "room", lambda: Room.NONE)
        config = configure(echo, keep_alive_s=5)
        config.load()
        server = Server(
            config,
            scheduler=None,  # type: ignore[arg-type]
            connections=served.connections,
            shutdown_timeout_s=0,
            on_listen=lambda _: None,
        )
        connection = Reset()
        server._accept(connection)
        assert -1 == connection.fileno()


@pytest.mark.parametrize(
    ("sent", "length"),
    [(b"%x\r\n" % 400_000 + b"\r\n\r\n" * 100_000 + b"\r\n", 400_000), (b"1\r\n{\r\n" * 60_000, 60_000)],
    ids=["empty lines", "chunks of a byte"],
)
async def test_a_body_that_is_slow_to_parse_is_parsed_in_several_turns(monkeypatch: pytest.MonkeyPatch, sent: bytes, length: int) -> None:
    body: list[bytes] = []
    turns = 0
    parse_on = HttpProtocol._parse_on

    def count(self: HttpProtocol, behind_an_answer: bool) -> None:
        nonlocal turns
        turns += 1
        parse_on(self, behind_an_answer)

    monkeypatch.setattr(HttpProtocol, "_parse_on", count)
    monkeypatch.setattr(parsing, "PARSE_S", 0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body.append(await body_of(receive))
        await answer(send)

    async with listening(app) as served, client(served, CHUNKED + sent + b"0\r\n\r\n") as (reader, _):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert [length] == [len(part) for part in body]
        assert turns > 1


async def test_a_turn_of_the_event_loop_parses_for_one_connection() -> None:
    """Connections with unparsed bytes take turns, and the loop does other work in between."""
    loop, order = asyncio.get_running_loop(), list[str]()
    open_ = connections.Connections(LIMITS)

    def parse(name: str, times: int) -> None:
        order.append(name)
        if times > 1:
            open_.unparsed.add(lambda: parse(name, times - 1))

    def turn() -> None:
        order.append("turn")
        if len(order) < 12:
            loop.call_soon(turn)

    for name, times in (("a", 3), ("b", 2)):
        open_.unparsed.add(lambda name=name, times=times: parse(name, times))  # type: ignore[misc]
    turn()
    while "turn" != order[-1] or len(order) < 12:
        await asyncio.sleep(0)
    assert ["a", "b", "a", "b", "a"] == [name for name in order if name != "turn"]
    assert all("turn" in pair for pair in itertools.pairwise(order))


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of a server and of a client that trusts it."""
    context, authority = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), trustme.CA()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return context, trusting


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_reads_are_limited(monkeypatch: pytest.MonkeyPatch, secure: bool) -> None:
    """A connection whose requests wait keeps a read; uvloop itself reads up to 256,000 bytes, and with TLS keeps them several times."""
    context, trusting = tls_contexts()
    sizes: list[int] = []
    monkeypatch.setattr(HttpProtocol, "data_received", lambda self, data: sizes.append(len(data)))
    async with listening(echo, context if secure else None) as served:
        _, writer = await asyncio.open_connection(*served.address, ssl=trusting if secure else None)
        writer.write(b" " * 2**22)
        await until(lambda: sum(sizes) == 2**22)
        writer.transport.abort()
    assert max(sizes) <= (TLS_READ_BYTES + 2**14 if secure else READ_BYTES)  # a read may complete a record of TLS of 2**14 bytes


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


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("refused", [CHUNKED + b"%x\r\n" % 2**25, b"no HTTP\r\n"], ids=["unread", "malformed"])
async def test_a_turn_of_the_event_loop_reads_little_from_a_connection(
    monkeypatch: pytest.MonkeyPatch, refused: bytes, secure: bool
) -> None:
    """It reads what it parses at once, and one read more. By default, uvloop reads up to 32 times while more bytes arrive, and others wait.

    On a TLS connection that the service closes, uvloop decrypts everything that arrives.
    """
    loop = asyncio.get_running_loop()
    turns: list[list[int]] = [[]]  # bytes of the reads of each turn
    data_received = HttpProtocol.data_received
    context, trusting = tls_contexts()

    def count(self: HttpProtocol, data: bytes) -> None:
        turns[-1].append(len(data))
        data_received(self, data)

    def turn() -> None:
        turns.append([])
        loop.call_soon(turn)

    def connect(address: tuple[str, int]) -> socket.socket:
        sender = socket.create_connection(address)
        return trusting.wrap_socket(sender, server_hostname="127.0.0.1") if secure else sender

    monkeypatch.setattr(HttpProtocol, "data_received", count)
    async with listening(refuse, context if secure else None) as served:
        with await asyncio.to_thread(connect, served.address) as sender:
            await asyncio.to_thread(sender.sendall, refused)
            await until(lambda: bool(turns[0]))
            turn()
            with suppress(OSError):  # closed by the service
                await asyncio.to_thread(sender.sendall, b" " * 2**25)

    measured = turns[1:]  # the first one is several turns
    assert max(sum(sizes[:-1]) for sizes in measured) <= TURN_BYTES  # what it parses at once; the last read pauses reading
    assert sum(map(len, measured)) > 20


async def test_a_request_that_is_read_but_not_parsed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a shutdown, nor the idle timeout, nor an eviction ends its connection."""
    sent = b"POST /a HTTP/1.1\r\nhost: test\r\ncontent-length: 20000\r\n\r\n" + b"b" * 20_000
    later: list[Any] = []
    async with listening(echo) as served, client(served, GET) as (reader, writer):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(served.connections.unparsed, "add", later.append)
        (connection,) = served.protocols
        writer.write(sent)
        await until(lambda: bool(later))
        much_later = asyncio.get_running_loop().time() + 1000
        assert connection.expendable_since is None
        connection.check(much_later)
        connection.wind_up(much_later)
        monkeypatch.undo()
        later[0]()
        assert b"/a " + b"b" * 20_000 in await reader.readuntil(b"b\n")


async def test_a_short_request_does_not_wait_behind_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait for all connections with large bodies."""
    later: list[Any] = []
    async with listening(echo) as served, client(served, CHUNKED) as (_, sender), client(served) as (reader, writer):
        await until(lambda: any(connection._stage == parsing.BODY for connection in served.protocols))
        monkeypatch.setattr(served.connections, "may_parse", lambda size: False)
        monkeypatch.setattr(served.connections.unparsed, "add", later.append)
        sender.write(b"5\r\nbbbbb\r\n")
        await until(lambda: 1 == len(later))
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET / HTTP/1.1\r\na: " + b"b" * parsing.PIECE_BYTES)
        await until(lambda: 2 == len(later))


async def test_a_body_that_the_application_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no memory, and the connection is read further, wherever the parser pauses."""
    monkeypatch.setattr(parsing, "PARSE_S", 0)
    sent = CHUNKED + (b"12c\r\n" + b"b" * 300 + b"\r\n") * 600
    async with listening(refuse) as served, client(served, sent) as (reader, writer):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        (connection,) = served.protocols
        await until(lambda: not connection._unparsed)
        assert b"" == connection.cycle.body
        writer.write(b"0\r\n\r\n" + GET)
        await reader.readuntil(b"no")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")


async def test_the_body_behind_an_answer_is_dropped_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each turn of the event loop would read from each of hundreds of connections whose requests were refused."""
    later: list[Callable[[], None]] = []
    sent = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 2000\r\n\r\n"
    async with listening(refuse) as served, client(served, sent) as (reader, writer):
        await reader.readuntil(b"no")
        (connection,) = served.protocols
        monkeypatch.setattr(served.connections.eager, "add", later.append)
        for count in (1, 2):
            writer.write(b"x" * 900)
            await until(lambda count=count: len(later) == count)  # type: ignore[misc]
            assert (True, b"") == (connection.flow.read_paused, connection._unparsed)
            later[-1]()
        writer.write(b"x" * 200 + GET)  # the rest of the body, and another request
        await reader.readuntil(b"no")
        assert 2 == len(later)


@pytest.mark.parametrize(("connections_", "pauses"), [(2, 1), (1, 0)])
async def test_the_event_loop_pauses_while_connections_wait(monkeypatch: pytest.MonkeyPatch, connections_: int, pauses: int) -> None:
    """Otherwise its system calls and those of OpenSSL could keep the GIL from a thread that waits for it."""
    open_, paused, parsed = connections.Connections(LIMITS), list[float](), list[int]()
    monkeypatch.setattr(connections, "time", SimpleNamespace(sleep=paused.append, monotonic=lambda: 1.0))
    for i in range(connections_):
        open_.unparsed.add(lambda i=i: parsed.append(i))  # type: ignore[misc]
    await until(lambda: len(parsed) == connections_)
    assert [GIL_PAUSE_S] * pauses == paused


async def test_a_pause_for_other_threads_follows_some_time_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    now = [1.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(sleep=paused.append, monotonic=lambda: now[0]))
    pauses = GilPauses()
    for at in (1.0, 1.0 + GIL_EVERY_S / 2, 1.0 + GIL_EVERY_S):
        now[0] = at
        pauses.pause()
    assert 2 == len(paused)


async def test_the_event_loop_pauses_between_two_requests_that_arrive_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client with cheap requests would occupy the event loop and the GIL."""
    later: list[Any] = []
    async with listening(echo) as served, client(served, GET) as (reader, writer):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        (connection,) = served.protocols
        monkeypatch.setattr(served.connections.eager, "add", later.append)
        writer.write(GET + GET)
        await until(lambda: bool(later))
        await asyncio.sleep(0.02)
        assert 2 == connection.server_state.total_requests
        (continue_,) = later
        continue_()
        await until(lambda: connection.server_state.total_requests == 3)
        writer.write_eof()
        assert 2 == (await everything(reader)).count(b"HTTP/1.1 200 ")


async def test_a_backlog_waits_before_each_call() -> None:
    loop = asyncio.get_running_loop()
    backlog, called = connections.Backlog(0.05), [loop.time()]
    for _ in range(3):
        backlog.add(lambda: called.append(loop.time()))
    await until(lambda: len(called) == 4)
    assert all(after - before >= 0.045 for before, after in itertools.pairwise(called))


async def test_bytes_that_arrive_between_two_requests_do_not_pause_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the service would not notice a disconnect while it answers the second request."""
    monkeypatch.setattr(connections, "EAGER_S", 0.1)
    answered = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await answered.wait()
        await answer(send)

    async with listening(slow) as served, client(served, GET + GET.replace(b"/ ", b"/slow ")) as (_, writer):
        await until(lambda: bool(served.protocols) and served.protocols[0]._served)
        (connection,) = served.protocols
        writer.write(GET)
        await until(lambda: connection._stage == parsing.COMPLETE and bool(connection._unparsed))
        assert not connection.flow.read_paused
        writer.transport.abort()
        await until(lambda: connection.cycle.disconnected)


async def test_bytes_after_an_early_response_get_no_second_response() -> None:
    """A client would take the second response for that of its next request."""
    async with listening(refuse) as served, client(served, HALF_BODY) as (reader, writer):
        await reader.readuntil(b"no")
        writer.write(b"x" * 99 + b"no request\r\n\r\n")
        assert b"" == await everything(reader)
        assert ["malformed"] == served.ends


async def test_all_connections_share_the_parsing_limit_of_a_turn() -> None:
    """Otherwise thousands of short reads, each with one-byte chunks, would stop the loop for seconds."""
    open_ = connections.Connections(LIMITS)
    assert [False, True, False] == [open_.may_parse(size) for size in (TURN_BYTES + 1, TURN_BYTES - 1, 2)]
    await asyncio.sleep(0)
    assert open_.may_parse(2)


async def test_a_short_read_counts_as_many_bytes_as_a_short_request() -> None:
    """Otherwise one turn would answer hundreds of requests without headers."""
    open_ = connections.Connections(LIMITS)
    most = TURN_BYTES // MIN_READ_BYTES
    assert [True] * most + [False] == [open_.may_parse(1) for _ in range(most + 1)]


async def test_connections_with_pipelined_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each turn of the event loop would answer a request of each of thousands of connections."""
    loop, parsed, parse_on = asyncio.get_running_loop(), [0], HttpProtocol._parse_on

    def counted(self: HttpProtocol, behind_an_answer: bool) -> None:
        parsed[-1] += 1
        parse_on(self, behind_an_answer)

    def turn() -> None:
        parsed.append(0)
        loop.call_soon(turn)

    monkeypatch.setattr(HttpProtocol, "_parse_on", counted)
    async with listening(echo) as served, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(client(served)) for _ in range(20)]
        turn()
        for _, writer in opened:
            writer.write(GET * 3)
        await until(lambda: sum(connection.server_state.total_requests for connection in served.protocols[:1]) == 60)

    assert (1, 40) == (max(parsed), sum(parsed))


@pytest.mark.parametrize("body", [b"{", b"{" * 90])
async def test_a_response_that_fails_while_the_body_arrives_ends_its_connection(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits for the rest of the response, and the service for the rest of the body. Only `check` can end this."""
    monkeypatch.setattr(parsing, "MAX_UNREAD_BYTES", 50)  # reading pauses in one of the cases

    async def fail(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"99")]})
        raise RuntimeError

    async with listening(fail) as served, client(served, HALF_BODY.removesuffix(b"{") + body) as (reader, _):
        await until(lambda: bool(served.protocols))
        (connection,) = served.protocols
        await until(lambda: connection._stage == parsing.ENDING)
        connection.check(asyncio.get_running_loop().time() + connections.LINGER_S + 1)
        await until(lambda: not served.connections)
        assert (await everything(reader)).startswith(b"HTTP/1.1 200 ")


async def test_a_closing_tls_connection_reads_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvloop would decrypt and drop all that a client sends until it closes the connection too."""
    context, trusting = tls_contexts()
    late: list[int] = []
    read = LimitedTlsReads.buffer_updated

    def noted(self: LimitedTlsReads, nbytes: int) -> None:
        late.extend([nbytes] * self._application.closing)
        read(self, nbytes)

    def flood(address: tuple[str, int]) -> bool:
        """Returns whether the service has stopped reading."""
        with trusting.wrap_socket(socket.create_connection(address, timeout=0.5), server_hostname="127.0.0.1") as connection:
            connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            connection.recv(1)
            try:
                for _ in range(500):
                    connection.sendall(bytes(2**17))
            except TimeoutError:
                return True
        return False

    monkeypatch.setattr(LimitedTlsReads, "buffer_updated", noted)
    async with listening(echo, context) as served:
        assert await asyncio.to_thread(flood, served.address)
    assert 0 < sum(late) <= 2 * TLS_READ_BYTES


async def test_a_closing_connection_has_a_time_limit() -> None:
    """Uvloop waits forever for a TLS client that closes only its sending half and reads nothing."""
    async with listening(refuse) as served, client(served, GET) as (reader, _):
        await reader.readuntil(b"no")
        (connection,) = served.protocols
        inner, aborted = connection.transport._transport, list[bool]()
        connection.transport._transport = SimpleNamespace(  # type: ignore[assignment]
            is_closing=lambda: True, get_write_buffer_size=lambda: 0, abort=lambda: aborted.append(True)
        )
        now = asyncio.get_running_loop().time()
        connection.check(now + 29)
        assert [] == aborted
        connection.check(now + 31)
        assert [True] == aborted
        connection.transport._transport = inner


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
