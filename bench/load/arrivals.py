"""Arrival times of an open loop: a Poisson process, drawn before the load, so that the generator only follows a list."""

from __future__ import annotations

import random


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process, ascending, in seconds from 0.

    The same seed gives the same sequence, stretched for another rate: the runs of a sweep differ in their rate only.

    Args:
        rate: Arrivals per second, over 0.
        seconds: Upper bound of the arrival times.
        seed: Seed of the gaps.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    times = []
    now = random_.expovariate(1.0) / rate
    while now < seconds:
        times.append(now)
        now += random_.expovariate(1.0) / rate
    return times
