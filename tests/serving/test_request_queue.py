"""RequestQueue keeps its limits, its order and its deadlines. The tests pass the time in and need no threads."""

from __future__ import annotations

import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.service.errors import InvalidValueError, RefusedError
from bertserve.service.scheduling.request_queue import KEPT_ENDED, RequestQueue
from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest, Shape, exact

KEY = "model"


def expensive_start(rows: int, length: int) -> float:
    """Predicts runs with a high fixed cost, as on a GPU: all items that fit are batched."""
    return 1.0 + rows * length * 1e-6


def batches_well(rows: int, length: int) -> float:
    """Predicts short runs, so that the priorities of a request's items are close together."""
    return 0.01 + rows * length * 1e-6


def no_fixed_cost(rows: int, length: int) -> float:
    """Predicts runs in which a batch saves no time, such as long texts on a CPU."""
    return rows * length * 1e-3


def new_queue(**options: Any) -> RequestQueue:
    return RequestQueue(**{"max_batch_tokens": 64, "max_queue_tokens": 1000} | options)


def add(
    queue: RequestQueue,
    *tokens: int,
    now: float = 0.0,
    deadline: float = 100.0,
    key: Any = KEY,
    cost: Callable[[int, int], float] = expensive_start,
    shape: Shape = exact,
) -> ScheduledRequest:
    """Admits and queues a request with one item per number of tokens; the payloads are their indexes."""
    request = queue.admit(tokens=sum(tokens), seconds=0.0, deadline=deadline, now=now)
    queue.put(request, key, [(n, i) for i, n in enumerate(tokens)], cost, now, shape=shape)
    return request


def drain(queue: RequestQueue, now: float = 0.0) -> list[list[Item]]:
    batches = []
    while batch := queue.take(now):
        batches.append(batch)
    return batches


def test_texts_of_similar_length_share_a_batch() -> None:
    queue = new_queue()
    add(queue, 16)
    add(queue, 4)
    add(queue, 15)

    assert [16, 15] == [item.tokens for item in queue.take(0.0)][:2]


@pytest.mark.parametrize("key", [None, "other"])
def test_only_equal_keys_share_a_batch(key: str | None) -> None:
    """Items with different keys, or without a key, never share a batch."""
    queue = new_queue()
    add(queue, 8, key=key)
    add(queue, 8, key=KEY)
    add(queue, 8, key=key)

    assert ([1, 1, 1] if key is None else [2, 1]) == [len(batch) for batch in drain(queue)]


def test_items_are_not_batched_if_a_batch_saves_no_time() -> None:
    """Each text then runs in its own batch, and no text waits for the rows of others."""
    queue = new_queue()
    for _ in range(4):
        add(queue, 8, cost=no_fixed_cost)

    assert [1, 1, 1, 1] == [len(batch) for batch in drain(queue)]


