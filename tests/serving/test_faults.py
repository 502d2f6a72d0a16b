"""Graph faults in a real service with a faulty session: the request that causes the fault gets an error, its batch-mates do not."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import play, queued, rejected
from bertserve.service.engine import onnx_engine
from bertserve.service.engine.sessions import open_session
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from fakes import FaultySession
from served_socket import until

GUILTY = "poor"
INNOCENT = ("good", "bad", "fine", "dull", "great")
FAULTS = {
    "raise": "RuntimeError",
    "panic": "SystemExit",
    "memory": "1 x 3 tokens",
    "allocation": "1 x 3 tokens",
    "bad_alloc": "1 x 3 tokens",
    "nan": "`logits` is not finite",
    "short": "`logits` has 0 rows",
}


@pytest.mark.parametrize(("fault", "value"), FAULTS.items())
def test_only_the_request_that_causes_a_graph_fault_fails(models: Path, monkeypatch: pytest.MonkeyPatch, fault: str, value: str) -> None:
    """Its batch-mates get their usual scores, the service stays ready, and the inference thread continues."""
    sessions: list[FaultySession] = []

    def opened(*arguments: Any, **options: Any) -> FaultySession:
        sessions.append(FaultySession(open_session(*arguments, **options), tiny.VOCABULARY.index(GUILTY), fault))
        return sessions[-1]

    monkeypatch.setattr(onnx_engine, "open_session", opened)
    service = build(Settings(models=models, threads=1))
    [session] = sessions

    async def check(client: httpx.AsyncClient) -> None:
        def ask(text: str) -> asyncio.Task[httpx.Response]:
            return asyncio.ensure_future(client.post("/classify", json={"inputs": text}))

        before = [(await ask(text)).json() for text in INNOCENT]
        session.gate.clear()
        blocker, runs = ask("book"), len(session.batches)
        await until(lambda: len(session.batches) > runs)
        together = [ask(text) for text in (*INNOCENT, GUILTY)]
        await queued(service, len(together))
        session.gate.set()
        *innocent, guilty = await asyncio.gather(*together)
        assert value in rejected(guilty, 500, "engine")
        assert [200] * len(INNOCENT) == [answer.status_code for answer in innocent]
        for expected, answer in zip(before, innocent, strict=True):
            assert [one["label"] for one in expected[0]] == [one["label"] for one in answer.json()[0]]
            assert [one["score"] for one in answer.json()[0]] == pytest.approx([one["score"] for one in expected[0]], abs=1e-6)
        assert max(session.batches) > 1, "they shared no batch"
        assert 200 == (await blocker).status_code
        assert 200 == (await ask("good")).status_code
        assert 200 == (await client.get("/health/ready")).status_code

    play(service, check)
