"""Later: entries that wait for their rank to come, as the windows of a document do. Who arrives now does not wait for them."""

from __future__ import annotations

import heapq
from itertools import count

from service.scheduling.job import Entry, Job


class Later:
    """Waiting entries whose rank is still to come, and the seconds that they will take."""

    def __init__(self) -> None:
        """Starts without any."""
        self._seconds = 0.0
        self._entries: list[tuple[float, int, Entry]] = []
        self._tie = count()

    def __len__(self) -> int:
        """How many are kept, those that count no more included."""
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Counts an entry until its rank has come, it starts, or its job ends."""
        entry.later = True
        entry.job.later_s += entry.seconds
        self._seconds += entry.seconds
        heapq.heappush(self._entries, (entry.rank, next(self._tie), entry))

    def drop(self, entry: Entry) -> None:
        """Counts an entry no more: it has started, or its rank has come."""
        if entry.later:
            entry.later = False
            entry.job.later_s -= entry.seconds
            self._seconds -= entry.seconds

    def drop_all(self, job: Job) -> None:
        """Counts a job's entries no more: it has ended."""
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
