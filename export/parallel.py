"""Work for all cores, an item a core: a run of a short text, or the many small steps of one matrix, gain little from two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bertserve.service.backend.hardware import usable_cores

MAX_WORKERS = 8  # each has the rows of a matrix in memory, or the activations of a batch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields what a function makes of each item, in their order.

    Args:
        function: Called in several threads.
        items: What it is called with.
    """
    with ThreadPoolExecutor(min(usable_cores(), MAX_WORKERS)) as pool:
        yield from pool.map(function, items)
