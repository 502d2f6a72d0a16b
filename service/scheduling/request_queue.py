"""RequestQueue: admits requests, orders waiting items and chooses the next batch. It is the core of the scheduler.

It has no threads, locks or clock: every call passes `now`, and calls must not overlap. For each item it knows an opaque
key (items with equal keys can share a batch), its cost in tokens, and a payload that it never reads.

A **ScheduledRequest** is one request: it is admitted or refused as a whole, and closed exactly once. It has one or more **items** (texts,
or windows of a text), which run in batches. Invariants: `queue_tokens` is the sum of the tokens that open requests still hold,
and a closed request's items never start.

Every operation takes amortized O(log n) for n items: an ended item is skipped once, when it reaches the front.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, islice
from math import inf
from typing import Any

from bertserve.service.errors import InvalidValueError, RefusedError, TooLargeError
from bertserve.service.scheduling.scheduled_request import (
    MAX_RESERVATIONS,
    PACE,
    UNDERESTIMATED,
    Group,
    Item,
    Reservations,
    RunSeconds,
    ScheduledRequest,
    Shape,
    exact,
)

# Ended requests and items that may stay in addition to the live ones, so that their removal is rare.
KEPT_ENDED = 64

# Nearly every wait is at most this many times its prediction: under load, or with other processes, a machine is about 10 % slower.
PREDICTION_ERROR = 1.15

# A request is long if its items before the last one take more predicted seconds of an inference thread than this.
LONG_S = 0.03

# The deadline can lower the pace of a request. The limit is LEAST_PACE, the speed of the clock, so that a short deadline gives no priority
# over other requests. For a request of more than HEAVY_S seconds the limit is PACE, because it would delay others for too long.
HEAVY_S, LEAST_PACE = 1.0, 1.0

# When the queue is full, requests of at most a 64th of it are still admitted, until small requests hold an 8th of it.
SMALL_PARTS, SPARE_PARTS = 64, 8

# After this many seconds of delay, long requests no longer delay all others: every second start goes to a short request, if one waits.
LATE_S = 0.1

# Predicted seconds of late long requests for each second of the short ones that wait with them: their runs are up to twice as long.
LATE_PER_SHORT = 2.0

# A step that can take longer, such as tokenizing a long text, cannot be interrupted. At least one of several threads starts no such step,
# and if there is only one, another thread serves all others meanwhile.
LONG_STEP_S = 0.02

# A request that takes at most this many predicted seconds in total is quick. With a single inference thread it does not wait for a longer
# run of another request, which can take 0.1 s: it starts next to it, and never shares its batch.
QUICK_S = 0.005

# Seconds by which a batch-mate may always overtake others: while waits are this short, the most efficient batch matters more.
OVERTAKEN_S = 0.1

# Minimum share of a run that a batch-mate must save. A run cannot be interrupted, so it must not become longer for a small gain.
LEAST_GAIN = 1 / 32

# Items that `put` and `put_part` queue in one call. It takes 0.3 ms, in which the scheduler's lock is held.
PART_ITEMS = 256

# An entry of a heap: a lower bound of the priority of the request's first waiting item; the number of its current stage; the request.
_Node = tuple[float, int, ScheduledRequest]


class RequestQueue:
    """Waiting requests and items in fair order, within a limit of tokens."""

    def __init__(self, *, max_batch_tokens: int, max_queue_tokens: int, threads: int = 1) -> None:
        """Creates an empty queue.

        Args:
            max_batch_tokens: Maximum tokens of a batch: rows times padded length.
            max_queue_tokens: Maximum tokens that all admitted requests hold together.
            threads: Number of batches that run at the same time, to predict waits. If it is 1, quick requests may start next to a longer run.
        """
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_tokens = max_queue_tokens
        self.queue_tokens = 0
        self.queue_items = 0
        self.queue_seconds = 0.0
        self._long_seconds = 0.0  # the part of long requests
        self.threads = threads
        self._has_quick_thread = threads == 1
        self._reservations = Reservations()
        self._tie = count()
        # Requests by a lower bound of the priority of their first waiting item, which is corrected at the front. Each stage of a request
        # has its own node; an older node is dropped.
        self._by_priority: list[_Node] = []
        self._long_by_priority: list[_Node] = []  # the same for long requests
        self._quick_by_priority: list[_Node] = []  # and for quick requests
        self._last_was_long = False
        self._groups: dict[Hashable, Group] = {}
        self._deadlines: list[tuple[float, int, ScheduledRequest]] = []
        self._open_requests = 0
        self._long_requests = 0
        self._small_tokens = 0
        self._ended = 0  # items in groups that will never start

    def admit(
        self,
        *,
        tokens: int,
        seconds: float,
        deadline: float,
        now: float,
        busy_s: float = 0.0,
        items: int = 1,
    ) -> ScheduledRequest:
        """Admits a whole request by its estimated cost.

        Args:
            tokens: Estimated tokens of the request.
            seconds: Estimated seconds of an inference thread.
            deadline: Time by which its last item must have started.
            now: The current time.
            busy_s: Seconds that the inference threads still need for their current runs, in total; 0 if a thread is free.
            items: Estimated number of items.

        Raises:
            TooLargeError: It is larger than the queue.
            RefusedError: The queue is full, or the request would probably not start before its deadline.
        """
        if tokens > self.max_queue_tokens:
            raise _larger_than_queue(tokens, self.max_queue_tokens)
        is_small = tokens * SMALL_PARTS <= self.max_queue_tokens
        has_room = is_small and self._small_tokens + tokens <= self.max_queue_tokens // SPARE_PARTS
        if self.queue_tokens + tokens > self.max_queue_tokens and not has_room:
            raise self._full(tokens, busy_s)
        before = seconds - seconds / max(items, 1)  # before its last item, if all have the same cost
        is_short = before <= LONG_S
        wait = self.wait_s(now, busy_s, is_short=is_short)
        # the last item of a long request also waits for later items of others
        last_wait = wait if is_short else max(wait, (self.queue_seconds + busy_s) / self.threads)
        # its own items count only within the error; otherwise a queue that is always at its limit would admit only short texts
        remaining_s, own = deadline - now, before / self.threads
        if now + (max(PREDICTION_ERROR * last_wait, last_wait + own) if last_wait else 0.0) > deadline:
            raise _too_late(last_wait, retry_after_s=last_wait - min(remaining_s / PREDICTION_ERROR, remaining_s - own))
        request = ScheduledRequest(
            deadline=deadline,
            tokens=tokens,
            seconds=seconds,
            arrived=now,
            priority=now,
            slack_s=max(remaining_s - PREDICTION_ERROR * last_wait - own, 0.0),
            is_short=True,
            is_small=is_small,
            predicted_wait_s=wait,
        )
        self._open_requests += 1
        self._pace(request, before)
        self._hold(request, tokens, seconds)
        self._reservations.expect(request, items)
        return request

    def _full(self, tokens: int, busy_s: float) -> RefusedError:
        """Returns the error for a request if the queue is full."""
        excess = (self.queue_tokens + tokens - self.max_queue_tokens) / self.queue_tokens
        return RefusedError(
            "the queue is full: it holds {queue_tokens} of {max_queue_tokens} tokens and the request has about {tokens}; try again later.",
            queue_tokens=self.queue_tokens,
            max_queue_tokens=self.max_queue_tokens,
            tokens=tokens,
            reason="queue_full",
            # capacity becomes free when items start, after the current runs
            retry_after_s=max(busy_s + self.queue_seconds * excess, 0.0) / self.threads,
        )

    def wait_s(self, now: float, busy_s: float = 0.0, *, is_short: bool = True) -> float:
        """Returns the predicted seconds until an item that arrives now starts: all work with priority over it, divided by the threads.

        Args:
            now: The current time.
            busy_s: Seconds that the inference threads still need for their current runs, in total.
            is_short: Whether its request is short; late long requests delay it only at every second start.
        """
        later = self._reservations.seconds_after(now)
        ahead = self.queue_seconds - later
        if is_short and self._long_seconds:
            short = max(self.queue_seconds - self._long_seconds, 0.0)
            ahead = min(ahead, (1 + LATE_PER_SHORT) * short + LATE_S * self.threads)
        return max(ahead + busy_s, 0.0) / self.threads

    def put(
        self,
        request: ScheduledRequest,
        key: Hashable | None,
        work: Sequence[tuple[int, Any]],
        cost: RunSeconds,
        now: float,
        *,
        keep_estimate: bool = False,
        reserved_tokens: int = 0,
        shape: Shape = exact,
    ) -> Iterator[Item]:
        """Queues items of an admitted request, which replace the tokens that it held; for a closed request it does nothing.

        Args:
            request: An open request without waiting items.
            key: Items with equal keys can share a batch; None for items that run alone.
            work: Tokens and payload of each item, at least one.
            cost: Predicted seconds of a batch of `rows` padded to `length`.
            now: The current time.
            keep_estimate: Whether the estimate of admission stays reserved in addition to these items.
            reserved_tokens: Tokens to reserve for the items of later calls. Their priority is later than that of requests that arrive until
                then, so they use capacity but delay no request.
            shape: Returns the shape at which a batch of this key runs. A longer batch never has a smaller shape, and one row always fits.

        Returns:
            The items after the first `PART_ITEMS`, which already count. The caller must pass them to `put_part` in parts.

        Raises:
            InvalidValueError: An item exceeds the maximum tokens of a batch.
            RefusedError: The items have many times the estimated tokens, and the queue is full now.
        """
        counts = [tokens for tokens, _ in work]
        runs = _runs(counts, key, cost, shape, self.max_batch_tokens)
        if not request.open:
            return iter(())
        item_tokens = sum(counts)
        needed_tokens, other_tokens = reserved_tokens + item_tokens, self.queue_tokens - request.tokens
        if needed_tokens > UNDERESTIMATED * request.tokens and other_tokens + needed_tokens > self.max_queue_tokens:
            raise self._underestimated(request, needed_tokens, other_tokens)
        self._hold(request, -request.tokens, -request.seconds)
        if not keep_estimate:
            request.tokens, request.seconds, request.estimated = reserved_tokens, 0.0, False
            if request.reserved_s:
                self._reservations.drop_all(request)
        request.items.clear()  # they have started
        request.results = [None] * len(work)
        request.waiting = request.remaining = len(work)
        request.queued_at = now
        total = sum(runs[tokens][1] for tokens in counts)
        done_s = request.started_s + request.finish_s + request.delay_s
        request.is_quick = self._has_quick_thread and not reserved_tokens and done_s + total + request.seconds <= QUICK_S
        self._pace(request, total - total / len(work))
        request.tokens += item_tokens
        request.seconds += total
        self._hold(request, request.tokens, request.seconds)
        self.queue_items += len(work)
        items = _items(request, key and (key, request.is_quick), work, cost, shape, runs, request.priority + request.pace * done_s)
        self.put_part(request, list(islice(items, PART_ITEMS)), now)
        return items

    def put_part(self, request: ScheduledRequest, items: Sequence[Item], now: float) -> None:
        """Lets the next items that `put` has returned, at least one, wait in order; for a closed request it does nothing."""
        if not request.open:
            return
        request.items.extend(items)
        key = items[0].key
        group = None if key is None else self._groups.setdefault(key, Group())
        for item in items:
            if group is not None:
                group.push(item.tokens, (item.priority, next(self._tie), item))
            if item.priority > now:
                self._reservations.add(item)
        request.stage_number = next(self._tie)
        heap = self._quick_by_priority if request.is_quick else self._by_priority if request.is_short else self._long_by_priority
        heapq.heappush(heap, (request.items[0].priority, request.stage_number, request))
        if request.expires and not request.watched:  # a request with several stages has only one node
            request.watched = True
            heapq.heappush(self._deadlines, (request.deadline, next(self._tie), request))

    def _underestimated(self, request: ScheduledRequest, tokens: int, other_tokens: int) -> RefusedError:
        """Returns the error for a request whose estimate was far too low, if it would overfill the queue; small differences are allowed."""
        return RefusedError(
            "the request has {tokens} tokens where about {estimate} were expected, and the queue holds {held} of "
            "{max_queue_tokens}; try again later, or split it.",
            tokens=tokens,
            estimate=request.tokens,
            held=other_tokens,
            max_queue_tokens=self.max_queue_tokens,
            reason="queue_full",
            retry_after_s=self.queue_seconds / self.threads,
        )

    @property
    def has_quick(self) -> bool:
        """Whether a quick request may wait."""
        return bool(self._quick_by_priority)

    def take(self, now: float, *, last_thread: bool = False, allow_long_step: bool = True, quick_only: bool = False) -> list[Item]:
        """Takes the best batch: the item with the lowest priority value and its best batch-mates; empty if no item can start.

        Batch-mates have the head's key, and have waited nearly as long. The nearest lengths come first. A batch-mate joins if the batch
        stays within its limit, and if the time that it saves for all waiting items exceeds the delay that it causes to the batch. It must
        also save at least LEAST_GAIN of the run.

        Args:
            now: The current time.
            last_thread: Whether no other thread is free and other requests may arrive. Then only requests without running items may start,
                so that no request has all inference threads.
            allow_long_step: Whether a request may start with a step that can take longer than `LONG_STEP_S`.
            quick_only: Whether only items of quick requests may start, which is possible with a single thread only.
        """
        if quick_only:
            head = _first_of(self._quick_by_priority, last_thread, allow_long_step)
        else:
            head = self._first(now, last_thread, allow_long_step)
        if head is None:
            return []
        batch = [head]
        length = head.length
        group = self._groups.get(head.key) if head.key is not None else None
        # items that have waited less than two thirds as long as the head must wait, so that waits are predictable
        last_priority = head.priority + max((now - head.priority) / 3, OVERTAKEN_S)
        self._start(head, now)
        while group is not None and group.lengths:
            batch_mate = self._batch_mate(group, len(batch), length, head, last_priority, last_thread)
            if batch_mate is None:
                break
            length = max(length, batch_mate.length)
            batch.append(batch_mate)
            self._start(batch_mate, now)
        return batch

    def finish(self, item: Item, result: Any) -> bool:
        """Records an item's result; returns whether it was the last result of an open request.

        If so, the caller must put the request's next items, or close it.
        """
        request = item.request
        if not request.open:
            return False
        request.results[item.index] = result
        request.running -= 1
        request.remaining -= 1
        return request.remaining == 0

    def close(self, request: ScheduledRequest) -> bool:
        """Ends a request in any state; returns true only for the first call. Its waiting items will never start."""
        if not request.open:
            return False
        request.open = False
        if request.reserved_s:
            self._reservations.drop_all(request)
        request.results = []  # the heap of deadlines may hold the request for a while
        self._ended += sum(item.key is not None for item in request.items if item.waiting)
        request.items.clear()
        self._open_requests -= 1
        self._long_requests -= not request.is_short
        self._hold(request, -request.tokens, -request.seconds)
        self.queue_items -= request.waiting
        self._drop_ended()
        return True

    def expire(self, now: float) -> list[ScheduledRequest]:
        """Closes and returns the requests whose deadline has passed while an item still waits."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            request.watched = False
            if request.waiting and request.expires and self.close(request):
                expired.append(request)
        return expired

    def _pace(self, request: ScheduledRequest, before: float) -> None:
        """Sets the pace of an open request from the number of long requests, so that all of them together do not fall behind.

        Its last item must get a priority early enough to start before the deadline, even if other requests keep all inference threads busy.
        `before` is the predicted seconds of its remaining work before this item.
        """
        before += request.started_s + request.finish_s
        if before > LONG_S and request.is_short:
            request.is_short = False
            self._long_requests += 1
        request.pace = PACE * max(1.0, self._long_requests / self.threads)
        if before * request.pace > request.slack_s:
            request.pace = max(request.slack_s / before, PACE if before > HEAVY_S else LEAST_PACE)

    def _drop_ended(self) -> None:
        """Drops ended items and requests before they outnumber the live ones; while all threads are busy, nothing else drops them."""
        slack = KEPT_ENDED if self._open_requests else 0
        if len(self._deadlines) > 2 * self._open_requests + slack:
            self._deadlines = [node for node in self._deadlines if node[2].open]
            heapq.heapify(self._deadlines)
        heaps = (self._quick_by_priority, self._by_priority, self._long_by_priority)
        if sum(map(len, heaps)) > 2 * self._open_requests + slack:
            for heap in heaps:
                heap[:] = [node for node in heap if node[2].open and node[1] == node[2].stage_number]
                heapq.heapify(heap)
        if self._ended > self.queue_items + slack:
            self._ended = 0
            self._groups.clear()
            for request in dict.fromkeys(node[2] for heap in heaps for node in heap):
                for item in request.items:
                    if item.waiting and item.key is not None:
                        self._groups.setdefault(item.key, Group()).push(item.tokens, (item.priority, next(self._tie), item))
        if len(self._reservations.items) > 2 * (self.queue_items + MAX_RESERVATIONS * self._open_requests) + slack:
            self._reservations.drop_ended()

    def _hold(self, request: ScheduledRequest, tokens: int, seconds: float) -> None:
        self.queue_tokens += tokens
        if request.is_small:
            self._small_tokens += tokens
        # sums of floats drift; an empty queue takes no time
        self.queue_seconds = self.queue_seconds + seconds if self.queue_tokens else 0.0
        if not request.is_short:
            self._long_seconds = self._long_seconds + seconds if self.queue_tokens else 0.0

    def _start(self, item: Item, now: float) -> None:
        request = item.request
        item.waiting = False
        if not request.started_s:
            request.wait_s = now - request.arrived
        request.started_s += item.seconds
        request.waiting -= 1
        request.running += 1
        request.tokens -= item.tokens
        request.seconds -= item.seconds
        self.queue_items -= 1
        if item.reserved:
            self._reservations.drop(item)
        self._hold(request, -item.tokens, -item.seconds)
        if not request.waiting:
            request.queued_s += now - request.queued_at
        if item.key is not None and (group := self._groups.get(item.key)) is not None:
            group.first(item.tokens)  # drops ended items, so that the group does not grow without limit
            if not group.lengths:
                del self._groups[item.key]

    def _first(self, now: float, last_thread: bool, allow_long_step: bool) -> Item | None:
        """Returns the item that starts next: the one with the lowest priority value, but a late long request only at every second start.

        Long requests become late if there are more of them, or if they take longer, than predicted at their admission. Without this rule,
        all short requests would wait equally long.
        """
        quick = _first_of(self._quick_by_priority, last_thread, allow_long_step) if self._quick_by_priority else None
        short = _first_of(self._by_priority, last_thread, allow_long_step) if self._by_priority else None
        if quick is not None and (short is None or _order(quick) < _order(short)):
            short = quick
        long = _first_of(self._long_by_priority, last_thread, allow_long_step) if self._long_by_priority else None
        if short is None or long is None:
            first = short or long
        elif self._last_was_long and now - long.priority > LATE_S:
            first = short
        else:
            first = min(short, long, key=_order)
        self._last_was_long = first is not None and first is long
        return first

    def _batch_mate(self, group: Group, rows: int, length: int, head: Item, last_priority: float, last_thread: bool) -> Item | None:
        """Returns the best item to add to a batch of `rows` padded to `length`, or None if no item is worth it."""
        for item in (group.longest_within(length, last_priority), group.shortest_over(length, last_priority)):
            if item is None or (last_thread and item.request.running and item.request is not head.request):
                continue
            longer = max(length, item.length)
            # cost of real rows only: rows that pad a planned shape are free for the next batch-mate
            run_s = head.cost(rows + 1, longer)
            delay = run_s - head.cost(rows, length)
            saved = head.cost(1, item.length) - delay
            shape = head.shape(rows + 1, longer)
            if shape is None or shape[0] * shape[1] > self.max_batch_tokens:
                continue
            if saved * self.queue_items > delay * rows and saved >= LEAST_GAIN * run_s:
                return item
        return None


