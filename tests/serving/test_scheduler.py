"""Scheduler runs the queue with real threads and a real event loop. The work is a fake that can block or fail."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import uvloop

from bertserve.service.errors import EngineError, ExpiredError, InvalidValueError, RefusedError, UnavailableError
from bertserve.service.scheduling.request_queue import RequestQueue
from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest
from bertserve.service.scheduling.scheduler import Scheduler
from bertserve.service.scheduling.stage import RequestResult, Stage
from bertserve.service.scheduling.watchdog import HUNG_FLOOR_S, OVERDUE_S
from fakes import ManualClock


class Work:
    """A run function that returns its payloads, and can block, fail on a payload, or return too few results."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.guilty: set[Any] = set()
        self.short = False

    def __call__(self, payloads: Sequence[Any]) -> list[Any]:
        self.started.release()
        gate = self.gate  # `let_one_pass` replaces the gate
        assert gate.wait(20), "the test never opened the gate"
        self.batches.append(list(payloads))
        if self.guilty & set(payloads):
            raise EngineError(f"guilty: {sorted(self.guilty & set(payloads))}")
        return list(payloads)[1 if self.short else 0 :]

    async def let_blockers_pass(self, queue: Watched) -> None:
        """Ends the runs at the gate, and returns when one thread waits at a new gate and another thread sleeps."""
        before, self.gate, asked = self.gate, threading.Event(), queue.in_vain
        before.set()
        await asyncio.to_thread(self.started.acquire)
        while queue.in_vain == asked:
            await asyncio.sleep(0)

    async def let_one_pass(self) -> None:
        """Ends the run at the gate, and returns when the next run waits at a new gate."""
        before, self.gate = self.gate, threading.Event()
        before.set()
        await asyncio.to_thread(self.started.acquire)


class Watched(RequestQueue):
    """A queue that counts the calls of `take` without a batch; an inference thread makes one before it sleeps."""

    in_vain = 0

    def take(self, now: float, **limits: bool) -> list[Item]:
        batch = super().take(now, **limits)
        self.in_vain += not batch
        return batch


def batched(rows: int, length: int) -> float:
    return 1e-3 + rows * length * 1e-9


class Bench:
    """A scheduler under test and its fake work."""

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
        """Returns a stage with one item per payload, whose value is the list of results."""
        fields = {"run": self.work, "finish": list, "key": key, "cost": batched} | changes
        return Stage(work=[(tokens, payload) for payload in payloads], **fields)

    def submit(self, *payloads: Any, timeout_s: float = 20.0, **options: Any) -> asyncio.Task[RequestResult]:
        return asyncio.ensure_future(self.scheduler.run(self.admit(8 * len(payloads), timeout_s), self.stage(*payloads, **options)))

    async def blocked(self) -> asyncio.Task[RequestResult]:
        """Occupies one thread until the gate opens, and returns the task of that request."""
        self.work.started = threading.Semaphore(0)  # discards the starts of earlier runs
        self.work.gate.clear()
        task = self.submit("blocker", key=None)
        await asyncio.sleep(0)
        await asyncio.to_thread(self.work.started.acquire)
        return task


def play(
    check: Callable[[Any], Awaitable[None]], kind: type[Bench] = Bench, *, new_loop: Any = asyncio.new_event_loop, **options: Any
) -> None:
    """Runs a check with a started scheduler, for at most 20 s, and stops the scheduler."""

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
    """Returns a decorator that makes a test from a coroutine with a bench and, after it, fixtures."""

    def decorate(check: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            play(lambda bench: check(bench, **fixtures), kind, **options)

        _, *rest = inspect.signature(check).parameters.values()
        test.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]  # pytest reads it for fixtures
        return test

    return decorate


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_each_caller_gets_its_own_results_in_order(new_loop: Any) -> None:
    """No result is swapped or lost among 300 requests on several threads with shared batches."""

    async def check(bench: Bench) -> None:
        requests = [[(i, k) for k in range(1 + i % 5)] for i in range(300)]
        answers = await asyncio.gather(*(bench.submit(*request, tokens=1 + i % 9) for i, request in enumerate(requests)))
        assert requests == [answer.value for answer in answers]
        assert max(map(len, bench.work.batches)) > 1

    play(check, new_loop=new_loop, threads=3, max_queue_tokens=100_000)


