"""Service level objectives such as `p99_ms=50`: parses them, and checks them against measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertserve.bench.errors import BenchError

# metric -> whether the objective is an upper bound (True) or a lower bound (False)
METRICS: Mapping[str, bool] = {
    "p50_ms": True,
    "p90_ms": True,
    "p99_ms": True,
    "p999_ms": True,
    "mean_ms": True,
    "max_ms": True,
    "overhead_ms": True,
    "error_rate": True,
    "queue_ratio": True,
    "rps": False,
    "texts_per_s": False,
    "tokens_per_s": False,
    "ratio": False,
}
DEFAULT_ERROR_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit on a metric.

    Attributes:
        metric: One of METRICS.
        bound: The limit, in the unit at the end of the metric's name.
    """

    metric: str
    bound: float

    def is_met(self, measured: float | None) -> bool:
        """Returns whether a measured value meets the limit; false for None, a metric that was not measured."""
        if measured is None:
            return False
        return measured <= self.bound if METRICS[self.metric] else measured >= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if METRICS[self.metric] else '>='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An objective and the measured value, None if the metric was not measured."""

    objective: Objective
    measured: float | None

    @property
    def passed(self) -> bool:
        """Whether the objective is met."""
        return self.objective.is_met(self.measured)


def parse_objectives(texts: Sequence[str]) -> tuple[Objective, ...]:
    """Parses objectives; each text has one, or several separated by commas.

    If there are objectives but none on `error_rate`, a limit of 1 % is added, because a service that refuses many requests looks fast.

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
            raise BenchError(f"`{part}` is not a target; give METRIC=NUMBER, where METRIC is one of {', '.join(METRICS)}.")
        objectives[metric] = Objective(metric, bound)
    if objectives:
        objectives.setdefault("error_rate", Objective("error_rate", DEFAULT_ERROR_RATE))
    return tuple(objectives.values())


def in_words(condition: str) -> str:
    """Returns an objective in a readable form: `p99 <= 50 ms` for `p99_ms <= 50`."""
    metric, sign, bound = condition.split()
    if metric.endswith("_ms"):
        return f"{metric.removesuffix('_ms')} {sign} {bound} ms"
    return f"error rate {sign} {100 * float(bound):g} %" if metric == "error_rate" else condition


def sweep_result(document: Mapping[str, Any]) -> str | None:
    """Returns the result of a sweep as a sentence, from a report in its JSON form.

    Returns:
        The sentence, without objectives on rates, which are not part of the search; None for other commands and without verdicts.
    """
    limits = [in_words(verdict["condition"]) for verdict in document["verdicts"] if " <= " in verdict["condition"]]
    if document["command"] != "sweep" or not limits:
        return None
    conditions, rate = " and ".join(limits), document["figures"].get("max_rate")
    if rate is None:
        return f"does not hold {conditions} at any rate that was tried"
    return f"holds {conditions} up to {rate:.4g} requests/s"