def _order(item: Item) -> tuple[float, int]:
    return item.priority, item.request.stage_number


def _first_of(heap: list[_Node], last_thread: bool, allow_long_step: bool) -> Item | None:
    """Returns the first waiting item, by priority, of the requests that may start one; a request with waiting items stays in the heap."""
    passed: list[_Node] = []
    item = None
    while heap and item is None:
        priority, tie, request = heap[0]
        while request.items and not request.items[0].waiting:  # it has started as a batch-mate
            request.items.popleft()
        if tie != request.stage_number or not request.items:
            heapq.heappop(heap)
        elif request.items[0].priority > priority:
            heapq.heapreplace(heap, (request.items[0].priority, tie, request))
        elif (last_thread and request.running) or (request.long_step and not allow_long_step):
            passed.append(heapq.heappop(heap))
        else:
            item = request.items[0]
    for node in passed:
        heapq.heappush(heap, node)
    return item


def _runs(
    counts: Sequence[int], key: Hashable | None, cost: RunSeconds, shape: Shape, max_batch_tokens: int
) -> dict[int, tuple[int, float]]:
    """Returns by the tokens of an item the length at which it runs alone, and its part of the predicted seconds of a full batch.

    Raises:
        InvalidValueError: An item exceeds the maximum tokens of a batch.
    """
    runs = {}
    for tokens in set(counts):
        rows, length = shape(1, tokens) or (inf, tokens)
        if rows * length > max_batch_tokens:
            raise _longer_than_batch(max(counts), max_batch_tokens)
        # a full batch has items of the same length, if the item can share a batch
        full = 1 if key is None else max(1, max_batch_tokens // max(1, length))
        runs[tokens] = length, cost(full, length) / full
    return runs


def _items(
    request: ScheduledRequest,
    key: Hashable | None,
    work: Sequence[tuple[int, Any]],
    cost: RunSeconds,
    shape: Shape,
    runs: dict[int, tuple[int, float]],
    priority: float,
) -> Iterator[Item]:
    """Yields the items of a request, of which the first one has the given priority."""
    pace = request.pace
    for index, (tokens, payload) in enumerate(work):
        length, seconds = runs[tokens]
        yield Item(request, index, tokens, payload, key, cost, shape, length, seconds, priority)
        priority += pace * seconds


def _larger_than_queue(tokens: int, max_queue_tokens: int) -> TooLargeError:
    return TooLargeError(
        "the request has about {tokens} tokens and the queue holds {max_queue_tokens}; split it; the operator can raise --max-queue-tokens.",
        tokens=tokens,
        max_queue_tokens=max_queue_tokens,
    )


def _too_late(wait: float, *, retry_after_s: float) -> RefusedError:
    return RefusedError(
        "the queue is about {wait:.1f} s long, so the request would probably miss its deadline; try again later, or allow more time.",
        wait=wait,
        reason="deadline",
        retry_after_s=retry_after_s,
    )


def _longer_than_batch(tokens: int, max_batch_tokens: int) -> InvalidValueError:
    return InvalidValueError(
        "the text has {tokens} tokens and a batch takes {max_batch_tokens}; shorten it; the operator can raise --max-batch-tokens.",
        tokens=tokens,
        max_batch_tokens=max_batch_tokens,
    )
