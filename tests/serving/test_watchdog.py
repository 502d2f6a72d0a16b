"""Scheduler: a run that hangs fails its requests, and another thread replaces its thread."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bertserve.service import monitor
from bertserve.service.errors import DeviceLostError, EngineError, UnavailableError
from support.app_client import error_of, fake_service, serving
from support.fakes import FakeEngine
from support.scheduler_harness import Harness, constant_seconds


class WatchdogHarness(Harness):
    """A harness that looks at its runs on demand. A run hangs after 5 s or 20 times its prediction."""

    def look(self, seconds: int) -> None:
        for _ in range(seconds):
            self.scheduler.check_hung_runs()

    async def wait_for_idle_thread(self) -> None:
        """Returns when a thread waits; a thread that has delivered a result needs some time until it does."""
        while self.scheduler.wait_s:
            await asyncio.sleep(0.001)


@pytest.mark.harness(kind=WatchdogHarness, manual=True, threads=2)
async def test_a_thread_that_hangs_is_replaced(harness: WatchdogHarness) -> None:
    """Its requests fail, also in a batch that runs again in halves."""
    blockers = [await harness.block(), await harness.block()]
    harness.work.guilty = {"bad"}
    good, bad = harness.submit("good"), harness.submit("bad")
    await harness.until_queued(2)
    await harness.work.let_one_pass()  # the blockers end, and the two share a run
    await harness.work.let_one_pass()  # the batch has failed, and its first half hangs
    await asyncio.gather(*blockers)
    await harness.wait_for_idle_thread()
    harness.look(5)
    assert (harness.hangs, harness.scheduler.ready) == (0, True)
    harness.look(1)
    for task in (good, bad):
        with pytest.raises(EngineError) as error:
            await task
        assert error.value.values == {"seconds": 5}
    old_gate, harness.work.gate = harness.work.gate, threading.Event()
    harness.work.gate.set()
    assert (harness.hangs, harness.scheduler.ready) == (1, True)
    total_run_s, harness.clock.now = harness.scheduler.total_run_s, harness.clock.now + 1.0
    assert harness.scheduler.total_run_s == total_run_s  # the run that hangs no longer counts
    assert await asyncio.gather(harness.submit("a"), harness.submit("b")) == [["a"], ["b"]]
    await harness.scheduler.stop(1000.0)
    old_gate.set()


@pytest.mark.harness(kind=WatchdogHarness, manual=True, threads=2)
async def test_after_as_many_hangs_as_threads_nothing_runs(harness: WatchdogHarness, caplog: pytest.LogCaptureFixture) -> None:
    blockers = [await harness.block()]
    harness.look(6)
    assert (harness.hangs, harness.scheduler.ready) == (1, True)
    blockers.append(await harness.block())
    await harness.wait_for_idle_thread()
    running = harness.submit("running", runner=harness.runs(seconds=constant_seconds(2.0)))
    await asyncio.to_thread(harness.work.started.acquire)
    harness.look(6)
    assert (harness.hangs, harness.scheduler.ready) == (2, False)
    assert [*map(type, await asyncio.gather(*blockers, return_exceptions=True))] == [EngineError, EngineError]
    for late in (running, harness.submit("late")):
        with pytest.raises(UnavailableError) as refusal:
            await late
        assert refusal.value.values["reason"] == harness.scheduler.failure
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2


@pytest.mark.harness(kind=WatchdogHarness, manual=True)
async def test_a_long_run_hangs_after_twenty_times_its_prediction(harness: WatchdogHarness) -> None:
    harness.work.gate.clear()
    task = harness.submit("long", runner=harness.runs(seconds=constant_seconds(2.0)))
    await asyncio.to_thread(harness.work.started.acquire)
    harness.look(40)
    assert harness.hangs == 0
    harness.look(1)
    assert harness.hangs == 1
    with pytest.raises(EngineError):
        await task


@pytest.mark.harness(kind=WatchdogHarness, manual=True)
async def test_decoding_is_no_hang_however_long_it_takes(harness: WatchdogHarness) -> None:
    def decode(results: Sequence[Any]) -> list[Any]:
        harness.look(100)
        return list(results)

    blocker = await harness.block()
    tasks = [harness.submit(payload, finish=decode) for payload in "abc"]
    await harness.until_queued(3)
    harness.work.gate.set()
    assert await asyncio.gather(*tasks) == [["a"], ["b"], ["c"]]
    assert harness.hangs == 0
    assert len(harness.work.batches) == 2
    await blocker


async def test_the_service_looks_at_its_runs_by_itself_also_after_an_error(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "TICK_S", 0.01)
    engine = FakeEngine()
    service = fake_service(models, engine)
    look, errors = service.scheduler.check_hung_runs, [RuntimeError("can't start new thread")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()
        look()

    monkeypatch.setattr(service.scheduler, "check_hung_runs", fail_once)
    engine.gate.clear()
    async with serving(service) as client:
        error_of(await client.post("/classify", json={"inputs": "good"}), 500, "engine")
        assert not service.scheduler.ready
        engine.gate.set()


class EndsLate(WatchdogHarness):
    """A harness whose runs end while their thread is replaced."""

    def count_hang(self) -> None:
        super().count_hang()
        self.work.gate.set()
        time.sleep(0.2)


@pytest.mark.harness(kind=EndsLate, manual=True, threads=2)
async def test_a_run_that_ends_while_its_thread_is_replaced_fails(harness: EndsLate) -> None:
    """It is either answered or counted."""
    task = await harness.block()
    harness.look(6)
    with pytest.raises(EngineError):
        await task
    assert harness.hangs == 1
    assert await harness.run("next") == ["next"]


@pytest.mark.harness(kind=WatchdogHarness, manual=True)
async def test_a_setup_call_after_a_run_is_not_part_of_the_run(harness: WatchdogHarness) -> None:
    start, gate = threading.Event(), threading.Event()

    def setup() -> None:
        start.set()
        gate.wait(10)

    task = await harness.block()
    calls = asyncio.create_task(asyncio.to_thread(harness.scheduler.on_each_thread, [setup]))
    await asyncio.sleep(0.05)
    harness.work.gate.set()
    await task
    await asyncio.to_thread(start.wait, 10)
    harness.look(20)
    gate.set()
    await calls
    assert (harness.hangs, harness.scheduler.ready) == (0, True)


@pytest.mark.harness(kind=WatchdogHarness)
async def test_a_device_that_is_lost_in_a_setup_call_ends_the_service(harness: WatchdogHarness) -> None:
    def lose() -> None:
        raise DeviceLostError("the GPU failed (CUDA failure 700).")

    await asyncio.to_thread(harness.scheduler.on_each_thread, [lose])
    assert not harness.scheduler.ready
    assert harness.scheduler.failure


@pytest.mark.harness(kind=WatchdogHarness, manual=True, threads=2)
async def test_a_hung_thread_gets_and_keeps_no_setup_calls(harness: WatchdogHarness) -> None:
    """They refer to engines, which must be freed when their model is unloaded."""

    class Engine:
        def warm_up(self) -> None:
            pass

    engines = [Engine(), Engine()]
    references = [weakref.ref(engine) for engine in engines]
    task = await harness.block()
    warm_up = asyncio.ensure_future(asyncio.to_thread(harness.scheduler.on_each_thread, [engines[0].warm_up]))
    await asyncio.sleep(0.1)
    harness.look(6)
    await asyncio.wait([warm_up, task])
    await asyncio.to_thread(harness.scheduler.on_each_thread, [engines[1].warm_up])
    engines.clear()
    del warm_up
    for _ in range(100):  # the thread of `to_thread` drops its call soon
        gc.collect()
        if not any(engine() for engine in references):
            break
        await asyncio.sleep(0.02)
    assert [engine() for engine in references] == [None, None]
    assert task.exception() is not None


@pytest.mark.harness(kind=WatchdogHarness, threads=2)
async def test_after_a_lost_device_only_another_process_helps(harness: WatchdogHarness) -> None:
    """All requests fail at once, also waiting ones, and the batch does not run again in halves. The failed run does not hang."""
    runs: list[Any] = []

    def lose(payloads: Sequence[Any]) -> Sequence[Any]:
        runs.append(payloads)
        raise DeviceLostError("the GPU failed (CUDA failure 700).")

    blockers = [await harness.block(), await harness.block()]
    failures = [harness.submit(payload, runner=harness.runs(lose, shares_batches=False)) for payload in "ab"]
    waiting = harness.submit("c", runner=harness.runs(seconds=constant_seconds(1.0)))
    await harness.until_queued(3)
    harness.work.gate.set()
    for task in (*failures, waiting, harness.submit("late")):
        with pytest.raises(UnavailableError) as error:
            await task
        assert error.value.values["reason"] == harness.scheduler.failure
    assert not harness.scheduler.ready
    assert 1 <= len(runs) <= 2  # one per thread
    await asyncio.gather(*blockers, return_exceptions=True)  # the device can be lost before the second one is delivered
    await harness.scheduler.stop(1.0)
    harness.look(7)
    assert harness.hangs == 0
