"""WorkerContext: which of a service's workers this process is, and its part of what is limited in total."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from pathlib import Path

REASONS = ("ended", "hung")


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Which worker this is.

    Attributes:
        index: From 0.
        workers: How many there are.
        folder: Folder in which all workers keep their metrics, and the changes of their models; None where there is only one worker.
        connections: The open connections of each worker, by index, in memory that all share; see `BalancedListener`.
        heartbeats: When the event loop of each worker last turned, by index, in memory that all share; see `Supervisor`.
        process_ids: Of each worker, by index, in memory that all share.
        replaced: How many workers were replaced, for each of REASONS, in memory that all share; see `Supervisor`.
    """

    index: int = 0
    workers: int = 1
    folder: Path | None = None
    connections: MutableSequence[int] = field(default_factory=list)
    heartbeats: MutableSequence[int] = field(default_factory=list)
    process_ids: MutableSequence[int] = field(default_factory=list)
    replaced: MutableSequence[int] = field(default_factory=list)

    def share(self, total: int) -> int:
        """Returns this worker's part of a total of at least one each: all parts add up to it, and differ by one at most."""
        part, rest = divmod(total, self.workers)
        return part + (self.index < rest)

    def replacements(self) -> dict[str, int]:
        """Returns how many workers were replaced until now, by why."""
        return dict(zip(REASONS, self.replaced or (0,) * len(REASONS), strict=True))


SINGLE_WORKER = WorkerContext()
