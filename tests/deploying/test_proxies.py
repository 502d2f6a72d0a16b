"""deploy/haproxy and deploy/nginx: the proxies accept the configurations, their limits match the service, and requests pass unchanged."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

import facts
from bertserve.service.api.jsonl import LINES_TYPES
from bertserve.service.command_line import parse
from bertserve.service.settings import Settings
from support import ROOT, slow, tiny, wait_until
from support.balanced import Balanced, balanced
from support.http_messages import CHUNKED, LAST_CHUNK, LINES, chunk, head, post
from support.loads import queue_items
from support.replica import HAPROXY_FILE, NGINX_FILE, PROXIES, HAProxy

HAPROXY, NGINX = HAPROXY_FILE.read_text(encoding="utf-8"), NGINX_FILE.read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/how-to/replicas.md").read_text(encoding="utf-8")
BODY = {"inputs": "good"}
UNITS = {"ms": 0.001, "s": 1, "m": 60, "k": 2**10, "M": 2**20}

needs_proxies = pytest.mark.skipif(not all(map(shutil.which, PROXIES)), reason="haproxy or nginx is not installed")


def through_proxies(test: Callable[..., None]) -> Callable[..., None]:
    return needs_proxies(pytest.mark.serial(test))


def value(text: str, name: str) -> float:
    """Returns a duration in seconds, a size in bytes, or a number of a configuration, such as `timeout server` or `inter`."""
    [(number, unit)] = set(re.findall(rf"^ .*\b{name} (\d+)(ms|s|m|k|)\b", text, re.MULTILINE))
    return float(number) * UNITS.get(unit, 1)


def default(name: str) -> float:
    return float(Settings.model_fields[name].default)


@needs_proxies
@pytest.mark.parametrize("variables", [{}, {"BIND": ":8000", "REPLICAS": "bertserve:8000"}], ids=["as it is", "compose"])
def test_haproxy_accepts_the_configuration(variables: dict[str, str]) -> None:
    command = ["haproxy", "-c", "-f", HAPROXY_FILE]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    assert (result.returncode, result.stderr.replace("Configuration file is valid\n", "")) == (0, "")


def test_the_proxies_listen_only_on_loopback() -> None:
    """This includes the service, which has no API key there, and the statistics page."""
    assert re.findall(r"^ +bind (\S+)", HAPROXY, re.MULTILINE) == ['"${BIND-127.0.0.1:8000}"', "127.0.0.1:8404"]
    assert re.findall(r"^ +listen ([^ ;]+)", NGINX, re.MULTILINE) == ["127.0.0.1:8000"]
    assert len(re.findall(r"^ +server replica\d 127\.0\.0\.1:\d+$", HAPROXY, re.MULTILINE)) == 2
    assert len(re.findall(r"^ +server 127\.0\.0\.1:\d+ ", NGINX, re.MULTILINE)) == 2


def test_timeouts_match_the_timeouts_of_the_service() -> None:
    """The service ends requests first and keeps connections longer. The proxies add a margin for the last run to each deadline."""
    [margin] = re.findall(r"x-request-timeout-ms\),add\((\d+)\)", HAPROXY)
    assert value(HAPROXY, "timeout server") == default("timeout_ms") / 1000 + int(margin) / 1000
    assert value(NGINX, "proxy_read_timeout") == default("max_timeout_ms") / 1000 + int(margin) / 1000
    [digits] = re.findall(r"x-request-timeout-ms\) -m reg \^\[1-9\]\[0-9\]\{0,(\d)\}\$", HAPROXY)
    assert default("max_timeout_ms") < 10 ** (int(digits) + 1)
    assert max(value(HAPROXY, "timeout http-keep-alive"), value(NGINX, "keepalive_timeout")) < default("keep_alive_s")
    assert {value(HAPROXY, "timeout http-request"), value(NGINX, "client_header_timeout")} == {default("header_timeout_s")}
    assert {value(HAPROXY, "wait-for-body time"), value(NGINX, "client_body_timeout")} == {default("body_timeout_s")}


def test_sizes_match_the_limits_of_the_service() -> None:
    """A buffer of HAProxy holds the largest headers, and the rules for streams match all media types of streams."""
    body, head = default("max_body_bytes"), default("max_header_bytes")
    assert 2 * head <= value(HAPROXY, "tune.bufsize")
    assert HAPROXY.count(f" gt {body:.0f} }}") == 2
    assert HAPROXY.count(f",length gt {head:.0f} }}") == 2
    assert f"client_max_body_size {body / 2**20:.0f}m;" in NGINX
    assert f"large_client_header_buffers 2 {head / 2**10:.0f}k;" in NGINX
    rules = re.findall(r"-m sub (.+)$", HAPROXY, re.MULTILINE) + re.findall(r'"~\*(.+)" 1;$', NGINX, re.MULTILINE)
    assert len(rules) == 2
    for names in rules:
        assert all(re.search(names.replace(" ", "|"), kind.decode()) for kind in LINES_TYPES)


def test_the_proxies_have_the_same_limits() -> None:
    """Connections and streams of an address, requests of an address per second, and open requests of a replica."""
    names = ("sc0_conn_cur gt", "sc1_conn_cur gt", "sc0_http_req_rate gt", "on-error fastinter maxconn")
    rate, burst = (int(number) for number in re.findall(r"(?:rate=|burst=)(\d+)", NGINX))
    assert burst == rate
    [most] = set(re.findall(r"max_conns=(\d+)", NGINX))
    of_nginx = [value(NGINX, "limit_conn address"), value(NGINX, "limit_conn stream"), rate, int(most)]
    assert of_nginx == [value(HAPROXY, name) for name in names]


def test_a_replica_drains_longer_than_haproxy_needs_to_notice() -> None:
    assert "fall 2" in HAPROXY
    notice = value(HAPROXY, "inter") + value(HAPROXY, "fastinter") + 2 * value(HAPROXY, "timeout check")
    shown = [parse(Settings, line.split()) for line in re.findall(r"^bert-serve serve (.+)$", GUIDE, re.MULTILINE)]
    assert [notice < settings.pre_stop_delay_s for settings in shown] == [True, True]


def test_the_health_check_uses_the_readiness_path() -> None:
    assert re.findall(r"http-check send meth GET uri (\S+)", HAPROXY) == ["/health/ready"]


def test_errors_of_the_proxies_have_the_format_of_the_service() -> None:
    documents = re.findall(r"lf-string '([^']+)'", HAPROXY)
    documents += [f'{{"error":{text},"request_id":""}}' for text in re.findall(r"^ +\S+ '(\"[^']+)';$", NGINX, re.MULTILINE)]
    assert len(documents) == 12 + 10
    error_types = {error.error_type for error in facts.errors()}
    for document in map(json.loads, documents):
        assert list(document) == ["error", "error_type", "request_id"]
        assert document["error"].endswith(".")
        assert document["error_type"] in error_types


@pytest.fixture(name="service", scope="module", params=PROXIES)
def replicas_behind_a_proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    """Yields two replicas with a fast and a slow model. They trust the proxy and log each request."""
    folder = tmp_path_factory.mktemp("balanced")
    tiny.bundle(folder / "models")
    slow.bundle(folder / "models")
    flags = ["--forwarded-allow-ips", "127.0.0.1", "--access-log", "--default", "text-classification=tiny"]
    with balanced(folder / "models", folder, *flags, proxy=request.param) as service:
        yield service


@pytest.fixture(name="client")
def client_of_the_proxy(service: Balanced) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.proxy.url, trust_env=False, timeout=60) as client:
        yield client


def connect(service: Balanced) -> socket.socket:
    url = httpx.URL(service.proxy.url)
    return socket.create_connection((url.host, url.port or 0), timeout=20)


def answer_to(service: Balanced, request: bytes) -> tuple[int, Any]:
    """Returns the status and the document of the answer to a raw request; None for a document that is not JSON."""
    with connect(service) as connection:
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        body = answer.read()
    return answer.status, json.loads(body) if body.startswith(b"{") else None


def log_lines(service: Balanced, request_id: str) -> list[str]:
    """Waits for log lines with a request id, and returns them from all replicas."""

    def lines() -> list[str]:
        return [line for replica in service.replicas for line in replica.log.read_text().splitlines() if request_id in line]

    wait_until(lambda: len(lines()) > 0)
    return lines()


@through_proxies
def test_the_log_has_the_address_of_the_caller_and_one_id(service: Balanced, client: httpx.Client) -> None:
    """A valid id of the caller is kept; otherwise, proxy and replica share a new one. An address in a caller's header is ignored."""
    answer = client.post("/classify", json=BODY, headers={"x-request-id": "mine-1", "x-forwarded-for": "203.0.113.7"})
    other = client.post("/classify", json=BODY, headers={"x-request-id": 'not "one"'})

    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    [line] = log_lines(service, "mine-1")
    assert " 127.0.0.1 POST /classify 200 " in line
    [request_id] = other.headers.get_list("x-request-id")
    assert re.fullmatch(r"[0-9a-f-]{32,36}", request_id)
    assert len(log_lines(service, request_id)) == 1


