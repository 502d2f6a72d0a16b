"""The simulation of an ideal service: one first-in-first-out queue in front of several equal servers.

It has no HTTP, no tokenizer and no scheduler, and it never pauses: a latency is waiting time plus run time. It is pure arithmetic without
a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def simulate(arrivals: Sequence[float], jobs: Sequence[Sequence[float]], servers: int) -> list[float]:
    """Returns each job's latency in seconds, from its arrival to the end of its last part.

    Args:
        arrivals: Arrival times in seconds, ascending.
        jobs: For each job, the run times of its parts in seconds; a part runs on the server that is free first.
        servers: Number of parts that run at the same time.
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


def scale_to_capacity(jobs: Sequence[Sequence[float]], servers: int, capacity: float) -> list[list[float]]:
    """Returns the jobs with all run times multiplied by one factor, so that the queue has the given capacity.

    Args:
        jobs: For each job, the run times of its parts in seconds; not all zero.
        servers: Number of parts that run at the same time. The capacity of the queue is `servers` over the mean time of a job.
        capacity: Jobs per second that the queue shall be able to do.
    """
    factor = servers * len(jobs) / (capacity * sum(map(sum, jobs)))
    return [[part * factor for part in parts] for parts in jobs]