@on_loop(manual=True)
async def test_a_request_with_several_runs_waits_only_for_the_first_run(bench: Bench) -> None:
    """`wait_s` ends when the first run starts; `runs_s` is the total time of the runs of all stages."""

    def slow(payloads: Sequence[Any]) -> list[Any]:
        bench.clock.now += 1.0
        return list(payloads)

    second = Stage(work=[(60, "b"), (60, "c")], run=slow, finish=list, key="k", cost=batched)
    first = Stage(work=[(60, "a")], run=slow, finish=lambda _: second, key="k", cost=batched)
    done = await bench.scheduler.run(bench.admit(180), first)
    assert (["b", "c"], 0.0, 3.0) == (done.value, done.wait_s, done.runs_s)


@on_loop(manual=True)
async def test_a_single_request_is_not_delayed(bench: Bench) -> None:
    """A waiting thread starts it at once, without a timer: the clock of this test does not move."""
    assert [0.0] * 20 == [(await bench.submit("x")).queue_s for _ in range(20)]


@on_loop(manual=True)
async def test_requests_that_wait_for_a_run_share_the_next_batch(bench: Bench) -> None:
    blocker = await bench.blocked()
    others = [bench.submit(i) for i in range(8)]
    await asyncio.sleep(0)
    bench.work.gate.set()
    await asyncio.gather(blocker, *others)
    assert [["blocker"], list(range(8))] == bench.work.batches


@on_loop()
async def test_an_item_over_the_batch_limit_fails_only_its_request(bench: Bench) -> None:
    """The failed request frees its place in the queue."""
    with pytest.raises(InvalidValueError, match="65 tokens"):
        await bench.submit("x", tokens=65)
    assert ["y"] == (await bench.submit("y")).value


@on_loop(manual=True)
async def test_a_failing_batch_runs_again_in_halves(bench: Bench) -> None:
    """Three halvings find the bad item among eight, and the other requests are answered."""
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
async def test_a_cancelled_request_is_not_retried(bench: Bench) -> None:
    """The retries of a failed batch leave out the items of cancelled requests."""
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
    """Too few results fail their batch, so results are never paired with the wrong texts."""
    bench.work.short = True
    with pytest.raises(EngineError, match="1 gave 0 results"):
        await bench.submit("x")
    bench.work.short = False
    assert ["y"] == (await bench.submit("y")).value


@on_loop(manual=True)
async def test_current_runs_count_in_the_predicted_wait(bench: Bench) -> None:
    """If all threads are busy for longer than the deadline, a request is refused although the queue is empty."""
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
    """A payload or an answer for weak references."""

    results: Sequence[Any] = ()


@on_loop()
async def test_an_answered_request_keeps_no_payloads_or_results(bench: Bench) -> None:
    kept = weakref.WeakSet[Text]()

    def finish(results: Sequence[Any]) -> Text:
        answer = Text()
        kept.update([*results, answer])
        answer.results = results
        return answer

    open_request = bench.admit()  # with an open request, the queue frees ended requests later
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
async def test_a_thousand_cancelled_requests_leave_nothing_in_memory(bench: Bench) -> None:
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
    await asyncio.sleep(0)  # the current step of the event loop holds the tasks
    gc.collect()
    assert (0, 0, 2) == (bench.queue.queue_items, bench.queue.queue_tokens, len(kept))  # the threads hold the two that run
    bench.work.gate.set()
    while len(bench.work.batches) < 2:
        await asyncio.sleep(0)
    assert [[Text], [Text]] == [[type(payload) for payload in batch] for batch in bench.work.batches]
    bench.work.batches.clear()
    assert [["a"], ["b"]] == [answer.value for answer in await asyncio.gather(bench.submit("a"), bench.submit("b"))]
    assert ["a", "b"] == sorted(payload for batch in bench.work.batches for payload in batch)
    assert bench.scheduler.ready
    while kept:  # until both threads wait again
        gc.collect()
        await asyncio.sleep(0)


