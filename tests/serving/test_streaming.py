"""JSON Lines: one answer or error per line in order, back pressure, and cancellation when the client disconnects."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from bertserve.service.api.application import Application
from bertserve.service.api.jsonl import READ_AHEAD_BYTES
from bertserve.service.api.request import LARGE_BYTES
from bertserve.service.app_state import AppState
from bertserve.service.errors import EngineError, RefusedError
from bertserve.service.models.request_progress import Prediction
from support import metric, slow, tiny, until
from support.app_client import assert_same, call, call_once, error_of, fake_service, posting, serving, state_of
from support.fakes import FakeEngine, record_runs
from support.http_messages import CHUNKED, LAST_CHUNK, chunk, get, head
from support.replica import running

LINES = {"content-type": "application/x-ndjson"}
HEAD = head(b"content-type: application/x-ndjson", CHUNKED)


def to_lines(*bodies: Any) -> bytes:
    return b"".join(json.dumps(body).encode() + b"\n" for body in bodies)


def from_lines(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n") or not response.text
    return [json.loads(line) for line in response.text.splitlines()]


def stream_lines(models: Path, content: bytes, *, path: str = "/classify", settings: Any = None, headers: Any = LINES) -> list[Any]:
    return from_lines(call(models, "POST", path, content=content, headers=headers, settings=settings))


@pytest.mark.parametrize("path", ["/classify", "/models/tiny", "/invocations", "/"])
def test_each_line_is_answered_in_order(models: Path, path: str) -> None:
    bodies = [{"inputs": "good " * (i % 7)} for i in range(50)] + [{"inputs": ["a", "b"], "parameters": {"top_k": 1}}]
    expected = [call(models, "POST", path, json=body).json() for body in bodies]

    assert_same(stream_lines(models, to_lines(*bodies), path=path), expected)


@pytest.mark.parametrize("kind", ["application/jsonl", "application/x-ndjson; charset=utf-8", "Application/JSONLines"])
def test_the_content_type_makes_a_request_a_stream(models: Path, kind: str) -> None:
    assert len(stream_lines(models, to_lines({"inputs": "a"}, {"inputs": "b"}), headers={"content-type": kind})) == 2
    answer = call(models, "POST", "/classify", content=to_lines({"inputs": "a"}, {"inputs": "b"}), headers={"content-type": "text/plain"})
    error_of(answer, 400, "malformed")


@pytest.mark.parametrize(
    ("content", "answers"), [(b"", 0), (b"\n\r\n  \n", 0), (b'{"inputs": "a"}', 1), (b'\n{"inputs": "a"}\r\n\n{"inputs": "b"}', 2)]
)
def test_blank_lines_are_skipped_and_the_last_line_needs_no_newline(models: Path, content: bytes, answers: int) -> None:
    assert len(stream_lines(models, content)) == answers


def test_a_failed_line_gets_an_error_at_its_position(models: Path) -> None:
    large = b'{"inputs": "%s"}' % (b"b" * 2000)
    lines = [b'{"inputs": "a"}', b"{", b'{"inputs": 1}', b'{"inputs": "a", "model": "none"}', large, b'{"inputs": "b"}']
    settings = {"max_body_bytes": 1024, "max_chars": 1024, "timeout_ms": 9000}
    items = stream_lines(models, b"\n".join(lines), settings=settings)

    assert [isinstance(item, dict) for item in items] == [False, True, True, True, True, False]
    assert [error["error_type"] for error in items[1:5]] == ["malformed", "invalid_value", "not_found", "too_large"]
    assert [sorted(error) for error in items[1:5]] == [["error", "error_type", "request_id"]] * 4
    assert "line 5: " in items[4]["error"]
    assert "line 2: " in items[1]["error"]
    page = call(models, "GET", "/metrics", settings=settings).text
    counts = {("200", "tiny"): 2, ("404", "unknown"): 1, ("413", "unknown"): 1}
    assert {(status, model): metric(page, "requests_total", status=status, model=model) for status, model in counts} == counts


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
    error_of(call(models, "POST", path, content=to_lines({"inputs": "a"}), headers=LINES | headers), status, kind)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_lines_do_not_depend_on_chunk_boundaries(models: Path, size: int) -> None:
    """Only the line over the limit fails, however it arrives."""
    content = to_lines({"inputs": "one"}) + b"\n\n" + to_lines({"inputs": "x" * 2000}) + b" \r\n" + to_lines({"inputs": "two"}).rstrip()
    client = Client([content[i : i + size] for i in range(0, len(content), size)])
    echo = Echo(models, max_body_bytes=1024, max_chars=1024)

    await echo.stream(client)

    assert echo.texts == ["one", "two"]
    assert [re.findall("label|too_large", str(answer))[0] for answer in client.answers] == ["label", "too_large", "label"]


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
        await asyncio.sleep(0)
        if self.taken == len(self.chunks) or self.gone.is_set():
            await self.gone.wait()
            return {"type": "http.disconnect"}
        self.taken += 1
        return {"type": "http.request", "body": self.chunks[self.taken - 1], "more_body": self.taken < len(self.chunks)}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message.get("body"):
            self.answers.append(message["body"])


def stream(state: AppState, client: Client, path: str = "/classify", kind: bytes = b"application/x-ndjson") -> Coroutine[Any, Any, None]:
    """Sends the client's chunks to a service."""
    return Application(state)(posting(path, (b"content-type", kind)), client.receive, client.send)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


