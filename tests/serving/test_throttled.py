"""Costly pages that need no key: the metrics page and the model statistics are computed at most once per second."""

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


async def test_simultaneous_calls_share_one_run() -> None:
    """The run starts after the calls. If one call is cancelled, the other calls still get the result."""
    runs = iter(range(10))
    costly = Throttled(lambda: next(runs))
    assert [0] * 5 == await asyncio.gather(*(costly() for _ in range(5)))
    leaving = asyncio.create_task(costly())
    staying = asyncio.create_task(costly())
    await asyncio.sleep(0)
    leaving.cancel()
    assert 1 == await staying


async def test_all_callers_get_the_error_of_a_run_and_the_next_run_can_succeed() -> None:
    results = iter([ValueError("no"), 7])

    def function() -> int:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    costly = Throttled(function)
    assert {ValueError} == {type(result) for result in await asyncio.gather(costly(), costly(), return_exceptions=True)}
    assert 7 == await costly()


@pytest.mark.parametrize(("path", "function"), [("/metrics", "page")])
def test_simultaneous_scrapes_share_one_run(models: Path, monkeypatch: pytest.MonkeyPatch, path: str, function: str) -> None:
    """Twenty scrapes, followed by twenty more, need two runs. The second run waits for the end of the interval."""
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
