"""RequestQueue: admits requests, orders their items, and chooses the next batch. It has no threads, locks or clock.

A request is admitted or refused as a whole, and closed once. Its items are texts, or windows of a text. The item with the lowest *priority*
starts first: the arrival of its request plus the predicted seconds of the request's earlier items. So the later items of a long request let
new short requests pass. No item waits forever, because later requests have later priorities.
"""

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Any

from bertserve.service.errors import RefusedError
from bertserve.service.scheduling.records import Batch, Item, ScheduledRequest
from bertserve.service.scheduling.waiting_items import WaitingItems

# Nearly every wait is at most this many times its prediction.
PREDICTION_ERROR = 1.15

# A request is long if its items before the last one take more seconds of a thread.
LONG_S = 0.03

# Seconds for which the past predicts the next requests: after a short request, long ones leave a thread to the next one, and after runs
# at the same time, each has one thread, because a multi-threaded run would soon share its cores.
RECENT_S = 1.0

# Share of the queue that is reserved for requests that fit into one batch (bench/results/2026-11-29-queue.md).
SHARE_FOR_SMALL = 1 / 8

# Minimum share of a run that a batch-mate must save. A run cannot be interrupted, so it must not become longer for a small gain.
MIN_GAIN = 1 / 16

# Seconds by which the priority of a batch-mate can be later than that of the first item: efficiency must not undo the order.
MAX_LAG_S = 0.3


