"""The highest rate of an open loop that keeps the conditions."""

from __future__ import annotations

from collections.abc import Sequence

from bench.errors import BenchError
from bench.experiments.aggregation import RATES, figures
from bench.experiments.load_test import Session
from bench.report.report import Report
from bench.report.slo import Condition

_ABOVE = 1.1  # the sweep looks up to here, of the closed loop's maximum


def sweep(
    session: Session, report: Report, conditions: Sequence[Condition], *, connections: int, steps: int, most_rate: float | None
) -> None:
    """Finds the highest rate of an open loop at which all conditions hold, by halving; at most `steps` loads.

    Args:
        session: What to load.
        report: Gets `max_rate`, None if no rate was low enough, and the figures of the run at that rate.
        conditions: On latencies and errors.
        connections: Of the closed loop whose rate says where to look.
        steps: Loads.
        most_rate: Where to look instead, in requests a second.
    """
    if most_rate is None:
        run = session.closed(connections)
        report.runs.append(run)
        most_rate = (figures(run)["rps"] or 0.0) * _ABOVE
        if not most_rate:
            raise BenchError("no request of the closed loop was answered; there is no rate to begin with.")
    low, high = 0.0, most_rate
    report.figures["max_rate"] = None
    for step in range(steps):
        if session.stop.is_set():
            break
        # the top first: it may hold, and if not, half of it is next
        rate = high if step == 0 else (low + high) / 2
        run, _, _ = session.open_loop(rate)
        report.runs.append(run)
        if session.stop.is_set():
            break
        found = figures(run)
        holds = all(condition.holds(found.get(condition.figure)) for condition in conditions if condition.figure not in RATES)
        session.progress.say(f"  {rate:.4g}/s: p99 {found['p99_ms'] or 0:.1f} ms: {'holds' if holds else 'does not hold'}")
        if holds:
            low = rate
            report.figures["max_rate"] = rate
            report.judged = figures(run)
            if rate == high:
                break
        else:
            high = rate
