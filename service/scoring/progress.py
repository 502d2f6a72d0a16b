"""The bar of a run: rows a second and the time left, on stderr where that is a terminal."""

from __future__ import annotations

import time

from tqdm import tqdm

_BAR = "{percentage:3.0f}%|{bar}| {postfix}, {elapsed} so far, {remaining} left"
_ENDLESS = "{postfix}, {elapsed} so far"


class ProgressBar:
    """Shows how far a run is."""

    def __init__(self, total: int | None, done: int) -> None:
        """Begins to show.

        Args:
            total: Size of the input, in what rows count for; None where nobody knows.
            done: What of it an earlier run did.
        """
        bar_format = _ENDLESS if total is None else _BAR
        self._bar = tqdm(total=total, initial=done, leave=False, disable=None, bar_format=bar_format)
        self._start, self._rows = time.perf_counter(), 0

    def advance(self, size: int, rows: int) -> None:
        """Counts rows that are answered."""
        self._rows += rows
        self._bar.set_postfix_str(f"{self._rows / (time.perf_counter() - self._start):,.0f} rows/s", refresh=False)
        self._bar.update(size)

    def close(self) -> float:
        """Removes the bar; returns the seconds since it began."""
        self._bar.close()
        return time.perf_counter() - self._start
