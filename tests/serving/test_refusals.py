"""Refusals: sizes, encodings, deadlines, a full queue, too many open requests, a stopping service and a failing engine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support import metric, tiny, until
from support.app_client import busy_client, call, call_once, error_of, fake_service, post, sent_for, serving, state_of, until_queued
from support.fakes import FakeEngine

SECRET = "hunter2secret"
HALF = {"type": "http.request", "body": b"{", "more_body": True}


async def chunks(count: int) -> AsyncIterator[bytes]:
    """Yields a body in pieces, so that its length is not declared."""
    for _ in range(count):
        yield b" " * 512


@pytest.mark.parametrize("body", [b" " * 2048, pytest.param(chunks(4), id="undeclared")])
def test_a_large_body_is_refused(models: Path, body: Any) -> None:
    response = call(models, "POST", "/classify", content=body, settings={"max_body_bytes": 1024, "max_chars": 1000})
    assert " 1024 " in error_of(response, 413, "too_large")


@pytest.mark.parametrize(
    "timeout", ["0", "-1", "1.5", "soon", "", "1e3", "120001", "9" * 30, "000000000001" + "9" * 8, "000000000001" + "9" * 5000]
)
def test_an_invalid_deadline_is_refused(models: Path, timeout: str) -> None:
    message = error_of(post(models, {"inputs": "good"}, headers={"x-request-timeout-ms": timeout}), 422, "invalid_value")
    assert "`x-request-timeout-ms`" in message
    assert "1 to 120000." in message


async def test_a_request_that_waits_too_long_expires(models: Path) -> None:
    engine = FakeEngine()
    async with busy_client(fake_service(models, engine), engine) as client:
        response = await client.post("/classify", json={"inputs": "bad"}, headers={"x-request-timeout-ms": "50"})
        page = (await client.get("/metrics")).text
    error_of(response, 504, "expired")
    assert metric(page, "expired_total") == 1


async def test_a_full_queue_refuses_at_once(models: Path) -> None:
    engine = FakeEngine()
    service = fake_service(models, engine, max_queue_tokens=64)
    async with busy_client(service, engine) as client:
        waiting = asyncio.ensure_future(client.post("/classify", json={"inputs": ["bad"] * 17}))  # 51 tokens
        await until_queued(service, 17)
        response = await client.post("/classify", json={"inputs": ["bad"] * 12})
        engine.gate.set()
        assert (await waiting).status_code == 200
        page = (await client.get("/metrics")).text
    error_of(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1
    assert metric(page, "refused_total", model="tiny", reason="queue_full") == 1


async def test_a_stopping_service_refuses_requests_and_is_not_ready(models: Path) -> None:
    service = fake_service(models, FakeEngine())
    async with serving(service) as client:
        await service.stop(0)
        probes = ("/health", "/health/ready", "/classify/health", "/models/tiny/health", "/ping", "/health/live")
        answers = {path: await client.get(path) for path in probes}
        answers |= {"post": await client.post("/classify", json={"inputs": "good"})}
    assert answers.pop("/health/live").status_code == 200
    for response in answers.values():
        error_of(response, 503, "unavailable")
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("inputs", "name"), [("poor", "inputs"), (["good", "bad", "poor"], "inputs[2]")])
def test_an_engine_failure_names_its_input(models: Path, inputs: Any, name: str) -> None:
    service = fake_service(models, FakeEngine(guilty_token=tiny.VOCABULARY.index("poor")))
    message = error_of(call_once(service, "POST", "/classify", json={"inputs": inputs}), 500, "engine")
    assert message.startswith(f"{name}: ")
    assert message.endswith(" GuiltyToken.")


def test_an_unexpected_error_reveals_nothing(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"while reading {SECRET}")

    service = state_of(models)
    service.registry.get("tiny").predict = fail
    headers = {"x-request-id": "r-1"}
    response = call_once(service, "POST", "/classify", json={"inputs": SECRET}, headers=headers)
    assert SECRET not in error_of(response, 500, "internal")
    assert SECRET not in caplog.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "RuntimeError r-1 POST /classify: fail (test_refusals.py:" in record.getMessage()


async def test_more_open_requests_than_allowed_get_503_and_probes_are_answered(models: Path) -> None:
    engine = FakeEngine()
    service = fake_service(models, engine, max_concurrent=2)
    async with serving(service) as client:
        engine.gate.clear()
        running = [asyncio.ensure_future(client.post("/classify", json={"inputs": "good"})) for _ in range(2)]
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        refusal = await client.post("/classify", json={"inputs": "good"})
        error_of(refusal, 503, "unavailable")
        assert refusal.headers["retry-after"] == "1"
        assert (await client.get("/health/ready")).status_code == 200
        engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await client.post("/classify", json={"inputs": "good"})).status_code == 200


async def test_a_client_that_disconnects_while_it_sends_is_counted_as_499(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An incomplete body is not an error of the service if its client has disconnected."""
    service = fake_service(models, FakeEngine())
    await sent_for(service, HALF, {"type": "http.disconnect"})
    assert metric(service.metrics.render().decode(), "requests_total", status="499") == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_body_that_is_not_complete_in_time_gets_408(models: Path) -> None:
    """The connection closes, because the rest of the body might never arrive."""
    service = fake_service(models, FakeEngine(), body_timeout_s=0.05)
    messages = await sent_for(service, HALF)
    await until(lambda: len(messages) == 2)
    assert messages[0]["status"] == 408
    assert (b"connection", b"close") in messages[0]["headers"]
