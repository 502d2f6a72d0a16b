"""InferenceThread: a thread that runs batches, as others see it: what it holds, and what it runs now. Records, without rules of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from bertserve.service.scheduling.scheduled_request import Item


@dataclass(slots=True, eq=False)
class Run:
    """One run of a batch, or of a part of one that has failed; or the decoding of what came of it.

    Attributes:
        held: All items of the batch, also those that run after this part or have run before it.
        predicted_s: Predicted seconds; 0 where nothing is predicted.
        started: Time at which it started.
        watched_s: Seconds that the watchdog has seen it run; the watchdog's own.
        hung: Whether the watchdog takes it for hung.
    """

    held: Sequence[Item]
    predicted_s: float
    started: float
    watched_s: float = 0.0
    hung: bool = False


@dataclass(slots=True, eq=False)
class InferenceThread:
    """A thread and its run.

    Attributes:
        handle: The thread itself; started by the scheduler.
        run: What it runs now; None while it waits. Another object for each run, so that who watches one never meets the next.
        busy: Seconds that it had a batch, of batches that have ended, and when the present one began; None while it waits. One object for
            both, so that who reads it from another thread gets two that belong together.
        long_step: Whether it has begun a step that takes long and cannot be interrupted.
    """

    handle: threading.Thread = field(init=False)
    run: Run | None = None
    busy: tuple[float, float | None] = (0.0, None)
    long_step: bool = False

    def busy_s(self, now: float) -> float:
        """Returns the seconds that it had a batch, up to now."""
        ended_s, since = self.busy
        return ended_s if since is None else ended_s + now - since
