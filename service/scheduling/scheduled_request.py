"""Waiting work: ScheduledRequest and its Items; Group has items by length; Reservations count later work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

RunSeconds = Callable[[int, int], float]
# rows and longest tokens of a batch -> the rows and length of its run; None if it has more rows than can run at once
Shape = Callable[[int, int], tuple[int, int] | None]

# Factor by which a request's earlier items count in the priorities of its later ones, so that other requests run between them even on a
# slower machine than predicted. If more long requests than threads share the inference threads, the factor is larger.
PACE = 1.5


def exact(rows: int, tokens: int) -> tuple[int, int]:
    """Returns the shape of a batch that is padded only to its longest text."""
    return rows, tokens


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request in the queue.

    Attributes:
        deadline: Time by which its last item must have started.
        tokens: Tokens that it holds of the queue: an estimate at first, then the tokens of its waiting items.
        seconds: Predicted seconds of these tokens.
        arrived: Time at which it was admitted.
        priority: Virtual start time of its first item, in seconds; the lowest is served first. It is the arrival.
        slack_s: Latest delay of its last item, in seconds after its arrival, that still meets the deadline, as predicted at admission.
        results: One per item, in order, filled as they finish.
        items: Its items by priority, from the first waiting one.
        waiting: Items that have not started.
        running: Items that have started and not finished.
        remaining: Items that have not finished.
        open: Whether it is neither answered nor failed.
        estimated: Whether its items are not yet known.
        stage_number: Number of its current stage among the stages of all requests; it breaks ties of priorities.
        watched: Whether the queue checks its deadline.
        expires: Whether the deadline ends it while items wait.
        queued_at: Time at which its items were put.
        queued_s: Seconds that its items waited: until the last one started, summed over stages.
        predicted_wait_s: Predicted seconds until its first item starts, from its admission.
        wait_s: Seconds from its arrival until its first item with a cost started.
        started_s: Predicted seconds of its items that have started.
        finish_s: Seconds in which threads finished its stages, by tokenizing and decoding.
        delay_s: Seconds of the step after its waiting item, such as tokenizing a long text. They count in the priorities of its items as if
            this step had already run.
        long_step: Whether the step after its waiting item can take a long time without interruption.
        pace: Factor by which its earlier items count in the priorities of its later ones.
        is_short: Whether it may start before late requests: it is not long.
        is_quick: Whether the single inference thread of a device may be busy with another request, and it starts nevertheless.
        is_small: Whether its estimate was a small part of the queue.
        reserved_s: Predicted seconds of its waiting items whose start time is in the future.
        owner: Data of the scheduler; the queue does not read it.
    """

    deadline: float
    tokens: int
    seconds: float
    arrived: float = 0.0
    priority: float = 0.0
    slack_s: float = inf
    results: list[Any] = field(default_factory=list)
    items: deque[Item] = field(default_factory=deque)
    waiting: int = 0
    running: int = 0
    remaining: int = 0
    open: bool = True
    estimated: bool = True
    stage_number: int = -1
    watched: bool = False
    expires: bool = True
    queued_at: float = 0.0
    queued_s: float = 0.0
    predicted_wait_s: float = 0.0
    wait_s: float = 0.0
    started_s: float = 0.0
    finish_s: float = 0.0
    delay_s: float = 0.0
    long_step: bool = False
    pace: float = PACE
    is_short: bool = True
    is_quick: bool = False
    is_small: bool = False
    reserved_s: float = 0.0
    owner: Any = None


@dataclass(slots=True, eq=False)
class Item:
    """One unit of work of a request.

    Attributes:
        request: Its request.
        index: Position of its result in the request's results.
        tokens: Its cost in tokens.
        payload: The argument of the run function; the queue does not read it.
        key: Items with equal keys can share a batch; None if it runs alone.
        cost: Predicted seconds of a batch of its kind.
        shape: Returns the shape at which a batch of its kind runs.
        length: Tokens to which it is padded if it runs alone.
        seconds: Predicted seconds of an inference thread: its part of a full batch.
        priority: Virtual start time, in seconds; the lowest is served first. It is the request's priority plus the cost of its earlier
            items, including earlier stages.
        waiting: Whether it has not started.
        reserved: Whether its start time is in the future, so that it counts in `Reservations`.
    """

    request: ScheduledRequest
    index: int
    tokens: int
    payload: Any
    key: Hashable | None
    cost: RunSeconds
    shape: Shape
    length: int
    seconds: float
    priority: float
    waiting: bool = True
    reserved: bool = False

    @property
    def alive(self) -> bool:
        """Whether it can still start."""
        return self.waiting and self.request.open