class Echo:
    """A service whose model records each text, and answers it when its gate is open."""

    def __init__(self, models: Path, **settings: Any) -> None:
        self.state = state_of(models, **settings)
        self.state.registry.get("tiny").predict = self.predict
        self.gates: dict[str, asyncio.Event] = {}
        self.texts: list[str] = []
        self.running = self.most = 0  # requests in progress, and their maximum

    async def predict(self, requests: Any, **_: Any) -> Prediction:
        [text] = [request.text for request in requests]
        self.texts.append(text)
        self.running += 1
        self.most = max(self.most, self.running)
        await (self.gates[text].wait() if text in self.gates else asyncio.sleep(0))
        self.running -= 1
        return Prediction(results=[[{"label": text[:10], "score": 1.0}]])

    def stream(self, client: Client) -> Coroutine[Any, Any, None]:
        return stream(self.state, client)


async def test_an_answer_waits_for_those_before_it(models: Path) -> None:
    texts = ["0", "1", "2"]
    client, echo = Client([to_lines({"inputs": text}) for text in texts]), Echo(models)
    echo.gates = {"0": asyncio.Event()}

    running = asyncio.create_task(echo.stream(client))
    await until(lambda: echo.texts == texts)
    assert client.answers == []
    echo.gates["0"].set()
    await running
    assert [json.loads(answer)[0][0]["label"] for answer in client.answers] == texts


@pytest.mark.parametrize(("size", "max_stream_requests", "started"), [(2000, 4, 4), (20_000, 32, 4), (20_000, 64, 7)])
async def test_a_client_that_does_not_read_pauses_its_stream(models: Path, size: int, max_stream_requests: int, started: int) -> None:
    """Lines start when there is room for them and their answers, and no more than a part of the body is read ahead."""
    lines = [to_lines({"inputs": f"{i}"}).rstrip() + b" " * size + b"\n" for i in range(1000)]
    client, echo = Client(lines), Echo(models, max_stream_requests=max_stream_requests)
    client.reads.clear()

    running = asyncio.create_task(echo.stream(client))
    await until(lambda: client.taken * len(lines[0]) > READ_AHEAD_BYTES)
    await settle()
    assert len(echo.texts) == started
    assert (client.taken - len(echo.texts) - 1) * len(lines[0]) <= READ_AHEAD_BYTES
    client.reads.set()
    await running
    assert len(lines) == len(echo.texts) == len(client.answers)


async def test_few_long_lines_are_in_progress(models: Path) -> None:
    """Lines of 40 KB wait for each other before they start, and not in the queue, where their deadlines would pass."""
    client, echo = Client([to_lines({"inputs": "x" * 40_000}) * 10]), Echo(models)
    await echo.stream(client)
    assert len(client.answers) == 10
    assert echo.most == 2


