"""Runs a function for many items on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bertserve.service.engine.hardware import usable_cores

MAX_WORKERS = 8  # each worker has the rows of a matrix or the activations of a batch in memory
Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the result of a function for each item, in order, computed in several threads."""
    with ThreadPoolExecutor(min(usable_cores(), MAX_WORKERS)) as pool:
        yield from pool.map(function, items)
