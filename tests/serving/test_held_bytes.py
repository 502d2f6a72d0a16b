"""The memory of large bodies and responses: one limit for all connections; small requests are answered even at the limit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import raw_http
from application import faked
from bertserve.service.http.app import create_app
from bertserve.service.serving.build import AppState
from bertserve.service.wire import json_text, reading
from fakes import FakeEngine
from served_socket import client, listening, until

BODY_BYTES = 200_000
LARGE = json.dumps({"inputs": "good", "parameters": {"top_k": 1}}).encode().ljust(BODY_BYTES)
SMALL = b'{"inputs":"good"}'


def chunked(body: bytes) -> bytes:
    """Returns a request with a chunked body, without the last chunk."""
    return b"POST /classify HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)


def service(models: Path, **held: int) -> AppState:
    """Returns a service that accepts bodies of 200,000 bytes and holds at most two of them at once."""
    found = faked(models, FakeEngine())
    object.__setattr__(found, "max_body_bytes", BODY_BYTES)
    found.held_bytes.limit = 2 * BODY_BYTES
    return found


@pytest.mark.parametrize(
    "begin", [raw_http.post(body=LARGE[:100_000], length=BODY_BYTES), chunked(LARGE[:190_000])], ids=["length", "chunks"]
)
async def test_unfinished_bodies_hold_a_limited_number_of_bytes(models: Path, begin: bytes) -> None:
    """A large body over the limit gets 503 and `Retry-After`. Small ones are answered; a large one is answered after others end."""
    state = service(models)

    state.scheduler.start()
    async with listening(create_app(state)) as served:
        async with client(served, begin), client(served, begin):
            await until(lambda: state.held_bytes.count >= 380_000)
            async with client(served, raw_http.post(body=LARGE)) as (refused, _), client(served, raw_http.post(body=SMALL)) as (small, _):
                head = await refused.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in head.lower()
                assert (await small.readline()).startswith(b"HTTP/1.1 200 ")
        await until(lambda: state.held_bytes.count == 0)
        async with client(served, raw_http.post(body=LARGE)) as (large, _):
            assert (await large.readline()).startswith(b"HTTP/1.1 200 ")
        assert 0 == state.held_bytes.count
    await state.scheduler.stop(0)


async def test_a_waiting_large_body_ends_with_its_deadline_or_its_client(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies are parsed one at a time. If the client of a waiting body leaves, the bytes are released before its turn."""
    may_parse = threading.Event()

    def parse(raw: bytes, *, finite: bool = False) -> Any:
        may_parse.wait(10)
        return json_text.parse(raw, finite=finite)

    monkeypatch.setattr(reading, "parse", parse)
    state = service(models)
    state.scheduler.start()
    async with listening(create_app(state)) as served, client(served, raw_http.post(body=LARGE)) as (first, _):
        await until(lambda: state.held_bytes.count == BODY_BYTES)
        async with client(served, raw_http.post(b"x-request-timeout-ms: 30", body=LARGE)) as (late, _):
            assert (await late.readline()).startswith(b"HTTP/1.1 504 ")
        async with client(served, raw_http.post(body=LARGE)):
            await until(lambda: state.held_bytes.count == 2 * BODY_BYTES)
        await until(lambda: state.held_bytes.count == BODY_BYTES)
        may_parse.set()
        assert (await first.readline()).startswith(b"HTTP/1.1 200 ")
    await state.scheduler.stop(0)
