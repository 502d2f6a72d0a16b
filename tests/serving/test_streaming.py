"""JSON Lines: one answer or error per line in order, back pressure, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import slow
from application import assert_same, call, faked, play, queued, rejected
from bertserve.service.errors import InvalidValueError, RefusedError, UnavailableError
from bertserve.service.http import streaming
from bertserve.service.http.app import create_app
from bertserve.service.http.auth import Authenticator
from bertserve.service.http.streaming import CUT_BYTES, WRONG_LINE_BYTES, LineAnswerer, LineCutter, LineStream
from bertserve.service.http.turns import LINE_BYTES, LONG_BYTES, PAUSES, SMALL_BYTES, Turns
from bertserve.service.serving import held_bytes
from bertserve.service.serving.build import AppState, build
from bertserve.service.serving.held_bytes import HeldBytes
from bertserve.service.serving.model import Model
from bertserve.service.settings import Settings
from bertserve.service.wire import json_text, reading
from bertserve.service.wire.call import Call, Content, Incoming
from bertserve.service.wire.routes import Route
from fakes import FakeEngine
from served_socket import client as socket_client
from served_socket import listening, until

LINES = {"content-type": "application/x-ndjson"}
Serve = Callable[..., Any]
HEAD = b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


def written(*bodies: Any) -> bytes:
    return b"".join(json.dumps(body).encode() + b"\n" for body in bodies)


def read(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n") or not response.text
    return [json.loads(line) for line in response.text.splitlines()]


def streamed(models: Path, content: bytes, *, path: str = "/classify", settings: Any = None, headers: Any = LINES) -> list[Any]:
    return read(call(models, "POST", path, content=content, headers=headers, settings=settings))


@pytest.mark.parametrize("path", ["/classify", "/models/tiny", "/invocations", "/"])
def test_each_line_is_answered_in_order(models: Path, path: str) -> None:
    bodies = [{"inputs": "good " * (i % 7)} for i in range(50)] + [{"inputs": ["a", "b"], "parameters": {"top_k": 1}}]
    expected = [call(models, "POST", path, json=body).json() for body in bodies]

    assert_same(expected, streamed(models, written(*bodies), path=path))


@pytest.mark.parametrize("kind", ["application/jsonl", "application/x-ndjson; charset=utf-8", "Application/JSONLines"])
def test_the_content_type_makes_a_request_a_stream(models: Path, kind: str) -> None:
    assert 2 == len(streamed(models, written({"inputs": "a"}, {"inputs": "b"}), headers={"content-type": kind}))
    answer = call(models, "POST", "/classify", content=written({"inputs": "a"}, {"inputs": "b"}), headers={"content-type": "text/plain"})
    rejected(answer, 400, "malformed")


@pytest.mark.parametrize(
    ("content", "answers"), [(b"", 0), (b"\n\r\n  \n", 0), (b'{"inputs": "a"}', 1), (b'\n{"inputs": "a"}\r\n\n{"inputs": "b"}', 2)]
)
def test_blank_lines_are_skipped_and_the_last_line_needs_no_newline(models: Path, content: bytes, answers: int) -> None:
    assert answers == len(streamed(models, content))


def test_a_failed_line_gets_an_error_at_its_position(models: Path) -> None:
    """The stream continues after an error. Each error has the usual fields, and the metrics count its status."""
    lines = [
        b'{"inputs": "a"}',
        b"{",
        b'{"inputs": 1}',
        b'{"inputs": "a", "model": "none"}',
        b'{"inputs": "%s"}' % (b"b" * 2000),
        b'{"inputs": "b"}',
    ]
    settings = {"max_body_bytes": 1024, "max_chars": 1024, "timeout_ms": 9000}
    found = streamed(models, b"\n".join(lines), settings=settings)

    assert [None, "malformed", "invalid_value", "not_found", "too_large", None] == [
        each["error_type"] if isinstance(each, dict) else None for each in found
    ]
    assert [["error", "error_type", "request_id"]] * 4 == [sorted(each) for each in found[1:5]]
    assert "line 5: " in found[4]["error"] and "line 2: " in found[1]["error"]
    page = call(models, "GET", "/metrics", settings=settings).text
    counted = {
        status: f'bertserve_requests_total{{model="{model}",status="{status}",task="text-classification"}}'
        for status, model in ((200, "tiny"), (404, "unknown"), (413, "unknown"))
    }
    assert ["2.0", "1.0", "1.0"] == [
        line.rsplit(" ", 1)[1] for metric in counted.values() for line in page.splitlines() if line.startswith(metric)
    ]


@pytest.mark.parametrize(
    ("path", "headers", "status", "kind"),
    [
        ("/models/none", {}, 404, "not_found"),
        ("/classify?model=tiny", {}, 422, "invalid_value"),
        ("/classify", {"content-encoding": "gzip"}, 415, "content_encoding"),
        ("/classify", {"x-request-timeout-ms": "soon"}, 422, "invalid_value"),
    ],
)
def test_an_error_of_the_whole_stream_has_its_own_status(models: Path, path: str, headers: dict[str, str], status: int, kind: str) -> None:
    """The response is a single error, before the first line."""
    rejected(call(models, "POST", path, content=written({"inputs": "a"}), headers=LINES | headers), status, kind)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_lines_do_not_depend_on_chunk_boundaries(size: int) -> None:
    """A line over the limit is cut to one byte more than the limit."""
    content = b"one\n\n two \r\n" + b"x" * 100 + b"\n  \nthree\nlast"
    cutter = LineCutter(10)
    lines = [line for i in range(0, len(content), size) for line in cutter.feed(content[i : i + size])]

    assert [b"one", b" two \r", b"x" * 11, b"three", b"last"] == [*lines, cutter.end()]


class Client:
    """A client of a stream without a server. It counts the chunks that were taken and records the answers."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.taken = 0
        self.answers: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        """Returns the next chunk; after the last chunk, waits until the client disconnects."""
        if self.taken == len(self.chunks):
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self.taken += 1
        return {"type": "http.request", "body": self.chunks[self.taken - 1], "more_body": self.taken < len(self.chunks)}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message.get("body"):
            self.answers.append(message["body"])


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def stream_of(client: Client, answer: Any, *, max_requests: int = 4, max_bytes: int = 100, held: HeldBytes | None = None) -> LineStream:
    return LineStream(
        {}, client.receive, answer, max_requests=max_requests, max_bytes=max_bytes, held=held or HeldBytes(max_bytes), turns=Turns()
    )