@on_loop(manual=True)
async def test_a_timer_that_fires_early_fires_again(bench: Bench) -> None:
    """Uvloop's timers can fire 1 ms before the deadline by the scheduler's clock; the request still expires."""
    blocker = await bench.blocked()
    late = bench.submit("late", timeout_s=0.01)
    await asyncio.sleep(0.05)  # the timer has fired; the scheduler's clock has not moved
    bench.clock.now += 1.0
    with pytest.raises(ExpiredError):
        await late
    bench.work.gate.set()
    await blocker


@on_loop(manual=True)
async def test_a_request_whose_deadline_passes_before_it_is_queued_expires(bench: Bench) -> None:
    """The error comes at once, even if all inference threads are busy."""
    blocker = await bench.blocked()
    request = bench.admit(timeout_s=1.0)
    bench.clock.now += 2.0
    with pytest.raises(ExpiredError):
        await bench.scheduler.run(request, bench.stage("late"))
    bench.work.gate.set()
    await blocker


@on_loop()
async def test_stop_answers_admitted_requests_and_refuses_new_ones(bench: Bench) -> None:
    """Queued requests are answered within the shutdown timeout; new requests are refused at once."""
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
    """A queue whose `take` raises an error when `broken` is set."""

    broken = False

    def take(self, now: float, **limits: bool) -> list[Item]:
        if self.broken:
            raise RuntimeError("a bug of the queue")
        return super().take(now, **limits)


@on_loop(threads=2, queue=Broken)
async def test_a_dead_thread_ends_readiness_and_fails_all_requests(bench: Bench) -> None:
    """If the scheduler's own code fails, running and waiting requests fail, and new requests are refused."""
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
    """An error like the panic of a native library, which is not an `Exception`."""


