"""The targets and the tokens of a request have limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny
from application import Send, faked, play, refused, rejected
from bertserve.service.models.build import build
from bertserve.service.settings import Settings
from bertserve.service.tasks import fill_mask
from bertserve.service.text.tokenizer import Tokenizer
from fakes import FakeEngine

# Targets


def test_many_targets_do_not_delay_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the maximum number of targets is tokenized, health probes and another short request are answered."""
    tiny.bundle(tmp_path, task="fill-mask")
    looked_up, go_on = threading.Event(), threading.Event()
    tokenize = Tokenizer.tokenize

    def slow(self: Tokenizer, texts: Sequence[str]) -> Any:
        if len(texts) > 1:
            looked_up.set()
            assert go_on.wait(10)
        return tokenize(self, texts)

    monkeypatch.setattr(Tokenizer, "tokenize", slow)
    many = {"inputs": "a [MASK] film", "parameters": {"targets": [f"x{number:03}{'x' * 12}" for number in range(fill_mask.MAX_TARGETS)]}}

    async def check(client: httpx.AsyncClient) -> list[int]:
        busy = asyncio.create_task(client.post("/fill-mask", json=many))
        assert await asyncio.to_thread(looked_up.wait, 10)
        others = [await client.get("/health/live"), await client.post("/fill-mask", json={"inputs": "a [MASK] film"})]
        assert not busy.done()
        go_on.set()
        return [answer.status_code for answer in (*others, await busy)]

    assert [200, 200, 200] == play(build(Settings(models=tmp_path, threads=2)), check)


def test_all_targets_together_have_a_limit_of_characters(api: Send) -> None:
    assert "16384 characters" in refused(api, "/fill-mask", "a [MASK]", targets=["x" * 256] * 65)


# Tokens


def test_a_request_with_more_tokens_than_the_queue_is_refused_before_it_runs(models: Path) -> None:
    engine = FakeEngine()
    service = faked(models, engine, max_queue_tokens=256)
    message = rejected(
        play(service, lambda client: client.post("/classify", json={"inputs": ["?" * 64] * 12})),
        413,
        "too_large",
    )

    assert "queue holds 256" in message
    assert [] == engine.batches
    assert 0 == service.scheduler.queued[1]
