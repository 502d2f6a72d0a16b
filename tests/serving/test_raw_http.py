"""For any bytes on a connection, each request gets its own answer or the connection ends, and other clients are not affected.

The tests use a real server process. `support.raw_http` defines the bytes.
"""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given

from support import hostile, raw_http, tiny
from support.http_messages import Answer, exchange
from support.replica import ServeProcess, running

SHARE = 0.2  # this share of all hostile cases
REFUSALS = {400, 403, 404, 405, 408, 413, 415, 422, 431}


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Yields a service with one model; asserts at the end that its log has no errors or tracebacks."""
    models = tiny.bundle(tmp_path_factory.mktemp("models"), "classifier").parent
    with running(models, tmp_path_factory.mktemp("log") / "log") as server:
        yield server
    log = server.log.read_text()
    assert [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line] == []


@pytest.fixture(name="bystander", scope="module")
def another_client(service: ServeProcess) -> Iterator[httpx.Client]:
    """Yields a client that sends only valid requests over one connection."""
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        yield client


def assert_clear(answer: Answer, request: bytes) -> None:
    """Asserts that an answer is a result, or an error in the standard format without internal details."""
    if answer.status == 200:
        return
    assert answer.status in REFUSALS, (answer, request)
    if answer.body:
        error = json.loads(answer.body)
        assert sorted(error) == ["error", "error_type", "request_id"]
        assert answer.headers["x-request-id"] == error["request_id"]
    assert [word for word in hostile.LEAKS if word.encode() in answer.body and word.encode() not in request] == [], (answer, request)


def assert_serves_on(bystander: httpx.Client) -> None:
    answer = bystander.post("/classify", json={"inputs": "good"}, headers={"x-request-id": "bystander"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "bystander"
    assert answer.json()[0][0]["label"] == "positive"


@pytest.mark.parametrize("name", raw_http.CORPUS)
def test_odd_bytes_get_the_expected_answers(service: ServeProcess, bystander: httpx.Client, name: str) -> None:
    """Bytes in a body, or after an unreadable request, are not treated as a request."""
    messages_, expected = raw_http.CORPUS[name]
    messages = [messages_.removesuffix(raw_http.CLEAN), raw_http.CLEAN] if expected[1:] else [messages_]
    answers = exchange(service.address, *messages, count=len(expected))
    assert [answer.status for answer in answers] == expected
    assert "smuggled" not in {answer.headers["x-request-id"] for answer in answers}
    for answer in answers:
        assert_clear(answer, messages_)
    assert_serves_on(bystander)


def test_hostile_bytes_do_not_affect_other_connections(service: ServeProcess, bystander: httpx.Client) -> None:
    @hostile.cases(SHARE)
    @given(data=raw_http.connections())
    def check(data: bytes) -> None:
        answers = exchange(service.address, data)
        assert len(answers) <= 1, data
        for answer in answers:
            assert_clear(answer, data)
            name = answer.headers["x-request-id"]
            assert name == "sent-0" or not name.startswith("sent-"), (name, data)
        assert_serves_on(bystander)

    check()
