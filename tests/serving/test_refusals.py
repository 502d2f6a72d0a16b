"""Refusals of /classify: sizes, encodings, deadlines, a full queue, a stopping service and a failing engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import blocked, call, classify, faked, play, queued, rejected
from bertserve.service.api.formats import hugging_face
from fakes import FakeEngine

SECRET = "hunter2secret"


async def chunks(count: int) -> AsyncIterator[bytes]:
    """Yields a body in pieces, so that its length is not declared."""
    for _ in range(count):
        yield b" " * 512


def sample(page: str, start: str) -> float:
    """Returns the value of the metrics line that starts with `start`."""
    [line] = [line for line in page.splitlines() if line.startswith(start)]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("body", [b" " * 2048, pytest.param(chunks(4), id="undeclared")])
def test_a_large_body_is_refused(models: Path, body: Any) -> None:
    """A body over the limit is 413, with or without a declared length."""
    response = call(models, "POST", "/classify", content=body, settings={"max_body_bytes": 1024, "max_chars": 1000})
    assert " 1024 " in rejected(response, 413, "too_large")


@pytest.mark.parametrize(
    "given", ["0", "-1", "1.5", "soon", "", "1e3", "120001", "9" * 30, "000000000001" + "9" * 8, "000000000001" + "9" * 5000]
)
def test_an_invalid_deadline_is_refused(models: Path, given: str) -> None:
    """`x-request-timeout-ms` must be a whole number from 1 to the maximum; otherwise the status is 422."""
    message = rejected(classify(models, {"inputs": "good"}, headers={"x-request-timeout-ms": given}), 422, "invalid_value")
    assert "`x-request-timeout-ms`" in message and "1 to 120000." in message


def test_a_request_that_waits_too_long_expires(models: Path) -> None:
    """A request that has not started by its deadline gets 504 and is counted, even while all inference threads are busy."""
    engine = FakeEngine()

    async def check(client: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        response = await client.post("/classify", json={"inputs": "bad"}, headers={"x-request-timeout-ms": "50"})
        return response, (await client.get("/metrics")).text

    response, page = blocked(faked(models, engine), engine, check)
    rejected(response, 504, "expired")
    assert sample(page, "bertserve_expired_total{") == 1


def test_a_full_queue_refuses_at_once(models: Path) -> None:
    """The response is 429 with a `Retry-After` of whole seconds, and the refusal is counted by reason."""
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=64)

    async def check(client: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        waiting = asyncio.ensure_future(client.post("/classify", json={"inputs": ["bad"] * 17}))  # 51 tokens
        await queued(service, 17)
        response = await client.post("/classify", json={"inputs": ["bad"] * 12})
        engine.gate.set()
        assert (await waiting).status_code == 200
        return response, (await client.get("/metrics")).text

    response, page = blocked(service, engine, check)
    rejected(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) >= 1
    assert sample(page, 'bertserve_refused_total{model="tiny",reason="queue_full"') == 1


def test_a_stopping_service_refuses_requests_and_is_not_ready(models: Path) -> None:
    """After the stop began, requests and readiness checks get 503; the liveness check still gets 200."""
    service = faked(models, FakeEngine())

    async def check(client: httpx.AsyncClient) -> dict[str, httpx.Response]:
        await service.scheduler.stop(0)
        probes = ("/health", "/health/ready", "/classify/health", "/models/tiny/health", "/ping", "/health/live")
        answers = {path: await client.get(path) for path in probes}
        return answers | {"post": await client.post("/classify", json={"inputs": "good"})}

    answers = play(service, check)
    assert answers.pop("/health/live").status_code == 200
    for response in answers.values():
        rejected(response, 503, "unavailable")


@pytest.mark.parametrize(("inputs", "name"), [("poor", "inputs"), (["good", "bad", "poor"], "inputs[2]")])
def test_an_engine_failure_names_its_input(models: Path, inputs: Any, name: str) -> None:
    service = faked(models, FakeEngine(guilty_token=tiny.VOCABULARY.index("poor")))
    message = rejected(play(service, lambda client: client.post("/classify", json={"inputs": inputs})), 500, "engine")
    assert message.startswith(f"{name}: ") and message.endswith(" GuiltyToken.")


def test_an_unexpected_error_reveals_nothing(models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The response is 500 `internal` without the error's message. The log has its type, its location and the request id."""

    def fail(*_: object) -> None:
        raise RuntimeError(f"while reading {SECRET}")

    monkeypatch.setattr(hugging_face, "read_as", fail)
    response = classify(models, {"inputs": SECRET}, headers={"x-request-id": "r-1"})
    assert SECRET not in rejected(response, 500, "internal")
    assert SECRET not in caplog.text
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "RuntimeError r-1 POST /classify: fail (test_refusals.py:" in record.getMessage()
