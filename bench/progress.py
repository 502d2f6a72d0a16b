"""What a waiting person sees: one line on stderr, redrawn on a terminal, every few seconds in a log."""

from __future__ import annotations

import sys
import time

_TERMINAL_S = 0.5
_LOG_S = 5.0


class Progress:
    """Says how far a run is."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._label = ""

    def say(self, line: str) -> None:
        """Prints a line of its own."""
        if not self._quiet:
            self._write(line, end="\n")

    def begin(self, label: str) -> None:
        """Begins a run."""
        self._label = label
        self._next = time.monotonic() + (_TERMINAL_S if self._terminal else _LOG_S)
        if not self._terminal:
            self.say(label)

    def update(self, elapsed_s: float, total_s: float, done: int, failed: int) -> None:
        """Shows the counts, not more often than is of use."""
        now = time.monotonic()
        if now >= self._next and not self._quiet:
            self._next = now + (_TERMINAL_S if self._terminal else _LOG_S)
            trouble = f", {failed} failed" if failed else ""
            self._write(f"{self._label}: {elapsed_s:.0f} of {total_s:.0f} s, {done} done{trouble}", end="" if self._terminal else "\n")

    def _write(self, line: str, *, end: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}{end}" if self._terminal else line + end)
        sys.stderr.flush()
