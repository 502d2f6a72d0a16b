"""Later: entries that wait for their rank to come, as the windows of a document do. Who arrives now does not wait for them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from bertserve.service.scheduling.job import Entry, Job

# Parts in which an admitted job is counted until its entries are known.
MAX_PARTS = 16


@dataclass(slots=True, eq=False)
class Part:
    """What an admitted job will probably put at a later rank.

    Attributes:
        job: Its job.
        seconds: Predicted seconds that it takes of a lane.
        rank: Order of service, as an entry has it.
        later: Whether it counts among those whose rank is still to come.
    """

    job: Job
    seconds: float
    rank: float
    later: bool = False

    @property
    def alive(self) -> bool:
        """Whether the job's entries are not known yet."""
        return self.job.estimated and self.job.open


class Later:
    """Waiting entries whose rank is still to come, and the seconds that they will take."""

    def __init__(self) -> None:
        """Starts without any."""
        self._seconds = 0.0
        self._entries: list[tuple[float, int, Entry | Part]] = []
        self._tie = count()

    def __len__(self) -> int:
        """How many are kept, those that count no more included."""
        return len(self._entries)

    def expect(self, job: Job, entries: int) -> None:
        """Counts about so many equal entries of a job just admitted; each will rank after the one before it."""
        parts = min(entries, MAX_PARTS)
        seconds = job.seconds / max(parts, 1)  # a list without texts has none
        for before in range(1, parts):
            self.add(Part(job, seconds, job.rank + job.pace * before * seconds))

    def add(self, entry: Entry | Part) -> None:
        """Counts an entry until its rank has come, it starts, or its job ends."""
        entry.later = True
        entry.job.later_s += entry.seconds
        self._seconds += entry.seconds
        heapq.heappush(self._entries, (entry.rank, next(self._tie), entry))

    def drop(self, entry: Entry | Part) -> None:
        """Counts an entry no more: it has started, or its rank has come."""
        if entry.later:
            entry.later = False
            entry.job.later_s -= entry.seconds
            self._seconds -= entry.seconds

    def drop_all(self, job: Job) -> None:
        """Counts a job's entries no more: it has ended, or they are known now."""
        self._seconds -= job.later_s
        job.later_s = 0.0

    def let_go(self) -> None:
        """Forgets entries that have started or ended."""
        self._entries = [item for item in self._entries if item[2].alive and item[2].later]
        heapq.heapify(self._entries)

    def seconds_after(self, now: float) -> float:
        """Returns the predicted seconds of waiting entries that rank after `now`."""
        while self._entries and (self._entries[0][0] <= now or not self._entries[0][2].alive):
            entry = heapq.heappop(self._entries)[2]
            if entry.alive:
                self.drop(entry)
        if not self._entries:
            self._seconds = 0.0  # float sums drift
        return self._seconds
