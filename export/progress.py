"""A line for each stage of an export that is done, with its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]


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
