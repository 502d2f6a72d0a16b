"""What waits: ScheduledRequest and its Items; Share, which limits one stream; Group, items by length; Reservations, items that are due later."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from bertserve.service.errors import RefusedError

Cost = Callable[[int, int], float]
# rows and longest tokens of a batch -> the rows and length that it is run at; None where it has more rows than may run at once
Shape = Callable[[int, int], tuple[int, int] | None]

# Times their prediction that a request's earlier items count in the priorities of its later ones, so that others come between them also on a machine that
# is slower than predicted. Where more long requests share the inference threads than there are threads, each has a smaller part of one, and they count more.
PACE = 1.5


def exact(rows: int, tokens: int) -> tuple[int, int]:
    """Returns the shape of a batch that is padded to its longest text and no further."""
    return rows, tokens


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request in the queue.

    Attributes:
        deadline: Time by which its last item must have started.
        tokens: Tokens that it holds of the queue: estimated at first, then those of its waiting items.
        seconds: Predicted seconds of what it holds.
        arrived: Time at which it was admitted.
        priority: Virtual start time of its first item, in seconds; the lowest is served first: its arrival, or later where requests of its share come before it.
        slack_s: Seconds after its arrival at which its last item may be due and still start before the deadline, as predicted when it was admitted.
        results: One per item, in order, filled as they finish.
        items: Its items by priority, from the first that waits on.
        waiting: Items that have not started.
        running: Items that have started and not finished.
        remaining: Items that have not finished.
        open: Whether it is neither answered nor failed.
        estimated: Whether its items are not known yet.
        place: Which node of the queue's order belongs to its current stage.
        watched: Whether the queue will look at it when its deadline has passed.
        expires: Whether the deadline ends it while items wait.
        queued_at: Time at which its items were put.
        queued_s: Seconds that its items waited: until the last of them started, summed over stages.
        predicted_wait_s: Seconds until its first item would start, as predicted when it was admitted.
        wait_s: Seconds from its arrival until the first of its items that costs anything started.
        started_s: Predicted seconds of its items that have started.
        finish_s: Seconds that threads took to finish its stages: to tokenize and to decode.
        delay_s: Seconds that its next step takes after the item that waits for it, such as to tokenize a long text. They count in the priorities of its
            items as if it had run so long already.
        pace: Times their seconds that its earlier items count in the priorities of its later ones.
        is_long: Whether it counts among the long requests.
        answer_bytes: Bytes of its answer, at most, as its share counts them.
        is_short: Whether it may start before other requests that are late: it is not long, and of no share.
        is_small: Whether it was estimated at a small part of the queue.
        reserved_s: Predicted seconds of its waiting items whose start time is still to come.
        memory: Numbers of four bytes that it holds until it ends.
        share: The share of the queue that it counts in; None for none.
        owner: What the scheduler attaches to it; opaque here.
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
    place: int = -1
    watched: bool = False
    expires: bool = True
    queued_at: float = 0.0
    queued_s: float = 0.0
    predicted_wait_s: float = 0.0
    wait_s: float = 0.0
    started_s: float = 0.0
    finish_s: float = 0.0
    delay_s: float = 0.0
    pace: float = PACE
    is_long: bool = False
    is_short: bool = True
    is_small: bool = False
    answer_bytes: int = 0
    reserved_s: float = 0.0
    memory: int = 0
    share: Share | None = None
    owner: Any = None


@dataclass(slots=True, eq=False)
class Item:
    """One unit of work of a request.

    Attributes:
        request: Its request.
        index: Place of its result among the request's.
        tokens: Its cost.
        payload: What the run function gets; opaque here.
        key: What may share a batch; None if it runs alone.
        cost: Predicted seconds of a batch of its kind.
        shape: What a batch of its kind is run at.
        length: Tokens that it is padded to if it runs alone.
        seconds: Predicted seconds that it takes of an inference thread: its share of a full batch.
        priority: Virtual start time, in seconds; the lowest is served first: that of the request plus the cost of its earlier items, those of earlier stages too.
        waiting: Whether it has not started.
        reserved: Whether it counts among those whose start time is still to come.
    """

    request: ScheduledRequest
    index: int
    tokens: int
    payload: Any
    key: Hashable | None
    cost: Cost
    shape: Shape
    length: int
    seconds: float
    priority: float
    waiting: bool = True
    reserved: bool = False

    @property
    def alive(self) -> bool:
        """Whether it may still start."""
        return self.waiting and self.request.open


# A text of ASCII has at most four times the tokens that its characters let expect (`estimate_tokens`): one a character.
UNDERESTIMATED = 4

# A share is at most this part of the queue, so that a stream leaves room to other callers.
PARTS_OF_QUEUE = 4

# Most bytes of the answers that the requests of a share make at once, unless there is only one: the results take several times as much memory.
MAX_ANSWER_BYTES = 2**23

# Reason of a refusal: other requests of the share hold all that it may have.
SHARE_FULL = "share_full"


@dataclass(slots=True, eq=False)
class Share:
    """A part of the queue.

    Attributes:
        tokens: Tokens that its open requests hold.
        answer_bytes: Bytes of the answers of its open requests, at most, as far as they are known.
        requests: How many are open.
        priority: Virtual start time of its next request: its requests start one after the other, as the items of one request do.
    """

    tokens: int = 0
    answer_bytes: int = 0
    requests: int = 0
    priority: float = 0.0

    def reservation(self, estimate: int, max_queue_tokens: int) -> int:
        """Returns the tokens that a request holds until its real number is known: the largest possible one, up to a whole share.

        A request that is larger than a share is the only one in it.

        Args:
            estimate: About how many tokens it has.
            max_queue_tokens: Most tokens of the queue.

        Raises:
            RefusedError: Other requests leave no room for them; the reason is `SHARE_FULL`.
        """
        limit = max_queue_tokens // PARTS_OF_QUEUE
        tokens = max(estimate, min(UNDERESTIMATED * estimate, limit))
        if self.tokens and self.tokens + tokens > limit:
            raise RefusedError(
                "the lines of this stream have {tokens} tokens in the queue and {limit} are allowed; wait for their answers.",
                tokens=self.tokens,
                limit=limit,
                reason=SHARE_FULL,
                retry_after_s=0.0,
            )
        return tokens

    def check_answer(self, own: int, size: int) -> None:
        """Checks that an answer can be made at the same time as those of other requests.

        Args:
            own: Bytes that the request counts already.
            size: Bytes of its answer.

        Raises:
            RefusedError: They have too many bytes together; the reason is `SHARE_FULL`.
        """
        others = self.answer_bytes - own
        if others and others + size > MAX_ANSWER_BYTES:
            raise RefusedError(
                "the answers to other lines of this stream need {others} bytes and {limit} are allowed at once; wait for them.",
                others=others,
                limit=MAX_ANSWER_BYTES,
                reason=SHARE_FULL,
                retry_after_s=0.0,
            )


class Group:
    """Items of one key by length; finds the nearest length that has any in a few machine words."""

    def __init__(self) -> None:
        """Starts without any."""
        self.lengths = 0  # bit n is set when a live item of n tokens may be there
        self._heaps: dict[int, list[tuple[float, int, Item]]] = {}

    def push(self, tokens: int, item: tuple[float, int, Item]) -> None:
        """Adds an item as `(priority, tie, item)`."""
        heapq.heappush(self._heaps.setdefault(tokens, []), item)
        self.lengths |= 1 << tokens

    def first(self, tokens: int) -> Item | None:
        """Returns the live item of that length of the first priority, dropping dead ones before it."""
        heap = self._heaps.get(tokens, [])
        while heap and not heap[0][2].alive:
            heapq.heappop(heap)
        if heap:
            return heap[0][2]
        self._heaps.pop(tokens, None)
        self.lengths &= ~(1 << tokens)
        return None

    def longest_within(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the greatest length of at most `tokens`, of those with a priority of at most `last_priority`."""
        shorter = self.lengths & ((1 << (tokens + 1)) - 1)
        while shorter:
            length = shorter.bit_length() - 1
            if (item := self.first(length)) is not None and item.priority <= last_priority:
                return item
            shorter ^= 1 << length
        return None

    def shortest_over(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the least length over `tokens`, of those with a priority of at most `last_priority`."""
        longer = self.lengths >> (tokens + 1)
        while longer:
            least = longer & -longer
            if (item := self.first(tokens + least.bit_length())) is not None and item.priority <= last_priority:
                return item
            longer ^= least
        return None


# Parts in which an admitted request is counted until its items are known.
MAX_RESERVATIONS = 16


@dataclass(slots=True, eq=False)
class Reservation:
    """Work that an admitted request will probably queue with a later priority.

    Attributes:
        request: Its request.
        seconds: Predicted seconds that it takes of an inference thread.
        priority: Virtual start time, as an item has it.
        reserved: Whether it counts among those whose start time is still to come.
    """

    request: ScheduledRequest
    seconds: float
    priority: float
    reserved: bool = False

    @property
    def alive(self) -> bool:
        """Whether the request's items are not known yet."""
        return self.request.estimated and self.request.open


class Reservations:
    """Waiting items whose start time is still to come, and the seconds that they will take.

    Attributes:
        items: A heap of `(priority, tie, item)`, in which items that no longer count may still be.
    """

    def __init__(self) -> None:
        """Starts without any."""
        self._seconds = 0.0
        self.items: list[tuple[float, int, Item | Reservation]] = []
        self._tie = count()

    def expect(self, request: ScheduledRequest, items: int) -> None:
        """Counts about so many equal items of a request just admitted; each is due after the one before it."""
        reservations = min(items, MAX_RESERVATIONS)
        seconds = request.seconds / max(reservations, 1)  # a list without texts has none
        for before in range(1, reservations):
            self.add(Reservation(request, seconds, request.priority + request.pace * before * seconds))

    def add(self, item: Item | Reservation) -> None:
        """Counts an item until its start time has come, it starts, or its request ends."""
        item.reserved = True
        item.request.reserved_s += item.seconds
        self._seconds += item.seconds
        heapq.heappush(self.items, (item.priority, next(self._tie), item))

    def drop(self, item: Item | Reservation) -> None:
        """Counts an item no more that has counted: it has started, or its start time has come."""
        item.reserved = False
        item.request.reserved_s -= item.seconds
        self._seconds -= item.seconds

    def drop_all(self, request: ScheduledRequest) -> None:
        """Counts a request's items no more: it has ended, or they are known now."""
        self._seconds -= request.reserved_s
        request.reserved_s = 0.0

    def let_go(self) -> None:
        """Forgets items that have started or ended."""
        self.items = [item for item in self.items if item[2].alive and item[2].reserved]
        heapq.heapify(self.items)

    def seconds_after(self, now: float) -> float:
        """Returns the predicted seconds of waiting items that rank after `now`."""
        while self.items and (self.items[0][0] <= now or not self.items[0][2].alive):
            item = heapq.heappop(self.items)[2]
            if item.alive and item.reserved:
                self.drop(item)
        if not self.items:
            self._seconds = 0.0  # float sums drift
        return self._seconds
