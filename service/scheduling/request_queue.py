"""RequestQueue: admits requests, orders their items, and chooses the next batch. It has no threads, locks or clock.

A request is admitted or refused as a whole, and closed once. Its items (texts, or windows of a text) start by *priority*, a virtual time:
the arrival of the request plus `PACE` times the predicted seconds of its earlier items. So a long list or document fills the time that
others leave, and no item waits forever, because later requests have later priorities.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain, count
from math import inf

from bertserve.service.errors import InvalidValueError, RefusedError
from bertserve.service.scheduling.scheduled_request import Item, Runner, ScheduledRequest, SizedPayloads

# Factor on the predicted seconds of a request's earlier items in the priority of its later ones. It is above 1 so that other requests run
# in between even if the machine is slower than predicted.
PACE = 1.5

# Nearly every wait is at most this many times its prediction.
PREDICTION_ERROR = 1.15

# Seconds after a short request in which long ones leave a thread to the next one.
RESERVE_S = 1.0

# Minimum share of a run that a batch-mate must save. A run cannot be interrupted, so it must not become longer for a small gain.
MIN_GAIN = 1 / 16


class RequestQueue:
    """Waiting requests and items in fair order, within a limit of tokens.

    Attributes:
        max_batch_tokens: Maximum tokens of a batch: rows times padded length.
        max_queue_tokens: Maximum tokens that all open requests hold together.
        requests: The open requests: admitted, and not ended.
        queue_tokens: Tokens that they hold.
        queue_items: Items that wait.
    """

    def __init__(self, *, max_batch_tokens: int, max_queue_tokens: int, threads: int = 1) -> None:
        """Creates an empty queue; `threads` is the number of batches that run at the same time, to predict waits."""
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_tokens = max_queue_tokens
        self.requests: set[ScheduledRequest] = set()
        self.queue_tokens = 0
        self.queue_items = 0
        self._threads = threads
        self._waiting_s = {False: 0.0, True: 0.0}  # predicted seconds of waiting items, of short and of long requests
        # Heaps of short (False) and long (True) requests. The key is a lower bound of the priority of the request's next item; `_first_of`
        # updates it at the front of the heap.
        self._waiting_by_priority: dict[bool, list[tuple[float, int, ScheduledRequest]]] = {False: [], True: []}
        self._owed_s = 0.0  # predicted seconds that short requests get before the next long one
        self._last_short = -inf  # arrival of the last short request
        self._items_by_length: dict[tuple[Runner, bool], ItemsByLength] = {}  # by runner, and whether their requests are long
        self._sequence = count()

    def wait_s(self, busy_s: float) -> float:
        """Returns the predicted seconds until a short request that arrives now starts.

        Args:
            busy_s: Seconds that the inference threads need for their current runs, in total; 0 if one is free.
        """
        # while both wait, short and long requests get equal thread time
        return (min(2 * self._waiting_s[False], sum(self._waiting_s.values())) + busy_s) / self._threads

    def check(self, time_left_s: float, busy_s: float) -> None:
        """Checks whether a short request that arrives now would probably start before its deadline, before its tokens are known.

        Raises:
            RefusedError: The queue is full or too long.
        """
        if self.queue_tokens >= self.max_queue_tokens:
            raise self._full_error(1, self.max_queue_tokens, busy_s)
        if wait := self.wait_s(busy_s):
            self._check_wait(wait, 0.0, time_left_s)

    def put(self, request: ScheduledRequest, payloads: SizedPayloads, held_tokens: int, time_left_s: float, busy_s: float = 0.0) -> None:
        """Admits a new request with its first items.

        Args:
            request: A new request.
            payloads: Tokens and payload of each of its first items, at least one.
            held_tokens: Tokens that it holds of the queue until it ends, at most `max_queue_tokens`.
            time_left_s: Seconds until its deadline.
            busy_s: Seconds that the inference threads need for their current runs, in total; 0 if one is free.

        Raises:
            InvalidValueError: An item exceeds the maximum tokens of a batch.
            RefusedError: The queue is full, or the last item would probably start after the deadline.
        """
        limit = self.max_queue_tokens
        if held_tokens > limit / 64:
            limit -= limit // 8  # large requests leave an eighth to small ones
        if self.queue_tokens and self.queue_tokens + held_tokens > limit:
            raise self._full_error(held_tokens, limit, busy_s)
        request.priority = request.arrived
        items = self._new_items(request, payloads)
        before = (items[-1].priority - request.arrived) / PACE
        request.is_long = before > 0.03  # seconds
        if request.is_long:
            threads = self._threads_for_long(request.arrived)
            wait = (sum(self._waiting_s.values()) + busy_s) / threads
        else:
            self._last_short = max(self._last_short, request.arrived)
            threads = self._threads
            wait = self.wait_s(busy_s) if before else 0.0  # for a single item, `check` has tested this wait
        if wait:
            self._check_wait(wait, PACE * before / threads, time_left_s)
        self.requests.add(request)
        request.held_tokens = held_tokens
        self.queue_tokens += held_tokens
        self._add(request, items)

    def put_next(self, request: ScheduledRequest, payloads: SizedPayloads) -> None:
        """Queues the next items of an open request after the results of the ones before.

        Raises:
            InvalidValueError: An item exceeds the maximum tokens of a batch.
        """
        self._add(request, self._new_items(request, payloads))

    def take(self, now: float, *, long_runs: int = 0) -> list[Item]:
        """Takes the best batch: the first item by priority, and batch-mates of nearest lengths while each saves more time than it costs.

        Args:
            now: The current time.
            long_runs: Number of current runs that began with an item of a long request. If short requests come, these leave a thread to them.
        """
        only_short = long_runs > 0 and long_runs >= self._threads_for_long(now)
        head = self._first(only_short) if self.queue_items else None
        if head is None:
            return []
        # While waits are short, the most efficient batch matters most. Later, items that have waited less than two thirds as long as the head
        # must wait, so that waits are predictable.
        last_priority = head.priority + max((now - head.priority) / 3, 0.1)
        batch, length = list[Item](), 0
        item: Item | None = head
        while item:
            batch.append(item)
            length = max(length, item.length)
            item.request.running += 1
            self._remove_item(item)
            item = self._batch_mate(head, len(batch), length, last_priority, only_short) if self.queue_items else None
        if head.request.is_long:
            self._owed_s = head.request.runner.seconds(len(batch), length)
        else:
            self._owed_s -= sum(item.predicted_s for item in batch if not item.request.is_long)
        return batch

    def finish(self, item: Item, result: object) -> bool:
        """Records a result; returns whether it was the last one of an open request, which must then get its next items or be closed."""
        request = item.request
        if request not in self.requests:
            return False
        request.results[item.index] = result
        request.running -= 1
        return not (request.running or request.waiting)

    def close(self, request: ScheduledRequest) -> bool:
        """Ends a request in any state; returns true only for the first call. Its waiting items never start."""
        if request not in self.requests:
            return False
        self.requests.remove(request)
        self.queue_tokens -= request.held_tokens
        request.results = []
        for item in list(request.waiting.values()):
            self._remove_item(item)
            item.payload = None  # it may stay in a heap, behind an item that waits
        return True

    def _threads_for_long(self, now: float) -> int:
        return max(self._threads - (now - self._last_short < RESERVE_S), 1)

    def _check_wait(self, wait: float, own: float, time_left_s: float) -> None:
        """Checks a predicted wait; `own` is the virtual time between a request's first and last item, divided by the threads."""
        # not `PREDICTION_ERROR * (wait + own)`: a full queue would then admit only short requests
        if max(PREDICTION_ERROR * wait, wait + own) > time_left_s:
            raise RefusedError(
                "the queue is about {wait:.1f} s long, so the request would probably miss its deadline; "
                "try again later, or allow more time.",
                wait=wait,
                reason="deadline",
                retry_after_s=wait - min(time_left_s / PREDICTION_ERROR, time_left_s - own),
            )

    def _full_error(self, tokens: int, limit: int, busy_s: float) -> RefusedError:
        excess = (self.queue_tokens + tokens - limit) / max(self.queue_tokens, 1)
        return RefusedError(
            "the queue is full: it holds {queue_tokens} of {max_queue_tokens} tokens and the request has {tokens} or more; try again later.",
            queue_tokens=self.queue_tokens,
            max_queue_tokens=self.max_queue_tokens,
            tokens=tokens,
            reason="queue_full",
            retry_after_s=(busy_s + sum(self._waiting_s.values()) * min(excess, 1.0))
            / self._threads,  # requests end after the current runs
        )

    def _new_items(self, request: ScheduledRequest, payloads: SizedPayloads) -> list[Item]:
        """Returns items with their priorities, and moves the priority of the request behind them."""
        runs: dict[int, tuple[int, float]] = {}  # length and seconds by tokens
        items = []
        for index, (tokens, payload) in enumerate(payloads):
            if tokens not in runs:
                runs[tokens] = self._length_and_seconds(request.runner, tokens)
            length, seconds = runs[tokens]
            items.append(Item(request, index, tokens, payload, length, seconds, request.priority))
            request.priority += PACE * seconds
        return items

    def _length_and_seconds(self, runner: Runner, tokens: int) -> tuple[int, float]:
        """Returns an item's padded length in a batch of its own, and its predicted seconds.

        These are the seconds of a full batch of such items, divided by their number.
        """
        rows, length = runner.padded_shape(1, tokens) or (inf, tokens)
        if rows * length > self.max_batch_tokens:
            raise InvalidValueError(
                "the text has {tokens} tokens and a batch takes {max_batch_tokens}; shorten it; the operator can raise --max-batch-tokens.",
                tokens=tokens,
                max_batch_tokens=self.max_batch_tokens,
            )
        full = max(1, self.max_batch_tokens // max(1, length)) if runner.shares_batches else 1
        return length, runner.seconds(full, length) / full

    def _add(self, request: ScheduledRequest, items: list[Item]) -> None:
        request.results = [None] * len(items)
        self.queue_items += len(items)
        by_length = self._items_by_length.setdefault((request.runner, request.is_long), ItemsByLength())
        for item in items:
            request.waiting[item.index] = item
            self._waiting_s[request.is_long] += item.predicted_s
            by_length.push(item, next(self._sequence))
        heapq.heappush(self._waiting_by_priority[request.is_long], (items[0].priority, next(self._sequence), request))

    def _remove_item(self, item: Item) -> None:
        """Removes an item that has started, or whose request has ended."""
        del item.request.waiting[item.index]
        item.is_waiting = False
        self.queue_items -= 1
        if not self.queue_items:  # sums of floats drift, and heaps have items that no longer wait
            self._waiting_s = {False: 0.0, True: 0.0}
            self._waiting_by_priority = {False: [], True: []}
            self._items_by_length.clear()
            return
        self._waiting_s[item.request.is_long] -= item.predicted_s
        key = item.request.runner, item.request.is_long
        self._items_by_length[key].clean(item.tokens)
        if not self._items_by_length[key].lengths:
            del self._items_by_length[key]  # it would keep a model in memory

    def _first(self, only_short: bool) -> Item | None:
        """Returns the item that starts next: the first by priority.

        After a batch of a long request, waiting short requests first get as much predicted time as that batch.
        """
        short, long = (self._first_of(heap) if heap else None for heap in self._waiting_by_priority.values())
        if only_short or long is None:
            return short
        if short is None:
            return long
        return short if self._owed_s > 0 or short.priority <= long.priority else long

    def _first_of(self, heap: list[tuple[float, int, ScheduledRequest]]) -> Item | None:
        while heap:
            priority, tie, request = heap[0]
            item = next(iter(request.waiting.values()), None)
            if item is None:
                heapq.heappop(heap)
            elif item.priority > priority:
                heapq.heapreplace(heap, (item.priority, tie, request))
            else:
                return item
        return None

    def _batch_mate(self, head: Item, rows: int, length: int, last_priority: float, only_short: bool) -> Item | None:
        """Returns the best item to add to a batch of `rows` items padded to `length`, or None if no item is worth it.

        It is worth it if the batch stays within its limit, and if the time that it saves for all waiting items exceeds the delay that it
        causes to the batch. An item of a long request must save more than it delays a short one. Items of short requests are added first.
        """
        request = head.request
        runner = request.runner
        long_flags = ((False,) if only_short else (False, True)) if runner.shares_batches else ()
        waiting = (self._items_by_length[runner, is_long] for is_long in long_flags if (runner, is_long) in self._items_by_length)
        for item in chain.from_iterable(by_length.nearest(length, last_priority) for by_length in waiting):
            longer = max(length, item.length)
            shape = runner.padded_shape(rows + 1, longer)
            if shape is None or shape[0] * shape[1] > self.max_batch_tokens:
                continue
            # cost of real rows only: rows that pad a planned shape are free for the next batch-mate
            run_s = runner.seconds(rows + 1, longer)
            delay = run_s - runner.seconds(rows, length)
            saved = runner.seconds(1, item.length) - delay
            favors_long = item.request.is_long and not request.is_long
            if saved * self.queue_items > delay * rows and saved >= max(MIN_GAIN * run_s, delay if favors_long else 0.0):
                return item
        return None


class ItemsByLength:
    """Waiting items of a runner. `lengths` has their different numbers of tokens, ascending: at most as many as a batch has tokens."""

    def __init__(self) -> None:
        """Starts with no items."""
        self.lengths: list[int] = []
        self._heaps: dict[int, list[tuple[float, int, Item]]] = {}  # by tokens; the first item of each waits

    def push(self, item: Item, tie: int) -> None:
        """Adds an item."""
        if item.tokens not in self._heaps:
            self._heaps[item.tokens] = []
            insort(self.lengths, item.tokens)
        heapq.heappush(self._heaps[item.tokens], (item.priority, tie, item))

    def clean(self, tokens: int) -> None:
        """Drops items of a length that no longer wait, up to the first one that waits."""
        heap = self._heaps[tokens]
        while heap and not heap[0][2].is_waiting:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[tokens], self.lengths[bisect_left(self.lengths, tokens)]

    def nearest(self, length: int, last_priority: float) -> Iterator[Item]:
        """Yields the first item of the greatest length up to `length`, and that of the smallest length above it."""
        place = bisect_right(self.lengths, length)
        for places in (range(place - 1, -1, -1), range(place, len(self.lengths))):
            for i in places:
                priority, _, item = self._heaps[self.lengths[i]][0]
                if priority <= last_priority:
                    yield item
                    break