async def test_a_stream_reads_few_lines_ahead() -> None:
    """A chunk has one line. The stream takes four lines, one that waits and two ahead, then one more for each answer that it sends."""
    client, gates = Client([b"%d\n" % i for i in range(1000)]), [asyncio.Event() for _ in range(1000)]
    started: list[int] = []

    async def answer(line: bytes, expected: int) -> list[bytes]:
        started.append(int(line))
        await gates[int(line)].wait()
        return [line]

    running = asyncio.create_task(stream_of(client, answer)(client.send))
    await settle()
    assert (4, 7) == (len(started), client.taken)
    gates[1].set()
    await settle()
    assert ([], 7) == (client.answers, client.taken)  # the previous answer is missing
    gates[0].set()
    await settle()
    assert ([b"0\n", b"1\n"], 9, 6) == (client.answers, client.taken, len(started))
    for gate in gates:
        gate.set()
    await running
    assert [b"%d\n" % i for i in range(1000)] == client.answers


@dataclass
class TurnCounter:
    """Counts events per turn of the event loop."""

    counts: list[int] = field(default_factory=lambda: [0])

    def note(self) -> None:
        self.counts[-1] += 1

    async def follow(self) -> None:
        """Starts a new count in each turn, until it is cancelled."""
        while True:
            await asyncio.sleep(0)
            self.counts.append(0)


