"""Group: waiting entries of one key by length. Knows neither costs nor batches."""

from __future__ import annotations

import heapq
from math import inf

from bertserve.service.scheduling.job import Entry


class Group:
    """Entries of one key by length; finds the nearest length that has any in a few machine words."""

    def __init__(self) -> None:
        """Starts without any."""
        self.lengths = 0  # bit n is set when a live entry of n tokens may be there
        self._heaps: dict[int, list[tuple[float, int, Entry]]] = {}

    def push(self, tokens: int, item: tuple[float, int, Entry]) -> None:
        """Adds an entry as `(rank, tie, entry)`."""
        heapq.heappush(self._heaps.setdefault(tokens, []), item)
        self.lengths |= 1 << tokens

    def first(self, tokens: int) -> Entry | None:
        """Returns the live entry of that length with the first rank, dropping dead ones before it."""
        heap = self._heaps.get(tokens, [])
        while heap and not heap[0][2].alive:
            heapq.heappop(heap)
        if heap:
            return heap[0][2]
        self._heaps.pop(tokens, None)
        self.lengths &= ~(1 << tokens)
        return None

    def longest_within(self, tokens: int, last_rank: float = inf) -> Entry | None:
        """Returns the first live entry of the greatest length of at most `tokens`, of those that rank no later than `last_rank`."""
        shorter = self.lengths & ((1 << (tokens + 1)) - 1)
        while shorter:
            length = shorter.bit_length() - 1
            if (entry := self.first(length)) is not None and entry.rank <= last_rank:
                return entry
            shorter ^= 1 << length
        return None

    def shortest_over(self, tokens: int, last_rank: float = inf) -> Entry | None:
        """Returns the first live entry of the least length over `tokens`, of those that rank no later than `last_rank`."""
        longer = self.lengths >> (tokens + 1)
        while longer:
            least = longer & -longer
            if (entry := self.first(tokens + least.bit_length())) is not None and entry.rank <= last_rank:
                return entry
            longer ^= least
        return None
