"""The number of open requests is limited, and a body has a deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from application import call, faked, play, posting, rejected
from bertserve.service.api.endpoint import Endpoint
from fakes import FakeEngine
from served_socket import until


def test_more_open_requests_than_allowed_get_503_and_probes_are_answered(models: Path) -> None:
    engine = FakeEngine()
    service = faked(models, engine, max_concurrent=2)

    async def check(client: httpx.AsyncClient) -> None:
        engine.gate.clear()
        running = [asyncio.ensure_future(client.post("/classify", json={"inputs": "good"})) for _ in range(2)]
        await asyncio.to_thread(engine.entered.acquire, timeout=20)
        refused = await client.post("/classify", json={"inputs": "good"})
        rejected(refused, 503, "unavailable")
        assert "1" == refused.headers["retry-after"]
        assert 200 == (await client.get("/health/ready")).status_code
        engine.gate.set()
        assert [200, 200] == [answer.status_code for answer in await asyncio.gather(*running)]
        assert 200 == (await client.post("/classify", json={"inputs": "good"})).status_code

    play(service, check)


async def test_a_body_that_is_not_complete_in_time_gets_408(models: Path) -> None:
    """The connection closes, because the rest of the body may never come."""
    service = faked(models, FakeEngine(), body_timeout_s=0.05)
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    sent: list[Any] = []

    async def receive() -> Any:
        if (part := next(parts, None)) is not None:
            return part
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    await Endpoint(service)(posting(), receive, send)
    await until(lambda: len(sent) == 2)
    assert 408 == sent[0]["status"]
    assert (b"connection", b"close") in sent[0]["headers"]


def test_two_content_types_are_refused(models: Path) -> None:
    """A proxy that limits streams may read the other one."""
    headers = [("content-type", "application/json"), ("content-type", "application/x-ndjson")]
    answer = call(models, "POST", "/classify", content=b'{"inputs": "good"}', headers=headers)
    rejected(answer, 400, "malformed")
