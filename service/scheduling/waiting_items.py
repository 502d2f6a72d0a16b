"""WaitingItems: items that wait, by priority and by length, with operations in logarithmic time."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from bertserve.service.scheduling.records import Item, Runner, ScheduledRequest

# Entries ordered by priority, then by arrival: the priority, the number of the arrival, and the item, None if it no longer waits.
_Heap = list[list[Any]]


class WaitingItems:
    """The waiting items of all short requests, or of all long ones.

    Attributes:
        predicted_s: Their predicted seconds, in total.
    """

    def __init__(self) -> None:
        """Starts with no items."""
        self.predicted_s = 0.0
        self._by_priority: _Heap = []
        # runner -> its different lengths, ascending (at most as many as a batch has tokens), and a heap for each, whose first item waits
        self._by_length: dict[Runner, tuple[list[int], dict[int, _Heap]]] = {}
        self._sequence = count()

    def add(self, request: ScheduledRequest, items: Sequence[Item]) -> None:
        """Adds the next items of a request."""
        lengths, heaps = self._by_length.setdefault(request.runner, ([], {}))
        for item in items:
            self.predicted_s += item.predicted_s
            if item.length not in heaps:
                heaps[item.length] = []
                insort(lengths, item.length)
            item.entry = [item.priority, next(self._sequence), item]
            heapq.heappush(heaps[item.length], item.entry)
            heapq.heappush(self._by_priority, item.entry)

    def remove(self, item: Item) -> None:
        """Removes an item that no longer waits."""
        self.predicted_s -= item.predicted_s
        item.entry[2] = None
        lengths, heaps = self._by_length[item.request.runner]
        heap = heaps[item.length]
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        if not heap:
            del heaps[item.length], lengths[bisect_left(lengths, item.length)]
        if not lengths:
            del self._by_length[item.request.runner]  # it would keep a model in memory
        if not self._by_length:  # sums of floats drift, and entries of items that no longer wait stay in the heap
            self.predicted_s = 0.0
            self._by_priority.clear()

    def first(self) -> Item | None:
        """Returns the first item by priority."""
        heap = self._by_priority
        while heap and heap[0][2] is None:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def nearest(self, runner: Runner, length: int, last_priority: float) -> Iterator[Item]:
        """Yields a runner's first item of the greatest length up to `length`, and its first item of the smallest length above it."""
        lengths, heaps = self._by_length.get(runner, ([], {}))
        place = bisect_right(lengths, length)
        for places in (range(place - 1, -1, -1), range(place, len(lengths))):
            for i in places:
                priority, _, item = heaps[lengths[i]][0]
                if priority <= last_priority:
                    yield item
                    break
