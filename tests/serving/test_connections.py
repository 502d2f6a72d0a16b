"""Limits of connections: time and bytes of heads and bodies, slow readers, and health probes of a full service."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import raw_http
import tiny
from bertserve.service.errors import SettingsError
from bertserve.service.server.preparation import RESERVE, max_connections
from conftest import BERT_SERVE, Served, metric, running, without_shutdown

HALF_HEAD = b"POST /classify HTTP/1.1\r\nhost: te"
HALF_BODY = b"POST /classify HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{"
WHOLE = raw_http.post()
# the header timeout starts with the connection; on a stalled machine, the first byte can arrive two seconds later
SHORT = ("--header-timeout-s", "2.2", "--body-timeout-s", "0.6", "--keep-alive-s", "1", "--max-header-bytes", "2048")
SWEEPS_OFTEN = f"from bertserve.service.server import connections; connections.SWEEP_S = 0.1; {BERT_SERVE}"


@pytest.fixture(name="service", scope="module")
def service_in_a_hurry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tiny.bundle(tmp_path_factory.mktemp("models")).parent
    with running(models, tmp_path_factory.mktemp("log") / "log", *SHORT, program=SWEEPS_OFTEN) as served:
        yield served


@contextmanager
def connected(served: Any, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(served.address, timeout=20) as connection:
        connection.sendall(sent)
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    """Returns all remaining bytes of a connection; fails if it is reset, or is not closed within its timeout."""
    return connection.makefile("rb").read()


def refused(answer: bytes, status: int, error_type: str) -> None:
    """Checks the status and the exact shape of a response that ended a connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    said = json.loads(body)
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert ("close", "application/json", str(len(body))) == tuple(
        headers[name] for name in ("connection", "content-type", "content-length")
    )
    assert (error_type, headers["x-request-id"]) == (said["error_type"], said["request_id"])
    assert ["error", "error_type", "request_id"] == sorted(said)


def closed(served: Any, reason: str) -> float:
    """Returns the number of connections that were closed for a reason, from the metrics."""
    return metric(httpx.get(f"{served.url}/metrics", trust_env=False).text, "connections_closed_total", reason=reason)


def counted(served: Any, status: int) -> float:
    return metric(httpx.get(f"{served.url}/metrics", trust_env=False).text, "requests_total", status=str(status))


