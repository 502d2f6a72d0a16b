"""An ideal service to compare with: one first-in-first-out queue before several equal servers. Pure arithmetic, no clock.

It has no HTTP, no tokenizer and no scheduler, and it never pauses: its latencies are waiting and running alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def simulate(arrivals: Sequence[float], jobs: Sequence[Sequence[float]], servers: int) -> list[float]:
    """Returns each job's latency in seconds, from its arrival until its last part is done.

    Args:
        arrivals: Arrival times in seconds, ascending.
        jobs: Run times in seconds of each job's parts; a part runs on whichever server is free first.
        servers: How many parts run at once.
    """
    free = [0.0] * servers
    latencies = []
    for arrival, parts in zip(arrivals, jobs, strict=True):
        done = arrival
        for part in parts:
            end = max(arrival, free[0]) + part
            heapq.heapreplace(free, end)
            done = max(done, end)
        latencies.append(done - arrival)
    return latencies


def scaled(jobs: Sequence[Sequence[float]], servers: int, capacity: float) -> list[list[float]]:
    """Returns the jobs with all run times stretched by one factor, so that the queue's capacity is what was measured.

    Args:
        jobs: Run times in seconds of each job's parts; not all zero.
        servers: How many parts run at once; `servers` / mean job time is the queue's capacity.
        capacity: Jobs a second that the queue shall be able to do.
    """
    factor = servers * len(jobs) / (capacity * sum(map(sum, jobs)))
    return [[part * factor for part in parts] for parts in jobs]