def test_a_short_text_does_not_join_if_its_padding_costs_more_than_its_run() -> None:
    def cost(rows: int, length: int) -> float:
        return 0.010 + rows * length * 1e-3

    queue = new_queue(max_batch_tokens=4096, max_queue_tokens=10_000)
    add(queue, 8, cost=cost)
    add(queue, 64, cost=cost)
    for _ in range(9):
        add(queue, 8, cost=cost)

    batches = [[item.tokens for item in batch] for batch in drain(queue)]
    assert [64] in batches
    assert len(batches[0]) > 1


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 16))
def test_a_padded_batch_never_exceeds_the_token_limit(lengths: list[int], multiple: int) -> None:
    def padded(n: int) -> int:
        return min(64, -(-n // multiple) * multiple)

    queue = new_queue(max_queue_tokens=10_000)
    for length in lengths:
        add(queue, length, shape=lambda rows, tokens: (rows, padded(tokens)))
    batches = drain(queue)

    assert sorted(lengths) == sorted(item.tokens for batch in batches for item in batch)
    assert all(len(batch) * max(padded(item.tokens) for item in batch) <= 64 for batch in batches)


def test_an_item_over_the_batch_limit_is_refused_before_it_is_queued() -> None:
    queue = new_queue()
    request = queue.admit(tokens=65, seconds=0.0, deadline=1.0, now=0.0)

    with pytest.raises(InvalidValueError, match=r"65 tokens .* takes 64; .* --max-batch-tokens"):
        queue.put(request, KEY, [(1, None), (65, None)], expensive_start, 0.0)

    queue.close(request)
    assert (0, 0, []) == (queue.queue_items, queue.queue_tokens, queue.take(0.0))


def test_admission_is_all_or_nothing() -> None:
    queue = new_queue(max_queue_tokens=100)
    add(queue, 60)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=41, seconds=0.0, deadline=100.0, now=0.0)

    assert "queue_full" == refused.value.reason
    assert 60 == queue.queue_tokens


def test_a_request_is_admitted_after_the_queue_has_drained() -> None:
    queue = new_queue(max_queue_tokens=100)
    add(queue, 60)
    queue.take(0.0)

    assert queue.admit(tokens=100, seconds=0.0, deadline=100.0, now=0.0).open


def test_a_request_that_would_miss_its_deadline_is_refused() -> None:
    """Admission predicts the wait from the queued work of all threads, with a margin for errors. The error says when to retry."""
    queue = new_queue(threads=2)
    add(queue, 10, key=None, cost=lambda rows, length: 6.0)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=10, seconds=1.0, deadline=2.0, now=0.0)

    assert ("deadline", pytest.approx(3 - 2 / 1.15)) == (refused.value.reason, refused.value.retry_after_s)
    assert queue.admit(tokens=10, seconds=1.0, deadline=3 * 1.15 + 1e-9, now=0.0).open
    with pytest.raises(RefusedError) as refused:  # its first item takes 4 s, divided by two threads
        queue.admit(tokens=10, seconds=8.0, deadline=5.4, now=0.0, items=2)
    assert 3.5 + 4 / 2 - 5.4 == pytest.approx(refused.value.retry_after_s)


def test_an_empty_queue_admits_a_request_that_takes_longer_than_its_deadline() -> None:
    """A later attempt would have no better chance."""
    assert new_queue().admit(tokens=10, seconds=5.0, deadline=1.0, now=0.0, items=5).open


def test_retry_after_is_the_time_until_the_excess_has_drained() -> None:
    """A full queue predicts from its queued seconds when the request will fit."""
    queue = new_queue(max_queue_tokens=100)
    add(queue, 50, 50, key=None, cost=lambda rows, length: 4.0)

    with pytest.raises(RefusedError) as refused:
        queue.admit(tokens=50, seconds=1.0, deadline=100.0, now=0.0)

    assert 4.0 == refused.value.retry_after_s


def test_short_texts_start_between_the_windows_of_a_long_document() -> None:
    """Each item of a request is due 1.5 times the predicted run time after the item before it."""
    queue = new_queue(max_queue_tokens=10_000)
    document = add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 1.0, key=None)
    text = add(queue, 5, now=2.5, cost=lambda rows, length: 0.1, key=None)

    order = [batch[0].request for batch in drain(queue)]
    assert [document] * 2 + [text] + [document] * 8 == order


def test_a_short_text_does_not_wait_for_requests_with_many_labels() -> None:
    """Ten requests of 45 ms are late. Before a text that arrives now, at most one of their runs starts."""
    queue = new_queue(max_queue_tokens=10_000)
    for _ in range(10):
        add(queue, *[5] * 90, now=0.0, cost=lambda rows, length: 0.0005, key=None)
    queue.take(0.0)
    text = add(queue, 5, now=0.4, cost=lambda rows, length: 0.001, key=None)

    assert text in {queue.take(0.4)[0].request for _ in range(2)}


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_oldest_waiting_item_leads_every_batch(texts: list[tuple[int, int]]) -> None:
    """Therefore no item waits forever."""
    queue = new_queue(max_queue_tokens=10_000)
    for tokens, now in sorted(texts, key=lambda text: text[1]):
        add(queue, tokens, now=float(now))
    waiting = len(texts)
    last = -1.0
    while batch := queue.take(10.0):
        assert last <= batch[0].priority
        last = batch[0].priority
        waiting -= len(batch)

    assert 0 == waiting


