"""Group: the waiting items of one key, by length. It does not depend on costs or batches."""

from __future__ import annotations

import heapq
from math import inf

from bertserve.service.scheduling.scheduled_request import Item


class Group:
    """Items of one key by length; finds the nearest length that has any in a few machine words."""

    def __init__(self) -> None:
        """Starts without any."""
        self.lengths = 0  # bit n is set when a live item of n tokens may be there
        self._heaps: dict[int, list[tuple[float, int, Item]]] = {}

    def push(self, tokens: int, item: tuple[float, int, Item]) -> None:
        """Adds an item as `(priority, tie, item)`."""
        heapq.heappush(self._heaps.setdefault(tokens, []), item)
        self.lengths |= 1 << tokens

    def first(self, tokens: int) -> Item | None:
        """Returns the live item of that length of the first priority, dropping dead ones before it."""
        heap = self._heaps.get(tokens, [])
        while heap and not heap[0][2].alive:
            heapq.heappop(heap)
        if heap:
            return heap[0][2]
        self._heaps.pop(tokens, None)
        self.lengths &= ~(1 << tokens)
        return None

    def longest_within(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the greatest length of at most `tokens`, of those with a priority of at most `last_priority`."""
        shorter = self.lengths & ((1 << (tokens + 1)) - 1)
        while shorter:
            length = shorter.bit_length() - 1
            if (item := self.first(length)) is not None and item.priority <= last_priority:
                return item
            shorter ^= 1 << length
        return None

    def shortest_over(self, tokens: int, last_priority: float = inf) -> Item | None:
        """Returns the first live item of the least length over `tokens`, of those with a priority of at most `last_priority`."""
        longer = self.lengths >> (tokens + 1)
        while longer:
            least = longer & -longer
            if (item := self.first(tokens + least.bit_length())) is not None and item.priority <= last_priority:
                return item
            longer ^= least
        return None
