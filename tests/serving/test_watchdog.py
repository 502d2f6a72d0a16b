"""Scheduler: a run that hangs fails its requests, and another thread replaces its thread."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from bertserve.service.errors import DeviceLostError, EngineError, UnavailableError
from bertserve.service.scheduling import scheduler
from bertserve.service.scheduling.inference_thread import InferenceThread
from scheduler_bench import Bench, on_loop, play, takes


class Hanging(Bench):
    """A bench that looks at its runs on demand. A tick is 1 s; a run hangs after ten ticks or 20 times its prediction."""

    def look(self, ticks: int) -> None:
        for _ in range(ticks):
            self.scheduler.check_hung_runs()

    async def one_waits(self) -> None:
        """Returns when a thread waits; a thread that has delivered a result needs some time until it does."""
        while self.scheduler.wait_s:
            await asyncio.sleep(0.001)


def test_a_thread_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests fail, also those of a batch that runs again in halves. After as many hangs as threads, the service is not ready."""

    async def check(bench: Hanging) -> None:
        blockers = [await bench.blocked(), await bench.blocked()]
        bench.work.guilty = {"bad"}
        good, bad = bench.submit("good"), bench.submit("bad")
        await asyncio.sleep(0)
        await bench.work.let_one_pass()  # the blockers end, and the two share a run
        await bench.work.let_one_pass()  # the batch has failed, and its first half hangs
        await asyncio.gather(*blockers)
        await bench.one_waits()
        bench.look(9)
        assert (0, True) == (bench.hangs, bench.scheduler.ready)
        bench.look(1)
        for task in (good, bad):
            with pytest.raises(EngineError, match="hung for 10 s"):
                await task
        hung, bench.work.gate = bench.work.gate, threading.Event()
        bench.work.gate.set()
        assert (1, True) == (bench.hangs, bench.scheduler.ready)
        busy_s, bench.clock.now = bench.scheduler.busy_s, bench.clock.now + 1.0
        assert busy_s == bench.scheduler.busy_s  # the run that hangs no longer counts
        assert [["a"], ["b"]] == await asyncio.gather(bench.submit("a"), bench.submit("b"))
        last = await bench.blocked()
        await bench.one_waits()
        waiting = bench.submit("waiting", runner=bench.runs(seconds=takes(2.0)))
        await asyncio.sleep(0)
        bench.look(10)
        assert (2, False) == (bench.hangs, bench.scheduler.ready)
        with pytest.raises(EngineError, match="hung for 10 s"):
            await last
        for late in (waiting, bench.submit("late")):
            with pytest.raises(UnavailableError, match="as many runs have hung"):
                await late
        await bench.scheduler.stop(1000.0)
        hung.set()

    play(check, Hanging, manual=True, min_hang_s=10.0, threads=2)
    assert ["ERROR"] * 2 == [record.levelname for record in caplog.records]


@on_loop(Hanging, manual=True, min_hang_s=10.0)
async def test_a_long_run_hangs_after_twenty_times_its_prediction(bench: Hanging) -> None:
    bench.work.gate.clear()
    task = bench.submit("long", runner=bench.runs(seconds=takes(2.0)))
    await asyncio.to_thread(bench.work.started.acquire)
    bench.look(39)
    assert 0 == bench.hangs
    bench.look(1)
    assert 1 == bench.hangs
    with pytest.raises(EngineError):
        await task


@on_loop(Hanging, manual=True, min_hang_s=10.0)
async def test_decoding_is_no_hang_however_long_it_takes(bench: Hanging) -> None:
    def decode(results: Sequence[Any]) -> list[Any]:
        bench.look(100)
        return list(results)

    blocker = await bench.blocked()
    tasks = [bench.submit(payload, finish=decode) for payload in "abc"]
    await asyncio.sleep(0)
    bench.work.gate.set()
    assert [["a"], ["b"], ["c"]] == await asyncio.gather(*tasks)
    assert (0, 2) == (bench.hangs, len(bench.work.batches))
    await blocker


