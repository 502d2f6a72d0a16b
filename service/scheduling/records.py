"""The records of the scheduler: a ScheduledRequest, its Work and Items, a Batch of items, and its Runner."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Runner(Protocol):
    """Runs batches of items, for example of a model."""

    @property
    def max_batch_tokens(self) -> int:
        """Maximum tokens of a batch: rows times padded length."""

    @property
    def shares_batches(self) -> bool:
        """Whether items of several requests, or several items of one, can share a batch."""

    def predict_seconds(self, rows: int, length: int) -> float:
        """Returns the predicted seconds of a batch of `rows` padded to `length` tokens."""

    def padded_shape(self, rows: int, length: int) -> tuple[int, int] | None:
        """Returns the rows and the length at which a batch runs, or None if it has too many rows; one row always fits."""

    def run(self, items: Sequence[Any], *, multi_threaded: bool) -> Sequence[Any]:
        """Returns one result per item, in order; called on an inference thread."""


class Work(Protocol):
    """The work of a request before and between its runs.

    Attributes:
        chars: Characters that `prepare` tokenizes.
        held_tokens: Tokens of all its items, and a reserve for later steps and decoding; known after `prepare`.
    """

    chars: int
    held_tokens: int

    def prepare(self) -> "Sequence[Item]":
        """Returns the first items; none if the request is done. Called on the event loop or a prepare thread."""

    def proceed(self, rows: Sequence[Any], /) -> "Sequence[Item]":
        """Returns the next items, given the results of all items, in order; none if the request is done. Called on an inference thread."""


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request. It is queued as a whole, and ends once.

    Attributes:
        runner: Runs its items.
        work: Makes its items.
        arrived: Time of its arrival.
        deadline: Time by which its last item must have started.
        admitted: Whether its first items were queued, so that it holds its tokens of the queue until its end.
        priority: Virtual start time of its next item; the queue changes it.
        waiting: The items that have not started.
        unfinished: Number of items without a result.
        results: One per item, in order.
        is_long: Whether the predicted seconds of its items before the last one exceed `LONG_S`.
        future: Resolved when it ends.
    """

    runner: Runner
    work: Work
    arrived: float
    deadline: float
    admitted: bool = False
    priority: float = 0.0
    waiting: "set[Item]" = field(default_factory=set)
    unfinished: int = 0
    results: list[Any] = field(default_factory=list)
    is_long: bool = False
    future: asyncio.Future[None] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Item:
    """A text, or a window of a text. A runner adds its own attributes in a subclass; the queue sets all attributes here except `tokens`.

    Attributes:
        tokens: Its number of tokens; each mask counts as one more.
        request: Its request.
        index: Position of its result.
        length: Tokens to which it is padded in a batch of one.
        predicted_s: Predicted seconds on an inference thread: the seconds of a full batch of such items, divided by its rows.
        priority: Virtual start time in seconds; the lowest starts first.
        entry: Its entry in the heaps of `WaitingItems`.
    """

    tokens: int
    request: ScheduledRequest = field(init=False)
    index: int = field(init=False)
    length: int = field(init=False)
    predicted_s: float = field(init=False)
    priority: float = field(init=False)
    entry: list[Any] = field(init=False)


@dataclass(slots=True, eq=False)
class Batch:
    """Items that run together.

    Attributes:
        items: The items. The batch is long if the request of the first item is.
        start: Time of its start.
        predicted_s: Predicted seconds of its run.
        multi_threaded: Whether it can run on several threads.
    """

    items: list[Item]
    start: float
    predicted_s: float
    multi_threaded: bool