@pytest.mark.parametrize(
    ("line", "most"), [(b"1\n", SMALL_BYTES // LINE_BYTES), (b"1" * (SMALL_BYTES // 2) + b"\n", 2)], ids=["short", "long"]
)
async def test_the_lines_of_all_streams_start_in_several_turns(line: bytes, most: int) -> None:
    begun, ended = TurnCounter(), TurnCounter()

    async def answer(line: bytes, expected: int) -> list[bytes]:
        begun.note()
        try:
            await asyncio.Event().wait()
        finally:
            ended.note()
        return [line]

    clients = [Client([line * 32]) for _ in range(20)]
    streams = [
        asyncio.create_task(
            LineStream({}, client.receive, answer, max_requests=32, max_bytes=2**20, held=HeldBytes(2**20), turns=turns)(client.send)
        )
        for turns in [Turns()]
        for client in clients
    ]
    following = [asyncio.create_task(counter.follow()) for counter in (begun, ended)]
    while sum(begun.counts) < 20 * 32:
        await asyncio.sleep(0)
    for client in clients:
        client.gone.set()
    await asyncio.gather(*streams, return_exceptions=True)
    for task in following:
        task.cancel()

    assert max(begun.counts) <= 2 * most  # a line that waited starts one turn later than a line that did not
    # the lines of one stream end in each turn; a count can contain the end of one turn and the start of the next
    assert max(ended.counts) <= 2 * 32
    assert sum(ended.counts) == 20 * 32


async def test_the_chunks_of_all_streams_are_cut_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 64 KiB can have 32,768 blank lines, so the number of bytes that one turn cuts is limited."""
    cut = TurnCounter()
    feed = LineCutter.feed

    def counted(self: LineCutter, chunk: bytes) -> list[bytes]:
        cut.note()
        assert len(chunk) <= SMALL_BYTES
        return feed(self, chunk)

    monkeypatch.setattr(LineCutter, "feed", counted)
    turns = Turns()
    following = asyncio.create_task(cut.follow())

    async def answered(client: Client) -> None:
        stream = LineStream({}, client.receive, asyncio.sleep, max_requests=32, max_bytes=2**20, held=HeldBytes(2**20), turns=turns)  # type: ignore[arg-type]
        await stream(client.send)

    await asyncio.gather(*(answered(Client([b"\n " * 2**15])) for _ in range(20)))
    following.cancel()

    assert max(cut.counts) <= 2 * CUT_BYTES
    assert sum(cut.counts) == 20 * 2**16 // SMALL_BYTES


def test_a_refused_line_takes_more_of_a_turn(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No inference thread limits the rate of such lines."""
    taken: list[int] = []

    async def take(self: Turns, size: int) -> None:
        taken.append(size)

    monkeypatch.setattr(Turns, "take", take)
    answers = call(models, "POST", "/classify", content=written({"inputs": 1}, {"inputs": "good"}, {}), headers=LINES).text
    assert (2, 3) == (answers.count("error_type"), answers.count("\n"))
    assert 2 == taken.count(WRONG_LINE_BYTES)


@pytest.mark.parametrize(("waiting", "rest_s", "least_s"), [(20, 0.02, 0.03), (8, 1000, 0)])
async def test_the_event_loop_rests_between_turns_while_lines_wait(
    monkeypatch: pytest.MonkeyPatch, waiting: int, rest_s: float, least_s: float
) -> None:
    """Lines that fit into two turns need no rest."""
    monkeypatch.setattr("bertserve.service.http.turns.REST_S", rest_s)
    turns, start = Turns(), time.monotonic()
    fit = SMALL_BYTES // LINE_BYTES  # in the first turn
    async with asyncio.timeout(30):
        await asyncio.gather(*(turns.take(LINE_BYTES) for _ in range(fit + waiting)))
    assert time.monotonic() - start >= least_s


@pytest.mark.parametrize("headers", [{}, LINES], ids=["body", "line"])
@pytest.mark.parametrize(("size", "on_loop"), [(1000, True), (LONG_BYTES + 1, False)])
def test_a_long_body_is_read_on_another_thread(
    models: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], size: int, on_loop: bool
) -> None:
    """Reading a long body must not block the event loop; a short body is read on it."""
    threads: list[bool] = []

    def parse(raw: bytes, *, finite: bool = False) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return json_text.parse(raw, finite=finite)

    monkeypatch.setattr(reading, "parse", parse)
    body = json.dumps({"inputs": "good"}).encode().ljust(size)
    assert 200 == call(models, "POST", "/classify", content=body, headers=headers).status_code
    assert [on_loop] == threads


def long_body(read: Callable[[], None]) -> dict[str, Any]:
    """Returns arguments for `Turns.read`: a long body, which it reads by a call of `read`."""
    return {"route": SimpleNamespace(read=lambda _: read()), "incoming": SimpleNamespace(raw=bytes(LONG_BYTES + 1))}


async def test_takes_of_no_bytes_start_only_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a stream can be too short to count."""
    begun: list[int] = []
    begin = Turns._begin_turn
    monkeypatch.setattr(Turns, "_begin_turn", lambda self: (begun.append(1), begin(self)))
    turns = Turns()
    for _ in range(9):
        await turns.take(0)
    await asyncio.sleep(0.01)
    assert [1] == begun


async def test_a_pause_follows_a_long_body() -> None:
    """The pause is `PAUSES` times as long as the CPU time of reading."""
    times: list[float] = []

    def read() -> None:
        times.append(time.monotonic())
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    turns = Turns()
    await turns.read(**long_body(read))
    await turns.read(**long_body(read))

    assert times[1] - times[0] >= 0.01 * PAUSES  # the clock of a timer can be some milliseconds late


async def test_the_next_body_waits_for_the_thread_of_a_cancelled_caller() -> None:
    begun, may_end, order = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        may_end.wait(10)
        order.append("first")

    turns = Turns()
    cancelled = asyncio.create_task(turns.read(**long_body(first)))
    await asyncio.to_thread(begun.wait, 10)
    cancelled.cancel()
    second = asyncio.create_task(turns.read(**long_body(lambda: order.append("second"))))
    await asyncio.wait([cancelled])
    await asyncio.sleep(0.01)
    assert [] == order
    may_end.set()
    await second
    assert ["first", "second"] == order


async def test_the_error_of_a_cancelled_read_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """By default, asyncio logs such an error with a traceback that has the caller's text."""
    begun, may_end = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        may_end.wait(10)
        raise InvalidValueError("a caller's text.")

    turns = Turns()
    reading = asyncio.create_task(turns.read(**long_body(read)))
    await asyncio.to_thread(begun.wait, 10)
    reading.cancel()
    await asyncio.wait([reading])
    del reading  # the task holds the error
    may_end.set()
    await turns.read(**long_body(lambda: None))
    gc.collect()
    assert [] == caplog.messages


async def test_a_client_that_does_not_read_pauses_its_stream() -> None:
    client = Client([b"%d\n" % i for i in range(1000)])
    client.reads.clear()
    started = 0

    async def answer(line: bytes, expected: int) -> list[bytes]:
        nonlocal started
        started += 1
        return [line]

    running = asyncio.create_task(stream_of(client, answer)(client.send))
    await settle()
    assert 4 == started
    assert client.taken <= 7
    client.reads.set()
    await running
    assert 1000 == started == len(client.answers)


async def test_other_tasks_run_between_the_pieces_of_an_answer() -> None:
    """Otherwise an answer of 10 MB to a client that reads fast would stop the event loop."""
    client, turns, seen = Client([b"1\n"]), 0, list[int]()

    async def answer(line: bytes, expected: int) -> list[bytes]:
        return [b"x"] * 10

    async def send(message: Any) -> None:
        if message.get("body"):
            seen.append(turns)
            client.answers.append(message["body"])

    async def count() -> None:
        nonlocal turns
        while len(seen) < 10:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await stream_of(client, answer)(send)
    await counting
    assert b"x" * 10 + b"\n" == b"".join(client.answers)
    assert seen == sorted(set(seen))


async def test_the_bytes_of_concurrent_lines_are_limited() -> None:
    client, most, now = Client([b"x" * 40 + b"\n"] * 20 + [b"y" * 100 + b"\n"] * 3), 0, 0

    async def answer(line: bytes, expected: int) -> list[bytes]:
        nonlocal most, now
        now += len(line)
        most = max(most, now)
        await asyncio.sleep(0)
        now -= len(line)
        return [b""]

    await stream_of(client, answer)(client.send)
    assert (100, 23) == (most, len(client.answers))


async def test_the_bytes_of_unread_answers_are_limited() -> None:
    client = Client([b"%d\n" % i for i in range(100)])
    client.reads.clear()
    held = most = 0

    async def answer(line: bytes, expected: int) -> list[bytes]:
        nonlocal held, most
        await asyncio.sleep(0)
        held += 1
        most = max(most, held - len(client.answers))
        return [b"x" * 60]

    running = asyncio.create_task(stream_of(client, answer, max_requests=32, max_bytes=300)(client.send))
    await settle()
    assert (True, 0) == (4 <= held <= 8, len(client.answers))
    client.reads.set()
    await running
    assert (100, True) == (len(client.answers), most <= 8)


def test_a_disconnect_cancels_the_waiting_requests(models: Path) -> None:
    """The requests in progress leave the queue and count as cancelled. No further line starts."""
    engine = FakeEngine()
    service = faked(models, engine)
    client_lines = written(*({"inputs": "good"} for _ in range(200)))

    async def check() -> None:
        service.scheduler.start()
        app, client = create_app(service), Client([client_lines])
        engine.gate.clear()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/classify",
            "query_string": b"",
            "headers": [(b"content-type", b"application/x-ndjson")],
        }
        running = asyncio.create_task(app(scope, client.receive, client.send))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        await asyncio.sleep(0.2)  # the other lines start in turns, a millisecond apart
        client.gone.set()
        await asyncio.wait_for(running, 5)
        engine.gate.set()
        await service.scheduler.stop(5)

    asyncio.run(check())
    page = service.metrics.page().decode()
    assert 'bertserve_cancelled_total{model="tiny",task="text-classification"} 32.0' in page
    assert 'bertserve_requests_total{model="tiny",status="499",task="text-classification"} 32.0' in page


