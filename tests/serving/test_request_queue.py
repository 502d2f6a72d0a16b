"""RequestQueue keeps its limits, its order and its deadlines. The tests pass the time in and need no threads."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.errors import RefusedError
from bertserve.service.scheduling.records import Item, ScheduledRequest
from bertserve.service.scheduling.request_queue import RequestQueue
from support.fakes import FakeRunner, fake_work

Seconds = Callable[[int, int], float]


def expensive_start(rows: int, length: int) -> float:
    """Predicts runs with a high fixed cost, as on a GPU: all items that fit are batched."""
    return 1.0 + rows * length * 1e-6


def no_fixed_cost(rows: int, length: int) -> float:
    """Predicts runs in which a batch saves no time, such as long texts on a CPU."""
    return rows * length * 1e-3


MODEL = FakeRunner(expensive_start)


def alone(seconds: float) -> FakeRunner:
    """Returns a runner of items that share no batch and take this long."""
    return FakeRunner(lambda rows, length: seconds, shares_batches=False)


def new_queue(**options: Any) -> RequestQueue:
    return RequestQueue(**{"max_queue_tokens": 10_000} | options)


def add(queue: RequestQueue, *tokens: int, now: float = 0.0, deadline: float = 100.0, runner: FakeRunner = MODEL) -> ScheduledRequest:
    """Queues a request with one item per number of tokens."""
    request = ScheduledRequest(runner, fake_work(sum(tokens)), now, deadline)
    try:
        queue.open(request, now)
        queue.put(request, [Item(n) for n in tokens], now)
    except RefusedError:
        queue.close(request)
        raise
    return request


def start(queue: RequestQueue, now: float = 0.0) -> list[Item]:
    """Starts the next batch, and returns its items; none if nothing can start."""
    batch = queue.start_batch(now)
    return batch.items if batch else []


def take(queue: RequestQueue, now: float = 0.0) -> list[Item]:
    """Starts the next batch, which ends at once."""
    current = set(queue.batches)
    items = start(queue, now)
    queue.batches &= current
    return items


def drain(queue: RequestQueue, now: float = 0.0) -> list[list[Item]]:
    batches = []
    while items := take(queue, now):
        batches.append(items)
    return batches


def test_texts_of_similar_length_share_a_batch() -> None:
    queue = new_queue()
    for tokens in (16, 4, 15):
        add(queue, tokens)
    assert [item.length for item in take(queue)][:2] == [16, 15]


@pytest.mark.parametrize("other", [alone(1.0), FakeRunner(expensive_start)])
def test_only_texts_of_one_model_share_a_batch(other: FakeRunner) -> None:
    queue = new_queue()
    for runner in (other, MODEL, other):
        add(queue, 8, runner=runner)
    assert [len(batch) for batch in drain(queue)] == ([2, 1] if other.shares_batches else [1, 1, 1])


def test_texts_are_not_batched_if_a_batch_saves_no_time() -> None:
    """Each text then runs in its own batch, and no text waits for the rows of others."""
    queue, runner = new_queue(), FakeRunner(no_fixed_cost)
    for _ in range(4):
        add(queue, 8, runner=runner)
    assert [len(batch) for batch in drain(queue)] == [1, 1, 1, 1]


def test_a_short_text_does_not_join_if_its_padding_costs_more_than_its_run() -> None:
    queue, runner = new_queue(), FakeRunner(lambda rows, length: 0.010 + rows * length * 1e-3, max_batch_tokens=4096)
    for tokens in (8, 64, *[8] * 9):
        add(queue, tokens, runner=runner)
    batches = [[item.length for item in batch] for batch in drain(queue)]
    assert [64] in batches
    assert len(batches[0]) > 1


def test_each_model_has_its_own_batch_limit() -> None:
    queue = new_queue()
    for runner in [FakeRunner(expensive_start, max_batch_tokens=limit) for limit in (32, 16)] * 4:
        add(queue, 8, runner=runner)
    assert [len(batch) for batch in drain(queue)] == [4, 2, 2]


def test_an_item_over_the_batch_limit_runs_alone() -> None:
    """Only the masks of a text, each of which counts as a token, can exceed the limit."""
    queue = new_queue()
    add(queue, 1, 65)
    assert sorted(([item.length for item in batch] for batch in drain(queue)), reverse=True) == [[65], [1]]


def test_admission_is_all_or_nothing() -> None:
    queue = new_queue(max_queue_tokens=100)
    first = add(queue, 60)
    for sizes in ((40, 1), (1, 1, 39)):
        with pytest.raises(RefusedError) as error:
            add(queue, *sizes)
        assert error.value.reason == "queue_full"
    assert queue.total_held_tokens == 60
    assert [[item.request for item in batch] for batch in drain(queue)] == [[first]]


def test_a_request_holds_its_tokens_until_it_ends() -> None:
    queue = new_queue(max_queue_tokens=100)
    first = add(queue, 60)
    take(queue)
    with pytest.raises(RefusedError):
        add(queue, 60)
    queue.close(first)
    assert queue.requests == {add(queue, 60)}


def test_large_requests_leave_room_for_small_ones() -> None:
    queue, runner = new_queue(max_queue_tokens=1024), FakeRunner(expensive_start, max_batch_tokens=16)
    add(queue, 512, runner=runner)
    add(queue, 384, runner=runner)
    with pytest.raises(RefusedError):
        add(queue, 20, runner=runner)
    for _ in range(8):
        add(queue, 16, runner=runner)
    with pytest.raises(RefusedError):
        add(queue, 16, runner=runner)
    with pytest.raises(RefusedError):
        queue.open(ScheduledRequest(runner, fake_work(), 0.0, 100.0), 0.0)
    empty = new_queue(max_queue_tokens=1024)
    with pytest.raises(RefusedError):
        add(empty, 897, runner=runner)
    add(empty, empty.max_request_tokens, runner=runner)
    add(empty, 16, runner=runner)
    assert empty.total_held_tokens == 896 + 16


def test_later_items_make_a_request_long() -> None:
    queue, runner = new_queue(threads=2), alone(0.01)
    explain_request = add(queue, 4, runner=runner)
    [first] = take(queue)
    assert queue.finish(first, None)
    queue.put(explain_request, [Item(4) for _ in range(10)], 0.0)
    assert [item.request for item in start(queue)] == [explain_request]
    short = add(queue, 4, runner=runner)
    assert [item.request for item in take(queue)] == [short]
    assert take(queue) == []
    queue.batches.clear()
    assert [item.request for item in take(queue)] == [explain_request]


@pytest.mark.parametrize("texts", [1, 2])
def test_a_request_that_would_miss_its_deadline_is_refused(texts: int) -> None:
    """A retry after the time in the error is admitted, and an earlier one is not."""

    def arrive(now: float) -> None:
        queue = new_queue(threads=2)
        for _ in range(2):  # both threads run until 6 s
            add(queue, 10, now=-1.0, runner=alone(6.0))
            start(queue)
        request = ScheduledRequest(alone(1.0), fake_work(10 * texts), now, now + 2.0, priority=now)
        if texts == 1:
            queue.open(request, now)
        queue.put(request, [Item(10) for _ in range(texts)], now)

    with pytest.raises(RefusedError) as error:
        arrive(0.0)
    assert error.value.reason == "deadline"
    with pytest.raises(RefusedError):
        arrive(0.9 * error.value.retry_after_s)
    arrive(error.value.retry_after_s + 0.001)


def test_a_request_is_refused_if_its_own_items_would_miss_its_deadline() -> None:
    queue, runner = new_queue(), alone(1.0)
    add(queue, 8, runner=runner)
    with pytest.raises(RefusedError):
        add(queue, *[8] * 5, deadline=5.0, runner=runner)
    add(queue, *[8] * 4, deadline=5.0, runner=runner)


def test_a_list_is_admitted_to_a_queue_that_is_as_long_as_it_can_be() -> None:
    queue, runner = new_queue(), alone(0.01)
    with pytest.raises(RefusedError):
        while True:
            add(queue, 8, deadline=5.0, runner=runner)
    take(queue)
    add(queue, *[8] * 10, deadline=5.0, runner=runner)


def test_an_empty_queue_admits_a_request_that_takes_longer_than_its_deadline() -> None:
    """A later attempt would have no better chance, so an earlier one is told when the queue will be empty."""
    queue = new_queue()
    assert queue.requests == {add(queue, *[10] * 5, deadline=1.0, runner=alone(1.0))}
    with pytest.raises(RefusedError) as error:
        add(queue, 10, 10, deadline=10.0, runner=alone(9.0))
    assert error.value.retry_after_s == 5.0


def test_retry_after_is_the_time_until_the_excess_has_drained() -> None:
    """A full queue predicts from its queued seconds when the request will fit."""
    queue = new_queue(max_queue_tokens=100)
    add(queue, 40, 40, runner=alone(4.0))
    with pytest.raises(RefusedError) as error:
        add(queue, 50, runner=FakeRunner(expensive_start, max_batch_tokens=40))
    assert error.value.retry_after_s == 4.2  # 42 of 80 tokens, because large requests leave an eighth of the queue


SECOND, TENTH = alone(1.0), alone(0.1)
# Requests as (name, arrival, texts, runner), and what starts until the time; a digit is the time at which one thread is free.
# A reader of docs/explanation/scheduling.md answered these questions.
QUESTIONS = {
    "the first of two texts": ([("A", 0.0, 1, TENTH), ("B", 0.1, 1, TENTH)], {1.0: "A"}),
    "a text before the next window, which is due later": ([("D", 0.0, 10, SECOND), ("T", 0.5, 1, TENTH)], {0.0: "D", 1.0: "T"}),
    "a text after a window, although the next one is due": ([("D", 0.0, 10, SECOND), ("T", 2.1, 1, TENTH)], {0.0: "D", 1.0: "D", 2.2: "T"}),
    "another text, because texts have had less time": (
        [("D", 0.0, 10, SECOND), ("T", 2.1, 1, TENTH), ("U", 2.2, 1, TENTH)],
        {0.0: "D", 1.0: "D", 2.2: "T", 2.3: "U"},
    ),
    "a late window, because texts have had as much time": (
        [("D", 0.0, 9, SECOND), ("E", 0.2, 9, SECOND), ("T", 3.5, 1, SECOND), ("U", 3.6, 1, TENTH)],
        {0.0: "D", 1.0: "E", 2.0: "D", 3.0: "E", 4.0: "T", 5.0: "D"},
    ),
    "the next window, if no text waits": ([("D", 0.0, 10, SECOND), ("T", 1.5, 1, TENTH)], {0.0: "D", 1.0: "D"}),
    "the first window of a second document": ([("D", 0.0, 10, SECOND), ("E", 0.2, 10, SECOND)], {0.0: "D", 1.0: "E", 2.0: "D"}),
    "texts of similar length together": ([("A", 0.0, 1, MODEL), ("B", 0.0, 1, MODEL), ("C", 0.0, 1, MODEL)], {0.0: "ABC"}),
    "a short list is not long": ([("L", 0.0, 2, alone(0.02)), ("T", 0.03, 1, alone(0.02))], {0.0: "L", 0.03: "L", 0.05: "T"}),
    "a text that came before the next item of a list": ([("L", 0.0, 3, SECOND), ("T", 0.9, 1, TENTH)], {0.0: "L", 1.0: "T", 1.1: "L"}),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_page_about_scheduling_predicts_what_runs_next(question: str) -> None:
    arrivals, starts = QUESTIONS[question]
    queue, names = new_queue(), {}
    for now, expected in starts.items():
        for name, arrival, texts, runner in arrivals:
            if arrival <= now and name not in names.values():
                names[add(queue, *[8] * texts, now=arrival, runner=runner)] = name
        assert "".join(names[item.request] for item in take(queue, now)) == expected


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_oldest_waiting_item_leads_every_batch(texts: list[tuple[int, int]]) -> None:
    """Therefore no item waits forever."""
    queue, last, waiting = new_queue(), -1.0, len(texts)
    for tokens, now in sorted(texts, key=lambda text: text[1]):
        add(queue, tokens, now=float(now))
    while batch := take(queue, 10.0):
        assert last <= batch[0].priority
        last = batch[0].priority
        waiting -= len(batch)
    assert waiting == 0


def test_the_predicted_wait_of_a_text_counts_only_a_part_of_long_requests() -> None:
    """Before a text start the earlier texts, and as many seconds of documents."""
    queue = new_queue()
    document = add(queue, *[60] * 10, runner=alone(1.0))
    for _ in range(2):
        add(queue, 5, now=20.0, runner=alone(1.0))
    assert queue.wait_s(20.0) == 4.0
    queue.close(document)
    assert queue.wait_s(20.0) == 2.0


def test_the_next_items_of_a_request_keep_its_place() -> None:
    """Their priority counts all work that the request has done."""
    queue = new_queue()
    explain_request = add(queue, 60, runner=alone(1.0))
    [first] = take(queue)
    before, after = add(queue, 5, now=0.9, runner=alone(0.1)), add(queue, 5, now=1.1, runner=alone(0.1))
    assert queue.finish(first, None)
    queue.put(explain_request, [Item(60)], 2.0)
    assert [[item.request for item in batch] for batch in drain(queue, 2.0)] == [[before], [explain_request], [after]]
    queue.close(explain_request)


def test_long_requests_leave_a_thread_to_short_ones() -> None:
    """There, they do not join batches of short ones either. A second after the last short request, they use all threads."""
    queue, runner = new_queue(threads=2), FakeRunner(lambda rows, length: 0.02 + rows * length * 1e-6)
    list_request = add(queue, *[30] * 8, runner=runner)
    for _ in range(2):
        assert [item.request for item in start(queue)] == [list_request, list_request]
    queue.batches.pop()
    text = add(queue, 30, now=1.0, runner=runner)
    assert [item.request for item in take(queue, 1.0)] == [text]
    assert take(queue, 1.9) == []
    queue.batches.clear()
    assert [item.request for item in start(queue, 1.9)] == [list_request, list_request]
    assert [item.request for item in take(queue, 2.0)] == [list_request, list_request]


def test_the_predicted_wait_of_a_long_request_leaves_a_thread_out() -> None:
    queue, runner = new_queue(threads=2), alone(1.0)
    add(queue, *[30] * 5, runner=runner)
    add(queue, 1, now=0.5, runner=runner)
    with pytest.raises(RefusedError) as error:
        add(queue, *[30] * 2, now=1.0, deadline=7.0, runner=runner)
    assert error.value.reason == "deadline"
    add(queue, *[30] * 2, now=2.0, deadline=8.0, runner=runner)


def test_a_batch_gets_short_requests_before_long_ones() -> None:
    queue, runner = new_queue(), FakeRunner(lambda rows, length: 0.02 + rows * length * 1e-6)
    list_request = add(queue, *[30] * 6, runner=runner)
    text = add(queue, 20, now=0.001, runner=runner)
    assert [item.request for item in take(queue, 0.001)] == [list_request, text]


def test_a_request_that_is_cancelled_while_queued_uses_no_capacity() -> None:
    queue = new_queue()
    first, cancelled, last = add(queue, 8), add(queue, 8, 8), add(queue, 8)
    assert [queue.close(cancelled), queue.close(cancelled)] == [True, False]
    assert (queue.queue_items, queue.total_held_tokens) == (2, 16)
    assert [[item.request for item in batch] for batch in drain(queue)] == [[first, last]]


def lines_of(call: Callable[[], object]) -> int:
    """Returns how many lines of Python a call runs."""
    count, outer = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    assert count, "the trace saw nothing, which would prove nothing"
    return count


def test_a_batch_takes_time_in_proportion_to_its_items() -> None:
    """A batch of short texts has thousands, and the event loop waits for the lock of the thread that takes it."""

    def count_lines(rows: int) -> int:
        queue = new_queue()
        add(queue, *[3] * rows, runner=FakeRunner(expensive_start, max_batch_tokens=10**6))
        batch: list[Item] = []
        count = lines_of(lambda: batch.extend(start(queue)))
        assert len(batch) == rows
        return count

    assert count_lines(1000) <= 11 * count_lines(100)


def test_every_operation_takes_logarithmic_time() -> None:
    def count_lines(waiting: int) -> dict[str, int]:
        queue, runner = new_queue(max_queue_tokens=10**9), FakeRunner(no_fixed_cost)
        requests = [add(queue, 1 + i * 7 % 60, now=float(i), deadline=1e6, runner=runner) for i in range(waiting)]
        return {
            "put": lines_of(lambda: add(queue, 1, now=float(waiting), deadline=1e6, runner=runner)),
            "take": lines_of(lambda: queue.start_batch(float(waiting))),
            "close": lines_of(lambda: queue.close(requests[waiting // 2])),
            "take past a closed request": lines_of(lambda: queue.start_batch(float(waiting))),
        }

    few, many = count_lines(100), count_lines(3_000)
    assert {name: many[name] <= 2 * few[name] + 20 for name in few} == dict.fromkeys(few, True)
