"""Figures of a run over its targets, and of several runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.report.report import Run
from bench.report.slo import FIGURES

RATES = ("rps", "texts_per_s", "tokens_per_s")


def figures(run: Run) -> dict[str, float | None]:
    """Returns a run's figures: over several targets the worst of each, and the sum of rates."""
    each = [target.figures() for target in run.targets]
    return {name: _total(name, [values[name] for values in each]) for name in each[0]}


def median_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Returns the median of each figure over runs."""
    each = [figures(run) for run in runs]
    return {name: median([values[name] for values in each]) for name in (each[0] if each else {})}


def _total(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if name in RATES:
        return sum(known)
    return max(known) if FIGURES[name] else min(known)


def median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that are known, or None."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