def test_lines_wait_while_the_queue_is_full(models: Path) -> None:
    """Lines that do not fit in the queue are retried, and the metrics do not count them as refused."""
    content = written(*({"inputs": "good " * 12} for _ in range(64)))
    settings = {"max_queue_tokens": 64, "max_batch_tokens": 64}

    assert [list] * 64 == [type(answer) for answer in streamed(models, content, settings=settings)]
    page = call(models, "GET", "/metrics", settings=settings).text
    assert [] == [line for line in page.splitlines() if line.startswith("bertserve_refused_total") and not line.endswith(" 0.0")]


def test_a_stream_uses_at_most_a_quarter_of_the_queue(models: Path) -> None:
    """The lines have more tokens than estimated. Other requests are answered meanwhile, and no line fails."""
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=1024)
    lines = written(*({"inputs": "! " * 25} for _ in range(100)))

    async def check(client: httpx.AsyncClient) -> tuple[list[Any], int, list[int]]:
        engine.gate.clear()
        headers = LINES | {"x-request-timeout-ms": "20000"}
        stream = asyncio.ensure_future(client.post("/classify", content=lines, headers=headers))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        await queued(service, 1)
        await asyncio.sleep(0.1)  # time to exceed its share
        held = service.scheduler._queue.queue_tokens
        others = [asyncio.ensure_future(client.post("/classify", json={"inputs": "good"})) for _ in range(20)]
        await asyncio.sleep(0)
        engine.gate.set()
        return read(await stream), held, [(await other).status_code for other in others]

    answers, held, statuses = play(service, check)
    assert [200] * 20 == statuses
    assert 0 < held <= 256
    assert [list] * 100 == [type(answer) for answer in answers]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_stream_leaves_nothing_to_the_garbage_collector(models: Path, is_complete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting the remains of a thousand streams would block the event loop for 0.2 s."""
    left: list[weakref.ref[Any]] = []
    for kind in (LineAnswerer, LineStream):
        init = kind.__init__

        def noted(self: Any, *args: Any, init: Any = init, **options: Any) -> None:
            left.append(weakref.ref(self))
            init(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", noted)
    engine = FakeEngine()
    state = faked(models, engine, max_queue_tokens=64)  # only some of the lines fit into the queue
    state.scheduler.start()
    if not is_complete:
        engine.gate.clear()
    body = written(*[{"inputs": ["good"] * 10}] * 20)
    head = (
        f"POST /classify HTTP/1.1\r\nhost: t\r\ncontent-type: application/x-ndjson\r\ncontent-length: {len(body) + 1 - is_complete}\r\n\r\n"
    )
    gc.collect()
    gc.disable()
    try:
        async with listening(create_app(state, auth=Authenticator(None))) as served:
            async with socket_client(served, head.encode() + body) as (reader, _):
                await asyncio.to_thread(engine.entered.acquire, timeout=20)
                if is_complete:
                    await reader.readuntil(b"0\r\n\r\n")
            engine.gate.set()
            await until(lambda: [None, None] == [reference() for reference in left])
    finally:
        gc.enable()
        await state.scheduler.stop(1)


def test_only_one_line_of_a_stream_retries_while_the_queue_is_full(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refused line retries. The other lines are parsed only after it is admitted."""
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=64)
    attempts: Counter[str] = Counter()
    parsed: list[bytes] = []
    predict, read_call = Model.predict, Turns.read

    async def counted(self: Model, requests: Any, **options: Any) -> Any:
        attempts[requests[0].text] += 1
        return await predict(self, requests, **options)

    async def noted(self: Turns, route: Route, incoming: Incoming) -> Call:
        parsed.append(incoming.raw)
        return await read_call(self, route, incoming)

    async def check(client: httpx.AsyncClient) -> list[Any]:
        engine.gate.clear()
        running = asyncio.ensure_future(client.post("/classify", json={"inputs": "good"}))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        waiting = asyncio.ensure_future(client.post("/classify", json={"inputs": ["good " * 26] * 2}))
        await queued(service, 2)
        monkeypatch.setattr(Model, "predict", counted)
        monkeypatch.setattr(Turns, "read", noted)
        headers = LINES | {"x-request-timeout-ms": "20000"}
        stream = asyncio.ensure_future(
            client.post("/classify", content=written(*({"inputs": f"{i} {'good ' * 20}"} for i in range(20))), headers=headers)
        )
        async with asyncio.timeout(20):
            while attempts.total() < 3:
                await asyncio.sleep(0.001)
        assert len(attempts) == len(parsed) == 1
        engine.gate.set()
        await asyncio.gather(running, waiting)
        return read(await stream)

    assert [list] * 20 == [type(answer) for answer in play(service, check)]
    assert len(parsed) == 20


