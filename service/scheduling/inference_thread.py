"""The state of inference threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bertserve.service.scheduling.scheduled_request import Item


@dataclass(slots=True, eq=False)
class InferenceThread:
    """An inference thread and its batch, which changes only under the scheduler's lock.

    Attributes:
        handle: The thread.
        batch: The items that run; empty while it waits.
        predicted_s: Predicted seconds of the run.
        since: Start time of the run.
        ticks: Ticks since the run began; None while the thread waits or decodes.
        hung: Whether its run hangs: another thread has taken its place, and it ends after the run.
        setup_calls: Functions that set up what libraries keep per thread; it calls one between two batches.
    """

    handle: threading.Thread = field(init=False)
    batch: Sequence[Item] = ()
    predicted_s: float = 0.0
    since: float = 0.0
    ticks: int | None = None
    hung: bool = False
    setup_calls: deque[Callable[[], object]] = field(default_factory=deque)
