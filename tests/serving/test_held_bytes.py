"""The memory of large bodies and responses: one limit for all connections; small requests are answered even at the limit."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raw_http
from application import faked
from bertserve.service.errors import UnavailableError
from bertserve.service.http import inference
from bertserve.service.http.app import create_app
from bertserve.service.http.middleware import PREDICTION
from bertserve.service.http.responses import send_body
from bertserve.service.http.streaming import LineStream
from bertserve.service.http.turns import Turns
from bertserve.service.process import parsing
from bertserve.service.serving.build import AppState
from bertserve.service.serving.held_bytes import ByteReservation, HeldBytes
from bertserve.service.serving.model import Model
from bertserve.service.settings import Settings
from bertserve.service.tasks.cost import MAX_MEMORY_TOGETHER
from bertserve.service.wire import json_text, reading
from bertserve.service.wire.json_text import PIECE_BYTES
from fakes import FakeEngine
from served_socket import GET, client, listening, until

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


def test_a_reservation_that_cannot_grow_can_be_released() -> None:
    held = HeldBytes(1)
    held.limit = 10
    reservation = ByteReservation(held)
    reservation.grow(6)
    assert 6 == held.count
    with pytest.raises(UnavailableError):
        reservation.grow(5)
    reservation.release()
    assert 0 == held.count


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


async def test_the_time_to_parse_a_body_is_part_of_the_deadline(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    left: list[float] = []
    predict = Model.predict

    async def noted(self: Model, requests: Any, *, timeout_s: float, **named: Any) -> Any:
        left.append(timeout_s)
        return await predict(self, requests, timeout_s=timeout_s, **named)

    def parse(raw: bytes, *, finite: bool = False) -> Any:
        nonlocal now_s
        now_s += 2
        return json_text.parse(raw, finite=finite)

    monkeypatch.setattr(inference, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(Model, "predict", noted)
    monkeypatch.setattr(reading, "parse", parse)
    state = service(models)
    state.scheduler.start()
    async with (
        listening(create_app(state)) as served,
        client(served, raw_http.post(b"x-request-timeout-ms: 9000", body=LARGE)) as (reader, _),
    ):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert left == [7]
    await state.scheduler.stop(0)


async def test_the_body_of_an_answered_request_is_not_counted(models: Path) -> None:
    """A client that reads its response slowly holds no bytes of its body."""
    state = service(models)
    sent: list[int] = []

    async def look(message: Any) -> None:
        sent.append(state.held_bytes.count)

    app = create_app(state)
    messages = [{"type": "http.request", "body": LARGE, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    state.scheduler.start()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/classify",
        "raw_path": b"/classify",
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
    }
    await app(scope, receive, look)
    assert len(sent) == 2 and max(sent) < 1000
    assert 0 == state.held_bytes.count
    await state.scheduler.stop(0)


async def test_a_long_response_over_the_limit_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = service(models)
    state.held_bytes.add(2 * BODY_BYTES)

    async def status() -> bytes:
        async with listening(create_app(state)) as served, client(served, raw_http.post(body=SMALL)) as (reader, _):
            return (await reader.readline()).split()[1]

    state.scheduler.start()
    assert b"200" == await status()
    monkeypatch.setattr(inference, "UNCOUNTED_BYTES", 1)
    assert b"503" == await status()
    state.held_bytes.add(-2 * BODY_BYTES)
    assert (b"200", 0) == (await status(), state.held_bytes.count)
    await state.scheduler.stop(0)


@pytest.mark.parametrize(("path", "requests"), [("/docs/static/swagger-ui-bundle.js", 6), ("/openapi.json", 100)])
async def test_an_unread_document_uses_the_memory_of_at_most_two_pieces(models: Path, path: str, requests: int) -> None:
    """The buffers of the system do not count. A document uses neither its own file descriptor nor bytes of large bodies."""
    state = service(models)
    async with listening(create_app(state)) as served, client(served, GET) as (reader, _):  # imports open files
        await reader.readline()
        await until(lambda: served.protocols[0]._stage == parsing.WAITING)
        before = len(os.listdir("/proc/self/fd"))
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(client(served, GET.replace(b"/", path.encode(), 1) * requests))
            await until(lambda: len(served.protocols) == 5)
            unread = [connection.transport for connection in served.protocols[1:]]
            await until(lambda: all(transport.get_write_buffer_size() for transport in unread))
            await asyncio.sleep(0.1)
            sizes = [transport.get_write_buffer_size() for transport in unread]
            assert (0 < min(sizes), max(sizes) < 2 * PIECE_BYTES + 1000, before + 8) == (True, True, len(os.listdir("/proc/self/fd")))
            assert 0 == state.held_bytes.count


async def test_a_long_line_waits_until_enough_bytes_are_free() -> None:
    """While other requests hold the bytes, nothing more is read. Short lines are answered one at a time."""
    held = HeldBytes(1)
    held.limit = 1_000_000
    chunks = [b"1\n2\n3\n", b"x" * 100_000, b"x" * 100_000, b"x" * 100_000, b"\n"]
    taken = most = running = 0
    answers: list[bytes] = []

    async def receive() -> Any:
        nonlocal taken
        if taken == len(chunks):
            await asyncio.Event().wait()
        taken += 1
        return {"type": "http.request", "body": chunks[taken - 1], "more_body": taken < len(chunks)}

    async def send(message: Any) -> None:
        if message.get("body"):
            answers.append(message["body"])

    async def answered(line: bytes, expected: int) -> list[bytes]:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return [b"%d" % len(line)]

    held.add(1_000_000)
    stream = asyncio.create_task(LineStream({}, receive, answered, max_requests=32, max_bytes=500_000, held=held, turns=Turns())(send))
    for _ in range(100):
        await asyncio.sleep(0)
    assert ([b"1\n"] * 3, 1, 4) == (answers, most, taken)
    held.add(-1_000_000)
    await stream
    assert ([*[b"1\n"] * 3, b"300000\n"], 0) == (answers, held.count)


async def test_a_response_stays_reserved_until_it_is_sent(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a response waits, its bytes are reserved, but the results from which it was made are released."""
    monkeypatch.setattr(inference, "UNCOUNTED_BYTES", 1)
    state = service(models)
    app = create_app(state)
    body = json.dumps({"inputs": "good"}).encode()
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/classify", "raw_path": b"/classify", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-length", b"%d" % len(body))],
    }  # fmt: skip
    messages = iter([{"type": "http.request", "body": body}])
    seen: list[tuple[int, list[Any]]] = []

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        seen.append((state.held_bytes.count, scope[PREDICTION].results))

    state.scheduler.start()
    await app(scope, receive, send)
    assert [] == [each for each in seen if each[0] <= len(body) or each[1]]
    assert (2, 0) == (len(seen), state.held_bytes.count)
    await state.scheduler.stop(0)


