"""deploy/haproxy: HAProxy accepts the configuration, its timeouts match the service, and requests pass unchanged."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import replica
import slow
import tiny
from balanced import Balanced, balanced, entries
from bertserve.service import errors
from bertserve.service.api import auth, jsonl
from bertserve.service.settings import Settings, parse
from conftest import wait_until
from manifests import DEPLOY, ROOT

CONFIGURATION = DEPLOY / "haproxy/haproxy.cfg"
TEXT = CONFIGURATION.read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/how-to/replicas.md").read_text(encoding="utf-8")
BODY = {"inputs": "good"}

needs_haproxy = pytest.mark.skipif(not replica.installed(), reason="haproxy is not installed")


def seconds(name: str) -> float:
    """Returns the seconds of a duration in the configuration, such as `timeout server` or `inter`."""
    [(value, unit)] = re.findall(rf"^ .*\b{name} (\d+)(ms|s|m)\b", TEXT, re.MULTILINE)
    return float(value) * {"ms": 0.001, "s": 1, "m": 60}[unit]


def default(name: str) -> float:
    return float(Settings.model_fields[name].default)


@needs_haproxy
def test_haproxy_accepts_the_configuration() -> None:
    done = subprocess.run(["haproxy", "-c", "-f", CONFIGURATION], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr.replace("Configuration file is valid\n", ""))


def test_haproxy_listens_only_on_loopback() -> None:
    """This includes the service, which has no API key there, and the statistics page."""
    assert ["127.0.0.1:8000", "127.0.0.1:8404"] == re.findall(r"^ +bind (\S+)", TEXT, re.MULTILINE)
    assert 2 == len(re.findall(r"^ +server replica\d 127\.0\.0\.1:\d+$", TEXT, re.MULTILINE))


def test_timeouts_match_the_timeouts_of_the_service() -> None:
    """The service ends requests first and keeps connections longer. HAProxy adds a margin for the last run to each deadline."""
    [margin] = re.findall(r"x-request-timeout-ms\),add\((\d+)\)", TEXT)
    assert default("timeout_ms") / 1000 + int(margin) / 1000 == seconds("timeout server")
    [digits] = re.findall(r"x-request-timeout-ms\) -m reg \^\[1-9\]\[0-9\]\{0,(\d)\}\$", TEXT)
    assert default("max_timeout_ms") < 10 ** (int(digits) + 1)
    assert seconds("timeout http-keep-alive") < default("keep_alive_s")
    assert default("header_timeout_s") == seconds("timeout http-request")
    assert default("body_timeout_s") == seconds("wait-for-body time")


def test_haproxy_accepts_the_headers_and_streams_of_the_service() -> None:
    """The buffer holds the largest headers of the service, and the rule for streams matches all its media types."""
    [size] = re.findall(r"tune\.bufsize (\d+)", TEXT)
    assert 2 * default("max_header_bytes") <= int(size)
    [names] = re.findall(r"acl stream req\.hdr\(content-type\) -i -m sub (.+)$", TEXT, re.MULTILINE)
    assert all(any(name in kind.decode() for name in names.split()) for kind in jsonl.MEDIA_TYPES)


def test_a_replica_drains_longer_than_haproxy_needs_to_notice() -> None:
    assert "fall 2" in TEXT
    notice = seconds("inter") + seconds("fastinter") + 2 * seconds("timeout check")
    assert {True} == {notice < settings.pre_stop_delay_s for settings in shown()}


def shown() -> list[Settings]:
    lines = re.findall(r"^bert-serve serve (.+)$", GUIDE, re.MULTILINE)
    assert 3 == len(lines)
    return [parse(Settings, line.split()) for line in lines]


def test_the_health_check_uses_the_readiness_path() -> None:
    [uri] = re.findall(r"http-check send meth GET uri (\S+)", TEXT)
    assert uri == "/health/ready"
    assert uri in auth.PROBES


def test_errors_of_haproxy_have_the_format_of_the_service() -> None:
    documents = [json.loads(text) for text in re.findall(r"lf-string '([^']+)'", TEXT)]
    assert 6 == len(documents)
    for document in documents:
        assert ["error", "error_type", "request_id"] == list(document)
        assert document["error"].endswith(".")
        assert document["error_type"] in {kind for _, kind in errors.ERROR_STATUSES.values()}


@pytest.fixture(name="service", scope="module")
def replicas_behind_haproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    """Yields two replicas with a fast and a slow model. They trust the proxy and log each request."""
    folder = tmp_path_factory.mktemp("balanced")
    tiny.bundle(folder / "models")
    slow.bundle(folder / "models")
    flags = ["--forwarded-allow-ips", "127.0.0.1", "--access-log", "--default", "text-classification=tiny"]
    with balanced(folder / "models", folder, *flags) as service:
        yield service


@pytest.fixture(name="client")
def client_of_the_proxy(service: Balanced) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.proxy.url, trust_env=False, timeout=60) as client:
        yield client


def logged(service: Balanced, request_id: str) -> list[str]:
    """Waits for log lines with a request id, and returns them from all replicas."""

    def lines() -> list[str]:
        return [line for replica in service.replicas for line in replica.log.read_text().splitlines() if request_id in line]

    wait_until(lambda: len(lines()) > 0)
    return lines()


@needs_haproxy
@pytest.mark.serial
def test_both_replicas_answer(service: Balanced, client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert {200} == {answer.status_code for answer in pool.map(lambda _: client.post("/classify", json=BODY), range(40))}

    def shares() -> list[int]:
        return [replica.log.read_text().count(" POST /classify 200 ") for replica in service.replicas]

    wait_until(lambda: sum(shares()) >= 40)  # a thread writes the log, with a delay
    assert (40, True) == (sum(shares()), min(shares()) > 0)


@needs_haproxy
@pytest.mark.serial
def test_the_log_has_the_address_of_the_caller_and_one_id(service: Balanced, client: httpx.Client) -> None:
    """A valid id of the caller is kept; otherwise, proxy and replica share a new one. An address in a caller's header is ignored."""
    named = client.post("/classify", json=BODY, headers={"x-request-id": "mine-1", "x-forwarded-for": "203.0.113.7"})
    made = client.post("/classify", json=BODY, headers={"x-request-id": 'not "one"'})

    assert ["mine-1"] == named.headers.get_list("x-request-id")
    [line] = logged(service, "mine-1")
    assert " 127.0.0.1 POST /classify 200 " in line
    [given] = made.headers.get_list("x-request-id")
    assert re.fullmatch(r"[0-9a-f-]{36}", given)
    assert 1 == len(logged(service, given))


