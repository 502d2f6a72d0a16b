"""Targets such as `p99_ms=50`: parsed, and held against what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.errors import BenchError

# figure -> whether it must be at most (True) or at least (False) the target
FIGURES: Mapping[str, bool] = {
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
class Condition:
    """One target.

    Attributes:
        figure: One of FIGURES.
        target: Its bound, in the unit that the figure's name ends with.
    """

    figure: str
    target: float

    def holds(self, measured: float | None) -> bool:
        """Returns whether a measured value keeps the bound; what was not measured does not."""
        if measured is None:
            return False
        return measured <= self.target if FIGURES[self.figure] else measured >= self.target

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if FIGURES[self.figure] else '>='} {self.target:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition and what was measured; `None` where nothing was."""

    condition: Condition
    measured: float | None

    @property
    def passed(self) -> bool:
        """Whether the condition holds."""
        return self.condition.holds(self.measured)


def parse(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Reads conditions, each text one or a comma list of them.

    A limit on errors of 1 % is added where none is given: a service that refuses half of its requests is not fast.

    Raises:
        BenchError: A text is not `FIGURE=NUMBER`, or names an unknown figure.
    """
    found: dict[str, Condition] = {}
    for part in (part for text in texts for part in text.split(",")):
        figure, equals, number = part.strip().partition("=")
        try:
            target = float(number)
        except ValueError:
            target = math.nan
        if figure not in FIGURES or not equals or not math.isfinite(target) or target < 0:
            raise BenchError(f"`{part}` is not a target; give FIGURE=NUMBER, where FIGURE is one of {', '.join(FIGURES)}.")
        found[figure] = Condition(figure, target)
    if found:
        found.setdefault("error_rate", Condition("error_rate", DEFAULT_ERROR_RATE))
    return tuple(found.values())


def judge(conditions: Sequence[Condition], figures: Mapping[str, float | None]) -> list[Verdict]:
    """Returns the verdict on each condition."""
    return [Verdict(condition, figures.get(condition.figure)) for condition in conditions]
