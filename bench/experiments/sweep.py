"""The highest rate of an open loop that meets the objectives: doubled until one does not, then found by bisection."""

from __future__ import annotations

from collections.abc import Sequence

from bertserve.bench.errors import BenchError
from bertserve.bench.experiments.load_test import RATES, LoadTest, run_figures
from bertserve.bench.report.report import Report, Run
from bertserve.bench.report.slo import Objective

_HEADROOM = 1.1  # first rate of the search, relative to the maximum of the closed loop
_GROWTH = 2.0  # of a rate that held, while none is known that does not: few connections may ask for less than the service can do


def sweep(test: LoadTest, report: Report, objectives: Sequence[Objective], *, connections: int, steps: int, max_rate: float | None) -> None:
    """Finds the highest rate of an open loop at which all objectives are met, with at most `steps` rates.

    A load in which the generator was late is another one than was meant. It is repeated once, and if that is late too, the step is
    inconclusive: the search goes on below it, and never takes its rate.

    Args:
        test: What to load.
        report: Gets `max_rate`, None if no rate was low enough, whether that is only a lower bound, the figures of the run at that rate, and
            the steps that were inconclusive.
        objectives: Objectives on latencies and errors; those on rates are not considered.
        connections: Connections of the closed loop that says where the search begins.
        steps: Number of rates.
        max_rate: Upper bound of the search in requests per second, which it then begins with.

    Raises:
        BenchError: No request of the closed loop was answered.
    """
    low, high = 0.0, None  # the highest rate that held, and the lowest that did not or was inconclusive
    rate = max_rate or _first_rate(test, report, connections)
    report.figures["max_rate"] = None
    for _ in range(steps):
        if test.stop.is_set():
            break
        run = _load_in_time(test, report, rate)
        if test.stop.is_set():
            break
        if run.generator.was_late:
            test.progress.log(f"  {rate:.4g}/s: the generator was late, twice: inconclusive")
            report.inconclusive.append(run.name)
            high = rate
        else:
            found = run_figures(run)
            met = all(objective.is_met(found.get(objective.figure)) for objective in objectives if objective.figure not in RATES)
            test.progress.log(f"  {rate:.4g}/s: p99 {found['p99_ms'] or 0:.1f} ms: {'holds' if met else 'does not hold'}")
            if met:
                low = report.figures["max_rate"] = rate
                report.judged = found
            else:
                high = rate
        if low == max_rate:
            break
        rate = low * _GROWTH if high is None else (low + high) / 2
    report.is_lower_bound = low > 0 and high is None


def _first_rate(test: LoadTest, report: Report, connections: int) -> float:
    """Returns the rate to begin with where none is given: just above what a closed loop gets."""
    run = test.run_closed_loop(connections)
    report.runs.append(run)
    rate = (run_figures(run)["rps"] or 0.0) * _HEADROOM
    if not rate:
        raise BenchError("no request of the closed loop was answered; there is no rate to begin with.")
    return rate


def _load_in_time(test: LoadTest, report: Report, rate: float) -> Run:
    """Returns the run at a rate; where the generator was late, the run of a second try."""
    run, _, _ = test.run_open_loop(rate)
    report.runs.append(run)
    if run.generator.was_late and not test.stop.is_set():
        test.progress.log(f"  {rate:.4g}/s: the generator was late; once more")
        run, _, _ = test.run_open_loop(rate)
        report.runs.append(run)
    return run
