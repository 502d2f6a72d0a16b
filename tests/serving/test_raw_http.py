"""For any bytes on a connection, each request gets its own answer or the connection ends, and other clients are not affected.

The tests use a real server process. tests/serving/raw_http.py defines the bytes.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given

import hostile
import raw_http
import tiny
from conftest import Served, running
from raw_http import Answer, exchange

SHARE = 0.2  # of all hostile cases
REFUSALS = {400, 403, 404, 405, 408, 413, 415, 422, 431}


@pytest.fixture(name="service", scope="module")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yields a service with one model; asserts at the end that its log has no errors or tracebacks."""
    models = tiny.bundle(tmp_path_factory.mktemp("models"), "classifier").parent
    with running(models, tmp_path_factory.mktemp("log") / "log") as served:
        yield served
    log = served.log.read_text()
    assert [] == [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line]


@pytest.fixture(name="address", scope="module")
def its_address(service: Served) -> tuple[str, int]:
    return service.address


@pytest.fixture(name="bystander", scope="module")
def another_client(service: Served) -> Iterator[httpx.Client]:
    """Yields a client that sends only valid requests over one connection."""
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        yield client


def assert_clear(answer: Answer, sent: bytes) -> None:
    """Asserts that an answer is a result, or an error in the standard format without internal details."""
    if answer.status == 200:
        return
    assert answer.status in REFUSALS, (answer, sent)
    if answer.body:
        said = json.loads(answer.body)
        assert ["error", "error_type", "request_id"] == sorted(said)
        assert said["request_id"] == answer.headers["x-request-id"]
    assert [] == [word for word in hostile.LEAKS if word.encode() in answer.body and word.encode() not in sent], (answer, sent)


def assert_serves_on(bystander: httpx.Client) -> None:
    answer = bystander.post("/classify", json={"inputs": "good"}, headers={"x-request-id": "bystander"})
    assert (200, "bystander", "positive") == (answer.status_code, answer.headers["x-request-id"], answer.json()[0][0]["label"])


@pytest.mark.parametrize("name", raw_http.CORPUS)
def test_odd_bytes_get_the_expected_answers(address: tuple[str, int], bystander: httpx.Client, name: str) -> None:
    """Bytes in a body, or after an unreadable request, are not treated as a request."""
    sent, expected = raw_http.CORPUS[name]
    received = exchange(address, sent, len(expected))
    assert expected == [answer.status for answer in received]
    assert "smuggled" not in {answer.headers["x-request-id"] for answer in received}
    for answer in received:
        assert_clear(answer, sent)
    assert_serves_on(bystander)


@pytest.mark.parametrize("count", [2, 50])
def test_requests_in_one_packet_get_their_own_answers_in_order(address: tuple[str, int], count: int) -> None:
    kinds = [
        raw_http.post(b"x-request-id: %d", body=b'{"inputs":' + json.dumps(["good film"] * 40).encode() + b"}"),
        raw_http.post(b"x-request-id: %d", body=b'{"inputs":"bad"}'),
        raw_http.get(b"x-request-id: %d"),
        raw_http.post(b"x-request-id: %d", body=b"{}"),
        raw_http.chunked(coding=b"x-request-id: %d\r\ntransfer-encoding: chunked"),
        raw_http.get(b"x-request-id: %d", start=b"GET /qqqq/qqqq HTTP/1.1"),
    ]
    alone = [exchange(address, kind.replace(b"%d", b"0"), 1)[0] for kind in kinds]
    together = exchange(address, b"".join(kinds[index % len(kinds)].replace(b"%d", b"%d" % index) for index in range(count)), count)
    assert [str(index) for index in range(count)] == [answer.headers["x-request-id"] for answer in together]
    expected = [alone[index % len(kinds)] for index in range(count)]
    assert [answer.status for answer in expected] == [answer.status for answer in together]
    assert [result(answer) for answer in expected] == [result(answer) for answer in together]


def result(answer: Answer) -> object:
    """Returns the content of a body, with rounded scores and without the request id."""
    said = json.loads(answer.body)
    if isinstance(said, dict):
        return {key: value for key, value in said.items() if key != "request_id"}
    return [[(each["label"], round(each["score"], 4)) for each in row] for row in said]


def test_hostile_bytes_do_not_affect_other_connections(address: tuple[str, int], bystander: httpx.Client) -> None:
    @hostile.cases(SHARE)
    @given(sent=raw_http.connections())
    def check(sent: bytes) -> None:
        received = exchange(address, sent)
        assert len(received) <= sent.count(b"HTTP") + 1, sent
        for answer in received:
            assert_clear(answer, sent)
        ids = [answer.headers["x-request-id"] for answer in received]
        ours = [int(name.rpartition("-")[2]) for name in ids if name.startswith(("sent-", "head-"))]
        assert sorted(set(ours)) == ours, (ids, sent)
        assert_serves_on(bystander)

    check()


@pytest.mark.parametrize("path", ["/health", "/classify", "/nope"])
def test_a_head_request_is_answered_at_once(address: tuple[str, int], path: str) -> None:
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 ")
    assert received.endswith(b"\r\n\r\n")
