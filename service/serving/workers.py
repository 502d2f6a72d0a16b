"""What several workers share: the limits of each, and the changes of models, which all of them make in one order.

The supervisor keeps the `ReloadLog`, and sends each worker one change at a time. A worker answers each with a `Report`, which the log sends to
all workers: so the worker that was asked learns what each of them did. `SharedReloader` is the other side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bertserve.service.errors import BertServeError, ServerError

REASONS = ("ended", "hung")


@dataclass(frozen=True, slots=True)
class Change:
    """A change that all workers make.

    Attributes:
        action: `load` or `unload` a model, or `refresh`: serve what the folders have.
        name: The model's; empty for `refresh`.
        asked: Index of the worker that was asked; None for the supervisor.
        number: Tells the changes that one process was asked for apart.
    """

    action: Literal["load", "unload", "refresh"]
    name: str = ""
    asked: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker serves, after its start or after a change.

    Attributes:
        index: Index of the worker.
        served: Name -> version of its models.
        broken: Name -> why a model could not be loaded.
        defaults: Task -> name of the model that its endpoint uses.
        change: The change; None after the start.
        error: Why the worker could not make the change.
    """

    index: int
    served: dict[str, str]
    broken: dict[str, str]
    defaults: dict[str, str]
    change: Change | None = None
    error: BertServeError | None = None


class ReloadLog:
    """The changes that each worker still has to make, and the last report of each. The supervisor keeps it, and workers inherit a copy.

    Attributes:
        reports: Index -> the last report of that worker, or of the one that it replaces.
    """

    def __init__(self, workers: int, send: Callable[[int, Change | Report], None]) -> None:
        """Creates an empty log.

        Args:
            workers: How many there are.
            send: Sends a message to the worker of an index.
        """
        self.reports: dict[int, Report] = {}
        self._waiting: list[deque[Change]] = [deque() for _ in range(workers)]
        self._following: set[int] = set()  # workers that have reported since their start
        self._send = send

    def take(self, message: Change | Report) -> None:
        """Takes a change that somebody was asked for, or the report of a worker."""
        if isinstance(message, Change):
            for index, waiting in enumerate(self._waiting):
                waiting.append(message)
                if len(waiting) == 1:
                    self._send_next(index)
            return
        if message.change is None:
            self._following.add(message.index)
            for report in self.reports.values():
                self._send(message.index, report)
        else:
            self._waiting[message.index].popleft()
        self.reports[message.index] = message
        for index in list(self._following):
            self._send(index, message)
        self._send_next(message.index)

    def on_end(self, index: int) -> None:
        """Handles the end of a worker. Its successor does not repeat the change that it was making, which may be the cause."""
        if index in self._following:
            self._following.remove(index)
            if self._waiting[index]:
                error = ServerError("it ended during the change")
                self.take(replace(self.reports[index], change=self._waiting[index][0], error=error))

    def _send_next(self, index: int) -> None:
        if index in self._following and self._waiting[index]:
            self._send(index, self._waiting[index][0])


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Which worker this process is.

    Attributes:
        index: From 0.
        workers: How many there are.
        folder: Folder in which all workers keep their metrics; None where there is only one worker.
        connections: The open connections of each worker, by index, in memory that all share; see `BalancedListener`.
        heartbeats: When the event loop of each worker last turned, by index, in memory that all share; see `Supervisor`.
        process_ids: Of each worker, by index, in memory that all share.
        replaced: How many workers were replaced, for each of REASONS, in memory that all share; see `Supervisor`.
        tell: Sends a message to the supervisor's `ReloadLog`; raises OSError where the supervisor is gone. None where there is only one worker.
        before: The last report of the worker that this one replaces.
    """

    index: int = 0
    workers: int = 1
    folder: Path | None = None
    connections: MutableSequence[int] = field(default_factory=list)
    heartbeats: MutableSequence[int] = field(default_factory=list)
    process_ids: MutableSequence[int] = field(default_factory=list)
    replaced: MutableSequence[int] = field(default_factory=list)
    tell: Callable[[Any], None] | None = None
    before: Report | None = None

    def share(self, total: int) -> int:
        """Returns this worker's part of a total of at least one each: all parts add up to it, and differ by one at most."""
        part, rest = divmod(total, self.workers)
        return part + (self.index < rest)

    def replacements(self) -> dict[str, int]:
        """Returns how many workers were replaced until now, by why."""
        return dict(zip(REASONS, self.replaced or (0,) * len(REASONS), strict=True))


SINGLE_WORKER = WorkerContext()
