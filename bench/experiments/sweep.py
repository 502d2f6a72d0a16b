"""The highest rate of an open loop that meets the objectives, found by bisection."""

from __future__ import annotations

from collections.abc import Sequence

from bench.errors import BenchError
from bench.experiments.aggregation import RATES, run_figures
from bench.experiments.load_test import LoadTest
from bench.report.report import Report
from bench.report.slo import Objective

_HEADROOM = 1.1  # upper bound of the search, relative to the maximum of the closed loop


def sweep(test: LoadTest, report: Report, objectives: Sequence[Objective], *, connections: int, steps: int, max_rate: float | None) -> None:
    """Finds the highest rate of an open loop at which all objectives are met, with at most `steps` loads.

    Args:
        test: What to load.
        report: Gets `max_rate`, None if no rate was low enough, and the figures of the run at that rate.
        objectives: Objectives on latencies and errors; those on rates are not considered.
        connections: Connections of the closed loop that gives the upper bound of the search.
        steps: Number of loads.
        max_rate: Upper bound of the search in requests per second, in place of the closed loop's.

    Raises:
        BenchError: No request of the closed loop was answered.
    """
    if max_rate is None:
        run = test.run_closed_loop(connections)
        report.runs.append(run)
        max_rate = (run_figures(run)["rps"] or 0.0) * _HEADROOM
        if not max_rate:
            raise BenchError("no request of the closed loop was answered; there is no rate to begin with.")
    low, high = 0.0, max_rate
    report.figures["max_rate"] = None
    for step in range(steps):
        if test.stop.is_set():
            break
        # the upper bound comes first: if it meets the objectives, the search is over
        rate = high if step == 0 else (low + high) / 2
        run, _, _ = test.run_open_loop(rate)
        report.runs.append(run)
        if test.stop.is_set():
            break
        found = run_figures(run)
        met = all(objective.is_met(found.get(objective.figure)) for objective in objectives if objective.figure not in RATES)
        test.progress.log(f"  {rate:.4g}/s: p99 {found['p99_ms'] or 0:.1f} ms: {'holds' if met else 'does not hold'}")
        if met:
            low = rate
            report.figures["max_rate"] = rate
            report.judged = found
            if rate == high:
                break
        else:
            high = rate
