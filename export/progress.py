"""Long work: a line for each finished stage, bars for long loops, and loops on all cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from bertserve.service.backend.hardware import usable_cores

Progress = Callable[[str], None]
Item = TypeVar("Item")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left"

MAX_WORKERS = 8  # each has the rows of a matrix in memory, or the activations of a batch
Result = TypeVar("Result")


@contextmanager
def stage(progress: Progress, name: str, detail: str) -> Iterator[None]:
    """Says that the block is done; where it fails, says nothing.

    Args:
        progress: Called with the line.
        name: Name of the stage.
        detail: What it works on.
    """
    start = time.perf_counter()
    yield
    progress(f"{name:<10}{detail}  ({time.perf_counter() - start:.1f} s)")


def track(items: Iterable[Item], step: str, *, unit: str, total: int | None = None) -> Iterable[Item]:
    """Returns the items with a bar on stderr that goes away at the end; without one where stderr is not a terminal.

    The bar says how many are done, for how long the loop runs, and how long it will take if the others are like these.

    Args:
        items: What is done.
        step: What is done with each.
        unit: What one of them is.
        total: How many there are, where the items do not say.
    """
    bar: Iterable[Item] = tqdm(items, desc=step, unit=f" {unit}", total=total, leave=False, disable=None, bar_format=_BAR)
    return bar


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields what a function makes of each item, in their order.

    Args:
        function: Called in several threads.
        items: What it is called with.
    """
    with ThreadPoolExecutor(min(usable_cores(), MAX_WORKERS)) as pool:
        yield from pool.map(function, items)


def time_runs(run: Callable[[], object], bounds: tuple[int, int], seconds: float) -> list[float]:
    """Returns the seconds of runs, after one that is not timed.

    Args:
        run: What is timed.
        bounds: How often at least, and at most.
        seconds: When the runs have taken so long, they end.
    """
    run()
    times: list[float] = []
    least, most = bounds
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
