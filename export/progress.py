"""What an export tells while it runs: a line for each finished stage, and bars for its long loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Progress = Callable[[str], None]
Item = TypeVar("Item")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left"


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
