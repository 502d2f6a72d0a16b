"""What an export tells while it runs: a line for each finished stage, and bars for its long loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Progress = Callable[[str], None]
Item = TypeVar("Item")


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


def track(items: Iterable[Item], step: str, *, unit: str) -> Iterable[Item]:
    """Returns the items with a bar on stderr that goes away at the end; without one where stderr is not a terminal.

    Args:
        items: A sized collection; the bar shows how many of it are done.
        step: What is done with each.
        unit: What one of them is.
    """
    bar: Iterable[Item] = tqdm(items, desc=step, unit=f" {unit}", leave=False, disable=None)
    return bar
