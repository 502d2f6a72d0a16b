"""What the scheduler must keep: real threads and a real loop around the queue, the work a fake that blocks and fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvloop

from bertserve.service.errors import EngineError, ExpiredError, InvalidValueError, RefusedError, UnavailableError
from bertserve.service.scheduling.request_queue import PART_ITEMS, RequestQueue
from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest
from bertserve.service.scheduling.scheduler import SWITCH_S, Scheduler
from bertserve.service.scheduling.stage import RequestResult, Stage
from bertserve.service.scheduling.watchdog import HUNG_FLOOR_S, OVERDUE_S, TICKS_OF_FLOOR, UNPREDICTED_FLOORS
from fakes import ManualClock


class Work:
    """A run function that echoes, and can block, fail on a payload, or return too few results."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.guilty: set[Any] = set()
        self.short = False

    def __call__(self, payloads: Sequence[Any]) -> list[Any]:
        self.started.release()
        gate = self.gate  # `let_one_pass` puts another one behind it
        assert gate.wait(20), "the test never opened the gate"
        self.batches.append(list(payloads))
        if self.guilty & set(payloads):
            raise EngineError(f"guilty: {sorted(self.guilty & set(payloads))}")
        return list(payloads)[1 if self.short else 0 :]

    async def let_blockers_pass(self, queue: Watched) -> None:
        """Lets the runs at the gate end, and returns when one thread stands at a gate of its own and another one sleeps."""
        before, self.gate, asked = self.gate, threading.Event(), queue.in_vain
        before.set()
        await asyncio.to_thread(self.started.acquire)
        while queue.in_vain == asked:
            await asyncio.sleep(0)

    async def let_one_pass(self) -> None:
        """Lets the run at the gate end, and returns when the next one stands at a gate of its own."""
        before, self.gate = self.gate, threading.Event()
        before.set()
        await asyncio.to_thread(self.started.acquire)


class Watched(RequestQueue):
    """A queue that counts how often it was asked for a batch in vain: once by each inference thread before it goes to sleep."""

    in_vain = 0

    def take(self, now: float, *, last_thread: bool = False, long_step: bool = True) -> list[Item]:
        batch = super().take(now, last_thread=last_thread, long_step=long_step)
        self.in_vain += not batch
        return batch


def batched(rows: int, length: int) -> float:
    return 1e-3 + rows * length * 1e-9


class Bench:
    """A scheduler under test with its work."""

    def __init__(
        self,
        *,
        threads: int = 1,
        multi_threads: int = 1,
        manual: bool = False,
        queue: type[RequestQueue] = RequestQueue,
        hung_floor_s: float = HUNG_FLOOR_S,
        **options: Any,
    ) -> None:
        self.work = Work()
        self.clock = ManualClock()
        self.queue = queue(**{"max_batch_tokens": 64, "max_queue_tokens": 1000, "threads": threads} | options)
        self.hangs = 0
        self.scheduler = Scheduler(
            self.queue,
            threads=threads,
            multi_threads=multi_threads,
            clock=self.clock if manual else time.monotonic,
            on_hang=self._count_hang,
            hung_floor_s=hung_floor_s,
        )

    def _count_hang(self) -> None:
        self.hangs += 1

    def admit(self, tokens: int = 8, timeout_s: float = 20.0) -> ScheduledRequest:
        return self.scheduler.admit(tokens=tokens, seconds=0.0, timeout_s=timeout_s)

    def stage(self, *payloads: Any, tokens: int = 8, key: Any = "model", **changes: Any) -> Stage:
        """Returns a stage with an item per payload that finishes with the list of results."""
        fields = {"run": self.work, "finish": list, "key": key, "cost": batched} | changes
        return Stage(work=[(tokens, payload) for payload in payloads], **fields)

    def submit(self, *payloads: Any, timeout_s: float = 20.0, **options: Any) -> asyncio.Task[RequestResult]:
        return asyncio.ensure_future(self.scheduler.run(self.admit(8 * len(payloads), timeout_s), self.stage(*payloads, **options)))

    async def blocked(self) -> asyncio.Task[RequestResult]:
        """Occupies one thread until the gate is opened; returns the request that does."""
        self.work.started = threading.Semaphore(0)  # earlier runs were not waited for
        self.work.gate.clear()
        task = self.submit("blocker", key=None)
        await asyncio.sleep(0)
        await asyncio.to_thread(self.work.started.acquire)
        return task


def play(
    check: Callable[[Any], Awaitable[None]], kind: type[Bench] = Bench, *, new_loop: Any = asyncio.new_event_loop, **options: Any
) -> None:
    """Runs a check against a started scheduler within 20 seconds and stops that."""

    async def start_and_stop() -> None:
        bench = kind(**options)
        bench.scheduler.start()
        try:
            await asyncio.wait_for(check(bench), 20)
        finally:
            bench.work.gate.set()
            await bench.scheduler.stop(5)
        assert (0, 0) == (bench.queue.queue_items, bench.queue.queue_tokens)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(start_and_stop())