@through_proxies
def test_responses_pass_unchanged(client: httpx.Client) -> None:
    error = client.post("/classify", json={"inputs": 3}, headers={"x": "a" * 30_000})
    large = client.post("/classify", json={"inputs": ["good " * 200] * 32})

    assert (error.status_code, error.json()["error_type"]) == (422, "invalid_value")
    assert large.status_code == 200
    assert len(large.json()) == 32
    assert large.headers["x-model"] == "tiny"


@through_proxies
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/%6detrics"),
        ("POST", "/models/tiny/unload"),
        ("POST", "/models/tiny/%75nload"),
        ("POST", "/models/tiny/reload"),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
def test_paths_that_affect_only_one_replica_are_refused(client: httpx.Client, method: str, path: str, kind: str) -> None:
    answer = client.request(method, path, headers={"content-type": kind})

    assert (answer.status_code, answer.json()["error_type"]) == (404, "not_found")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@through_proxies
def test_a_request_over_a_limit_is_refused(client: httpx.Client) -> None:
    """The limits equal the service's, so that it would refuse these requests too."""
    large = client.post("/classify", content=b" " * (2**21 + 1), headers={"x-request-id": "mine-3"})
    chunked = client.post("/classify", content=iter([b" " * 2**20] * 3))
    large_head = client.get("/classify", headers={"x": "a" * 40_000})
    trace = client.request("TRACE", "/classify")

    assert large.status_code == 413
    assert large.json()["error_type"] == "too_large"
    assert large.headers["x-request-id"] == "mine-3"
    assert (chunked.status_code, chunked.json()["error_type"]) == (413, "too_large")
    assert (large_head.status_code, large_head.json()["error_type"]) == (431, "head_too_large")
    assert (trace.status_code, trace.json()["error_type"]) == (405, "method_not_allowed")


