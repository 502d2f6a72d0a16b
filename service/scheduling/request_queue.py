"""RequestQueue: what is admitted and what waits, and which items run next. The heart of the scheduler, and pure.

No threads, no locks and no clock: every call passes `now`, and one caller at a time calls. It sees of an item an opaque
key (what may share a batch), its cost in tokens and a payload that it never opens.

A **ScheduledRequest** is one request: admitted whole or refused whole, closed exactly once. It has one or more **items** (texts, or
windows of a text), which run in batches. Invariants: `queue_tokens` is the sum over open requests of what they still hold,
and a closed request's items never start.

Every operation is O(log n) amortized over the items: dead items are skipped when they come up, each once.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import count
from math import inf
from typing import Any

from bertserve.service.errors import InvalidValueError, RefusedError, TooLargeError
from bertserve.service.scheduling.scheduled_request import (
    MAX_RESERVATIONS,
    PACE,
    UNDERESTIMATED,
    Cost,
    Group,
    Item,
    Reservations,
    ScheduledRequest,
    Shape,
    Share,
    exact,
)

# Ended requests and items that can be kept in addition to the live ones, so that dropping them is rare.
KEPT_ENDED = 64

# Times its prediction that nearly every wait is at most: under overload, and with neighbors, a machine is a tenth slower than it was.
PREDICTION_ERROR = 1.15

# A request is long if its items before the last one take more predicted seconds of an inference thread.
LONG_S = 0.05

# The deadline can lower the pace of a request. The limit is LEAST_PACE, the speed of the clock, so that a short deadline gives no priority over
# other requests. For a request of more than HEAVY_S seconds it is PACE, because it would delay others for too long.
HEAVY_S, LEAST_PACE = 1.0, 1.0

# When the queue is full, requests of at most a 64th of it are still admitted, until small requests hold an 8th of it.
SMALL_PARTS, SPARE_PARTS = 64, 8

# A long request that is so many seconds late no longer delays others alone: every second start goes to a short request, if one waits.
LATE_S = 0.1

# Predicted seconds of late long requests for each second of the short ones that wait with them: their runs are up to twice as long.
LATE_PER_SHORT = 2.0

# A step of more seconds, such as to tokenize a very long text, cannot be interrupted. One thread begins none while all others have one.
LONG_STEP_S = 0.02

# Seconds by which a batch-mate may always start after the head: while waits are this short, the best batch counts for more.
OVERTAKEN_S = 0.1

# Minimum share of a run that a batch-mate must save. A run cannot be interrupted, so it must not become longer for a small gain.
LEAST_GAIN = 1 / 32


# A request in a heap: the priority of its first waiting item, or less; the place of its current stage; itself.
_Node = tuple[float, int, ScheduledRequest]


class RequestQueue:
    """Requests and items that wait, in fair order, within a token budget."""

    def __init__(self, *, max_batch_tokens: int, max_queue_tokens: int, max_memory: float = inf, threads: int = 1) -> None:
        """Creates an empty queue.

        Args:
            max_batch_tokens: Budget of a batch: rows times padded length.
            max_queue_tokens: Most tokens that admitted requests may hold together.
            max_memory: Most numbers of four bytes that they may hold together.
            threads: How many batches run at once, for predicted waits.
        """
        self.max_batch_tokens = max_batch_tokens
        self.max_queue_tokens = max_queue_tokens
        self._max_memory = max_memory
        self._memory = 0
        self.queue_tokens = 0
        self.queue_items = 0
        self.queue_seconds = 0.0
        self._long_seconds = 0.0  # the part of long requests, and of those of a share
        self.threads = threads
        self._reservations = Reservations()
        self._tie = count()
        # Requests by a priority that is at most that of their first waiting item, which is corrected when it comes up. Each stage of a request has its own
        # node; an older one is dropped.
        self._by_priority: list[_Node] = []
        self._long_by_priority: list[_Node] = []  # the same for long requests, and for those of a share
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
        share: Share | None = None,
    ) -> ScheduledRequest:
        """Admits a whole request by its estimated cost.

        Args:
            tokens: About how many it has.
            seconds: About how many it takes of an inference thread.
            deadline: Time by which its last item must have started.
            now: The time.
            busy_s: Seconds that the inference threads still need for what they run, together; 0 where one is free.
            items: About how many items it will have.
            share: The share of the queue that it counts in.

        Raises:
            TooLargeError: It is larger than the queue and would never fit.
            RefusedError: It does not fit now, into the queue or its share, or would probably not start before its deadline.
        """
        if tokens > self.max_queue_tokens:
            raise _larger_than_queue(tokens, self.max_queue_tokens)
        if share is not None:
            tokens = share.reservation(tokens, self.max_queue_tokens)
        is_small = share is None and tokens * SMALL_PARTS <= self.max_queue_tokens
        self._check_room(tokens, busy_s, is_small=is_small)
        before = _before_last(seconds, items)
        is_short = before <= LONG_S and share is None
        wait = self.wait_s(now, busy_s, is_short=is_short)
        # the last item of a long request, and a request of a share, wait for the later items of others too
        last_wait = wait if is_short else max(wait, (self.queue_seconds + busy_s) / self.threads)
        # its own items count within the error only: otherwise a queue that is always as long as allowed would admit nothing but short texts
        left, own = deadline - now, before / self.threads
        if now + (max(PREDICTION_ERROR * last_wait, last_wait + own) if last_wait else 0.0) > deadline:
            raise _too_late(last_wait, retry_after_s=last_wait - min(left / PREDICTION_ERROR, left - own))
        request = ScheduledRequest(
            deadline=deadline,
            tokens=tokens,
            seconds=seconds,
            arrived=now,
            priority=now,
            slack_s=max(left - PREDICTION_ERROR * last_wait - own, 0.0),
            is_short=share is None,
            is_small=is_small,
            predicted_wait_s=wait,
            share=share,
        )
        self._open_requests += 1
        self._enter_share(request, seconds, before)
        self._hold(request, tokens, seconds)
        self._reservations.expect(request, items)
        return request

    def _check_room(self, tokens: int, busy_s: float, *, is_small: bool) -> None:
        """Refuses a request for which the queue has no room."""
        has_room = is_small and self._small_tokens + tokens <= self.max_queue_tokens // SPARE_PARTS
        if self.queue_tokens + tokens > self.max_queue_tokens and not has_room:
            excess = (self.queue_tokens + tokens - self.max_queue_tokens) / self.queue_tokens
            raise RefusedError(
                "the queue is full: it holds {queue_tokens} of {max_queue_tokens} tokens and the request has about {tokens}; "
                "try again later.",
                queue_tokens=self.queue_tokens,
                max_queue_tokens=self.max_queue_tokens,
                tokens=tokens,
                reason="queue_full",
                # room comes with starts, after the runs of now
                retry_after_s=max(busy_s + self.queue_seconds * excess, 0.0) / self.threads,
            )

    def wait_s(self, now: float, busy_s: float = 0.0, *, is_short: bool = True) -> float:
        """Returns the predicted seconds until an item that arrives now starts: what has priority over it, over all inference threads.

        Args:
            now: The time.
            busy_s: Seconds that the inference threads still need for what they run, together.
            is_short: Whether it is of a short request, which late long ones delay only every second time.
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
        cost: Cost,
        now: float,
        *,
        keep_estimate: bool = False,
        reserved_tokens: int = 0,
        shape: Shape = exact,
    ) -> None:
        """Queues an admitted request's items, in place of what it held before; a closed request's are dropped.

        Args:
            request: An open request none of whose items wait.
            key: What may share a batch; None for items that run alone.
            work: Tokens and payload of each item, at least one.
            cost: Predicted seconds of a batch of `rows` padded to `length`.
            now: The time.
            keep_estimate: Keep the estimate of admission reserved, in addition to these items.
            reserved_tokens: Tokens to reserve for the items of later calls. Their priority is later than that of requests that arrive until then, so they
                use capacity and delay no request.
            shape: What a batch of this key is run at; a longer one of as many rows is never smaller, and one row always runs.

        Raises:
            InvalidValueError: An item is over the budget of a batch.
            RefusedError: They have many times the admitted tokens, and do not fit now.
        """
        alone = [shape(1, tokens) or (inf, tokens) for tokens, _ in work]  # rows and length of a run of each item by itself
        if max(rows * length for rows, length in alone) > self.max_batch_tokens:
            raise _longer_than_batch(max(tokens for tokens, _ in work), self.max_batch_tokens)
        if not request.open:
            return
        needed, others = reserved_tokens + sum(tokens for tokens, _ in work), self.queue_tokens - request.tokens
        if needed > UNDERESTIMATED * request.tokens and others + needed > self.max_queue_tokens:
            raise self._underestimated(request, needed, others)
        self._hold(request, -request.tokens, -request.seconds)
        if not keep_estimate:
            request.tokens, request.seconds, request.estimated = reserved_tokens, 0.0, False
            if request.reserved_s:
                self._reservations.drop_all(request)
        request.results = [None] * len(work)
        request.waiting = request.remaining = len(work)
        request.queued_at = now
        # of a full batch of items of the same length, if an item may share one
        full = [1 if key is None else max(1, self.max_batch_tokens // max(1, length)) for _, length in alone]
        costs = [cost(rows, length) / rows for rows, (_, length) in zip(full, alone, strict=True)]
        total = sum(costs)
        self._pace(request, total - total / len(costs))
        priority = first = request.priority + request.pace * (request.started_s + request.finish_s + request.delay_s)
        for index, ((tokens, payload), (_, length), seconds) in enumerate(zip(work, alone, costs, strict=True)):
            self._add(Item(request, index, tokens, payload, key, cost, shape, length, seconds, priority), now)
            priority += request.pace * seconds
        self._hold(request, request.tokens, request.seconds)
        self.queue_items += len(work)
        self._order(request, first)

    def _order(self, request: ScheduledRequest, priority: float) -> None:
        """Puts a request with new items into the order of those that wait, by the priority of the first item."""
        request.place = next(self._tie)
        heap = self._by_priority if request.is_short else self._long_by_priority
        heapq.heappush(heap, (priority, request.place, request))
        if request.expires and not request.watched:  # a request with several stages has one node
            request.watched = True
            heapq.heappush(self._deadlines, (request.deadline, next(self._tie), request))

    def _underestimated(self, request: ScheduledRequest, tokens: int, held: int) -> RefusedError:
        """Returns the error of a request whose estimate was far too low and that would overfill the queue; a smaller difference is only charged."""
        return RefusedError(
            "the request has {tokens} tokens where about {estimate} were expected, and the queue holds {held} of "
            "{max_queue_tokens}; try again later, or split it.",
            tokens=tokens,
            estimate=request.tokens,
            held=held,
            max_queue_tokens=self.max_queue_tokens,
            reason="queue_full",
            retry_after_s=self.queue_seconds / self.threads,
        )

    def _add(self, item: Item, now: float) -> None:
        """Adds the next item of a request, which does not count as held yet."""
        request = item.request
        request.items.append(item)
        if item.key is not None:
            self._groups.setdefault(item.key, Group()).push(item.tokens, (item.priority, next(self._tie), item))
        if item.priority > now:
            self._reservations.add(item)
        request.tokens += item.tokens
        request.seconds += item.seconds

    def expect_memory(self, request: ScheduledRequest, memory: int) -> None:
        """Counts the numbers of four bytes that a request will hold until it ends.

        Raises:
            RefusedError: There is no room for them in addition to those of other requests.
        """
        if not request.open:
            return
        others = self._memory - request.memory
        if memory > request.memory and others and others + memory > self._max_memory:
            raise RefusedError(
                "the request needs memory for {memory} numbers, and other requests hold {others} of {max_memory}; try again later, or split it.",
                memory=memory,
                others=others,
                max_memory=self._max_memory,
                reason="queue_full",
                retry_after_s=self.queue_seconds / self.threads,
            )
        self._memory, request.memory = others + memory, memory

    def expect_answer(self, request: ScheduledRequest, size: int) -> None:
        """Counts the bytes of a request's answer in its share.

        Raises:
            RefusedError: The requests of its share would make too large answers at once.
        """
        if request.share is not None and request.open:
            request.share.check_answer(request.answer_bytes, size)
            request.share.answer_bytes += size - request.answer_bytes
            request.answer_bytes = size

    def take(self, now: float, *, last_thread: bool = False, long_step: bool = True) -> list[Item]:
        """Takes the best batch there is: the item of the first priority and its best batch-mates; empty if nothing waits.

        Batch-mates have the head's key, and have waited nearly as long. The nearest lengths come first, and one joins as long as the batch
        stays within the budget and the fixed cost that it saves everyone who waits outweighs the delay to those already in the batch.
        It is not too small a part of the run either.

        Args:
            now: The time.
            last_thread: Whether no other thread is free and others may come: then only requests of which nothing runs may start, so that none has all inference threads.
            long_step: Whether a request may begin with a long step, of over `LONG_STEP_S`.
        """
        head = self._first(now, last_thread, long_step)
        if head is None:
            return []
        batch = [head]
        length = head.length
        group = self._groups.get(head.key) if head.key is not None else None
        # who has waited less than two thirds as long as the head waits on, so that waits can be predicted
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
        """Records an item's result; returns whether it was the last one of an open request.

        The caller then puts the request's next items, or closes it.
        """
        request = item.request
        if not request.open:
            return False
        request.results[item.index] = result
        request.running -= 1
        request.remaining -= 1
        return request.remaining == 0

    def close(self, request: ScheduledRequest) -> bool:
        """Ends a request, whatever its state; true for the first call only. Its waiting items will never start."""
        if not request.open:
            return False
        request.open = False
        if request.reserved_s:
            self._reservations.drop_all(request)
        request.results = []  # the deadline heap may hold the request for a while longer
        self._ended += sum(item.key is not None for item in request.items if item.waiting)
        request.items.clear()
        self._memory -= request.memory
        self._open_requests -= 1
        self._long_requests -= request.is_long
        if request.share is not None:
            request.share.requests -= 1
            request.share.priority -= request.pace * request.seconds  # of what will not run
            request.share.answer_bytes -= request.answer_bytes
            self._long_requests -= request.share.requests == 0
        self._hold(request, -request.tokens, -request.seconds)
        self.queue_items -= request.waiting
        self._let_go()
        return True

    def expire(self, now: float) -> list[ScheduledRequest]:
        """Closes and returns the requests whose deadline has passed while an item of theirs still waits."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            request.watched = False
            if request.waiting and request.expires and self.close(request):
                expired.append(request)
        return expired

    def _enter_share(self, request: ScheduledRequest, seconds: float, before: float) -> None:
        """Queues a new request behind those of its share, if it has one, and sets its pace."""
        share = request.share
        if share is not None:
            share.requests += 1
            self._long_requests += share.requests == 1
        self._pace(request, before)
        if share is not None:
            request.priority = min(max(request.priority, share.priority), request.priority + request.slack_s)
            share.priority = request.priority + request.pace * seconds

    def _pace(self, request: ScheduledRequest, before: float) -> None:
        """Sets the pace of a request by how many long requests share the inference threads: all of them together must not fall behind the time.

        The last item must have a priority early enough to start before the deadline, even if the requests with priority over it keep the inference threads busy.

        Args:
            request: An open request.
            before: Predicted seconds of what it still has to do before its last item.
        """
        before += request.started_s + request.finish_s
        if before > LONG_S and not request.is_long and request.share is None:  # all requests of a share together count as a long one
            request.is_long, request.is_short = True, False
            self._long_requests += 1
        request.pace = PACE * max(1.0, self._long_requests / self.threads)
        if before * request.pace > request.slack_s:
            request.pace = max(request.slack_s / before, PACE if before > HEAVY_S else LEAST_PACE)

    def _let_go(self) -> None:
        """Drops ended items and requests before they outnumber the live ones: if all inference threads are busy, nothing else drops them."""
        slack = KEPT_ENDED if self._open_requests else 0
        if len(self._deadlines) > 2 * self._open_requests + slack:
            self._deadlines = [node for node in self._deadlines if node[2].open]
            heapq.heapify(self._deadlines)
        heaps = (self._by_priority, self._long_by_priority)
        if sum(map(len, heaps)) > 2 * self._open_requests + slack:
            for heap in heaps:
                heap[:] = [node for node in heap if node[2].open and node[1] == node[2].place]
                heapq.heapify(heap)
        if self._ended > self.queue_items + slack:
            self._ended = 0
            self._groups.clear()
            for request in dict.fromkeys(node[2] for heap in heaps for node in heap):
                for item in request.items:
                    if item.waiting and item.key is not None:
                        self._groups.setdefault(item.key, Group()).push(item.tokens, (item.priority, next(self._tie), item))
        if len(self._reservations.items) > 2 * (self.queue_items + MAX_RESERVATIONS * self._open_requests) + slack:
            self._reservations.let_go()

    def _hold(self, request: ScheduledRequest, tokens: int, seconds: float) -> None:
        self.queue_tokens += tokens
        if request.is_small:
            self._small_tokens += tokens
        if request.share is not None:
            request.share.tokens += tokens
        # float sums drift; an empty queue takes no time
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
            group.first(item.tokens)  # drops the item, so that no group grows without end
            if not group.lengths:
                del self._groups[item.key]

    def _first(self, now: float, last_thread: bool, long_step: bool) -> Item | None:
        """Returns the item that starts next: the one of the first priority, but of a late long request only every second time.

        Long requests are late when there are more of them, or they take longer, than was predicted when they were admitted. Without this, all
        short requests would wait as long as they are late.
        """
        short = _first_of(self._by_priority, last_thread, long_step) if self._by_priority else None
        long = _first_of(self._long_by_priority, last_thread, long_step) if self._long_by_priority else None
        if short is None or long is None:
            first = short or long
        elif self._last_was_long and now - long.priority > LATE_S:
            first = short
        else:
            first = min(short, long, key=lambda item: (item.priority, item.request.place))
        self._last_was_long = first is not None and first is long
        return first

    def _batch_mate(self, group: Group, rows: int, length: int, head: Item, last_priority: float, last_thread: bool) -> Item | None:
        """Returns the best item to add to a batch of `rows` padded to `length`, or None if none is worth it."""
        for item in (group.longest_within(length, last_priority), group.shortest_over(length, last_priority)):
            if item is None or (last_thread and item.request.running and item.request is not head.request):
                continue
            longer = max(length, item.length)
            # by the rows that are worth something: rows that fill up a planned shape are there for the next batch-mate
            run_s = head.cost(rows + 1, longer)
            delay = run_s - head.cost(rows, length)
            saved = head.cost(1, item.length) - delay
            shape = head.shape(rows + 1, longer)
            if shape is None or shape[0] * shape[1] > self.max_batch_tokens:
                continue
            if saved * self.queue_items > delay * rows and saved >= LEAST_GAIN * run_s:
                return item
        return None


def _first_of(heap: list[_Node], last_thread: bool, long_step: bool) -> Item | None:
    """Returns the waiting item of the first priority of a request that may start one; a request stays in the heap for as long as any of its waits."""
    passed: list[_Node] = []
    item = None
    while heap and item is None:
        priority, tie, request = heap[0]
        while request.items and not request.items[0].waiting:  # it has started as a batch-mate
            request.items.popleft()
        if tie != request.place or not request.items:
            heapq.heappop(heap)
        elif request.items[0].priority > priority:
            heapq.heapreplace(heap, (request.items[0].priority, tie, request))
        elif (last_thread and request.running) or (request.delay_s > LONG_STEP_S and not long_step):
            passed.append(heapq.heappop(heap))
        else:
            item = request.items[0]
    for node in passed:
        heapq.heappush(heap, node)
    return item


def _before_last(seconds: float, items: int) -> float:
    """Returns the predicted seconds of a request before its last item, of `items` about equal ones."""
    return seconds - seconds / max(items, 1)


def _larger_than_queue(tokens: int, most: int) -> TooLargeError:
    return TooLargeError(
        "the request has about {tokens} tokens and the queue holds {max_queue_tokens}; split it; the operator can raise --max-queue-tokens.",
        tokens=tokens,
        max_queue_tokens=most,
    )


def _too_late(wait: float, *, retry_after_s: float) -> RefusedError:
    return RefusedError(
        "the queue is about {wait:.1f} s long, so the request would probably miss its deadline; try again later, or allow more time.",
        wait=wait,
        reason="deadline",
        retry_after_s=retry_after_s,
    )


def _longer_than_batch(tokens: int, most: int) -> InvalidValueError:
    return InvalidValueError(
        "the text has {tokens} tokens and a batch takes {max_batch_tokens}; shorten it; the operator can raise --max-batch-tokens.",
        tokens=tokens,
        max_batch_tokens=most,
    )