def on_loop(kind: type[Bench] = Bench, **options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a test of a coroutine that takes a bench, and fixtures behind it."""

    def decorate(check: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            play(lambda bench: check(bench, **fixtures), kind, **options)

        _, *rest = inspect.signature(check).parameters.values()
        test.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]  # what pytest asks for fixtures
        return test

    return decorate


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_each_caller_gets_its_own_results_in_order(new_loop: Any) -> None:
    """Hundreds of requests over several threads and shared batches: no result is swapped or lost."""

    async def check(bench: Bench) -> None:
        requests = [[(i, k) for k in range(1 + i % 5)] for i in range(300)]
        answers = await asyncio.gather(*(bench.submit(*request, tokens=1 + i % 9) for i, request in enumerate(requests)))
        assert requests == [answer.value for answer in answers]
        assert max(map(len, bench.work.batches)) > 1

    play(check, new_loop=new_loop, threads=3, max_queue_tokens=100_000)


@on_loop(max_queue_tokens=100_000)
async def test_a_request_of_many_items_holds_the_lock_for_a_part_of_them_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the event loop, which needs the lock to admit other requests, never waits for thousands of items to be queued."""
    blocker = await bench.blocked()
    request, count = bench.admit(8 * 10 * PART_ITEMS + 8), 10 * PART_ITEMS + 1
    task = asyncio.ensure_future(bench.scheduler.run(request, bench.stage(*range(count))))
    lock, before, queued = bench.scheduler._condition, 0, list[int]()

    class Counting:
        def __enter__(self) -> None:
            nonlocal before
            lock.acquire()
            before = len(request.items)

        def __exit__(self, *_: object) -> None:
            queued.append(len(request.items) - before)
            lock.release()

        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

    with monkeypatch.context() as patch:
        patch.setattr(bench.scheduler, "_condition", Counting())
        await asyncio.sleep(0)
    assert [PART_ITEMS] * 10 + [1] == queued
    assert 10 * PART_ITEMS + 1 == bench.queue.queue_items
    bench.work.gate.set()
    assert list(range(count)) == (await task).value
    await blocker


@on_loop(max_queue_tokens=100_000)
async def test_a_request_that_ends_while_its_items_are_queued_leaves_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = await bench.blocked()
    request = bench.admit(8 * 3 * PART_ITEMS)
    link, parts = bench.queue.link, list[int]()

    def link_and_close(request: ScheduledRequest, items: Sequence[Item], now: float) -> None:
        link(request, items, now)
        parts.append(len(items))
        if len(parts) == 2:
            bench.scheduler.close(request)

    monkeypatch.setattr(bench.queue, "link", link_and_close)
    task = asyncio.ensure_future(bench.scheduler.run(request, bench.stage(*range(3 * PART_ITEMS))))
    await asyncio.sleep(0)
    assert [PART_ITEMS] * 3 == parts
    assert (0, 0) == (bench.queue.queue_items, len(request.items))
    task.cancel()
    bench.work.gate.set()
    await blocker
    assert [["blocker"]] == bench.work.batches


@on_loop(manual=True)
async def test_a_request_of_several_runs_waits_only_for_its_first(bench: Bench) -> None:
    """The time from the first run to the end of the last one is that of its runs, which its stages, one after the other, add up to."""

    def slow(payloads: Sequence[Any]) -> list[Any]:
        bench.clock.now += 1.0
        return list(payloads)

    second = Stage(work=[(60, "b"), (60, "c")], run=slow, finish=list, key="k", cost=batched)
    first = Stage(work=[(60, "a")], run=slow, finish=lambda _: second, key="k", cost=batched)
    done = await bench.scheduler.run(bench.admit(180), first)
    assert (["b", "c"], 0.0, 3.0) == (done.value, done.wait_s, done.runs_s)


@on_loop(manual=True)
async def test_a_lone_request_is_not_delayed(bench: Bench) -> None:
    """A waiting thread starts at once: requests are answered while the clock stands still, so that no timer holds them back."""
    assert [0.0] * 20 == [(await bench.submit("x")).queue_s for _ in range(20)]


@on_loop(manual=True)
async def test_what_gathers_behind_a_run_shares_the_next_one(bench: Bench) -> None:
    blocker = await bench.blocked()
    others = [bench.submit(i) for i in range(8)]
    await asyncio.sleep(0)
    bench.work.gate.set()
    await asyncio.gather(blocker, *others)
    assert [["blocker"], list(range(8))] == bench.work.batches


@on_loop()
async def test_an_item_over_the_budget_fails_only_its_request(bench: Bench) -> None:
    """A text that no batch can hold is an error of its request, and frees its place."""
    with pytest.raises(InvalidValueError, match="65 tokens"):
        await bench.submit("x", tokens=65)
    assert ["y"] == (await bench.submit("y")).value


@on_loop(manual=True)
async def test_a_failing_batch_runs_again_in_halves(bench: Bench) -> None:
    """One guilty item of eight is found in the runs of three halvings, and its neighbors are answered."""
    blocker = await bench.blocked()
    bench.work.guilty = {5}
    tasks = [bench.submit(i) for i in range(8)]
    await asyncio.sleep(0)
    bench.work.gate.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert ["guilty: [5]"] == [str(error) for error in ended if isinstance(error, Exception)]
    assert [0, 1, 2, 3, 4, 6, 7] == [result.value[0] for result in ended if isinstance(result, RequestResult)]
    assert [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]] == bench.work.batches[1:]
    await blocker


