"""Long work: a line per finished stage, bars for long loops, and loops on all cores."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from bertserve.service.engine.hardware import usable_cores

T = TypeVar("T")
R = TypeVar("R")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left"


@contextmanager
def stage(name: str, detail: str) -> Iterator[None]:
    """Writes a line to stderr when the block is done; writes nothing if it fails."""
    start = time.perf_counter()
    yield
    sys.stderr.write(f"{name:<10}{detail}  ({time.perf_counter() - start:.1f} s)\n")


def track(items: Iterable[T], work: str, *, unit: str, total: int | None = None) -> Iterable[T]:
    """Returns the items with a progress bar on stderr, which disappears at the end; without a bar if stderr is not a terminal.

    The bar shows the finished number, the elapsed time, and the remaining time if other items take as long. `total` is the number of items
    of an iterable without a length.
    """
    return tqdm(items, desc=work, unit=f" {unit}", total=total, leave=False, disable=None, bar_format=_BAR)


def parallel_map(function: Callable[[T], R], items: Collection[T], work: str = "", *, unit: str = "") -> Iterator[R]:
    """Yields the result of a function for each item, in order, computed in several threads; with a bar if the work has a name.

    There are at most eight threads, because each has the rows of a matrix or the activations of a batch in memory.
    """
    with ThreadPoolExecutor(min(usable_cores(), 8)) as pool:
        results = pool.map(function, items)
        yield from track(results, work, unit=unit, total=len(items)) if work else results
