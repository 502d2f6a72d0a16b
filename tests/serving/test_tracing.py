"""Tracing: the spans of real requests as an OTLP collector receives them, the caller's trace, and a missing collector."""

import asyncio
import gzip
import http.server
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bertserve.service.errors import SettingsError
from bertserve.service.process import check_requirements
from bertserve.service.settings import Settings
from bertserve.service.tracing import Tracer
from support import tiny
from support.app_client import busy_client, call_once, fake_service, serving, state_of, until_queued
from support.fakes import FakeEngine, ManualClock
from support.replica import running

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{CALLER}-{PARENT}-01"


class Collector(http.server.ThreadingHTTPServer):
    """Receives spans on loopback like an OpenTelemetry collector."""

    def __init__(self) -> None:
        self.exports: list[ExportTraceServiceRequest] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        scopes = [scope for export in self.exports for resource in export.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def one(self, name: str) -> Span:
        [span] = [span for span in self.spans if span.name == name]
        return span

    def resources(self) -> list[dict[str, Any]]:
        return [values(resource.resource) for export in self.exports for resource in export.resource_spans]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        self.server.exports.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@pytest.fixture(name="collector")
def collector_on_loopback() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def values(carrier: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in carrier.attributes}


@contextmanager
def tracing(collector: Collector) -> Iterator[Tracer]:
    """Yields a tracer; after the block, the collector has all its spans."""
    tracer = Tracer(collector.address)
    yield tracer
    tracer.close()


@asynccontextmanager
async def traced_client(models: Path, collector: Collector, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a service; after the block, the collector has all its spans."""
    with tracing(collector) as tracer:
        async with serving(replace(state_of(models, **settings), tracer=tracer)) as client:
            yield client


async def classify(models: Path, collector: Collector, body: Any, **headers: str) -> httpx.Response:
    """Returns the response to a classification; the collector then has all its spans."""
    async with traced_client(models, collector) as client:
        return await client.post("/classify", json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def test_a_request_is_a_span_with_a_child_per_stage(models: Path, collector: Collector) -> None:
    async with traced_client(models, collector) as client:
        await client.post("http://test:8000/classify", json={"inputs": "good"}, headers={"x-request-id": "mine-1"})
    server = collector.one("POST /classify")
    children = sorted(
        (span for span in collector.spans if span.parent_span_id == server.span_id), key=lambda span: span.start_time_unix_nano
    )
    assert [span.name for span in children] == ["tokenize", "run", "decode"]
    assert (server.kind, server.parent_span_id) == (Span.SPAN_KIND_SERVER, b"")
    assert {span.trace_id for span in children} == {server.trace_id}
    assert all(server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in children)
    assert max(span.end_time_unix_nano for span in children) <= server.end_time_unix_nano
    attributes = values(server)
    assert 0 <= attributes.pop("bertserve.queue_ms") <= (server.end_time_unix_nano - server.start_time_unix_nano) / 1e6
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/classify",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/classify",
        "network.protocol.version": "1.1",
        "server.address": "test",
        "server.port": 8000,
        "client.address": "127.0.0.1",
        "bertserve.request_id": "mine-1",
        "bertserve.task": "text-classification",
        "bertserve.model": "tiny",
    }
    assert server.status.code == Status.STATUS_CODE_UNSET


async def test_each_of_the_first_lines_of_a_stream_is_a_span_with_its_stages(models: Path, collector: Collector) -> None:
    lines = b'{"inputs": "good"}\n{"inputs": 1}\n' * 65
    async with traced_client(models, collector) as client:
        await client.post("/classify", content=lines, headers={"content-type": "application/x-ndjson"})
    spans = {span.span_id: span for span in collector.spans if span.name == "line"}
    assert {span.parent_span_id for span in spans.values()} == {collector.one("POST /classify").span_id}
    statuses = [values(span)["bertserve.line.status"] for span in spans.values()]
    assert len(statuses) == 128
    assert statuses.count("200") == 64
    for stage in ("tokenize", "run", "decode"):
        assert {span.parent_span_id for span in collector.spans if span.name == stage} < spans.keys()
    assert {link.span_id for span in collector.spans if span.name == "batch tiny" for link in span.links} <= spans.keys()


async def test_a_batch_is_a_span_with_links_to_its_requests(models: Path, collector: Collector) -> None:
    engine = FakeEngine()
    service = fake_service(models, engine)
    service.scheduler.clock = ManualClock()

    with tracing(collector) as tracer:
        async with busy_client(replace(service, tracer=tracer), engine) as client:
            both = [asyncio.ensure_future(client.post("/classify", json={"inputs": text})) for text in ("good", "bad film")]
            await until_queued(service, 2)
            engine.gate.set()
            await asyncio.gather(*both)
    batches = sorted((span for span in collector.spans if span.name == "batch tiny"), key=lambda span: span.start_time_unix_nano)
    together = batches[1]
    requests = {span.span_id: span.trace_id for span in collector.spans if span.name == "POST /classify"}
    links = {link.span_id: link.trace_id for link in together.links}
    runs = [span for span in collector.spans if span.name == "run" and [link.span_id for link in span.links] == [together.span_id]]
    assert [len(batch.links) for batch in batches] == [1, 2]
    assert links.items() <= requests.items()
    assert {run.parent_span_id for run in runs} == set(links)
    assert together.parent_span_id == b""
    assert together.trace_id not in requests.values()
    assert values(together) == {
        "bertserve.model": "tiny",
        "bertserve.model.version": service.registry.get("tiny").bundle.version,
        "bertserve.task": "text-classification",
        "bertserve.precision": "fp32",
        "bertserve.provider": "cpu",
        "bertserve.batch.rows": 2,
        "bertserve.batch.tokens": 7,
        "bertserve.batch.padded_tokens": 1,
        "bertserve.batch.multi_threaded": False,
    }


async def test_the_trace_of_the_caller_is_continued(models: Path, collector: Collector) -> None:
    answer = await classify(models, collector, {"inputs": "good"}, traceparent=TRACEPARENT, tracestate="vendor=1", x_request_id="mine-2")
    server = collector.one("POST /classify")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (CALLER, PARENT)
    assert server.trace_state == "vendor=1"
    assert f'traceparent;desc="00-{CALLER}-{server.span_id.hex()}-01"' in answer.headers["server-timing"]
    assert answer.headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize("header", ["", f"{TRACEPARENT},{TRACEPARENT}", "00-" + "ä" * 32 + f"-{PARENT}-01"])
def test_a_malformed_traceparent_starts_a_new_trace(collector: Collector, header: str) -> None:
    with tracing(collector) as tracer:
        trace = tracer.start_request_span([(b"traceparent", header.encode("latin-1"))], 1.0)
        trace.end(2.0, name="POST", attributes={}, failed=False)
    assert (trace.trace_id, trace.is_recording) != (CALLER, True)
    assert (collector.one("POST").trace_id.hex(), collector.one("POST").parent_span_id) == (trace.trace_id, b"")


@pytest.mark.parametrize(
    "headers", [{"baggage": "sesame" * 2000}, {"baggage": "sesame;sesame,sesame"}, {"traceparent": TRACEPARENT, "tracestate": "Sesame!"}]
)
def test_headers_of_a_caller_are_not_logged(collector: Collector, caplog: pytest.LogCaptureFixture, headers: dict[str, str]) -> None:
    """By default, OpenTelemetry's propagators log each header member that is too long or invalid."""
    with tracing(collector) as tracer:
        trace = tracer.start_request_span([(name.encode(), value.encode("latin-1")) for name, value in headers.items()], 1.0)
        trace.end(2.0, name="POST", attributes={}, failed=False)
    assert [record.name for record in caplog.records if record.name.startswith("opentelemetry")] == []
    assert "traceparent" not in headers or trace.trace_id == CALLER


async def test_a_trace_that_the_caller_does_not_sample_is_not_recorded(models: Path, collector: Collector) -> None:
    """No span is sent, but the ids of the trace are passed on."""
    answer = await classify(models, collector, {"inputs": "good"}, traceparent=f"00-{CALLER}-{PARENT}-00")
    assert collector.spans == []
    assert f'traceparent;desc="00-{CALLER}-' in answer.headers["server-timing"]
    assert answer.headers["server-timing"].endswith('-00"')


async def test_no_span_contains_text_of_a_caller(models: Path, collector: Collector) -> None:
    async with traced_client(models, collector) as client:
        headers = {"user-agent": "sesame", "authorization": "Bearer sesame", "referer": "http://sesame/"}
        for path in ("/classify", "/classify?sesame=1", "/sesame", "/models/sesame", "/v2/models/tiny/versions/sesame/infer"):
            await client.post(path, json={"inputs": "sesame", "sesame": 1}, headers=headers)
    assert len([span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]) >= 5
    assert [span for span in collector.spans if b"sesame" in span.SerializeToString().lower()] == []


def test_a_failed_run_is_an_error_of_its_batch_and_its_request(models: Path, collector: Collector) -> None:
    """The request's span has the status, and the batch's span has the type of the error. Neither has its message."""
    engine = FakeEngine(guilty_token=tiny.VOCABULARY.index("bad"))
    with tracing(collector) as tracer:
        service = replace(fake_service(models, engine), tracer=tracer)
        assert call_once(service, "POST", "/classify", json={"inputs": "bad"}).status_code == 500
    batch, server = collector.one("batch tiny"), collector.one("POST /classify")
    assert values(batch)["error.type"] == "EngineError"
    assert batch.status.code == Status.STATUS_CODE_ERROR
    assert values(server)["error.type"] == "500"
    assert server.status.code == Status.STATUS_CODE_ERROR
    assert "GuiltyToken" not in str(collector.exports)


async def test_probes_and_scrapes_are_not_traced(models: Path, collector: Collector) -> None:
    async with traced_client(models, collector) as client:
        for path in ("/health/live", "/health/ready", "/metrics", "/ping", "/models/tiny/info"):
            assert (await client.get(path)).status_code == 200
    assert [span.name for span in collector.spans] == ["GET /models/{name}/info"]


async def test_log_lines_have_the_ids_of_the_trace(models: Path, collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    """The span of a request with a client error has its status, but is not an error."""
    caplog.set_level(logging.INFO)
    async with traced_client(models, collector, access_log=True) as client:
        await client.post("/classify", json={"inputs": 1}, headers={"traceparent": TRACEPARENT})
    lines = [record.__dict__ for record in caplog.records if record.name in ("bertserve.access", "bertserve.errors")]
    span = collector.one("POST /classify")
    assert values(span)["http.response.status_code"] == 422
    assert "error.type" not in values(span)
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert [(line.get("trace_id"), line.get("span_id")) for line in lines] == [(CALLER, span.span_id.hex())] * 2


async def test_an_unreachable_collector_has_no_effect(
    models: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracer = Tracer("http://127.0.0.1:1/v1/traces")
    async with serving(replace(state_of(models), tracer=tracer)) as client:
        assert [(await client.post("/classify", json={"inputs": "sesame"})).status_code for _ in range(3)] == [200] * 3
    tracer.close()
    assert "sesame" not in caplog.text
    assert any(record.name.startswith("opentelemetry.exporter") for record in caplog.records)
    # the exporter retries with `random.uniform`; hypothesis would attribute this to a strategy of the next test
    for thread in threading.enumerate():
        if thread.name == "last-spans":
            thread.join(20)


def test_a_missing_extra_is_named_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bertserve.service.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"--otlp-endpoint .*pip install '.*\[otel\]'"):
        check_requirements(Settings(otlp_endpoint="http://localhost:4318"))


@pytest.mark.full_grid
@pytest.mark.serial
def test_each_worker_sends_its_own_spans(models: Path, tmp_path: Path, collector: Collector) -> None:
    flags = ("--workers", "2", "--threads", "2", "--otlp-endpoint", collector.address, "--access-log", "--log-format", "json")
    with running(models, tmp_path / "log", *flags) as server:
        for _ in range(8):
            with (
                httpx.Client(base_url=server.url, timeout=30, trust_env=False) as one,
                httpx.Client(base_url=server.url, trust_env=False) as other,
            ):
                for client in (one, other):
                    assert client.post("/classify", json={"inputs": "good"}).status_code == 200
    assert len({resource["service.instance.id"] for resource in collector.resources()}) == 2
    trace_ids = {span.trace_id.hex() for span in collector.spans if span.name == "POST /classify"}
    logged_ids = {line["trace_id"] for line in map(json.loads, server.log.read_text().splitlines()) if "trace_id" in line}
    assert len(trace_ids) == 16
    assert logged_ids == trace_ids
