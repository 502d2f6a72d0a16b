"""The records of the queue: a ScheduledRequest and its Items; and Runner, which runs them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Runner(Protocol):
    """Runs batches of items, for example of a model."""

    @property
    def shares_batches(self) -> bool:
        """Whether items of several requests, or several items of one, can share a batch."""
        ...

    def seconds(self, rows: int, length: int) -> float:
        """Returns the predicted seconds of a batch of `rows` padded to `length` tokens."""
        ...

    def padded_shape(self, rows: int, length: int) -> tuple[int, int] | None:
        """Returns the rows and the length at which a batch runs, or None if it has too many rows; one row always fits."""
        ...

    def run(self, payloads: Sequence[Any], *, multi_threaded: bool) -> Sequence[Any]:
        """Returns one result per payload, in order; called on an inference thread."""
        ...


SizedPayloads = Sequence[tuple[int, Any]]  # tokens and payload of each item


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request. It is queued as a whole, and ends once.

    Attributes:
        runner: Runs its items.
        proceed: Results of all items, in order -> the next items; empty if the request is done. Called on an inference thread.
        arrived: Time of its arrival.
        deadline: Time by which its last item must have started.
        priority: Virtual start time of its next item; the queue changes it.
        held_tokens: Tokens that it holds of the queue until it ends.
        waiting: The items that have not started, by index.
        running: Number of items that have started and have no result.
        results: One per item, in order.
        is_long: Whether its items up to now, before the last one, take long.
        future: Resolved when it ends.
    """

    runner: Runner
    proceed: Callable[[Sequence[Any]], SizedPayloads]
    arrived: float
    deadline: float
    priority: float = 0.0
    held_tokens: int = 0
    waiting: OrderedDict[int, Item] = field(default_factory=OrderedDict)
    running: int = 0
    results: list[Any] = field(default_factory=list)
    is_long: bool = False
    future: asyncio.Future[None] | None = None


@dataclass(slots=True, eq=False)
class Item:
    """A text, or a window of a text.

    Attributes:
        request: Its request.
        index: Position of its result.
        tokens: Its tokens.
        payload: The argument of its runner.
        length: Tokens to which it is padded if it runs alone.
        predicted_s: Predicted seconds of an inference thread: its part of a full batch.
        priority: Virtual start time in seconds; the lowest starts first.
        is_waiting: Whether it can still start.
    """

    request: ScheduledRequest
    index: int
    tokens: int
    payload: Any
    length: int
    predicted_s: float
    priority: float
    is_waiting: bool = True
