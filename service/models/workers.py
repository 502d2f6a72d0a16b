"""The shared state of workers: the limits of each worker, and the changes of models, which all workers make in the same order.

The supervisor keeps the `ReloadLog`, and sends each worker one change at a time. A worker answers each change with a `Report`. The log
sends it to all workers, so that the worker that was asked learns the results of the others. `SharedReloader` is the other side.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bertserve.service.errors import BertServeError, ServerError

logger = logging.getLogger("bertserve.loading")

REASONS = ("ended", "hung")


@dataclass(frozen=True, slots=True)
class Change:
    """A change that all workers make.

    Attributes:
        action: `load` or `unload` a model, or `refresh` to follow the folders.
        name: The model's name; empty for `refresh`.
        asked: Index of the worker that was asked; None for the supervisor.
        number: Distinguishes the changes that were requested from the same process.
    """

    action: Literal["load", "unload", "refresh"]
    name: str = ""
    asked: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The models of a worker, after its start or after a change.

    Attributes:
        index: Index of the worker.
        served: Name -> version of its models.
        broken: Name -> error, for models that could not be loaded.
        defaults: Task -> name of its default model.
        change: The change; None after the start.
        error: The reason why the worker could not make the change.
        choices: Task -> name of its default model, as the operator chose before the first start.
    """

    index: int
    served: dict[str, str]
    broken: dict[str, str]
    defaults: dict[str, str]
    change: Change | None = None
    error: BertServeError | None = None
    choices: Mapping[str, str] = field(default_factory=dict)


class ReloadLog:
    """The pending changes of each worker, and its last report. The supervisor keeps it, and workers inherit a copy.

    Attributes:
        reports: Index -> the last report of that worker, or of the worker that it replaces.
    """

    def __init__(self, workers: int, send: Callable[[int, Change | Report], None]) -> None:
        """Creates an empty log; `send` sends a message to the worker with an index."""
        self.reports: dict[int, Report] = {}
        self._waiting: list[deque[Change]] = [deque() for _ in range(workers)]
        self._following: set[int] = set()  # workers that have reported since their start
        self._send = send

    def take(self, message: Change | Report) -> None:
        """Handles a requested change, or the report of a worker."""
        if isinstance(message, Change):
            for index, waiting in enumerate(self._waiting):
                if message.action == "refresh" and self._will_refresh(index):
                    continue
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

    def on_end(self, index: int, *, stopping: bool = False) -> None:
        """Handles the end of a worker. Its successor does not repeat the unfinished change, which may have caused the end.

        There is no successor if the service is `stopping`.
        """
        if index in self._following:
            self._following.remove(index)
            if self._waiting[index]:
                change = self._waiting[index][0]
                if change.action == "refresh" and not stopping:
                    logger.error(
                        "worker %d ended while it reloaded its models, and its successor does not repeat this; send SIGHUP again", index
                    )
                self.take(replace(self.reports[index], change=change, error=ServerError("it ended during the change")))

    def _will_refresh(self, index: int) -> bool:
        """Returns whether the last change of a worker is a refresh that has not started: another one after it would change nothing."""
        waiting = self._waiting[index]
        has_started = len(waiting) == 1 and index in self._following
        return bool(waiting) and waiting[-1].action == "refresh" and not has_started

    def _send_next(self, index: int) -> None:
        if index in self._following and self._waiting[index]:
            self._send(index, self._waiting[index][0])


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The position of this process among the workers.

    Attributes:
        index: Index of this worker, from 0.
        workers: Number of workers.
        folder: Folder with the metrics of all workers; None if there is only one worker.
        connections: Number of open connections of each worker, by index, in shared memory; see `BalancedListener`.
        heartbeats: Time of the last turn of each worker's event loop, by index, in shared memory; see `Supervisor`.
        process_ids: Process id of each worker, by index, in shared memory.
        replaced: Number of replaced workers for each of REASONS, in shared memory; see `Supervisor`.
        tell: Sends a message to the supervisor's `ReloadLog`; raises OSError if the supervisor has ended. None if there is only one worker.
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
        """Returns this worker's part of a total of at least `workers`. All parts add up to the total, and differ by at most 1."""
        part, rest = divmod(total, self.workers)
        return part + (self.index < rest)

    def replacements(self) -> dict[str, int]:
        """Returns the number of replaced workers so far, by reason."""
        return dict(zip(REASONS, self.replaced or (0,) * len(REASONS), strict=True))


SINGLE_WORKER = WorkerContext()