@on_loop(manual=True)
async def test_what_has_ended_does_not_run_again(bench: Bench) -> None:
    """Items of a failed batch whose callers have left meanwhile are not tried once more."""
    blocker = await bench.blocked()
    bench.work.guilty = {"bad"}
    stayer, leaver, bad = [bench.submit(payload) for payload in ("stayer", "leaver", "bad")]
    await asyncio.sleep(0)
    await bench.work.let_one_pass()
    leaver.cancel()
    await asyncio.sleep(0)
    bench.work.gate.set()
    assert ["stayer"] == (await stayer).value
    with pytest.raises(EngineError, match="guilty"):
        await bad
    await blocker
    assert [["blocker"], ["stayer", "leaver", "bad"], ["stayer"], ["bad"]] == bench.work.batches


@on_loop()
async def test_the_first_failure_ends_the_whole_request(bench: Bench) -> None:
    bench.work.guilty = {"bad"}
    with pytest.raises(EngineError, match="guilty"):
        await bench.submit("a", "bad", "c", tokens=60)
    assert 0 == bench.queue.queue_items


@on_loop()
async def test_a_wrong_number_of_results_is_an_error(bench: Bench) -> None:
    """Results are never paired with the wrong texts: too few of them fail their batch."""
    bench.work.short = True
    with pytest.raises(EngineError, match="1 gave 0 results"):
        await bench.submit("x")
    bench.work.short = False
    assert ["y"] == (await bench.submit("y")).value


@on_loop(manual=True)
async def test_what_runs_counts_as_wait(bench: Bench) -> None:
    """With every inference thread busy for longer than the deadline a request is refused though nothing waits, and told when to come."""
    bench.work.gate.clear()
    long = bench.submit("long", cost=lambda rows, length: 8.0)
    await asyncio.sleep(0)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.clock.now += 1.0
    with pytest.raises(RefusedError) as refused:
        bench.admit(timeout_s=5.0)
    assert ("deadline", pytest.approx(7 - 5 / 1.15)) == (refused.value.reason, refused.value.retry_after_s)
    bench.clock.now += 2.75
    assert bench.scheduler.close(bench.admit(timeout_s=5.0))
    bench.work.gate.set()
    await long


class Text:
    """A payload or an answer whose life can be watched."""

    results: Sequence[Any] = ()


@on_loop()
async def test_an_answered_request_keeps_neither_payloads_nor_results_until_its_deadline(bench: Bench) -> None:
    kept = weakref.WeakSet[Text]()

    def finish(results: Sequence[Any]) -> Text:
        answer = Text()
        kept.update([*results, answer])
        answer.results = results
        return answer

    open_request = bench.admit()  # while one is open, the queue forgets ended ones later
    answered = bench.submit(Text(), finish=finish)
    await answered
    assert len(kept) == 2
    del answered
    bench.work.batches.clear()
    await bench.submit("next")  # an inference thread keeps its last batch
    gc.collect()
    assert len(kept) == 0
    bench.scheduler.close(open_request)


