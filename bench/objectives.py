"""Objectives such as `p99_ms=50`: parses them, and checks them against measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bertserve.bench import BenchError

# metric -> whether an objective is an upper bound (True) or a lower bound (False)
METRICS: Mapping[str, bool] = {
    **dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "p999_ms", "mean_ms", "max_ms", "overhead_ms", "error_rate"), True),
    **dict.fromkeys(("rps", "texts_per_s", "ratio"), False),
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit on a metric in `METRICS`, in the unit at the end of its name."""

    metric: str
    bound: float

    def is_met(self, measured: float | None) -> bool:
        """Returns whether a measured value meets the limit; false for None, a metric that was not measured."""
        if measured is None:
            return False
        return measured <= self.bound if METRICS[self.metric] else measured >= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if METRICS[self.metric] else '>='} {self.bound:g}"


def parse(texts: Sequence[str]) -> list[Objective]:
    """Parses objectives; each text has one, or several separated by commas.

    A limit of 1 % on `error_rate` is added if there is none, because a service that refuses many requests looks fast.

    Raises:
        BenchError: A text is not `METRIC=NUMBER`, or names an unknown metric.
    """
    objectives: dict[str, Objective] = {}
    for part in (part for text in texts for part in text.split(",")):
        metric, equals, number = part.strip().partition("=")
        try:
            bound = float(number)
        except ValueError:
            bound = math.nan
        if metric not in METRICS or not equals or not math.isfinite(bound) or bound < 0:
            raise BenchError(f"`{part}` is not an objective; give METRIC=NUMBER, where METRIC is one of {', '.join(METRICS)}.")
        objectives[metric] = Objective(metric, bound)
    objectives.setdefault("error_rate", Objective("error_rate", 0.01))
    return list(objectives.values())