@pytest.mark.parametrize("content_type", [b"application/json", b"application/x-ndjson"])
async def test_the_event_loop_writes_one_large_answer_per_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_type: bytes
) -> None:
    """Many requests can end at the same time. Probes are answered between their answers."""
    gate = threading.Event()
    gate.set()
    record_runs(monkeypatch, lambda feed: gate.wait(20))
    tiny.bundle(tmp_path, "vectors", task="feature-extraction", max_length=512)
    service = state_of(tmp_path, threads=1, allow_implicit_default=True)
    gate.clear()
    clients = [Client([to_lines({"inputs": ["good " * 500] * 4, "parameters": {"pooling": "none"}})]) for _ in range(8)]
    async with serving(service):
        request = asyncio.create_task(answered_in(service, clients, "/embed", content_type))
        await until(lambda: service.scheduler.queue.total_held_tokens == len(clients) * 4 * 502)
        gate.set()
        while service.scheduler.queue.total_held_tokens:
            time.sleep(0.001)  # the event loop is busy until all requests have ended
        turns = await request
    assert min(len(client.answers[0]) for client in clients) > LARGE_BYTES
    assert len(set(turns)) == len(clients)


@pytest.mark.parametrize("content_type", [b"application/json", b"application/x-ndjson"])
async def test_the_event_loop_reads_one_large_body_per_turn(models: Path, content_type: bytes) -> None:
    """The last bytes of many bodies can arrive at the same time."""
    clients = [Client([to_lines({"inputs": "good", "unknown": "x" * LARGE_BYTES})]) for _ in range(8)]
    turns = await answered_in(state_of(models), clients, "/classify", content_type)
    assert all(b"invalid_value" in client.answers[0] for client in clients)
    assert len(set(turns)) == len(clients)


async def answered_in(service: AppState, clients: list[Client], path: str, content_type: bytes) -> list[int]:
    """Sends the requests of all clients at once; returns for each the number of the event loop's turn in which it was answered."""
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def ask(client: Client) -> int:
        await application(posting(path, (b"content-type", content_type)), client.receive, client.send)
        return turn

    application = Application(service)
    counter = asyncio.create_task(count())
    turns = await asyncio.gather(*map(ask, clients))
    counter.cancel()
    return turns


@pytest.mark.parametrize("chunks", [1, 50])
async def test_a_disconnect_cancels_the_waiting_requests(models: Path, chunks: int) -> None:
    engine = FakeEngine()
    service = fake_service(models, engine)
    client = Client([to_lines(*({"inputs": "good"} for _ in range(200)))] * chunks)
    async with serving(service):
        engine.gate.clear()
        running = asyncio.create_task(stream(service, client))
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        await settle()
        client.gone.set()
        await asyncio.wait_for(running, 5)
        engine.gate.set()
    page = service.metrics.render().decode()
    assert metric(page, "cancelled_total", model="tiny") == metric(page, "requests_total", status="499") == 32


@pytest.mark.parametrize("timeout_ms", ["120000", "1"])
async def test_lines_wait_while_the_queue_is_full(models: Path, timeout_ms: str) -> None:
    """Lines that do not fit in the queue ask again until their deadline. The metrics count the lines that are refused in the end."""
    content = to_lines(*({"inputs": "good " * 12} for _ in range(64)))
    async with serving(state_of(models, max_queue_tokens=64, max_batch_tokens=64)) as client:
        answers = from_lines(await client.post("/classify", content=content, headers=LINES | {"x-request-timeout-ms": timeout_ms}))
        page = (await client.get("/metrics")).text

    kinds = {list} if timeout_ms == "120000" else {list, "expired", "overloaded"}
    items = [list if isinstance(answer, list) else answer["error_type"] for answer in answers]
    assert len(answers) == 64
    assert kinds >= set(items)
    assert metric(page, "refused_total") == items.count("overloaded")


def stream_failing(models: Path, failure: Exception) -> tuple[list[str], int]:
    """Returns the errors of a line whose prediction fails and of an invalid line, and the number of predictions."""
    service, predict = state_of(models), AsyncMock(side_effect=failure)
    service.registry.get("tiny").predict = predict
    content, headers = to_lines({"inputs": "a"}, {"inputs": 1}), LINES | {"x-request-timeout-ms": "300"}
    answer = call_once(service, "POST", "/classify", content=content, headers=headers)
    return [error["error_type"] for error in from_lines(answer)], predict.await_count


