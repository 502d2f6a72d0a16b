"""Progress on stderr: one line that is redrawn on a terminal, and a line every few seconds in a log.

tqdm supports only the terminal: in a log it writes carriage returns instead of lines.
"""

from __future__ import annotations

import sys
import time

_TERMINAL_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 5.0


class BenchProgress:
    """Reports the state of the current measurement."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._interval_s = _TERMINAL_INTERVAL_S if self._terminal else _LOG_INTERVAL_S
        self._next_update = 0.0
        self._label = ""

    def log(self, line: str) -> None:
        """Prints a permanent line."""
        if not self._quiet:
            self._write(line, end="\n")

    def start(self, label: str) -> None:
        """Starts the progress of a measurement."""
        self._label = label
        self._next_update = time.monotonic() + self._interval_s
        if not self._terminal:
            self.log(label)

    def update(self, elapsed_s: float, total_s: float, done: int, failed: int) -> None:
        """Shows the counts, at most once per interval."""
        now = time.monotonic()
        if now >= self._next_update and not self._quiet:
            self._next_update = now + self._interval_s
            failures = f", {failed} failed" if failed else ""
            self._write(f"{self._label}: {elapsed_s:.0f} of {total_s:.0f} s, {done} done{failures}", end="" if self._terminal else "\n")

    def _write(self, line: str, *, end: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}{end}" if self._terminal else line + end)
        sys.stderr.flush()
