"""Scheduler runs the queue with real threads and a real event loop. The work is a fake that can block or fail."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from bertserve.service.errors import EngineError, ExpiredError, RefusedError, UnavailableError
from bertserve.service.models.prepare_pool import MAX_PREPARE_CHARS
from bertserve.service.scheduling.records import Batch
from bertserve.service.scheduling.request_queue import RequestQueue
from support import until
from support.scheduler_harness import Harness, constant_seconds


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.harness(threads=3, max_queue_tokens=100_000)
def test_each_caller_gets_its_own_results_in_order(harness: Harness, new_loop: Any) -> None:
    requests = [[(i, k) for k in range(1 + i % 5)] for i in range(300)]

    async def check() -> None:
        async with harness, asyncio.timeout(20):
            tasks = [harness.submit(*request, tokens=1 + i % 9) for i, request in enumerate(requests)]
            assert await asyncio.gather(*tasks) == requests

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(check())
    assert max(map(len, harness.work.batches)) > 1


@pytest.mark.harness(manual=True)
async def test_a_single_request_is_not_delayed(harness: Harness) -> None:
    """A waiting thread starts it at once, without a timer: the clock of this test does not move."""
    for _ in range(20):
        assert await harness.run("x") == ["x"]


async def test_a_request_has_further_items_after_its_results(harness: Harness) -> None:
    assert await harness.run("a", then=["b", "c"]) == ["c"]
    assert harness.work.batches == [["a"], ["b"], ["c"]]


@pytest.mark.harness(manual=True)
async def test_a_failing_batch_runs_again_in_halves(harness: Harness) -> None:
    """Three halvings find the bad item among eight, and the other requests are answered."""
    blocker = await harness.block()
    harness.work.guilty = {5}
    tasks = [harness.submit(i) for i in range(8)]
    await harness.until_queued(8)
    harness.work.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in outcomes if isinstance(error, Exception)] == ["guilty: [5]"]
    assert [result[0] for result in outcomes if isinstance(result, list)] == [0, 1, 2, 3, 4, 6, 7]
    assert harness.work.batches[1:] == [[*range(8)], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5], [4], [5], [6, 7]]
    await blocker


@pytest.mark.harness(manual=True)
async def test_a_cancelled_request_is_not_retried(harness: Harness) -> None:
    blocker = await harness.block()
    harness.work.guilty = {"bad"}
    stayer, leaver, bad = [harness.submit(payload) for payload in ("stayer", "leaver", "bad")]
    await harness.until_queued(3)
    await harness.work.let_one_pass()
    leaver.cancel()
    await asyncio.wait([leaver])
    harness.work.gate.set()
    assert await stayer == ["stayer"]
    with pytest.raises(EngineError, match="guilty"):
        await bad
    await blocker
    assert harness.work.batches == [["blocker"], ["stayer", "leaver", "bad"], ["stayer"], ["bad"]]


async def test_the_first_failure_ends_the_whole_request(harness: Harness) -> None:
    harness.work.guilty = {"bad"}
    with pytest.raises(EngineError, match="guilty"):
        await harness.run("a", "bad", "c", tokens=60)
    assert harness.queue.queue_items == 0


async def test_a_wrong_number_of_results_is_an_error(harness: Harness) -> None:
    """Too few results fail their batch, so results are never paired with the wrong texts."""
    harness.work.short = True
    with pytest.raises(EngineError):
        await harness.run("x")
    harness.work.short = False
    assert await harness.run("y") == ["y"]


@pytest.mark.harness(manual=True, max_queue_tokens=100)
async def test_current_runs_count_in_the_predicted_wait(harness: Harness) -> None:
    """If all threads are busy for longer than the deadline, a request is refused although the queue is empty."""
    harness.work.gate.clear()
    long = harness.submit("long", runner=harness.runs(seconds=constant_seconds(8.0)), tokens=60)
    await asyncio.to_thread(harness.work.started.acquire)
    with pytest.raises(RefusedError) as error:
        await harness.run("text", tokens=60, timeout_s=100.0)
    assert (error.value.reason, error.value.retry_after_s) == ("queue_full", 8.0)
    harness.clock.now += 1.0
    with pytest.raises(RefusedError) as error:
        await harness.run("text", timeout_s=5.0)
    assert error.value.reason == "deadline"
    harness.clock.now += 0.9 * error.value.retry_after_s
    with pytest.raises(RefusedError):
        await harness.run("text", timeout_s=5.0)
    harness.clock.now += 0.1 * error.value.retry_after_s + 0.001
    text = harness.submit("text", timeout_s=5.0)
    await asyncio.sleep(0)
    harness.work.gate.set()
    assert [await long, await text] == [["long"], ["text"]]


class Text:
    """A payload or an answer for weak references."""

    results: Sequence[Any] = ()


async def test_an_answered_request_keeps_no_payloads_or_results(harness: Harness) -> None:
    alive = weakref.WeakSet[Text]()

    def finish(results: Sequence[Any]) -> Text:
        answer = Text()
        alive.update([*results, answer])
        answer.results = results
        return answer

    await harness.run(Text(), finish=finish)
    harness.work.batches.clear()
    await harness.run("next")  # an inference thread keeps its last batch
    gc.collect()
    assert len(alive) == 0


@pytest.mark.harness(max_queue_tokens=100_000)
async def test_a_thousand_cancelled_requests_leave_nothing_in_memory(harness: Harness) -> None:
    alive, alone = weakref.WeakSet[Text](), harness.runs(shares_batches=False)
    blocker, stayer = await harness.block(), harness.submit("stayer")
    texts = [[Text() for _ in range(1 + i % 3)] for i in range(1000)]
    alive.update(text for some in texts for text in some)
    tasks = [harness.submit(*some, runner=[alone, harness.runner][i % 2], tokens=1 + i % 60) for i, some in enumerate(texts)]
    await harness.until_queued(len(alive) + 1)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in outcomes] == [asyncio.CancelledError] * 1000
    del texts, tasks, outcomes, task
    await asyncio.sleep(0)  # the current step of the event loop holds the tasks
    gc.collect()
    assert harness.queue.queue_items == 1
    assert len(alive) == 0
    harness.work.gate.set()
    assert [await blocker, await stayer] == [["blocker"], ["stayer"]]


@pytest.mark.harness(manual=True)
async def test_a_request_expires_only_while_an_item_waits(harness: Harness) -> None:
    harness.work.gate.clear()
    running = harness.submit("running", timeout_s=0.3)
    await asyncio.to_thread(harness.work.started.acquire)
    with pytest.raises(ExpiredError):
        await harness.run("late", timeout_s=0.3)  # it ends after the deadline of the one that runs
    harness.clock.now += 1.0
    harness.work.gate.set()
    assert await running == ["running"]


@pytest.mark.harness(manual=True)
async def test_a_request_expires_between_two_runs(harness: Harness) -> None:
    """The deadline passed during the first run, when no item waited."""
    harness.work.gate.clear()
    request = harness.submit("first", then=["second"], timeout_s=10.0)
    await asyncio.to_thread(harness.work.started.acquire)
    harness.clock.now += 11.0
    harness.work.gate.set()
    with pytest.raises(ExpiredError):
        await request
    assert harness.work.batches == [["first"]]


async def test_stop_answers_admitted_requests_and_refuses_new_ones(harness: Harness) -> None:
    assert not Harness().scheduler.ready  # it has not started
    blocker = await harness.block()
    waiting = harness.submit("waiting")
    await harness.until_queued(1)
    stopping = asyncio.ensure_future(harness.scheduler.stop(10))
    await until(lambda: not harness.scheduler.ready)
    with pytest.raises(UnavailableError):
        await harness.run("x")
    harness.work.gate.set()
    assert [await blocker, await waiting] == [["blocker"], ["waiting"]]
    await stopping


class Broken(RequestQueue):
    """A queue that starts no batch, but raises an error, when `broken` is set."""

    broken = False

    def start_batch(self, now: float) -> Batch | None:
        if self.broken:
            raise RuntimeError("a bug of the queue")
        return super().start_batch(now)


@pytest.mark.harness(threads=2, queue=Broken)
async def test_a_dead_thread_ends_readiness_and_fails_all_requests(harness: Harness) -> None:
    blocker = await harness.block()
    harness.queue.broken = True
    errors = await asyncio.gather(harness.submit("x"), blocker, harness.submit("later"), return_exceptions=True)
    assert [error.values["reason"] for error in errors if isinstance(error, UnavailableError)] == [harness.scheduler.failure] * 3
    assert len({id(error) for error in errors}) == 3  # a stream adds the number of its line to the message
    assert not harness.scheduler.ready


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
async def test_an_error_of_a_request_does_not_affect_its_batch_mates(harness: Harness, fault: str, place: str) -> None:
    fault_error, expected, message = FAULTS[fault]

    def fails(values: Sequence[Any], here: str) -> list[Any]:
        if place == here and "bad" in values:
            raise fault_error
        return list(values)

    runner = harness.runs(lambda payloads: fails(payloads, "run"))
    blocker = await harness.block()
    tasks = {
        payload: harness.submit(payload, runner=runner, finish=lambda results: fails(results, "finish"))
        for payload in ("good", "bad", "fine", "well")
    }
    await harness.until_queued(4)
    harness.work.gate.set()
    with pytest.raises(expected, match=message):
        await tasks.pop("bad")
    assert [await task for task in tasks.values()] == [["good"], ["fine"], ["well"]]
    assert harness.scheduler.ready
    assert await harness.run("after") == ["after"]
    await blocker


async def test_stop_waits_for_requests_that_are_tokenized(harness: Harness) -> None:
    gate = threading.Event()
    tokenized = harness.submit("x", tokenize=lambda: gate.wait(20))
    await until(lambda: harness.queue.requests)
    stopping = asyncio.ensure_future(harness.scheduler.stop(10))
    await until(lambda: not harness.scheduler.ready)
    gate.set()
    assert await tokenized == ["x"]
    await stopping


async def test_requests_that_are_tokenized_during_the_stop_are_refused(harness: Harness) -> None:
    start, gate = threading.Event(), threading.Event()

    def tokenize() -> None:
        start.set()
        assert gate.wait(20)

    running, waiting = (harness.submit("x", tokenize=tokenize) for _ in range(2))
    await asyncio.to_thread(start.wait)
    await harness.scheduler.stop(0.0)
    gate.set()
    for task in (running, waiting):
        with pytest.raises(UnavailableError):
            await task


async def test_texts_that_wait_to_be_tokenized_are_limited(harness: Harness) -> None:
    gate = threading.Event()
    running, waiting = (harness.submit("x", tokenize=lambda: gate.wait(20), chars=MAX_PREPARE_CHARS // 2) for _ in range(2))
    await until(lambda: len(harness.queue.requests) == 2)
    with pytest.raises(RefusedError):
        await harness.run("x", tokenize=list)
    waiting.cancel()
    await asyncio.wait([waiting])
    with pytest.raises(ExpiredError):
        await harness.run("x", tokenize=list, timeout_s=0.01)
    gate.set()
    assert [await running, await harness.run("y", tokenize=list, chars=2 * MAX_PREPARE_CHARS)] == [["x"], ["y"]]


@pytest.mark.harness(threads=2, max_queue_tokens=100_000)
async def test_a_result_is_never_set_twice(harness: Harness) -> None:
    """Each request ends exactly once while cancellation, expiry, failure and completion race; the threads continue."""
    harness.work.guilty = {i for i in range(400) if i % 7 == 0}
    tasks = [harness.submit(i, i + 1000, tokens=1 + i % 60, timeout_s=0.002 if i % 5 == 0 else 20) for i in range(400)]

    async def leave() -> None:
        for task in tasks[::3]:
            task.cancel()
            await asyncio.sleep(0)

    results = await asyncio.gather(leave(), *tasks, return_exceptions=True)
    kinds = {type(result) for result in results[1:]}
    assert {list, asyncio.CancelledError, EngineError} <= kinds <= {list, asyncio.CancelledError, ExpiredError, EngineError, RefusedError}
    answers = [(i, result) for i, result in enumerate(results[1:]) if isinstance(result, list)]
    assert answers == [(i, [i, i + 1000]) for i, _ in answers]
    assert harness.scheduler.ready


@pytest.mark.harness(threads=2, threads_per_run=2, manual=True)
async def test_a_run_is_multi_threaded_only_without_other_work(harness: Harness) -> None:
    """It is if no other work runs, waits or has run recently."""
    multi_threaded_payloads: list[Any] = []

    def multi_threaded(payloads: Sequence[Any]) -> Sequence[Any]:
        multi_threaded_payloads.extend(payloads)
        return payloads

    runner, alone = (harness.runs(run_multi_threaded=multi_threaded, shares_batches=shares) for shares in (True, False))
    await harness.run("lone", runner=runner)
    await harness.run(*range(8), runner=alone)
    for delay_s, payload in ((1.0, "soon after"), (0.1, "later")):
        await asyncio.to_thread(harness.scheduler.on_each_thread, [list])  # a thread can still be behind its last run
        harness.clock.now += delay_s
        await harness.run(payload, runner=runner)
    assert multi_threaded_payloads == ["lone", "later"]
    blocker = await harness.block()
    beside = harness.submit("beside", runner=runner)
    await asyncio.to_thread(harness.work.started.acquire)
    harness.work.gate.set()
    await asyncio.gather(blocker, beside)
    assert multi_threaded_payloads == ["lone", "later"]


@pytest.mark.harness(threads=2)
async def test_a_decoder_delays_neither_its_batch_mates_nor_the_next_items_of_others(harness: Harness) -> None:
    decoder = threading.Event()
    blockers = [await harness.block(), await harness.block()]
    first = harness.submit("first", then=["second"])
    slow = harness.submit("slow", finish=lambda results: decoder.wait(20) and list(results))
    await harness.until_queued(2)
    harness.work.gate.set()
    assert await first == ["second"]
    assert not slow.done()
    decoder.set()
    assert await slow == ["slow"]
    await asyncio.gather(*blockers)
    assert ["first", "slow"] in harness.work.batches


@pytest.mark.harness(threads=2, manual=True)
async def test_a_thread_stays_free_for_new_requests(harness: Harness) -> None:
    blocker = await harness.block()
    list_task = harness.submit("a", "b", "c", runner=harness.runs(seconds=constant_seconds(1000.0), shares_batches=False))
    await asyncio.to_thread(harness.work.started.acquire)
    await harness.work.let_one_pass()  # both runs end, and one thread takes the second text
    text = harness.submit("text", timeout_s=3600.0)  # the runs that cost 1,000 s need not have ended yet
    await asyncio.to_thread(harness.work.started.acquire)
    assert harness.queue.queue_items == 1
    harness.work.gate.set()
    assert [await blocker, await text, await list_task] == [["blocker"], ["text"], ["a", "b", "c"]]


@pytest.mark.harness(threads=2)
async def test_a_list_continues_on_its_thread_if_no_other_request_arrives(harness: Harness) -> None:
    """The thread that ran an item takes the next one, while the other thread stays busy."""
    blocker = await harness.block()
    assert await harness.run("a", "b", "c", runner=harness.runs(list, constant_seconds(0.05), shares_batches=False)) == ["a", "b", "c"]
    harness.work.gate.set()
    assert await blocker == ["blocker"]