def test_lines_that_are_refused_after_admission_retry_one_at_a_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line can be refused after its admission if it has more tokens than estimated."""
    service = faked(models, FakeEngine())
    attempts: Counter[str] = Counter()
    trying, peak = 0, 0
    predict = Model.predict

    async def refused_once(self: Model, requests: Any, **options: Any) -> Any:
        nonlocal trying, peak
        attempts[requests[0].text] += 1
        if attempts[requests[0].text] == 1:
            options["share"].on_admitted()
            raise RefusedError("full", reason="queue_full", retry_after_s=0.0)
        trying += 1
        peak = max(peak, trying)
        await asyncio.sleep(0.001)
        trying -= 1
        return await predict(self, requests, **options)

    monkeypatch.setattr(Model, "predict", refused_once)
    content = written(*({"inputs": f"good {i}"} for i in range(10)))
    answers = read(play(service, lambda client: client.post("/classify", content=content, headers=LINES)))
    assert [list] * 10 == [type(answer) for answer in answers]
    assert peak == 1


@pytest.mark.parametrize("wait_s", [10.0, 0.0])
async def test_a_line_starts_when_the_bytes_of_a_large_answer_can_be_reserved(monkeypatch: pytest.MonkeyPatch, wait_s: float) -> None:
    """The last answer was large, and another request holds the memory. The stream waits for it, but not for ever."""
    monkeypatch.setattr(held_bytes, "WAIT_S", wait_s)
    client, held, expectations = Client([b"1\n", b"2\n"]), HeldBytes(1), list[int]()
    held.limit = 200_000

    async def answer(line: bytes, expected: int) -> list[bytes]:
        expectations.append(expected)
        if line == b"1":
            held.add(150_000)
        return [b"x" * 100_000]

    running = asyncio.create_task(stream_of(client, answer, held=held, max_bytes=2**20)(client.send))
    await settle()
    await asyncio.sleep(0.05)
    assert ([0] if wait_s else [0, 0]) == expectations
    held.add(-150_000)
    await running
    assert ([0, 100_000 if wait_s else 0], 0) == (expectations, held.count)


def test_an_answer_that_is_larger_than_expected_needs_memory(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of streams share the memory; while it is full, a line gets an error, and no answer is built."""
    service = faked(models, FakeEngine())
    service.held_bytes.limit = 400_000
    building = most = 0
    predict = Model.predict

    async def large(self: Model, requests: Any, **options: Any) -> Any:
        prediction = await predict(self, requests, **options)
        prediction.answer_bytes = 200_000
        return prediction

    async def build(call: Call, prediction: Any) -> Content:
        nonlocal building, most
        building += 1
        most = max(most, building)
        await asyncio.sleep(0.05)
        building -= 1
        return Content([b"[1]"], "application/json", {})

    monkeypatch.setattr(Model, "predict", large)
    monkeypatch.setattr(streaming, "content_of", build)

    async def check(client: httpx.AsyncClient) -> list[Any]:
        content = written({"inputs": "good"})
        return await asyncio.gather(*(client.post("/classify", content=content, headers=LINES) for _ in range(3)))

    answers = [read(answer)[0] for answer in play(service, check)]
    assert ["unavailable"] * 2 == [answer["error_type"] for answer in answers if isinstance(answer, dict)]
    assert (1, 0) == (most, service.held_bytes.count)


