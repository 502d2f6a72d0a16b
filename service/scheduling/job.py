"""Job and Entry: what waits, as the backlog and the lanes see it. Records, without rules of their own."""

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

# Times their prediction that a job's earlier entries count in the ranks of its later ones, so that others come between them also on a machine that
# is slower than predicted. Where more long jobs share the lanes than there are lanes, each has a smaller part of one, and they count more.
PACE = 1.5


def exact(rows: int, tokens: int) -> tuple[int, int]:
    """Returns the shape of a batch that is padded to its longest text and no further."""
    return rows, tokens


@dataclass(slots=True, eq=False)
class Job:
    """One request in the backlog.

    Attributes:
        deadline: Time by which its last entry must have started.
        tokens: Tokens that it holds of the queue: estimated at first, then those of its waiting entries.
        seconds: Predicted seconds of what it holds.
        arrived: Time at which it was admitted.
        rank: Order of service of its first entry, in seconds: its arrival, or later where jobs of its share come before it.
        slack_s: Seconds after its arrival at which its last entry may rank and still start before the deadline, as predicted when it was admitted.
        results: One per entry, in order, filled as they finish.
        entries: Its entries in rank, from the first that waits on.
        waiting: Entries that have not started.
        running: Entries that have started and not finished.
        remaining: Entries that have not finished.
        open: Whether it is neither answered nor failed.
        estimated: Whether its entries are not known yet.
        place: Which item of the queue's order is that of its current stage.
        watched: Whether the queue will look at it when its deadline has passed.
        expires: Whether the deadline ends it while entries wait.
        queued_at: Time at which its entries were put.
        queued_s: Seconds that its entries waited: until the last of them started, summed over stages.
        predicted_wait_s: Seconds until its first entry would start, as predicted when it was admitted.
        wait_s: Seconds from its arrival until the first of its entries that costs anything started.
        started_s: Predicted seconds of its entries that have started.
        finish_s: Seconds that threads took to finish its stages: to tokenize and to decode.
        delay_s: Seconds that count in the ranks of its entries as if it had run so long already.
        pace: Times their seconds that its earlier entries count in the ranks of its later ones.
        is_long: Whether it counts among the long jobs.
        answer_bytes: Bytes of its answer, at most, as its share counts them.
        is_small: Whether it was estimated at a small part of the queue.
        later_s: Predicted seconds of its waiting entries whose rank is still to come.
        share: The share of the queue that it counts in; None for none.
        owner: What the scheduler attaches to it; opaque here.
    """

    deadline: float
    tokens: int
    seconds: float
    arrived: float = 0.0
    rank: float = 0.0
    slack_s: float = inf
    results: list[Any] = field(default_factory=list)
    entries: deque[Entry] = field(default_factory=deque)
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
    is_small: bool = False
    answer_bytes: int = 0
    later_s: float = 0.0
    share: Share | None = None
    owner: Any = None


@dataclass(slots=True, eq=False)
class Entry:
    """One unit of work of a job.

    Attributes:
        job: Its job.
        index: Place of its result among the job's.
        tokens: Its cost.
        payload: What the run function gets; opaque here.
        key: What may share a batch; None if it runs alone.
        cost: Predicted seconds of a batch of its kind.
        shape: What a batch of its kind is run at.
        seconds: Predicted seconds that it takes of a lane: its share of a full batch.
        rank: Order of service, in seconds: that of the job plus the cost of its earlier entries, those of earlier stages too.
        waiting: Whether it has not started.
        later: Whether it counts among those whose rank is still to come.
    """

    job: Job
    index: int
    tokens: int
    payload: Any
    key: Hashable | None
    cost: Cost
    shape: Shape
    seconds: float
    rank: float
    waiting: bool = True
    later: bool = False

    @property
    def alive(self) -> bool:
        """Whether it may still start."""
        return self.waiting and self.job.open
