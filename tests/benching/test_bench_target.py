"""Load test targets: their URLs, their requests, and the metrics of their service."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bertserve.bench import bodies
from bertserve.bench.errors import BenchError
from bertserve.bench.target import BatchStats, batch_stats, build_target, parse_metrics, parse_url, probe_target, read_metrics
from listening import listening


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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target, _ = probe_target(f"http://127.0.0.1:{server.server_port}/fill-mask=mask", {}, texts=1, seed=0)
        server.shutdown()

    assert [1] == [text.count(mask) for text in asked]
    assert {1} == {json.loads(body.content)["inputs"].count(mask) for body in target.bodies}


def test_batch_statistics_are_differences_of_metrics() -> None:
    name = "bertserve_batch_rows"
    before = {(f"{name}_count", "m", ""): 10.0, (f"{name}_sum", "m", ""): 10.0, (f"{name}_bucket", "m", "1.0"): 10.0}
    before |= {(f"{name}_bucket", "m", bound): 10.0 for bound in ("2.0", "4.0", "+Inf")}
    after = {
        (f"{name}_count", "m", ""): 14.0,
        (f"{name}_sum", "m", ""): 17.0,
        (f"{name}_bucket", "m", "1.0"): 12.0,
        (f"{name}_bucket", "m", "2.0"): 13.0,
        (f"{name}_bucket", "m", "4.0"): 14.0,
        (f"{name}_bucket", "m", "+Inf"): 14.0,
        ("bertserve_tokens_total", "m", "real"): 90.0,
        ("bertserve_tokens_total", "m", "padded"): 10.0,
    }

    found = batch_stats(before, after, "m")

    assert BatchStats(runs=4, mean_rows=1.75, rows={"1": 2, "2": 1, "4": 1}, real_tokens=90, padding_share=0.1) == found
    assert None is batch_stats(before, after, "another")


def test_metrics_are_parsed_from_the_prometheus_format() -> None:
    """Batch and token series are kept per model and summed over tasks; other series are ignored."""
    page = """# HELP bertserve_batch_rows Rows of a run.
# TYPE bertserve_batch_rows histogram
bertserve_batch_rows_bucket{le="1.0",model="m",task="a"} 2.0
bertserve_batch_rows_bucket{le="1.0",model="m",task="b"} 3.0
bertserve_batch_rows_bucket{le="+Inf",model="odd \\" } name",task="a"} 7.0
bertserve_batch_rows_count{model="m",task="a"} 2.0
bertserve_batch_rows_sum{model="m",task="a"} 4.0
# HELP bertserve_tokens_total Tokens.
# TYPE bertserve_tokens_total counter
bertserve_tokens_total{kind="real",model="m"} 1e+06
# HELP bertserve_queue_seconds Wait.
# TYPE bertserve_queue_seconds summary
bertserve_queue_seconds_count{model="m"} 5.0
"""
    expected = {
        ("bertserve_batch_rows_bucket", "m", "1.0"): 5.0,
        ("bertserve_batch_rows_bucket", 'odd " } name', "+Inf"): 7.0,
        ("bertserve_batch_rows_count", "m", ""): 2.0,
        ("bertserve_batch_rows_sum", "m", ""): 4.0,
        ("bertserve_tokens_total", "m", "real"): 1e6,
    }

    assert expected == parse_metrics(page)


@pytest.mark.parametrize("answer", [b"200 OK", b"404 Not Found"])
def test_a_missing_or_invalid_metrics_page_gives_no_metrics(answer: bytes) -> None:
    async def page(_: int) -> bytes:
        return b"HTTP/1.1 %s\r\ncontent-length: 9\r\n\r\n{nonsense" % answer

    with listening(page) as server:
        assert {} == read_metrics(parse_url(f"http://127.0.0.1:{server.port}/classify"), {})
    assert {} == read_metrics(parse_url(f"http://127.0.0.1:{server.port}/classify"), {})


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/b", "http://", "http://a:b/", "http://a b/", "http://[::1/x"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:8000/classify"):
        parse_url(url)


def test_a_request_is_complete_http() -> None:
    address = parse_url("http://[::1]:8000/classify?a=b")
    made = build_target(address, "m", [bodies.Body(b"{}", 1)], {"x-a": "1"})
    expected = b"POST /classify?a=b HTTP/1.1\r\nHost: [::1]:8000\r\nContent-Type: application/json\r\nx-a: 1\r\nContent-Length: 2\r\n\r\n{}"

    assert [expected] == made.requests