@through_proxies
@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize(
    ("path", "header", "kinds"),
    [
        ("/x%zz", "", {"malformed", "not_found"}),
        ("/x%00", "", {"malformed"}),
        ("/" + 40_000 * "x", "", {"head_too_large"}),
        ("/classify", 40_000 * "x", {"head_too_large"}),
    ],
    ids=["percent", "null", "long path", "long header"],
)
def test_a_request_without_a_valid_head_is_refused(service: Balanced, content_type: str, path: str, header: str, kinds: set[str]) -> None:
    request = f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: {content_type}\r\nx: {header}\r\ncontent-length: 2\r\n\r\n{{}}"
    assert answer_to(service, request.encode())[1]["error_type"] in kinds


@through_proxies
def test_an_encoded_body_is_refused(service: Balanced) -> None:
    """HAProxy's parser answers with a page of its own."""
    status, error = answer_to(service, head(b"transfer-encoding: gzip, chunked") + LAST_CHUNK)
    if isinstance(service.proxy, HAProxy):
        assert status == 422
    else:
        assert (status, error["error_type"]) == (415, "content_encoding")


@through_proxies
def test_an_address_has_a_limit_of_streams(service: Balanced, client: httpx.Client) -> None:
    line = {"content": json.dumps(BODY), "headers": {"content-type": "application/x-ndjson"}}
    with ExitStack() as stack:
        for _ in range(2 * int(value(HAPROXY, "sc1_conn_cur gt"))):  # a request of `refused` can come before some of them
            stack.enter_context(connect(service)).sendall(head(LINES, CHUNKED) + chunk(b"{"))

        def is_refused() -> bool:
            answer = client.post("/classify", **line)
            return (answer.status_code, answer.headers.get("retry-after")) == (429, "1")

        wait_until(is_refused)
        assert client.post("/classify", json=BODY).status_code == 200
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.3"), base_url=service.proxy.url, timeout=60) as other:
            assert other.post("/classify", **line).status_code == 200
    wait_until(lambda: client.post("/classify", **line).status_code == 200)


