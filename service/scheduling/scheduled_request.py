"""ScheduledRequest and Item: what waits, as the queue and the inference threads see it. Records, without rules of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from bertserve.service.scheduling.share import Share

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
    seconds: float
    priority: float
    waiting: bool = True
    reserved: bool = False

    @property
    def alive(self) -> bool:
        """Whether it may still start."""
        return self.waiting and self.request.open
