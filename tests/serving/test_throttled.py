"""What is costly and needs no key: the page of metrics and the statistics of models are made at most once per second."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from application import play
from bertserve.service.http import throttled
from bertserve.service.http.throttled import Throttled
from bertserve.service.metrics import Metrics
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings


async def test_calls_share_runs_that_start_after_them() -> None:
    """Of many calls at once and of calls during a run; no caller gets a result from before its call."""
    runs = iter(range(10))
    costly = Throttled(lambda: next(runs))
    assert [0] * 5 == await asyncio.gather(*(costly() for _ in range(5)))
    leaving = asyncio.create_task(costly())
    staying = asyncio.create_task(costly())
    await asyncio.sleep(0)
    leaving.cancel()
    assert 1 == await staying


async def test_a_failure_is_that_of_all_callers_and_the_next_run_may_succeed() -> None:
    results = iter([ValueError("no"), 7])

    def function() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    costly = Throttled(function)
    assert {ValueError} == {type(result) for result in await asyncio.gather(costly(), costly(), return_exceptions=True)}
    assert 7 == await costly()


@pytest.mark.parametrize(("path", "function"), [("/metrics", "page"), ("/v2/models/stats", "totals"), ("/v2/models/tiny/stats", "totals")])
def test_many_scrapes_cost_one(models: Path, monkeypatch: pytest.MonkeyPatch, path: str, function: str) -> None:
    """Twenty at once, and twenty more right behind, take two runs, of which the second waits until the interval is over."""
    runs: list[str] = []
    slept: list[float] = []
    run, sleep = getattr(Metrics, function), asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(throttled, "INTERVAL_S", 1000)
    monkeypatch.setattr(throttled, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": noted}))
    monkeypatch.setattr(Metrics, function, lambda self: runs.append(function) or run(self))

    async def check(client: httpx.AsyncClient) -> list[int]:
        return [answer.status_code for _ in range(2) for answer in await asyncio.gather(*(client.get(path) for _ in range(20)))]

    assert [200] * 40 == play(build(Settings(models=models)), check)
    assert 2 == len(runs)
    assert slept[0] == 0 < slept[1]
