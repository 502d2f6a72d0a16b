"""When requests are due: a Poisson process, drawn beforehand, so that the generator only follows a list."""

from __future__ import annotations

import random


def poisson(rate: float, seconds: float, *, seed: int) -> list[float]:
    """Returns the arrival times of a Poisson process, ascending, in seconds from 0.

    The same seed gives the same arrivals, at another rate stretched: runs of a sweep differ in their rate only.

    Args:
        rate: Arrivals a second, over 0.
        seconds: Arrivals are before this time.
        seed: Of the gaps.
    """
    random_ = random.Random(seed)  # noqa: S311  # load, not secrets
    times = []
    now = random_.expovariate(1.0) / rate
    while now < seconds:
        times.append(now)
        now += random_.expovariate(1.0) / rate
    return times