@on_loop(threads=2, max_queue_tokens=100_000)
async def test_a_thousand_callers_that_hang_up_leave_nothing(bench: Bench) -> None:
    kept = weakref.WeakSet[Text]()

    def texts(count: int) -> list[Text]:
        made = [Text() for _ in range(count)]
        kept.update(made)
        return made

    bench.work.gate.clear()
    running = [bench.submit(*texts(1), key=None) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(2):
        await asyncio.to_thread(bench.work.started.acquire)
    queued = [bench.submit(*texts(1 + i % 3), key=[None, "model"][i % 2], tokens=1 + i % 60) for i in range(998)]
    await asyncio.sleep(0)
    assert 998 < bench.queue.queue_items
    for task in (*running, *queued):
        task.cancel()
    ended = await asyncio.gather(*running, *queued, return_exceptions=True)
    assert [asyncio.CancelledError] * 1000 == [type(error) for error in ended]
    del running, queued, ended, task
    await asyncio.sleep(0)  # this step of the loop was woken by the tasks, and keeps them
    gc.collect()
    assert (0, 0, 2) == (bench.queue.queue_items, bench.queue.queue_tokens, len(kept))  # the two that run are their threads'
    bench.work.gate.set()
    while len(bench.work.batches) < 2:
        await asyncio.sleep(0)
    assert [[Text], [Text]] == [[type(payload) for payload in batch] for batch in bench.work.batches]
    bench.work.batches.clear()
    assert [["a"], ["b"]] == [answer.value for answer in await asyncio.gather(bench.submit("a"), bench.submit("b"))]
    assert ["a", "b"] == sorted(payload for batch in bench.work.batches for payload in batch)
    assert bench.scheduler.ready
    while kept:  # until both threads have gone back to wait
        gc.collect()
        await asyncio.sleep(0)


@on_loop(manual=True)
async def test_a_timer_that_fires_early_fires_again(bench: Bench) -> None:
    """A timer may end before the scheduler's own clock has passed the deadline, as uvloop's do by a millisecond: the caller hears of it all the same."""
    blocker = await bench.blocked()
    late = bench.submit("late", timeout_s=0.01)
    await asyncio.sleep(0.05)  # the timer has fired; the scheduler's clock stands still
    bench.clock.now += 1.0
    with pytest.raises(ExpiredError):
        await late
    bench.work.gate.set()
    await blocker


@on_loop(manual=True)
async def test_a_deadline_that_passed_before_the_work_was_queued_ends_it(bench: Bench) -> None:
    """What took its time before it waits is told at once, though every inference thread is busy."""
    blocker = await bench.blocked()
    request = bench.admit(timeout_s=1.0)
    bench.clock.now += 2.0
    with pytest.raises(ExpiredError):
        await bench.scheduler.run(request, bench.stage("late"))
    bench.work.gate.set()
    await blocker


@on_loop()
async def test_stop_answers_what_was_admitted_and_refuses_the_rest(bench: Bench) -> None:
    """Within the grace period queued requests are drained; new ones are refused from the first moment."""
    blocker = await bench.blocked()
    waiting = bench.submit("waiting")
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(bench.scheduler.stop(10))
    await asyncio.sleep(0)
    assert not bench.scheduler.ready
    with pytest.raises(UnavailableError, match="stopping"):
        bench.admit()
    bench.work.gate.set()
    assert [["blocker"], ["waiting"]] == [(await task).value for task in (blocker, waiting)]
    await stopping


class Broken(RequestQueue):
    """A queue whose own code fails once it is told to."""

    broken = False

    def take(self, now: float, *, last_thread: bool = False, long_step: bool = True) -> list[Item]:
        if self.broken:
            raise RuntimeError("a bug of the queue")
        return super().take(now, last_thread=last_thread, long_step=long_step)


@on_loop(threads=2, queue=Broken)
async def test_a_dead_thread_turns_readiness_red_and_fails_what_waits(bench: Bench) -> None:
    """If an inference thread dies in the scheduler's own code, all requests end, in its run or outside it, and new ones are refused."""
    assert isinstance(bench.queue, Broken)
    blocker = await bench.blocked()
    bench.queue.broken = True
    with pytest.raises(UnavailableError, match="thread died"):
        await bench.submit("x")
    with pytest.raises(UnavailableError, match="thread died"):
        await blocker
    assert not bench.scheduler.ready
    with pytest.raises(UnavailableError, match="thread died"):
        bench.admit()


class NativePanicError(BaseException):
    """What a native library raises that panicked: no Exception."""


FAULTS: dict[str, tuple[BaseException, type[Exception], str]] = {
    "error": (ValueError("as it is"), ValueError, "as it is"),
    "exit": (SystemExit(3), EngineError, "SystemExit"),
    "panic": (NativePanicError("of the tokenizer"), EngineError, "NativePanicError"),
    "memory": (MemoryError(), EngineError, "enough memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["run", "finish"])
def test_no_fault_of_a_request_reaches_its_neighbors(fault: str, place: str) -> None:
    """Whatever a run or a decoder raises, in a batch of several, is the answer of the guilty request alone; the inference threads live."""
    raised, expected, message = FAULTS[fault]

    async def check(bench: Bench) -> None:
        def run(payloads: Sequence[Any]) -> list[Any]:
            if place == "run" and "bad" in payloads:
                raise raised
            return list(payloads)

        def finish(results: Sequence[Any]) -> list[Any]:
            if place == "finish" and "bad" in results:
                raise raised
            return list(results)

        blocker = await bench.blocked()
        tasks = {payload: bench.submit(payload, run=run, finish=finish) for payload in ("good", "bad", "fine", "well")}
        await asyncio.sleep(0)
        bench.work.gate.set()
        with pytest.raises(expected, match=message):
            await tasks.pop("bad")
        assert [["good"], ["fine"], ["well"]] == [(await task).value for task in tasks.values()]
        assert bench.scheduler.ready
        assert ["after"] == (await bench.submit("after")).value
        await blocker

    play(check)


@on_loop(manual=True)
async def test_what_is_too_much_for_the_memory_runs_in_parts(bench: Bench) -> None:
    """A batch that is too large for memory runs in two halves, and all callers get their answers."""
    ran: list[int] = []

    def run(payloads: Sequence[Any]) -> list[Any]:
        ran.append(len(payloads))
        if len(payloads) > 2:
            raise MemoryError
        return list(payloads)

    blocker = await bench.blocked()
    tasks = [bench.submit(i, run=run) for i in range(8)]
    await asyncio.sleep(0)
    bench.work.gate.set()
    assert [[i] for i in range(8)] == [(await task).value for task in tasks]
    assert [8, 4, 2, 2, 4, 2, 2] == ran
    await blocker


class Hanging(Bench):
    """A bench whose watchdog looks when it is told to: a tick is a second, and a run hangs after ten of them or 20 times its prediction."""

    def look(self, ticks: int) -> None:
        for _ in range(ticks):
            self.scheduler._watchdog.look()


def test_a_run_that_hangs_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    """Ten seconds that were watched make it hang; it is logged and counted once, and readiness turns red only when no inference thread is left."""

    async def check(bench: Hanging) -> None:
        first = await bench.blocked()
        bench.look(9)
        assert (0, True) == (bench.hangs, bench.scheduler.ready)
        bench.look(1)
        assert (1, True) == (bench.hangs, bench.scheduler.ready)
        second = bench.submit("second", key=None)
        assert 1 == bench.queue.threads  # waits are predicted for the threads that are left
        await asyncio.to_thread(bench.work.started.acquire)
        bench.look(10)
        assert (2, False) == (bench.hangs, bench.scheduler.ready)
        with pytest.raises(UnavailableError, match="threads hang"):
            bench.admit()
        bench.work.gate.set()
        await asyncio.gather(first, second)
        while any(thread.run is not None for thread in bench.scheduler._threads):
            await asyncio.sleep(0)
        bench.look(1)
        assert (2, True) == (bench.hangs, bench.scheduler.ready)
        assert ["after"] == (await bench.submit("after")).value

    play(check, Hanging, manual=True, hung_floor_s=10.0, threads=2)
    logged = sorted((line.split()[0], " 10 s" in line and " 0.001 s" in line) for line in caplog.messages)
    assert [("inference-0", True), ("inference-1", True)] == logged


@on_loop(Hanging, manual=True, hung_floor_s=10.0)
async def test_a_long_run_hangs_after_twenty_times_its_prediction(bench: Hanging) -> None:
    bench.work.gate.clear()
    task = bench.submit("long", cost=lambda rows, length: 2.0)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.look(39)
    assert 0 == bench.hangs
    bench.look(1)
    assert 1 == bench.hangs
    bench.work.gate.set()
    await task


@on_loop(Hanging, manual=True, hung_floor_s=10.0)
async def test_requests_in_a_run_that_hangs_are_failed_after_their_deadlines(bench: Hanging) -> None:
    """Each gets the reason after its own deadline and the grace, also requests that were to run after a failed part."""
    blocker = await bench.blocked()
    bench.work.guilty = {"bad"}
    soon, bad, late = bench.submit("soon", timeout_s=20.0), bench.submit("bad", timeout_s=20.0), bench.submit("late", timeout_s=60.0)
    await asyncio.sleep(0)
    await bench.work.let_one_pass()  # the three share a run
    await bench.work.let_one_pass()  # it failed, and its first half hangs now
    await blocker
    bench.look(10)
    bench.clock.now += 20.0 + OVERDUE_S
    bench.look(1)
    for task in (soon, bad):
        with pytest.raises(EngineError, match="hung for 11 s"):
            await task
    assert not late.done()
    bench.clock.now += 40.0
    bench.look(1)
    with pytest.raises(EngineError, match="has hung"):
        await late


@on_loop(manual=True, hung_floor_s=0.05)
async def test_the_watchdog_ticks_by_itself_while_there_is_work(bench: Bench) -> None:
    """Nobody has to call it: a run that hangs turns readiness red, and fails its request, while the loop has nothing else to do."""
    bench.work.gate.clear()
    task = bench.submit("x")
    await asyncio.sleep(0)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.clock.now += 100.0
    with pytest.raises(EngineError, match="has hung"):
        await task
    assert not bench.scheduler.ready


@on_loop(Hanging, manual=True, hung_floor_s=10.0)
async def test_a_stop_does_not_wait_for_threads_that_hang(bench: Hanging) -> None:
    """Where nothing would finish the grace is left out, so that another process takes over at once; who only waited may ask that one."""
    blocker = await bench.blocked()
    waiting = bench.submit("waiting")
    await asyncio.sleep(0)
    bench.look(10)
    await bench.scheduler.stop(1000.0)
    with pytest.raises(EngineError, match=r"hung for 10 s, .* abandoned"):
        await blocker
    with pytest.raises(UnavailableError, match="threads hang"):
        await waiting
    assert bench.scheduler._threads[0].handle.is_alive()


@pytest.mark.parametrize("place", ["tokenizing", "decoding"])
@on_loop(Hanging, manual=True, hung_floor_s=10.0)
async def test_what_is_not_predicted_has_more_time(bench: Hanging, place: str) -> None:
    """Nobody knows how long a large body takes to tokenize, or its answer to decode: it hangs only after a longer time."""
    bench.work.gate.clear()
    if place == "tokenizing":
        task = bench.submit("text", key=None, cost=lambda rows, length: 0.0)
    else:
        task = bench.submit("text", run=list, finish=bench.work)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.look(TICKS_OF_FLOOR * UNPREDICTED_FLOORS - 1)
    assert (0, True) == (bench.hangs, bench.scheduler.ready)
    bench.look(1)
    assert (1, False) == (bench.hangs, bench.scheduler.ready)
    bench.work.gate.set()
    await task


@on_loop(threads=2, max_queue_tokens=100_000)
async def test_a_result_is_never_set_twice(bench: Bench) -> None:
    """Cancellation, expiry, failure and completion race for the same requests; each ends exactly once and the inference threads live."""
    bench.work.guilty = {i for i in range(400) if i % 7 == 0}
    tasks = [bench.submit(i, i + 1000, tokens=1 + i % 60, timeout_s=0.002 if i % 5 == 0 else 20) for i in range(400)]

    async def leave() -> None:
        for task in tasks[::3]:
            task.cancel()
            await asyncio.sleep(0)

    results = await asyncio.gather(leave(), *tasks, return_exceptions=True)
    kinds = {type(result) for result in results[1:]}
    assert kinds <= {RequestResult, asyncio.CancelledError, ExpiredError, EngineError}
    answered = [(i, result.value) for i, result in enumerate(results[1:]) if isinstance(result, RequestResult)]
    assert [(i, [i, i + 1000]) for i, _ in answered] == answered
    assert bench.scheduler.ready


def test_a_count_that_fails_fails_nothing() -> None:
    """Whatever watches the queue may raise: requests are admitted, answered, and their places freed all the same."""

    def fail(items: int, tokens: int) -> None:
        raise OSError("no space left for metrics")

    async def play() -> None:
        queue = RequestQueue(max_batch_tokens=64, max_queue_tokens=100)
        scheduler = Scheduler(queue, threads=1, observe=fail)
        scheduler.start()
        request = scheduler.admit(tokens=10, seconds=0, timeout_s=5)
        answer = await asyncio.wait_for(scheduler.run(request, Stage(work=[(9, "x")], run=Work(), finish=list, key=None, cost=batched)), 20)
        assert ["x"] == answer.value
        assert scheduler.ready
        assert 0 == queue.queue_tokens
        await scheduler.stop(1)

    asyncio.run(play())


class MultiThreaded:
    """A `run_multi_threaded` that echoes and remembers what it ran."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __call__(self, payloads: Sequence[Any]) -> list[Any]:
        self.ran += payloads
        return list(payloads)


@on_loop(threads=2, multi_threads=2, manual=True)
async def test_a_lone_run_is_multi_threaded(bench: Bench) -> None:
    """The stage's other function runs if nothing else runs, waits or did so lately; with another run or more work it does not."""
    multi_threaded, clock = MultiThreaded(), bench.clock
    assert ["lone"] == (await bench.submit("lone", run_multi_threaded=multi_threaded)).value
    assert list(range(8)) == (await bench.submit(*range(8), key=None, run_multi_threaded=multi_threaded)).value
    assert ["lone"] == multi_threaded.ran
    clock.now += 1.0
    assert ["soon after"] == (await bench.submit("soon after", run_multi_threaded=multi_threaded)).value
    clock.now += 2.0
    assert ["later"] == (await bench.submit("later", run_multi_threaded=multi_threaded)).value
    assert ["lone", "later"] == multi_threaded.ran
    blocker = await bench.blocked()
    beside = bench.submit("beside", run_multi_threaded=multi_threaded)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.work.gate.set()
    await asyncio.gather(blocker, beside)
    assert ["lone", "later"] == multi_threaded.ran


@pytest.mark.parametrize(("threads", "expected"), [(4, []), (5, []), (6, ["beside"])])
def test_with_many_threads_a_few_runs_may_have_several_threads(threads: int, expected: list[str]) -> None:
    async def check(bench: Bench) -> None:
        multi_threaded = MultiThreaded()
        blocker = await bench.blocked()
        assert ["beside"] == (
            await bench.submit("beside", run_multi_threaded=multi_threaded) if expected else await beside(bench, multi_threaded)
        ).value
        bench.work.gate.set()
        await blocker
        assert expected == multi_threaded.ran

    async def beside(bench: Bench, multi_threaded: MultiThreaded) -> RequestResult:
        task = bench.submit("beside", run_multi_threaded=multi_threaded)
        await asyncio.to_thread(bench.work.started.acquire)
        bench.work.gate.set()
        return await task

    play(check, threads=threads, multi_threads=3)


@on_loop()
async def test_a_failing_multi_threaded_run_is_tried_one_by_one(bench: Bench) -> None:
    """The guilty item of a shared run is found also where all cores were given to it."""
    bench.work.guilty = {"bad"}

    def run_multi_threaded(payloads: Sequence[Any]) -> list[Any]:
        return bench.work(payloads)

    with pytest.raises(EngineError, match=r"guilty: \['bad'\]"):
        await bench.submit("good", "bad", run_multi_threaded=run_multi_threaded)
    assert [["good", "bad"], ["good"], ["bad"]] == bench.work.batches


@on_loop(threads=2, queue=Watched)
async def test_the_next_stage_of_a_lone_request_is_alone_too(bench: Bench) -> None:
    """The thread that made the next stage is not running then, so that it does not count; it takes the work itself and wakes no other."""
    ran: list[str] = []
    second = bench.stage("text", run=lambda payloads: ran.append("run") or list(payloads))  # type: ignore[func-returns-value]
    second = replace(second, run_multi_threaded=lambda payloads: ran.append("multi_threaded") or list(payloads))  # type: ignore[func-returns-value]
    assert isinstance(bench.queue, Watched)
    for requests in range(50):
        while bench.queue.in_vain < 2 + requests:  # until both threads sleep
            await asyncio.sleep(0)
        stage = bench.stage("raw", key=None, finish=lambda results: second)
        assert ["text"] == (await bench.scheduler.run(bench.admit(), stage)).value
    assert ["multi_threaded"] * 50 == ran
    # both threads at the start, and of each request but the last the one thread that its first stage has woken
    assert 2 + 49 <= bench.queue.in_vain <= 2 + 50


class Delivery:
    """A `finish` that stands still until it is let go, as one that decodes for long."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, results: Sequence[Any]) -> list[Any]:
        assert self.gate.wait(20), "the test never let it go"
        return list(results)


@pytest.mark.parametrize("guilty", [(), ("bad",)], ids=["whole", "in halves"])
@on_loop(threads=2, queue=Watched, manual=True)
async def test_the_next_stage_does_not_wait_for_the_rest_of_a_batch(bench: Bench, guilty: tuple[str, ...]) -> None:
    assert isinstance(bench.queue, Watched)
    bench.work.guilty, deliver = set(guilty), Delivery()
    blockers = [await bench.blocked(), await bench.blocked()]
    second = bench.stage("second", key=None)
    first = bench.submit("first", finish=lambda results: second)
    rest = [bench.submit("rest", finish=deliver), *(bench.submit(payload) for payload in guilty)]
    await asyncio.sleep(0)
    await bench.work.let_blockers_pass(bench.queue)
    bench.work.gate.set()
    assert ["second"] == (await first).value
    assert not rest[0].done()
    deliver.gate.set()
    assert ["rest"] == (await rest[0]).value
    await asyncio.gather(*blockers, *rest, return_exceptions=True)
    assert ["first", "rest", *guilty] in bench.work.batches


@on_loop(threads=2, queue=Watched, manual=True)
async def test_the_rest_of_a_request_does_not_wait_for_the_rest_of_a_batch(bench: Bench) -> None:
    """An inference thread that left a request's texts to others takes the next one once none of them runs, and not only when the other thread is done."""
    assert isinstance(bench.queue, Watched)
    deliver = Delivery()
    blockers = [await bench.blocked(), await bench.blocked()]
    stage = replace(bench.stage("a", "b"), work=[(8, "a"), (60, "b")])  # the second is too long for the batch of the first
    listed = asyncio.ensure_future(bench.scheduler.run(bench.admit(68), stage))
    rest = bench.submit("rest", finish=deliver)
    await asyncio.sleep(0)
    await bench.work.let_blockers_pass(bench.queue)
    bench.work.gate.set()
    assert ["a", "b"] == (await listed).value
    assert not rest.done()
    deliver.gate.set()
    await asyncio.gather(*blockers, rest)
    assert ["a", "rest"] in bench.work.batches


@on_loop(threads=2, manual=True)
async def test_a_thread_stays_free_for_those_who_come(bench: Bench) -> None:
    """While there are several callers a list that runs leaves one thread to the others."""
    blocker = await bench.blocked()
    listed = bench.submit("a", "b", "c", key=None, cost=lambda rows, length: 1000.0)
    await asyncio.to_thread(bench.work.started.acquire)
    await bench.work.let_one_pass()  # both threads' runs end, and one of the inference threads takes the second text
    text = bench.submit("text", timeout_s=3600.0)  # the runs of those thousand seconds may not have ended yet
    await asyncio.to_thread(bench.work.started.acquire)
    assert 1 == bench.queue.queue_items
    bench.work.gate.set()
    assert ["blocker"] == (await blocker).value
    assert ["text"] == (await text).value
    assert ["a", "b", "c"] == (await listed).value


class LongSteps:
    """Two requests whose next step takes long, such as tokenizing a long text, each until its gate is opened."""

    def __init__(self, bench: Bench) -> None:
        self.begun = threading.Semaphore(0)
        self.gates = [threading.Event(), threading.Event()]
        self.requests = [
            bench.submit(str(i), key=None, finish=partial(self._step, gate), long_step=True) for i, gate in enumerate(self.gates)
        ]

    def _step(self, gate: threading.Event, results: Sequence[Any]) -> list[Any]:
        self.begun.release()
        assert gate.wait(20)
        return list(results)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_short_text_does_not_wait_for_long_steps(threads: int) -> None:
    """Two long steps run one after the other, and a short text that comes meanwhile does not wait, even for the only thread."""

    async def check(bench: Bench) -> None:
        steps = LongSteps(bench)
        await asyncio.to_thread(steps.begun.acquire)
        assert bench.scheduler.busy_s > 0
        assert ["text"] == (await asyncio.wait_for(bench.submit("text"), 20)).value
        assert not steps.begun.acquire(blocking=False)
        for gate, request in zip(steps.gates, steps.requests, strict=True):
            gate.set()
            await request

    play(check, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_step_does_not_wait_for_one_that_hangs(threads: int) -> None:
    async def check(bench: Hanging) -> None:
        steps = LongSteps(bench)
        await asyncio.to_thread(steps.begun.acquire)
        bench.look(UNPREDICTED_FLOORS * TICKS_OF_FLOOR)
        assert 1 == bench.hangs
        assert bench.scheduler.ready
        await asyncio.to_thread(steps.begun.acquire)
        for gate in steps.gates:
            gate.set()
        await asyncio.gather(*steps.requests)

    play(check, Hanging, manual=True, hung_floor_s=10.0, threads=threads)


@on_loop()
async def test_an_error_of_a_long_step_is_an_error_of_its_request(bench: Bench) -> None:
    """The thread for long steps continues after an error, and ends with the scheduler."""

    def fail(results: Sequence[Any]) -> Any:
        raise InvalidValueError("no")

    for _ in range(2):
        with pytest.raises(InvalidValueError):
            await bench.submit("a", key=None, finish=fail, long_step=True)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "long-steps"]
    await bench.scheduler.stop(0)
    assert not thread.is_alive()


@on_loop(threads=2)
async def test_what_was_left_to_others_runs_when_nobody_comes(bench: Bench) -> None:
    """The thread that ran the one text takes the next, while the other thread is busy all the time."""
    blocker = await bench.blocked()
    listed = bench.submit("a", "b", "c", key=None, run=list, cost=lambda rows, length: 0.05)
    assert ["a", "b", "c"] == (await listed).value
    bench.work.gate.set()
    assert ["blocker"] == (await blocker).value


@pytest.mark.parametrize("is_cause", [False, True])
@on_loop()
async def test_an_error_keeps_nothing_of_its_request(bench: Bench, is_cause: bool) -> None:
    """Tokens of a refused text are freed before its caller has the answer: the error, or its cause, has a traceback, whose frames had them."""
    held: list[weakref.ref[Text]] = []

    def fail() -> None:
        tokens = Text()
        held.append(weakref.ref(tokens))
        raise InvalidValueError("no")

    def refuse(results: Sequence[Any]) -> None:
        try:
            fail()
        except InvalidValueError as error:
            if is_cause:
                raise InvalidValueError("not this") from error
            raise

    with pytest.raises(InvalidValueError) as error:
        await bench.submit("text", finish=refuse)
    assert error.value.__traceback__ is not None
    assert held[0]() is None


def test_a_refused_request_is_freed_without_the_garbage_collector() -> None:
    """Its error is in no cycle: ten callers whose texts were refused after tokenizing would otherwise hold 300 MB for minutes."""

    def refuse(results: Sequence[Any]) -> None:
        raise InvalidValueError("no")

    async def check(bench: Bench) -> None:
        kept = weakref.WeakSet[Text]()

        async def predict() -> None:
            kept.add(tokens := Text())
            await bench.scheduler.run(bench.admit(), bench.stage("text", finish=refuse))
            del tokens

        gc.disable()
        try:
            with contextlib.suppress(InvalidValueError):
                await predict()
            await bench.submit("next")  # the thread that delivered the error has returned from it
            assert 0 == len(kept)
        finally:
            gc.enable()

    play(check)


def test_python_switches_threads_as_before_once_it_has_stopped() -> None:
    before = sys.getswitchinterval()

    async def check(bench: Bench) -> None:
        assert SWITCH_S == pytest.approx(sys.getswitchinterval())

    play(check)
    assert before == sys.getswitchinterval()