def test_a_request_that_is_cancelled_while_queued_uses_no_capacity() -> None:
    """The items of a closed request never start, as heads or as batch-mates, and hold no tokens."""
    queue = new_queue()
    first, cancelled, last = add(queue, 8), add(queue, 8, 8), add(queue, 8)
    assert queue.close(cancelled)

    assert (2, 16) == (queue.queue_items, queue.queue_tokens)
    assert [[first, last]] == [[item.request for item in batch] for batch in drain(queue)]


def test_a_request_closes_once() -> None:
    queue = new_queue()
    request = add(queue, 8)

    assert [True, False] == [queue.close(request), queue.close(request)]


def test_the_deadline_applies_until_the_last_item_has_started() -> None:
    """A request with a waiting item expires; a request whose items have all started does not."""
    queue = new_queue()
    started = add(queue, 8, deadline=1.0)
    queue.take(0.0)
    half = add(queue, 60, 60, deadline=1.0)
    queue.take(0.0)

    assert [half] == queue.expire(2.0)
    assert started.open


class Steps:
    """Counts the steps of a queue: comparisons of times and keys, and calls of its cost and shape functions."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, call: Callable[[], Any]) -> int:
        before = self.count
        call()
        return self.count - before

    def cost(self, rows: int, length: int) -> float:
        """Predicts runs in which a batch saves no time, so that each operation handles one item."""
        self.count += 1
        return no_fixed_cost(rows, length)

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        self.count += 1
        return rows, tokens


class Time(float):
    """Seconds that count their comparisons as steps."""

    def __new__(cls, seconds: float, steps: Steps) -> Time:
        made = super().__new__(cls, seconds)
        made.steps = steps
        return made

    steps: Steps

    def __add__(self, other: float) -> Time:
        return Time(float(self) + other, self.steps)

    def _counted(self, compare: Callable[[float, float], bool], other: Any) -> bool:
        self.steps.count += 1
        return compare(float(self), float(other))

    def __lt__(self, other: Any) -> bool:
        return self._counted(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._counted(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._counted(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._counted(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return self._counted(operator.eq, other)

    __hash__ = float.__hash__


class Key:
    """A key that counts its comparisons as steps. Each request has its own object, and all are equal."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        self.steps.count += 1
        return isinstance(other, Key)

    def __hash__(self) -> int:
        return 7


