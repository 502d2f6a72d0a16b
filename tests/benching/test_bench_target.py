"""Load test targets: their URLs, their requests, and the metrics of their service."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from bertserve.bench.target import Body, Target, parse_url, probe_target
from bertserve.service.errors import StartError
from support.listening import OK, always, http_server, ok, response


@pytest.mark.parametrize(
    ("model", "mask"),
    [
        ({"task": "fill-mask", "mask_token": "<mask>"}, "<mask>"),
        (None, "[MASK]"),  # a different server
    ],
)
def test_texts_contain_the_mask_token_of_the_target_model(model: dict[str, str] | None, mask: str) -> None:
    async def info_then_ok(i: int) -> bytes:
        return OK if i else response(json.dumps(model).encode(), b"200 OK" if model else b"404 Not Found")

    with http_server(info_then_ok) as server:
        target = probe_target(f"http://127.0.0.1:{server.port}/fill-mask=mask", {}, texts=1, seed=0)

    assert target.model is None  # a report needs also the model's name
    assert [json.loads(body)["inputs"].count(mask) for body in (server.bodies[1], target.bodies[0].content)] == [1, 1]


def test_the_name_of_a_file_of_bodies_can_have_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "a=1.jsonl").write_text('"a text"\n')
    with http_server(ok) as server:
        target = probe_target(f"http://127.0.0.1:{server.port}/classify={tmp_path}/a=1.jsonl", {}, texts=1, seed=0)

    assert [json.loads(body.content) for body in target.bodies] == [{"inputs": "a text"}]


@pytest.mark.parametrize(
    ("status", "refused"),
    [
        (b"302 Found", True),
        (b"422 Unprocessable Content", True),
        (b"429 Too Many Requests", False),
        (b"503 Service Unavailable", False),
    ],
)
def test_a_target_that_refuses_the_first_request_is_an_error_unless_it_is_busy(status: bytes, refused: bool) -> None:
    expected = pytest.raises(StartError, match=status[:3].decode()) if refused else nullcontext()
    with http_server(always(response(b"{}", status))) as server, expected:
        probe_target(f"http://127.0.0.1:{server.port}/classify", {}, texts=1, seed=0)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a/b", "http://", "http://a:b/", "http://a b/", "http://[::1/x", "http://a:b@c/", "http://a/#b"]
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(StartError, match=r"http://127\.0\.0\.1:8000/classify"):
        parse_url(url)


def test_a_request_is_complete_http() -> None:
    address = parse_url("http://[::1]:8000/classify?a=b")
    target = Target(address, [Body(b"{}", 1)], {"x-a": "1"})
    expected = b"POST /classify?a=b HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\nx-a: 1\r\nContent-Length: 2\r\n\r\n{}"

    assert target.requests == [expected]