class RequestQueue:
    """Waiting requests and items in fair order, within a limit of tokens, and the current batches.

    Attributes:
        max_queue_tokens: Maximum tokens that all open requests hold together.
        max_request_tokens: Maximum tokens of one request. A request larger than a batch is also refused if all open requests together
            would hold more than this: the rest of the queue is for smaller requests.
        threads: Maximum number of current batches.
        threads_per_run: Threads of a multi-threaded run. Runs are multi-threaded if, for the last `RECENT_S` seconds, the active and
            waiting ones fit into `threads` with this many threads each; a run without others always fits.
        batches: The current batches.
        requests: The open requests: not refused, and not ended.
        total_held_tokens: Tokens that the open requests hold together.
        queue_items: Items that wait.
    """

    def __init__(self, *, max_queue_tokens: int, threads: int = 1, threads_per_run: int = 1) -> None:
        """Creates an empty queue."""
        self.max_queue_tokens = max_queue_tokens
        self.max_request_tokens = max_queue_tokens - int(max_queue_tokens * SHARE_FOR_SMALL)
        self.requests: set[ScheduledRequest] = set()
        self.total_held_tokens = 0
        self.queue_items = 0
        self.threads = threads
        self.threads_per_run = threads_per_run
        self.batches: set[Batch] = set()
        self._short_items = WaitingItems()
        self._long_items = WaitingItems()
        self._owed_s = 0.0  # predicted seconds that short requests get before the next long one: as many as the last long batch
        self._last_short = -inf  # arrival of the last short request
        self._last_crowded = -inf  # last time at which the active and waiting runs were too many for multi-threaded runs

    def wait_s(self, now: float) -> float:
        """Returns the predicted seconds until a short request that arrives now starts."""
        short_s, long_s = self._short_items.predicted_s, self._long_items.predicted_s
        # while both wait, short and long requests get equal thread time
        return (short_s + min(short_s, long_s) + self._remaining_s(now)) / self.threads

    def open(self, request: ScheduledRequest, now: float) -> None:
        """Opens a request before its tokens are known, if a short one would probably start before the deadline.

        Raises:
            RefusedError: The queue is full or too long.
        """
        if self.total_held_tokens >= self.max_queue_tokens:
            raise self._full_error(1, self.max_queue_tokens, now)
        self._check_wait(self.wait_s(now), 0.0, request.deadline - now)
        request.priority = request.arrived
        self.requests.add(request)

    def put(self, request: ScheduledRequest, items: Sequence[Item], now: float) -> None:
        """Queues the first or the next items of an open request, at least one. It must hold at most `max_request_tokens`.

        Raises:
            RefusedError: The queue is full for the first items, or the last of them would probably start after the deadline.
        """
        self._predict(request, items)
        if not request.admitted:
            self._admit(request, items[-1].priority - request.arrived, now)
        request.results = [None] * len(items)
        request.unfinished = len(items)
        request.waiting.update(items)
        self.queue_items += len(items)
        (self._long_items if request.is_long else self._short_items).add(request, items)

    def start_batch(self, now: float) -> Batch | None:
        """Starts the best batch: the first item by priority, and batch-mates of nearest lengths while each saves more time than it costs.

        After a short request, batches that begin with an item of a long one leave one thread free. Returns None if nothing can start.
        """
        if not self.queue_items:
            return None
        long_batches = sum(batch.items[0].request.is_long for batch in self.batches)
        only_short = long_batches > 0 and long_batches >= self._threads_for_long(now)
        short = self._short_items.first()
        long = None if only_short else self._long_items.first()
        long_is_first = long and (not short or (self._owed_s <= 0 and long.priority < short.priority))
        head = long if long_is_first else short
        if head is None:
            return None
        items, length = [head], head.length
        self._remove(head)
        while self.queue_items and (item := self._batch_mate(head, len(items), length, only_short)):
            items.append(item)
            length = max(length, item.length)
            self._remove(item)
        predicted_s = head.request.runner.predict_seconds(len(items), length)
        if head.request.is_long:
            self._owed_s = predicted_s
        else:
            self._owed_s -= sum(item.predicted_s for item in items if not item.request.is_long)
        runs = len(self.batches) + 1 + self.queue_items
        if runs > 1 and runs * self.threads_per_run > self.threads:
            self._last_crowded = now
        batch = Batch(items, now, predicted_s, multi_threaded=now - self._last_crowded > RECENT_S)
        self.batches.add(batch)
        return batch

    def finish(self, item: Item, result: object) -> list[Any] | None:
        """Records a result; after the last one of an open request, returns all. The request must then get its next items or be closed."""
        request = item.request
        if request not in self.requests:  # it has ended
            return None
        request.results[item.index] = result
        request.unfinished -= 1
        return None if request.unfinished else request.results

    def close(self, request: ScheduledRequest) -> bool:
        """Ends a request in any state; returns true only for the first call. Its waiting items never start."""
        if request not in self.requests:
            return False
        self.requests.remove(request)
        if request.admitted:
            self.total_held_tokens -= request.work.held_tokens
        request.results = []
        for item in list(request.waiting):
            self._remove(item)
        return True

    def _admit(self, request: ScheduledRequest, own_s: float, now: float) -> None:
        """Admits or refuses a request, by its tokens and the wait; its items before the last one take `own_s` predicted seconds."""
        tokens = request.work.held_tokens
        limit = self.max_request_tokens if tokens > request.runner.max_batch_tokens else self.max_queue_tokens
        if self.total_held_tokens + tokens > limit:
            raise self._full_error(tokens, limit, now)
        if request.is_long:
            threads = self._threads_for_long(request.arrived)
            long_s = self._long_items.predicted_s + self._remaining_s(now)
            # the items that wait share all threads, and the long ones among them only those for long requests
            wait_s = max((self._short_items.predicted_s + long_s) / self.threads, long_s / threads)
        else:
            threads, wait_s = self.threads, self.wait_s(now)
            self._last_short = max(self._last_short, request.arrived)
        self._check_wait(wait_s, own_s / threads, request.deadline - now)
        self.total_held_tokens += tokens
        request.admitted = True

    def _remaining_s(self, now: float) -> float:
        """Returns the predicted seconds until all current batches have ended, in total; 0 if another one can start."""
        if len(self.batches) < self.threads:
            return 0.0
        return sum(max(batch.start + batch.predicted_s - now, 0.0) for batch in self.batches)

    def _threads_for_long(self, now: float) -> int:
        return max(self.threads - (now - self._last_short < RECENT_S), 1)

    def _check_wait(self, wait_s: float, own_s: float, time_left_s: float) -> None:
        """Refuses a request that would be late if its wait or its own seconds of work (`own_s`) took `PREDICTION_ERROR` times as long."""
        # one of the two, not both: while short requests keep the wait at its limit, no list would be admitted
        max_wait_s = max(min(time_left_s / PREDICTION_ERROR, time_left_s - PREDICTION_ERROR * own_s), 0.0)
        if wait_s > max_wait_s:  # an empty queue admits all, because a retry would be no better
            raise RefusedError(
                "the queue takes about {wait:.1f} s and the request itself {own:.1f} s, and its deadline is in {left:.1f} s; "
                "try again later, send less at once, or allow more time.",
                wait=wait_s,
                own=own_s,
                left=time_left_s,
                reason="deadline",
                retry_after_s=wait_s - max_wait_s,
            )

    def _full_error(self, tokens: int, limit: int, now: float) -> RefusedError:
        excess = min((self.total_held_tokens + tokens - limit) / max(self.total_held_tokens, 1), 1.0)
        return RefusedError(
            "the queue has no room for the request: it holds {queue_tokens} of {limit} tokens; try again later.",
            queue_tokens=self.total_held_tokens,
            limit=limit,
            reason="queue_full",
            # requests end after the current batches
            retry_after_s=(self._remaining_s(now) + excess * (self._short_items.predicted_s + self._long_items.predicted_s)) / self.threads,
        )

    def _predict(self, request: ScheduledRequest, items: Sequence[Item]) -> None:
        """Gives the next items of a request their priorities, moves its own priority behind them, and decides whether it is long."""
        runner = request.runner
        runs: dict[int, tuple[int, float]] = {}  # padded length and seconds by tokens
        for index, item in enumerate(items):
            if item.tokens not in runs:
                _, length = runner.padded_shape(1, item.tokens) or (1, item.tokens)
                full = max(1, runner.max_batch_tokens // max(1, length)) if runner.shares_batches else 1
                runs[item.tokens] = length, runner.predict_seconds(full, length) / full
            item.request, item.index, item.priority = request, index, request.priority
            item.length, item.predicted_s = runs[item.tokens]
            request.priority += item.predicted_s
        request.is_long |= items[-1].priority - request.arrived > LONG_S

    def _remove(self, item: Item) -> None:
        """Removes an item that has started, or whose request has ended."""
        request = item.request
        request.waiting.remove(item)
        self.queue_items -= 1
        (self._long_items if request.is_long else self._short_items).remove(item)

    def _batch_mate(self, head: Item, rows: int, length: int, only_short: bool) -> Item | None:
        """Returns the best item to add to a batch of `rows` items padded to `length`, or None if no item is worth it.

        It is worth it if the batch stays within its limit, and if the time that it saves for all waiting items exceeds the delay that it
        causes to the batch. An item of a long request must save more than it delays a short one. Items of short requests are added first.
        """
        request = head.request
        runner = request.runner
        waiting_items = ((self._short_items,) if only_short else (self._short_items, self._long_items)) if runner.shares_batches else ()
        for item in chain.from_iterable(waiting.nearest(runner, length, head.priority + MAX_LAG_S) for waiting in waiting_items):
            longer = max(length, item.length)
            shape = runner.padded_shape(rows + 1, longer)
            if shape is None or shape[0] * shape[1] > runner.max_batch_tokens:
                continue
            # cost of real rows only: rows that pad a planned shape are free for the next batch-mate
            run_s = runner.predict_seconds(rows + 1, longer)
            delay = run_s - runner.predict_seconds(rows, length)
            saved = runner.predict_seconds(1, item.length) - delay
            favors_long = item.request.is_long and not request.is_long
            if saved * self.queue_items > delay * rows and saved >= max(MIN_GAIN * run_s, delay if favors_long else 0.0):
                return item
        return None