def test_a_line_that_stays_refused_ends_at_its_deadline(models: Path) -> None:
    """It waits for the predicted time before it asks again, because each attempt can tokenize it again."""
    refusal = RefusedError("the queue is long.", reason="deadline", retry_after_s=1000)
    assert stream_failing(models, refusal) == (["overloaded", "invalid_value"], 2)


@pytest.mark.parametrize(
    ("failure", "kind", "log_text"),
    [(RuntimeError("swordfish"), "internal", "RuntimeError"), (EngineError("the graph failed."), "engine", "line 1: the graph failed.")],
)
def test_a_service_failure_is_logged(models: Path, caplog: pytest.LogCaptureFixture, failure: Exception, kind: str, log_text: str) -> None:
    assert stream_failing(models, failure) == ([kind, "invalid_value"], 1)
    assert len(caplog.records) == 1
    assert log_text in caplog.text
    assert "swordfish" not in caplog.text


def test_answers_are_sent_while_the_body_arrives(models: Path, tmp_path: Path) -> None:
    """Over a real connection, a client can wait for an answer before it sends the next line. The connection is kept."""
    with (
        running(models, tmp_path / "log") as server,
        socket.create_connection(server.address, timeout=20) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(HEAD)
        line = b'{"inputs": "good"}\n'
        client.sendall(chunk(line))
        answer_head = b"".join(iter(answers.readline, b"\r\n"))
        assert b"200 OK" in answer_head
        assert b"transfer-encoding: chunked" in answer_head
        for _ in range(3):
            size = int(answers.readline(), 16)
            assert b"label" in answers.read(size + 2)
            client.sendall(chunk(line))
        client.sendall(LAST_CHUNK)
        rest = answers.readline(), answers.read(size + 2), answers.readline(), answers.readline()
        assert rest[2] == b"0\r\n"
        client.sendall(get())
        assert b"200 OK" in answers.readline()


@pytest.mark.full_grid
def test_a_slow_sender_is_cut_off(models: Path, tmp_path: Path) -> None:
    """If all lines are answered, a client that sends nothing for `--body-timeout-s` is disconnected."""
    with running(models, tmp_path / "log", "--body-timeout-s", "1") as server:
        with socket.create_connection(server.address, timeout=20) as client:
            client.sendall(HEAD)
            client.sendall(b'13\r\n{"inputs": "good"}\n\r\n')
            data, end = b"", time.monotonic() + 20
            while (more := client.recv(65536)) and time.monotonic() < end:
                data += more
        assert b"label" in data
        assert not data.endswith(b"0\r\n\r\n")  # without the final chunk, the client knows that the stream is incomplete
    [line] = server.lines()
    assert " 408 too_slow " in line


class SlowClient(Client):
    async def receive(self) -> Any:
        await asyncio.sleep(0.01)
        return await super().receive()


async def test_a_line_has_the_time_of_a_body(models: Path) -> None:
    """Frequent bytes give it no more time, and answers to lines before it do."""
    line = to_lines({"inputs": "a"})
    client, echo = SlowClient([*[line] * 60, *[b"{"] * 1000]), Echo(models, body_timeout_s=0.5)
    await echo.stream(client)
    assert len(client.answers) == 60
    assert client.taken < 200


@pytest.mark.full_grid
def test_a_slow_model_does_not_end_the_stream(tmp_path: Path) -> None:
    """While lines are unanswered, the client need not send, because the service causes the delay."""
    slow.hanging_bundle(tmp_path, turns=slow.SECOND // 3)
    with (
        running(tmp_path, tmp_path / "log", "--body-timeout-s", "0.2", "--threads", "1") as server,
        socket.create_connection(server.address, timeout=30) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall(HEAD)
        lines, end = to_lines(*({"inputs": "dull"} for _ in range(20))), time.monotonic() + 4
        while time.monotonic() < end:
            client.sendall(chunk(lines))
            data = b""
            while data.count(b"label") < 20 * 3:
                line = answers.readline()
                assert line, "the stream was cut off"
                data += line
