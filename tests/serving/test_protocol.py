"""A response reaches the socket in one write, and nothing is written after the client has disconnected."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

import raw_http
from bertserve.service.api.request import until_disconnect
from bertserve.service.errors import ClientGoneError
from served_socket import GET, body_of, client, everything, listening, play, until


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
async def test_a_lost_connection_cancels_its_request(reset: bool) -> None:
    ended: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await body_of(receive)
        try:
            await until_disconnect(work(), receive)
        except ClientGoneError:
            ended.append("gone")

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
