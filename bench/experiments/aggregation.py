"""The figures of a run over all its targets, and their medians over several runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bertserve.bench.report.report import Run
from bertserve.bench.report.slo import FIGURES

RATES = ("rps", "texts_per_s", "tokens_per_s")


def run_figures(run: Run) -> dict[str, float | None]:
    """Returns a run's figures: the sum of rates over its targets, and the worst of every other figure."""
    each = [target.figures() for target in run.targets]
    return {name: _combine(name, [values[name] for values in each]) for name in each[0]}


def median_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Returns the median of each figure over runs."""
    each = [run_figures(run) for run in runs]
    return {name: median([values[name] for values in each]) for name in (each[0] if each else {})}


def median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _combine(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if name in RATES:
        return sum(known)
    return max(known) if FIGURES[name] else min(known)