@on_loop(manual=True, min_hang_s=0.05)
async def test_the_scheduler_looks_at_its_runs_by_itself(bench: Bench) -> None:
    bench.work.gate.clear()
    with pytest.raises(EngineError, match="has hung"):
        await bench.run("x")
    assert not bench.scheduler.ready


class SlowlyRead(InferenceThread):
    """A thread whose run can end while its ticks are read."""

    gate: threading.Event | None = None

    @property
    def ticks(self) -> int:
        value = self._ticks
        if self.gate is not None:
            self.gate.set()
            time.sleep(0.2)
        return value

    @ticks.setter
    def ticks(self, value: int) -> None:
        self._ticks = value


def test_a_run_that_ends_during_the_look_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is either answered or counted."""

    async def check(bench: Hanging) -> None:
        task = await bench.blocked()
        bench.look(9)
        monkeypatch.setattr(SlowlyRead, "gate", bench.work.gate)
        bench.look(1)
        await asyncio.wait([task])
        assert (bench.hangs == 1) is (task.exception() is not None)

    monkeypatch.setattr(scheduler, "InferenceThread", SlowlyRead)
    play(check, Hanging, manual=True, min_hang_s=10.0, threads=2)


@on_loop(Hanging, manual=True, min_hang_s=10.0)
async def test_a_step_of_the_warm_up_after_a_run_is_not_part_of_the_run(bench: Hanging) -> None:
    started, gate = threading.Event(), threading.Event()

    def step() -> None:
        started.set()
        gate.wait(10)

    task = await bench.blocked()
    steps = asyncio.create_task(asyncio.to_thread(bench.scheduler.on_each_thread, [step]))
    await asyncio.sleep(0.05)
    bench.work.gate.set()
    await task
    await asyncio.to_thread(started.wait, 10)
    bench.look(20)
    gate.set()
    await steps
    assert (0, True) == (bench.hangs, bench.scheduler.ready)


@on_loop(Hanging, manual=True, min_hang_s=10.0, threads=2)
async def test_a_hung_thread_gets_and_keeps_no_steps(bench: Hanging) -> None:
    """They refer to engines, which must be freed when their model is unloaded."""

    class Engine:
        def warm_up(self) -> None:
            pass

    engines = [Engine(), Engine()]
    kept = [weakref.ref(engine) for engine in engines]
    task = await bench.blocked()
    warm_up = asyncio.ensure_future(asyncio.to_thread(bench.scheduler.on_each_thread, [engines[0].warm_up]))
    await asyncio.sleep(0.1)
    bench.look(10)
    await asyncio.wait([warm_up, task])
    await asyncio.to_thread(bench.scheduler.on_each_thread, [engines[1].warm_up])
    engines.clear()
    del warm_up
    for _ in range(100):  # the thread of `to_thread` drops its call soon
        gc.collect()
        if not any(engine() for engine in kept):
            break
        await asyncio.sleep(0.02)
    assert [None, None] == [engine() for engine in kept]
    assert task.exception() is not None


@on_loop(threads=2)
async def test_after_a_lost_device_only_another_process_helps(bench: Bench) -> None:
    """All requests fail at once, also those that wait, and the batch does not run again in halves."""
    runs: list[Any] = []

    def lose(payloads: Sequence[Any]) -> Sequence[Any]:
        runs.append(payloads)
        raise DeviceLostError("the GPU failed (CUDA failure 700).")

    blockers = [await bench.blocked(), await bench.blocked()]
    lost = [bench.submit(payload, runner=bench.runs(lose, shares_batches=False)) for payload in "ab"]
    waiting = bench.submit("c", runner=bench.runs(seconds=takes(1.0)))
    await asyncio.sleep(0)
    bench.work.gate.set()
    for task in (*lost, waiting, bench.submit("late")):
        with pytest.raises(UnavailableError, match="the GPU failed"):
            await task
    assert (False, True) == (bench.scheduler.ready, bench.scheduler.failure is not None)
    assert 1 <= len(runs) <= 2  # one per thread
    await asyncio.gather(*blockers, return_exceptions=True)  # the device may be lost before the second one is delivered
