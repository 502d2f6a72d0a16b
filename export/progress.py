"""Progress of long work: a line per finished stage, and bars for long loops."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left"


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