def test_every_operation_takes_logarithmic_time() -> None:
    def taken(waiting: int) -> dict[str, int]:
        queue, steps = RequestQueue(max_batch_tokens=64, max_queue_tokens=10**9), Steps()
        end = 10.0**6

        def enter(i: int) -> ScheduledRequest:
            # priorities and deadlines ascend and lengths cycle, so that a new entry belongs at the end of each heap
            return add(
                queue, 1 + i * 7 % 60, now=Time(i, steps), deadline=Time(end + i, steps), key=Key(steps), cost=steps.cost, shape=steps.shape
            )

        requests = [enter(i) for i in range(waiting)]
        now, late = Time(waiting, steps), Time(end + waiting, steps)
        admitted: list[ScheduledRequest] = []
        return {
            "admit": steps.of(lambda: admitted.append(queue.admit(tokens=5, seconds=0.1, deadline=late, now=now))),
            "put": steps.of(lambda: queue.put(admitted[0], Key(steps), [(5, None)], steps.cost, now, shape=steps.shape)),
            "take": steps.of(lambda: queue.take(now)),
            "close": steps.of(lambda: queue.close(requests[waiting // 2])),
            "take past a closed request": steps.of(lambda: queue.take(now)),
            "expire": steps.of(lambda: queue.expire(Time(end + 1, steps))),
        }

    few, many = taken(100), taken(3_000)

    assert dict.fromkeys(few, True) == {name: many[name] <= 2 * few[name] + 20 for name in few}
    assert [] == [name for name in few if name != "close" and few[name] == 0]  # an operation without steps would prove nothing


def test_closed_requests_are_freed_while_no_batch_is_taken() -> None:
    """While all threads are busy and one request waits, 3,000 others are closed, and their payloads do not accumulate."""

    class Kept:
        """An object for weak references."""

    queue = new_queue(max_queue_tokens=10_000)
    stayer = add(queue, 8)
    payloads = weakref.WeakSet[Kept]()
    most = 0
    for i in range(3_000):
        request = queue.admit(tokens=16, seconds=0.0, deadline=1e9, now=float(i))
        work = [(1 + i % 64, Kept()), (1 + i % 64, Kept())]
        payloads.update(payload for _, payload in work)
        queue.put(request, KEY if i % 2 else None, work, expensive_start, float(i))
        del work
        queue.close(request)
        most = max(most, len(payloads))
    del request

    assert most <= 2 * KEPT_ENDED + 4
    assert [[stayer]] == [[item.request for item in batch] for batch in drain(queue, 1e4)]
    queue.close(stayer)
    gc.collect()
    assert 0 == len(payloads)


def test_ended_requests_are_freed() -> None:
    """After 1,000 requests of many lengths, no key, payload or result is in memory, and fewer than 100 requests are."""

    class Kept:
        """An object for weak references."""

    queue = new_queue(max_queue_tokens=10_000)
    keys, owners, payloads, results = (weakref.WeakSet[Kept]() for _ in range(4))
    for i in range(1000):
        if i % 10 == 0:
            keys.add(key := Kept())
        request = queue.admit(tokens=128, seconds=0.0, deadline=1e9, now=float(i))
        work = [(1 + i % 64, Kept()), (1 + i * 3 % 64, Kept())]
        request.owner = Kept()
        owners.add(request.owner)
        payloads.update(payload for _, payload in work)
        queue.put(request, key, work, expensive_start, float(i))
        if i % 3:
            for item in itertools.chain.from_iterable(drain(queue, float(i))):
                result = Kept()
                results.add(result)
                queue.finish(item, result)
        queue.close(request)
    drain(queue)
    del key, request, work, item, result
    gc.collect()

    assert (0, 0, 0.0) == (queue.queue_items, queue.queue_tokens, queue.queue_seconds)
    assert (0, 0, 0) == (len(keys), len(payloads), len(results))
    assert len(owners) < 100


def test_a_running_request_leaves_the_last_free_thread_to_others() -> None:
    """While its items run, it starts no others there, not even as batch-mates of other requests. Its items can share a batch."""
    queue = new_queue(max_queue_tokens=10_000)
    listed = add(queue, *[30] * 6, now=0.0, cost=batches_well)
    running = queue.take(0.0, last_thread=True)
    assert [listed, listed] == [item.request for item in running]
    assert [] == queue.take(0.0, last_thread=True)
    text = add(queue, 30, now=0.001, cost=batches_well)

    assert [text] == [item.request for item in queue.take(0.001, last_thread=True)]
    assert [] == queue.take(0.001, last_thread=True)
    for item in running:
        queue.finish(item, None)
    assert [listed, listed] == [item.request for item in queue.take(0.001, last_thread=True)]
    assert [listed, listed] == [item.request for item in queue.take(0.001)]
    assert [] == queue.take(0.001)


# ---- many long requests


def test_short_texts_do_not_wait_for_many_earlier_documents() -> None:
    """Ten documents on two threads get a fifth of a thread each, so their later items are due after a text that arrives now."""
    queue = new_queue(max_queue_tokens=10_000, threads=2)
    documents = [queue.admit(tokens=600, seconds=10.0, deadline=100.0, now=0.0, items=10) for _ in range(10)]
    for document in documents:
        queue.put(document, None, [(60, None)] * 10, lambda rows, length: 1.0, 0.0)
    for _ in range(10):
        queue.take(0.0)
    for now in (1.0, 2.0, 3.0):  # two items of documents per second
        text = add(queue, 5, now=now, cost=lambda rows, length: 0.1, key=None)
        assert [text] == [item.request for item in queue.take(now)]
        queue.take(now)
        queue.take(now)


def test_late_documents_get_every_second_start() -> None:
    """Two documents are seconds late because the thread is slower than predicted. Documents and short texts then take turns."""
    queue = new_queue(max_queue_tokens=10_000)
    documents = [add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 0.1, key=None) for _ in range(2)]
    queue.take(0.0)
    texts = [add(queue, 5, now=9.0, key=None) for _ in range(3)]

    order = [batch[0].request in documents for batch in drain(queue, now=10.0)]
    assert [False, True] * 3 + [True] * 16 == order
    assert [item.request for item in queue.take(10.0)] == []
    assert all(text.wait_s == 1.0 for text in texts)


def test_the_predicted_wait_of_a_text_counts_only_a_part_of_late_documents() -> None:
    """A text counts two seconds of late documents per second of earlier texts; a document counts all seconds of both."""
    queue = new_queue(max_queue_tokens=10_000)
    document = add(queue, *[60] * 10, now=0.0, cost=lambda rows, length: 1.0, key=None)
    for _ in range(2):
        add(queue, 5, now=20.0, cost=lambda rows, length: 1.0, key=None)

    assert 2.0 < queue.wait_s(20.0) < 8.0 < queue.wait_s(20.0, is_short=False) == 12.0
    queue.close(queue.admit(tokens=5, seconds=1.0, deadline=28.0, now=20.0))
    queue.close(document)
    assert 2.0 == queue.wait_s(20.0)


def test_a_document_that_is_not_late_keeps_its_turn() -> None:
    """If no document is late, the item with the earliest priority starts, whether its request is long or short."""
    queue = new_queue(max_queue_tokens=10_000)
    document = add(queue, *[60] * 3, now=0.0, cost=lambda rows, length: 0.1, key=None)
    queue.take(0.0)
    text = add(queue, 5, now=0.16, key=None)

    assert [document, text, document] == [batch[0].request for batch in drain(queue, now=0.2)]


def test_a_document_is_refused_if_its_last_item_would_start_too_late() -> None:
    queue = new_queue(max_queue_tokens=10_000)
    add(queue, *[60] * 10, cost=lambda rows, length: 1.0, key=None)

    with pytest.raises(RefusedError) as error:
        queue.admit(tokens=20, seconds=2.0, deadline=5.0, now=0.0, items=2)
    assert "deadline" == error.value.reason
    queue.admit(tokens=10, seconds=1.0, deadline=5.0, now=0.0)


def test_a_request_does_not_expire_while_its_outputs_are_decoded() -> None:
    queue = new_queue()
    request = add(queue, 5, deadline=1.0)
    queue.take(0.0)
    request.expires = False
    queue.put(request, None, [(0, None)], no_fixed_cost, 0.5)

    assert [] == queue.expire(2.0)
    queue.take(2.0)
    request.expires = True
    queue.put(request, KEY, [(5, None)], no_fixed_cost, 2.0)
    assert [request] == queue.expire(2.0)


@pytest.mark.parametrize("size", [1, 4, 32, 100])
def test_admitted_requests_start_in_time_under_overload(size: int) -> None:
    """At twice the load that a thread can handle, at most a tenth of the admitted requests expire: texts and lists."""
    queue = new_queue(max_queue_tokens=100_000, max_batch_tokens=512)
    now, admitted, expired = 0.0, 0, 0
    run_s = 0.01
    for arrival in range(3000 // size):
        now = max(now, arrival * size * run_s / 2)
        with suppress(RefusedError):
            request = queue.admit(tokens=9 * size, seconds=run_s * size, deadline=now + 2.0, now=now, items=size)
            admitted += 1
            queue.put(request, None, [(9, None)] * size, lambda rows, length: run_s, now)
        while now < (arrival + 1) * size * run_s / 2 and (batch := queue.take(now)):
            now += run_s
            expired += len(queue.expire(now))
            for item in batch:
                if queue.finish(item, None):
                    queue.close(item.request)
    assert admitted * size > 1000
    assert expired <= admitted / 10
