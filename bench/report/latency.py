"""Latency percentiles and the distribution that a report plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_CURVE_POINTS = 200


def percentile(ascending: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed (nearest rank).

    Args:
        ascending: At least one value, sorted.
        share: Within (0, 1].
    """
    return ascending[max(math.ceil(share * len(ascending) - 1e-9), 1) - 1]


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency distribution of answered requests, in milliseconds. The field names are those of the JSON report.

    Attributes:
        count: Number of requests.
        curve: Points `[share, milliseconds]` of the cumulative distribution, denser towards a share of 1.
    """

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    curve: list[list[float]]


def latency_distribution(milliseconds: Iterable[float]) -> Latency | None:
    """Returns the distribution, or None if there are no values."""
    ascending = sorted(milliseconds)
    if not ascending:
        return None
    # equal steps of log(1 - share): as many points between 99 % and 99.9 % as between 90 % and 99 %
    least = 1 / len(ascending)
    shares = [1 - least ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS)] + [1.0]
    p50, p90, p99, p999 = (percentile(ascending, share) for share in (0.5, 0.9, 0.99, 0.999))
    return Latency(
        count=len(ascending),
        mean_ms=math.fsum(ascending) / len(ascending),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        p999_ms=p999,
        max_ms=ascending[-1],
        curve=[[share, percentile(ascending, share)] for share in shares],
    )
