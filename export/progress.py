"""Progress of long work: a line per finished stage, bars for long loops, and loops on all cores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from bertserve.service.engine.hardware import usable_cores

Item = TypeVar("Item")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left"

MAX_WORKERS = 8  # each worker has the rows of a matrix or the activations of a batch in memory
Result = TypeVar("Result")


@contextmanager
def stage(name: str, detail: str) -> Iterator[None]:
    """Writes a line to stderr when the block is done; writes nothing if it fails."""
    start = time.perf_counter()
    yield
    sys.stderr.write(f"{name:<10}{detail}  ({time.perf_counter() - start:.1f} s)\n")


def track(items: Iterable[Item], step: str, *, unit: str, total: int | None = None) -> Iterable[Item]:
    """Returns the items with a progress bar on stderr, which disappears at the end; without a bar if stderr is not a terminal.

    The bar shows the finished number, the elapsed time, and the remaining time if other items take as long. `total` is the number of items
    of an iterable without a length.
    """
    bar: Iterable[Item] = tqdm(items, desc=step, unit=f" {unit}", total=total, leave=False, disable=None, bar_format=_BAR)
    return bar


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the result of a function for each item, in order, computed in several threads."""
    with ThreadPoolExecutor(min(usable_cores(), MAX_WORKERS)) as pool:
        yield from pool.map(function, items)


def time_runs(run: Callable[[], object], bounds: tuple[int, int], seconds: float) -> list[float]:
    """Returns the seconds of runs, after one run that is not timed.

    Args:
        run: The function to time.
        bounds: Minimum and maximum number of runs.
        seconds: Total time after which the runs stop.
    """
    run()
    times: list[float] = []
    min_runs, max_runs = bounds
    while len(times) < min_runs or (len(times) < max_runs and sum(times) < seconds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