@pytest.mark.parametrize(
    ("sent", "status", "error_type", "reason"),
    [
        (HALF_HEAD, 408, "too_slow", "head_timeout"),
        (WHOLE + HALF_HEAD, 408, "too_slow", "head_timeout"),
        (b"GET / HTTP/1.1\r\nhost: test\r\nx: " + b"x" * 2048, 431, "head_too_large", "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2048 + b"\r\n", 431, "head_too_large", "head_too_large"),
        (b"GET /" + b"x" * 2048 + b" HTTP/1.1\r\n\r\n", 431, "head_too_large", "head_too_large"),
        (b"NONSENSE\r\n\r\n", 400, "malformed", "malformed"),
        (b"POST /classify HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n", 400, "malformed", "malformed"),
        (b"POST /classify HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}", 400, "malformed", "malformed"),
        (WHOLE + b"NONSENSE\r\n\r\n", 200, "", "malformed"),
    ],
)  # fmt: skip
def test_a_slow_or_invalid_request_is_refused(service: Served, sent: bytes, status: int, error_type: str, reason: str) -> None:
    """The error has the usual shape, and follows the responses to earlier requests on the connection.

    Then the connection is closed without a reset, and the metrics count it.
    """
    before = closed(service, reason)
    with connected(service, sent) as connection:
        answer = until_closed(connection)
    if answer.startswith(b"HTTP/1.1 200 "):
        head, _, rest = answer.partition(b"\r\n\r\n")
        [length] = re.findall(rb"content-length: (\d+)", head)
        answer = rest[int(length) :]
    if error_type:
        refused(answer, status, error_type)
    else:
        assert b"" == answer
    assert before + 1 == closed(service, reason)


def test_a_connection_without_data_is_closed_without_a_response(service: Served) -> None:
    with connected(service) as connection:
        assert b"" == until_closed(connection)


@pytest.mark.full_grid
def test_an_idle_connection_is_closed(service: Served) -> None:
    """After the response and `--keep-alive-s`, the connection is closed without further bytes."""
    with connected(service, WHOLE) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"" == until_closed(connection)


def test_the_rest_of_a_refused_body_is_not_awaited(service: Served) -> None:
    """If the client is still sending a refused body, the connection is closed without a second response."""
    with connected(service, b"POST /nowhere HTTP/1.1\r\nhost: test\r\ncontent-length: 100\r\n\r\n{") as connection:
        answer = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    assert 1 == answer.count(b"HTTP/1.1 ")


@pytest.mark.full_grid
@pytest.mark.parametrize(("rate", "status"), [("1", 200), ("1000000", 408)])
def test_a_body_with_the_minimum_rate_can_exceed_the_timeout(models: Path, serve: Callable[..., Any], rate: str, status: int) -> None:
    """A body that arrives in steps is read completely if it has the minimum rate, and is refused otherwise."""
    body = json.dumps({"inputs": "good " * 200}).encode()
    with (
        serve(models, *SHORT, "--min-body-rate", rate) as served,
        connected(
            served, b"POST /classify HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        ) as connection,
    ):
        for step in range(13):
            try:
                connection.sendall(body[step * 80 : step * 80 + 80])
            except OSError:
                break
            time.sleep(0.2)
        assert until_closed(connection).startswith(b"HTTP/1.1 %d " % status)


def test_a_client_that_does_not_read_is_disconnected(service: Served) -> None:
    before = closed(service, "send_timeout")
    with connected(service) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(0.2)
        try:
            while True:
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n" * 20)
        except OSError:
            pass
        end = time.monotonic() + 30
        while closed(service, "send_timeout") == before:
            assert time.monotonic() < end, "it was not cut off"
            time.sleep(0.1)


def test_probes_succeed_despite_many_incomplete_heads(models: Path, tmp_path: Path) -> None:
    """With 256 file descriptors and 300 incomplete heads, probes succeed at once, and all requests soon after.

    The log has about one line per second.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [str(Path(sys.executable).with_name("bert-serve")), "serve", "--models", str(models), "--port", "0"]
    command = ["/bin/sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command]
    log = tmp_path / "log"
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True))
        stack.callback(process.terminate)
        assert process.stdout is not None
        line = next(line for line in process.stdout if " listens on " in line)
        served = Served(process, line.split(" listens on ")[1].split(",")[0], log)  # type: ignore[arg-type]
        for _ in range(300):
            stack.enter_context(connected(served, HALF_HEAD))
        assert 200 == httpx.get(f"{served.url}/health/live", trust_env=False).status_code
        assert 200 == httpx.get(f"{served.url}/health/ready", trust_env=False).status_code
        answers = [httpx.post(f"{served.url}/classify", content=raw_http.BODY, trust_env=False)]
        while answers[-1].status_code != 200:
            assert len(answers) < 100, "there never was room"
            time.sleep(0.1)
            answers.append(httpx.post(f"{served.url}/classify", content=raw_http.BODY, trust_env=False))
        assert {(503, "1")} >= {(answer.status_code, answer.headers.get("retry-after")) for answer in answers[:-1]}
        assert closed(served, "evicted") > 0
    lines = without_shutdown(log.read_text())
    assert 0 < len(lines) < 20
    assert [] == [line for line in lines if "closed before" not in line]
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_full_service_refuses_a_new_connection(models: Path, serve: Callable[..., Any]) -> None:
    """If every connection has a request, a new one gets 503 with Retry-After; existing connections continue."""
    flags = ("--max-connections", "2", "--min-body-rate", "1")  # a slower body could be evicted
    with serve(models, *flags) as served, connected(served, HALF_BODY), connected(served, HALF_BODY):
        with connected(served, WHOLE) as connection:
            answer = until_closed(connection)
        refused(answer, 503, "unavailable")
        assert b"retry-after: 1\r\n" in answer
        assert 1 == closed(served, "refused")


def test_the_limit_of_connections_depends_on_file_descriptors() -> None:
    """By default, the file descriptors set the limit, at most 2048 connections. A higher setting is an error with both numbers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (min(soft - RESERVE, 2048), 7) == (max_connections(None), max_connections(7))
    with pytest.raises(SettingsError, match=f"--max-connections is {soft}, .* {soft} file descriptors"):
        max_connections(soft)
