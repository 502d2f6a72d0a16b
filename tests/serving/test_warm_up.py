"""Models on a GPU are warmed up on each inference thread, because cuDNN builds its plans per thread."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.bundle.graph_spec import ShapeBucket, ShapePlan
from bertserve.service.metrics import Metrics
from bertserve.service.models.loading import load_model
from bertserve.service.settings import ModelSettings
from support import tiny
from support.fakes import record_runs
from support.scheduler_harness import Harness

THREADS = {"inference-0", "inference-1"}
PLAN = ShapePlan(buckets=(ShapeBucket(length=16, rows=(1, 4)), ShapeBucket(length=32, rows=(1,))))
SHAPES = {(1, 16), (4, 16), (1, 32)}


@pytest.mark.parametrize("provider", ["cuda", "cpu"])
async def test_a_gpu_model_runs_its_planned_shapes_on_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: Any) -> None:
    """This applies at the start and after a reload. On a CPU, the runs that are timed at the load suffice."""
    runs: set[tuple[str, Any]] = set()
    record_runs(monkeypatch, lambda feed: runs.add((threading.current_thread().name, feed["input_ids"].shape)), provider="cpu")
    changes = {"provider": provider, "shapes": PLAN.model_dump(mode="json")}
    path = tiny.edit(tiny.bundle(tmp_path), lambda fields: fields["graphs"][0].update(changes))
    settings = ModelSettings(provider=provider)
    expected = {(name, shape) for name in THREADS for shape in SHAPES} if provider != "cpu" else set()
    harness, metrics = Harness(threads=2), Metrics()
    load_model(path, settings=settings, scheduler=harness.scheduler, metrics=metrics)
    harness.scheduler.start()
    assert {(name, shape) for name, shape in runs if name in THREADS} == expected
    runs.clear()
    await asyncio.to_thread(load_model, path, settings=settings, scheduler=harness.scheduler, metrics=metrics)
    assert {(name, shape) for name, shape in runs if name in THREADS} == expected
    await harness.scheduler.stop(0)


@pytest.mark.harness(threads=2)
async def test_requests_are_answered_between_setup_calls(harness: Harness) -> None:
    """Those after a reload take seconds, and the requests of other models must not wait for all of it."""
    entries, gates = threading.Semaphore(0), [threading.Event() for _ in range(3)]
    calls = [lambda gate=gate: (entries.release(), gate.wait(20)) for gate in gates]
    setup = asyncio.ensure_future(asyncio.to_thread(harness.scheduler.on_each_thread, calls))
    for gate in gates:
        for _ in THREADS:
            await asyncio.to_thread(entries.acquire)
        request = harness.submit("text")
        await harness.until_queued(1)
        gate.set()
        await request
    await setup


async def test_a_setup_call_that_fails_ends_no_thread() -> None:
    harness = Harness(threads=2)
    harness.scheduler.on_each_thread([lambda: 1 // 0])
    harness.scheduler.start()
    await asyncio.wait_for(harness.run(*"abcd"), 20)
    assert harness.scheduler.ready
    await harness.scheduler.stop(0)


@pytest.mark.harness(threads=2)
async def test_setup_calls_end_when_the_service_stops(harness: Harness) -> None:
    entry, gate = threading.Event(), threading.Event()
    setup = asyncio.ensure_future(asyncio.to_thread(harness.scheduler.on_each_thread, [lambda: (entry.set(), gate.wait(20))]))
    await asyncio.to_thread(entry.wait, 20)
    stopping = asyncio.ensure_future(harness.scheduler.stop(0))
    await setup
    gate.set()
    await stopping