FAULTS: dict[str, tuple[BaseException, type[Exception], str]] = {
    "error": (ValueError("as it is"), ValueError, "as it is"),
    "exit": (SystemExit(3), EngineError, "SystemExit"),
    "panic": (NativePanicError("of the tokenizer"), EngineError, "NativePanicError"),
    "memory": (MemoryError(), EngineError, "enough memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["run", "finish"])
def test_an_error_of_a_request_does_not_affect_its_batch_mates(fault: str, place: str) -> None:
    """Any error of a run or a decoder fails only the request that causes it, and the inference threads continue."""
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
async def test_a_batch_over_the_memory_limit_runs_in_parts(bench: Bench) -> None:
    """A batch that raises `MemoryError` runs again in halves, and all requests are answered."""
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
    """A bench whose watchdog ticks on demand. A tick is 1 s; a run hangs after ten ticks or 20 times its prediction."""

    def look(self, ticks: int) -> None:
        for _ in range(ticks):
            self.scheduler._watchdog.look()


def test_a_hung_run_is_logged_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    """A run counts as hung after ten ticks of 1 s. The scheduler stays ready until all inference threads hang."""

    async def check(bench: Hanging) -> None:
        first = await bench.blocked()
        bench.look(9)
        assert (0, True) == (bench.hangs, bench.scheduler.ready)
        bench.look(1)
        assert (1, True) == (bench.hangs, bench.scheduler.ready)
        second = bench.submit("second", key=None)
        assert 1 == bench.queue.threads  # predicted waits use the remaining threads
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
async def test_requests_in_a_hung_run_fail_after_their_deadlines(bench: Hanging) -> None:
    """Each request fails `OVERDUE_S` after its own deadline, even if it waits for a retry of a failed batch."""
    blocker = await bench.blocked()
    bench.work.guilty = {"bad"}
    soon, bad, late = bench.submit("soon", timeout_s=20.0), bench.submit("bad", timeout_s=20.0), bench.submit("late", timeout_s=60.0)
    await asyncio.sleep(0)
    await bench.work.let_one_pass()  # the three share a run
    await bench.work.let_one_pass()  # the batch has failed, and its first half hangs
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
    """The test does not call the watchdog: a hung run ends readiness and fails its request."""
    bench.work.gate.clear()
    task = bench.submit("x")
    await asyncio.sleep(0)
    await asyncio.to_thread(bench.work.started.acquire)
    bench.clock.now += 100.0
    with pytest.raises(EngineError, match="has hung"):
        await task
    assert not bench.scheduler.ready


@on_loop(Hanging, manual=True, hung_floor_s=10.0)
async def test_stop_does_not_wait_for_hung_threads(bench: Hanging) -> None:
    """If all threads hang, the shutdown timeout is skipped. Running requests get an engine error, waiting requests `UnavailableError`."""
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


@on_loop(threads=2, max_queue_tokens=100_000)
async def test_a_result_is_never_set_twice(bench: Bench) -> None:
    """Each request ends exactly once while cancellation, expiry, failure and completion race; the threads continue."""
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


class MultiThreaded:
    """A `run_multi_threaded` function that returns its payloads and records them."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __call__(self, payloads: Sequence[Any]) -> list[Any]:
        self.ran += payloads
        return list(payloads)


@on_loop(threads=2, multi_threads=2, manual=True)
async def test_a_run_is_multi_threaded_only_without_other_work(bench: Bench) -> None:
    """`run_multi_threaded` runs only if no other work runs, waits or has run recently."""
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


@on_loop()
async def test_a_failed_multi_threaded_run_is_retried_item_by_item(bench: Bench) -> None:
    """The retries find the bad item."""
    bench.work.guilty = {"bad"}

    def run_multi_threaded(payloads: Sequence[Any]) -> list[Any]:
        return bench.work(payloads)

    with pytest.raises(EngineError, match=r"guilty: \['bad'\]"):
        await bench.submit("good", "bad", run_multi_threaded=run_multi_threaded)
    assert [["good", "bad"], ["good"], ["bad"]] == bench.work.batches


class Delivery:
    """A `finish` that blocks until its gate opens, like a long decoding."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, results: Sequence[Any]) -> list[Any]:
        assert self.gate.wait(20), "the test never let it go"
        return list(results)


@pytest.mark.parametrize("guilty", [(), ("bad",)], ids=["whole", "in halves"])
@on_loop(threads=2, queue=Watched, manual=True)
async def test_the_next_stage_of_a_request_does_not_wait_for_its_batch_mates(bench: Bench, guilty: tuple[str, ...]) -> None:
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


@on_loop(threads=2, manual=True)
async def test_a_thread_stays_free_for_new_requests(bench: Bench) -> None:
    """While there are several clients, a running list leaves one thread to other requests."""
    blocker = await bench.blocked()
    listed = bench.submit("a", "b", "c", key=None, cost=lambda rows, length: 1000.0)
    await asyncio.to_thread(bench.work.started.acquire)
    await bench.work.let_one_pass()  # both runs end, and one thread takes the second text
    text = bench.submit("text", timeout_s=3600.0)  # the runs that cost 1,000 s may not have ended yet
    await asyncio.to_thread(bench.work.started.acquire)
    assert 1 == bench.queue.queue_items
    bench.work.gate.set()
    assert ["blocker"] == (await blocker).value
    assert ["text"] == (await text).value
    assert ["a", "b", "c"] == (await listed).value


class LongSteps:
    """Two requests with a long step, such as tokenizing a long text; each step ends when its gate opens."""

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
    """Two long steps run one after the other. A short text does not wait for them, even with a single thread."""

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


@on_loop(threads=2)
async def test_a_list_continues_on_its_thread_if_no_other_request_arrives(bench: Bench) -> None:
    """The thread that ran an item takes the next one, while the other thread stays busy."""
    blocker = await bench.blocked()
    listed = bench.submit("a", "b", "c", key=None, run=list, cost=lambda rows, length: 0.05)
    assert ["a", "b", "c"] == (await listed).value
    bench.work.gate.set()
    assert ["blocker"] == (await blocker).value
