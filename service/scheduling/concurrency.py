"""PeakConcurrency: how many runs wanted a core at once, recently. Pure, no clock of its own."""

from __future__ import annotations

WINDOW_S = 1.0


class PeakConcurrency:
    """The most runs at once, running or waiting, over the last one to two windows.

    That nothing else runs now says little about the next few milliseconds: if texts arrive at random, a run on several cores soon shares them
    with another run, and both take longer. If nothing else has run for a second or more, this is likely to continue.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        """Starts with none.

        Args:
            window_s: Seconds of a window.
        """
        self._window_s = window_s
        self._window = 0
        self._now = 0
        self._before = 0

    def record(self, runs: int, now: float) -> None:
        """Counts that so many runs wanted a core at `now`, in seconds of a clock that never goes back."""
        self._turn(now)
        self._now = max(self._now, runs)

    def peak(self, now: float) -> int:
        """Returns the most that were counted in this window and the one before."""
        self._turn(now)
        return max(self._now, self._before)

    def _turn(self, now: float) -> None:
        window = int(now // self._window_s)
        if window != self._window:
            self._before = self._now if window == self._window + 1 else 0
            self._window, self._now = window, 0