# An ASCII text has at most four times the tokens that `estimate_tokens` expects from its characters: one per character.
UNDERESTIMATED = 4


class Group:
    """Items of one key by length; a bit set finds the nearest length that has items."""

    def __init__(self) -> None:
        """Starts with no items."""
        self.lengths = 0  # bit n is set if there may be a live item of n tokens
        self._heaps: dict[int, list[tuple[float, int, Item]]] = {}

    def push(self, tokens: int, item: tuple[float, int, Item]) -> None:
        """Adds an item as `(priority, tie, item)`."""
        heapq.heappush(self._heaps.setdefault(tokens, []), item)
        self.lengths |= 1 << tokens

    def first(self, tokens: int) -> Item | None:
        """Returns the live item of that length with the lowest priority value, and drops ended items before it."""
        heap = self._heaps.get(tokens, [])
        while heap and not heap[0][2].alive:
            heapq.heappop(heap)
        if heap:
            return heap[0][2]
        self._heaps.pop(tokens, None)
        self.lengths &= ~(1 << tokens)
        return None

    def longest_within(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the greatest length up to `tokens`, if its priority is at most `last_priority`."""
        shorter = self.lengths & ((1 << (tokens + 1)) - 1)
        while shorter:
            length = shorter.bit_length() - 1
            if (item := self.first(length)) is not None and item.priority <= last_priority:
                return item
            shorter ^= 1 << length
        return None

    def shortest_over(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the smallest length over `tokens`, if its priority is at most `last_priority`."""
        longer = self.lengths >> (tokens + 1)
        while longer:
            least = longer & -longer
            if (item := self.first(tokens + least.bit_length())) is not None and item.priority <= last_priority:
                return item
            longer ^= least
        return None


# Parts in which the work of an admitted request is counted until its items are known.
MAX_RESERVATIONS = 16


@dataclass(slots=True, eq=False)
class Reservation:
    """Work that an admitted request will probably queue at a later priority.

    Attributes:
        request: Its request.
        seconds: Predicted seconds of an inference thread.
        priority: Virtual start time, as for an item.
        reserved: Whether its start time is in the future, so that it counts in `Reservations`.
    """

    request: ScheduledRequest
    seconds: float
    priority: float
    reserved: bool = False

    @property
    def alive(self) -> bool:
        """Whether the request's items are not yet known."""
        return self.request.estimated and self.request.open


class Reservations:
    """Waiting items whose start time is in the future, and their total seconds.

    Attributes:
        items: A heap of `(priority, tie, item)`; it may contain items that no longer count.
    """

    def __init__(self) -> None:
        """Starts with no items."""
        self._seconds = 0.0
        self.items: list[tuple[float, int, Item | Reservation]] = []
        self._tie = count()

    def expect(self, request: ScheduledRequest, items: int) -> None:
        """Counts a new request as `items` items of equal cost; each is due after the one before it."""
        reservations = min(items, MAX_RESERVATIONS)
        seconds = request.seconds / max(reservations, 1)  # a list without texts has no items
        for before in range(1, reservations):
            self.add(Reservation(request, seconds, request.priority + request.pace * before * seconds))

    def add(self, item: Item | Reservation) -> None:
        """Counts an item until its start time comes, it starts, or its request ends."""
        item.reserved = True
        item.request.reserved_s += item.seconds
        self._seconds += item.seconds
        heapq.heappush(self.items, (item.priority, next(self._tie), item))

    def drop(self, item: Item | Reservation) -> None:
        """Stops counting an item: it has started, or its start time has come."""
        item.reserved = False
        item.request.reserved_s -= item.seconds
        self._seconds -= item.seconds

    def drop_all(self, request: ScheduledRequest) -> None:
        """Stops counting a request's items: it has ended, or its real items are known."""
        self._seconds -= request.reserved_s
        request.reserved_s = 0.0

    def drop_ended(self) -> None:
        """Removes items that have started or ended."""
        self.items = [item for item in self.items if item[2].alive and item[2].reserved]
        heapq.heapify(self.items)

    def seconds_after(self, now: float) -> float:
        """Returns the predicted seconds of waiting items whose priority is after `now`."""
        while self.items and (self.items[0][0] <= now or not self.items[0][2].alive):
            item = heapq.heappop(self.items)[2]
            if item.alive and item.reserved:
                self.drop(item)
        if not self.items:
            self._seconds = 0.0  # sums of floats drift
        return self._seconds
