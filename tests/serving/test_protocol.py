"""A response reaches the socket in one write, and nothing is written after the client has disconnected."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

import raw_http
from bertserve.service.errors import ClientGoneError
from bertserve.service.http.errors import GONE
from bertserve.service.http.inference import unless_disconnected
from bertserve.service.http.streaming import LineStream
from bertserve.service.http.turns import Turns
from bertserve.service.process import connections
from bertserve.service.process.protocol import CoalescingTransport
from bertserve.service.serving.held_bytes import HeldBytes
from served_socket import GET, body_of, client, everything, listening, play, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport(asyncio.Transport):
    """A transport that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed, "uvloop raises here"
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def written(*steps: bytes | str) -> list[Any]:
    """Returns the calls that a transport gets when the steps are written; `close` closes it, and `turn` lets the event loop run once."""

    async def play() -> list[Any]:
        transport = Transport()
        joined = CoalescingTransport(transport)
        for step in steps:
            if step == "close":
                joined.close()
            elif step == "turn":
                await asyncio.sleep(0)
            else:
                joined.write(step)
        await asyncio.sleep(0)
        return transport.calls

    return asyncio.run(play())


def test_head_and_body_are_one_write() -> None:
    assert [HEAD + b"{}", HEAD + b"[]"] == written(HEAD, b"{}", HEAD, b"[]")


def test_a_head_waits_for_the_next_write() -> None:
    """A response to HEAD ends with an empty write. Closing the connection sends the held head."""
    assert [HEAD + b"{}"] == written(HEAD, "turn", b"{}")
    assert [HEAD] == written(HEAD, b"")
    assert [HEAD, "close"] == written(HEAD, "close")


def test_100_continue_is_written_at_once() -> None:
    """The client waits for it before it sends the body, so no other write would follow."""
    assert [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"{}"] == written(b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, b"{}")


def test_bytes_other_than_a_head_are_written_at_once() -> None:
    assert [b"a", b"b", HEAD + b"c"] == written(b"a", b"b", HEAD, b"c")


def test_closing_writes_the_held_bytes_first() -> None:
    """Later writes are dropped, as in asyncio's own transports."""
    assert [HEAD, "close"] == written(HEAD, "close")
    assert ["close"] == written("close", HEAD, b"{}")


def test_a_client_receives_a_response_in_one_piece(models: Path, serve: Callable[..., Any]) -> None:
    with serve(models) as served, connect(served.url) as connection:
        for _ in range(3):
            connection.sendall(raw_http.post())
            whole = connection.recv(65536)
            assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
            assert {"label", "score"} == json.loads(whole.partition(b"\r\n\r\n")[2])[0][0].keys()


def test_a_connection_reset_is_not_logged_as_an_error(models: Path, serve: Callable[..., Any]) -> None:
    with serve(models) as served:
        for _ in range(20):
            with connect(served.url) as connection:
                connection.sendall(raw_http.post() * 3)
                connection.recv(1)
                # a reset instead of an orderly close
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.3)
        with connect(served.url) as connection:
            connection.sendall(raw_http.post())
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
    assert "ERROR" not in served.log.read_text()


def test_closing_the_sending_half_counts_as_a_disconnect() -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        ended.append((await receive())["type"])

    async def check() -> None:
        async with listening(app) as served, client(served, GET) as (reader, writer):
            writer.write_eof()
            assert b"" == await everything(reader)
            await until(lambda: not served.connections)

    play(check)
    assert ["http.disconnect"] == ended


@pytest.mark.parametrize("reset", [False, True])
async def test_a_disconnect_from_a_paused_stream_is_detected(monkeypatch: pytest.MonkeyPatch, reset: bool) -> None:
    monkeypatch.setattr(connections, "SWEEP_S", 0.02)
    started, cancelled = [], []

    async def answered(line: bytes, expected: int) -> list[bytes]:
        started.append(line)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(line)
        return [b""]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await LineStream(scope, receive, answered, max_requests=2, max_bytes=2**20, held=HeldBytes(2**20), turns=Turns())(send)

    async with (
        listening(app) as served,
        client(served, b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9999999\r\n\r\n") as (_, writer),
    ):
        served.connections.start()
        while not (started and served.protocols[0].flow.read_paused):
            writer.write(b"x" * 9_999 + b"\n")
            await asyncio.sleep(0.001)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await until(lambda: not served.connections and len(cancelled) == 2)
    assert 2 == len(started)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_lost_connection_cancels_its_request_at_once(monkeypatch: pytest.MonkeyPatch, reset: bool) -> None:
    """Without this, callers that reset each request filled the queue with requests that nothing waits for."""
    monkeypatch.setattr("bertserve.service.http.inference.WATCH_AFTER_S", 60)
    ended: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        try:
            await unless_disconnected(work(), scope, receive)
        except ClientGoneError:
            ended.append("gone")
        assert GONE not in scope

    async with listening(app) as served, client(served, GET) as (_, writer):
        await started.wait()
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await until(lambda: not served.connections and bool(ended))
    assert ["gone"] == ended


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)
