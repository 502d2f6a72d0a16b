"""Load test targets: their URLs, their requests, and the metrics of their service."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bertserve.bench import BenchError, bodies
from bertserve.bench.target import build_target, parse_url, probe_target


@pytest.mark.parametrize(
    ("model", "mask"),
    [
        ({"task": "fill-mask", "mask_token": "<mask>"}, "<mask>"),
        ({"task": "fill-mask"}, "[MASK]"),  # a service of an earlier version
        (None, "[MASK]"),  # a different server
    ],
)
def test_texts_contain_the_mask_token_of_the_target_model(model: dict[str, str] | None, mask: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if model and self.path == "/fill-mask/info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(model).encode())

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        target, _ = probe_target(f"http://127.0.0.1:{server.server_port}/fill-mask=mask", {}, texts=1, seed=0)
        server.shutdown()

    assert [1] == [text.count(mask) for text in asked]
    assert {1} == {json.loads(body.content)["inputs"].count(mask) for body in target.bodies}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/b", "http://", "http://a:b/", "http://a b/", "http://[::1/x"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:8000/classify"):
        parse_url(url)


def test_a_request_is_complete_http() -> None:
    address = parse_url("http://[::1]:8000/classify?a=b")
    made = build_target(address, [bodies.Body(b"{}", 1)], {"x-a": "1"})
    expected = b"POST /classify?a=b HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\nx-a: 1\r\nContent-Length: 2\r\n\r\n{}"

    assert [expected] == made.requests