def test_workers_share_the_limit() -> None:
    """Two workers together hold as much as one. Each of many workers can hold two of the largest bodies or responses."""
    alone, of_two, of_many = (HeldBytes(2**23, workers).limit for workers in (1, 2, 64))

    assert alone == 2 * of_two
    assert 2 * 2**24 == of_many


@pytest.mark.parametrize("workers", [1, 2])
def test_all_requests_together_need_less_than_256_mib(workers: int) -> None:
    """An eighth is left for what is not counted, such as JSON that is being built and memory that the allocator keeps."""
    held = workers * HeldBytes(Settings.model_fields["max_body_bytes"].default, workers).limit

    assert 7 * 2**25 >= held + 4 * MAX_MEMORY_TOGETHER


@pytest.mark.parametrize("more", [False, True])
async def test_a_long_body_is_sent_in_several_turns_of_the_event_loop(more: bool) -> None:
    """TLS encrypts each piece when it is sent, which blocks the event loop."""
    sent: list[Any] = []
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    async def send(message: Any) -> None:
        sent.append((turns, message))

    turn()
    body = bytes(range(256)) * 1000
    await send_body(send, body, more=more)
    assert body == b"".join(message["body"] for _, message in sent)
    assert [True, True, True, more] == [message["more_body"] for _, message in sent]
    assert len({when for when, _ in sent}) == len(sent)


async def test_a_short_body_is_one_message() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for body in (b"", b"a" * PIECE_BYTES):
        await send_body(send, body)
        assert [{"type": "http.response.body", "body": body, "more_body": False}] == sent
        sent.clear()