def test_a_line_waits_for_the_queue_until_its_deadline(models: Path) -> None:
    """A line that does not fit in the queue in time is refused, and the stream continues."""
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=64)

    async def check(client: httpx.AsyncClient) -> list[Any]:
        engine.gate.clear()
        running = asyncio.ensure_future(client.post("/classify", json={"inputs": "good"}))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        waiting = asyncio.ensure_future(client.post("/classify", json={"inputs": ["good " * 26] * 2}))
        await settle()
        found = await client.post(
            "/classify", content=written({"inputs": "good " * 26}, {"inputs": 1}), headers=LINES | {"x-request-timeout-ms": "200"}
        )
        engine.gate.set()
        await asyncio.gather(running, waiting)
        return read(found)

    assert ["overloaded", "invalid_value"] == [answer["error_type"] for answer in play(service, check)]


def test_a_failure_of_the_service_is_logged(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    service: AppState = build(Settings(models=models))
    model = service.registry.get("tiny")

    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("swordfish")

    model.predict = broken  # type: ignore[method-assign]
    answer = play(service, lambda client: client.post("/classify", content=written({"inputs": "a"}, {"inputs": 1}), headers=LINES))

    assert ["internal", "invalid_value"] == [each["error_type"] for each in read(answer)]
    assert 1 == len(caplog.records)
    assert "RuntimeError" in caplog.text and "swordfish" not in caplog.text


def test_lines_and_requests_share_the_rate_limit_of_the_log(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    service: AppState = build(Settings(models=models))

    async def stopping(*_: Any, **__: Any) -> Any:
        raise UnavailableError("stopping.")

    service.registry.get("tiny").predict = stopping  # type: ignore[method-assign]

    async def check(client: httpx.AsyncClient) -> None:
        [error] = read(await client.post("/classify", content=written({"inputs": "a"}), headers=LINES))
        assert "unavailable" == error["error_type"]
        rejected(await client.post("/classify", json={"inputs": "a"}), 503, "unavailable")

    play(service, check)
    assert 1 == len(caplog.records)


def test_answers_are_sent_while_the_body_arrives(models: Path, serve: Serve) -> None:
    """Over a real connection, a client can wait for an answer before it sends the next line. The connection is kept."""
    with serve(models) as served, socket.create_connection(served.address, timeout=20) as client, client.makefile("rb") as answers:
        client.sendall(HEAD)
        line = b'{"inputs": "good"}\n'
        client.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        head = b"".join(iter(answers.readline, b"\r\n"))
        assert b"200 OK" in head and b"transfer-encoding: chunked" in head
        for _ in range(3):
            size = int(answers.readline(), 16)
            assert b"label" in answers.read(size + 2)
            client.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        client.sendall(b"0\r\n\r\n")
        rest = answers.readline(), answers.read(size + 2), answers.readline(), answers.readline()
        assert b"0\r\n" == rest[2]
        client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"200 OK" in answers.readline()


@pytest.mark.full_grid
def test_httpx_can_send_a_large_stream(models: Path, serve: Serve) -> None:
    """Httpx sends 5,000 lines from a generator in chunks. The limit of the body size applies to each line."""

    async def lines() -> AsyncIterator[bytes]:
        for i in range(5000):
            yield written({"inputs": f"good film {i}"})

    async def check(url: str) -> int:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
            client.stream("POST", f"{url}/classify", content=lines(), headers=LINES) as response,
        ):
            return len([json.loads(line) async for line in response.aiter_lines()])

    with serve(models, "--max-body-bytes", "4096", "--max-chars", "4096") as served:
        assert 5000 == asyncio.run(check(served.url))


@pytest.mark.full_grid
def test_a_slow_sender_is_cut_off(models: Path, serve: Serve) -> None:
    """If all lines are answered, a client that sends less than `--min-body-rate` is disconnected."""
    with serve(models, "--body-timeout-s", "1") as served:
        with socket.create_connection(served.address, timeout=20) as client:
            client.sendall(HEAD)
            client.sendall(b'13\r\n{"inputs": "good"}\n\r\n')
            received, end = b"", time.monotonic() + 20
            while (more := client.recv(65536)) and time.monotonic() < end:
                received += more
        assert b"label" in received
        assert not received.endswith(b"0\r\n\r\n")  # without the final chunk, the client knows that the stream is incomplete
        page = httpx.get(f"{served.url}/metrics", trust_env=False).text
    assert 'bertserve_connections_closed_total{reason="body_timeout"} 1.0' in page


@pytest.mark.full_grid
def test_a_slow_model_does_not_end_the_stream(tmp_path: Path, serve: Serve) -> None:
    """While lines are unanswered, the client need not send, because the service causes the delay."""
    slow.hanging_bundle(tmp_path, turns=2 * slow.SECOND)
    with (
        serve(tmp_path, "--body-timeout-s", "1", "--threads", "1") as served,
        socket.create_connection(served.address, timeout=30) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(HEAD)
        lines, end = written(*({"inputs": "dull"} for _ in range(20))), time.monotonic() + 4
        while time.monotonic() < end:
            client.sendall(b"%x\r\n%s\r\n" % (len(lines), lines))
            received = b""
            while received.count(b"label") < 20 * 3:
                line = answers.readline()
                assert line, "the stream was cut off"
                received += line