@through_proxies
def test_an_address_has_a_limit_of_requests(service: Balanced, tmp_path: Path) -> None:
    """A limit of 20 requests per second in place of 1,000. Requests of another address are answered."""
    start = PROXIES["haproxy" if isinstance(service.proxy, HAProxy) else "nginx"]
    with start([each.port for each in service.replicas], tmp_path, 20) as proxy:
        with httpx.Client(base_url=proxy.url, trust_env=False) as client:
            answers = [client.post("/classify", json=BODY) for _ in range(100)]
        with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.3"), base_url=proxy.url) as other:
            assert other.post("/classify", json=BODY).status_code == 200

    assert {answer.status_code for answer in answers} == {200, 429}
    assert {(one.headers["retry-after"], one.json()["error_type"]) for one in answers if one.status_code == 429} == {("1", "overloaded")}


@through_proxies
def test_a_stream_answers_each_line_before_the_next_line_is_sent(service: Balanced) -> None:
    line = chunk(json.dumps(BODY).encode() + b"\n")
    with connect(service) as connection, connection.makefile("rb") as answers:
        connection.sendall(head(LINES, CHUNKED) + line)
        assert any(b'"label"' in answer for answer in answers)  # the request body has not ended yet
        connection.sendall(line + LAST_CHUNK)
        assert any(b'"label"' in answer for answer in answers)


@through_proxies
def test_only_haproxy_forwards_a_stream_longer_than_a_body(service: Balanced, client: httpx.Client) -> None:
    lines = 400 * (json.dumps(BODY | {"options": {"use_cache": 8000 * "x"}}) + "\n")
    answer = client.post("/classify", content=lines, headers={"content-type": "application/x-ndjson"})

    if isinstance(service.proxy, HAProxy):
        assert (answer.status_code, answer.text.count('"label"') // answer.text.splitlines()[0].count('"label"')) == (200, 400)
    else:
        assert (answer.status_code, answer.json()["error_type"]) == (413, "too_large")


@through_proxies
def test_a_disconnect_drops_the_queued_work(service: Balanced) -> None:
    body = json.dumps({"inputs": ["good"] * 100}).encode()
    with connect(service) as connection:
        connection.sendall(post(b"x-request-id: gone-1", body=body, path=b"/models/slow"))
        wait_until(lambda: max(map(queue_items, service.replicas)) > 50)
    assert any(" 499 " in line for line in log_lines(service, "gone-1"))
    wait_until(lambda: max(map(queue_items, service.replicas)) == 0)


@through_proxies
@pytest.mark.full_grid
@pytest.mark.parametrize("proxy", PROXIES)
def test_errors_without_replicas_have_the_usual_format(tmp_path: Path, models: Path, proxy: str) -> None:
    with balanced(models, tmp_path, count=1, proxy=proxy) as service, httpx.Client(base_url=service.proxy.url, trust_env=False) as client:
        service.replicas[0].stop()
        answer = client.post("/classify", json=BODY, headers={"x-request-id": "mine-2"})
        red = client.get("/health/ready")

    assert answer.status_code == 503
    assert answer.json()["error_type"] == "unavailable"
    assert answer.json()["request_id"] == "mine-2"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"] == "mine-2"
    assert red.status_code == 503