@needs_haproxy
@pytest.mark.serial
def test_responses_pass_unchanged(client: httpx.Client) -> None:
    """This includes errors, a header of 30 kB, and large bodies."""
    wrong = client.post("/classify", json={"inputs": 3}, headers={"x": "a" * 30_000})
    large = client.post("/classify", json={"inputs": ["good " * 200] * 32})

    assert (422, "invalid_value") == (wrong.status_code, wrong.json()["error_type"])
    assert (200, 32, "tiny") == (large.status_code, len(large.json()), large.headers["x-model"])


@needs_haproxy
@pytest.mark.serial
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/%6detrics"),
        ("POST", "/models/tiny/unload"),
        ("POST", "/models/tiny/%75nload"),
    ],
)
def test_paths_that_affect_only_one_replica_are_refused(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)

    assert (404, "not_found") == (answer.status_code, answer.json()["error_type"])
    assert answer.headers["x-request-id"] == answer.json()["request_id"]


@needs_haproxy
@pytest.mark.serial
def test_a_stream_answers_each_line_before_the_next_line_is_sent(service: Balanced) -> None:
    host, port = service.proxy.url.removeprefix("http://").split(":")
    head = "POST /classify HTTP/1.1\r\nhost: test\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    line = json.dumps(BODY) + "\n"
    chunk = f"{len(line):x}\r\n{line}\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection, connection.makefile("rb") as answers:
        connection.sendall((head + chunk).encode())
        assert any(b'"label"' in read for read in answers)  # the request body has not ended yet
        connection.sendall(f"{chunk}0\r\n\r\n".encode())
        assert any(b'"label"' in read for read in answers)


@needs_haproxy
@pytest.mark.serial
def test_a_disconnect_drops_the_queued_work(service: Balanced) -> None:
    """The proxy forwards the disconnect, and the replica drops the items that have not started."""
    body = json.dumps({"inputs": ["good"] * 100}).encode()
    request = b"POST /models/slow HTTP/1.1\r\nhost: test\r\nx-request-id: gone-1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    host, port = service.proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        wait_until(lambda: max(map(entries, service.replicas)) > 50)
    assert any(" 499 " in line for line in logged(service, "gone-1"))
    wait_until(lambda: max(map(entries, service.replicas)) == 0)


@needs_haproxy
@pytest.mark.serial
@pytest.mark.full_grid
def test_errors_without_replicas_have_the_usual_format(tmp_path: Path, models: Path) -> None:
    """The response has Retry-After and the caller's id. The health check of the proxy fails."""
    with balanced(models, tmp_path, count=1) as service, httpx.Client(base_url=service.proxy.url, trust_env=False) as client:
        service.replicas[0].stop()
        answer = client.post("/classify", json=BODY, headers={"x-request-id": "mine-2"})
        red = client.get("/health/ready")

    assert (503, "unavailable", "mine-2") == (answer.status_code, answer.json()["error_type"], answer.json()["request_id"])
    assert ("1", "mine-2", 503) == (answer.headers["retry-after"], answer.headers["x-request-id"], red.status_code)
