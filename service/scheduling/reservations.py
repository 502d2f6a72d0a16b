"""Reservations: work that is due later, such as the next windows of a document. A request that arrives now does not wait for it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest

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
    """Waiting items whose start time is still to come, and the seconds that they will take."""

    def __init__(self) -> None:
        """Starts without any."""
        self._seconds = 0.0
        self._items: list[tuple[float, int, Item | Reservation]] = []
        self._tie = count()

    def __len__(self) -> int:
        """How many are kept, those that count no more included."""
        return len(self._items)

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
        heapq.heappush(self._items, (item.priority, next(self._tie), item))

    def drop(self, item: Item | Reservation) -> None:
        """Counts an item no more: it has started, or its start time has come."""
        if item.reserved:
            item.reserved = False
            item.request.reserved_s -= item.seconds
            self._seconds -= item.seconds

    def drop_all(self, request: ScheduledRequest) -> None:
        """Counts a request's items no more: it has ended, or they are known now."""
        self._seconds -= request.reserved_s
        request.reserved_s = 0.0

    def let_go(self) -> None:
        """Forgets items that have started or ended."""
        self._items = [item for item in self._items if item[2].alive and item[2].reserved]
        heapq.heapify(self._items)

    def seconds_after(self, now: float) -> float:
        """Returns the predicted seconds of waiting items that rank after `now`."""
        while self._items and (self._items[0][0] <= now or not self._items[0][2].alive):
            item = heapq.heappop(self._items)[2]
            if item.alive:
                self.drop(item)
        if not self._items:
            self._seconds = 0.0  # float sums drift
        return self._seconds
