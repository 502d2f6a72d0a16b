"""The commands that are more than one load: each adds its runs to the report as they end, and its figures at the end.

All compare things measured in turn in one process, so that a machine that is slower today is slower for both. Ctrl-C ends
each after the run it is in, with the figures of what there is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from bench import queueing
from bench.errors import BenchError
from bench.report import measurement
from bench.report.measurement import Measurement
from bench.report.report import Report, Run
from bench.report.slo import FIGURES, Condition
from bench.session import Engine, Session

_RATES = ("rps", "texts_per_s", "tokens_per_s")
_ABOVE = 1.1  # the sweep looks up to here, of the closed loop's maximum


def figures(run: Run) -> dict[str, float | None]:
    """Returns a run's figures: over several targets the worst of each, and the sum of rates."""
    each = [target.figures() for target in run.targets]
    return {name: _total(name, [values[name] for values in each]) for name in each[0]}


def median_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Returns the median of each figure over runs."""
    each = [figures(run) for run in runs]
    return {name: _median([values[name] for values in each]) for name in (each[0] if each else {})}


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
        holds = all(condition.holds(found.get(condition.figure)) for condition in conditions if condition.figure not in _RATES)
        session.progress.say(f"  {rate:.4g}/s: p99 {found['p99_ms'] or 0:.1f} ms: {'holds' if holds else 'does not hold'}")
        if holds:
            low = rate
            report.figures["max_rate"] = rate
            report.judged = figures(run)
            if rate == high:
                break
        else:
            high = rate


def compare(session: Session, report: Report, *, connections: int, rounds: int) -> None:
    """Measures the service and the bare engine in turn; the report gets the medians and the median of their ratios.

    Args:
        session: One target, with an engine.
        report: Gets `ratio` of the speeds in texts, and `ratio_tokens`; of a single connection also `request_ratio`, the median
            latency of a request over the time that the bare loop needs for as much.
        connections: Of the closed loop.
        rounds: Of both.
    """
    engine = _engine(session)
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        run = session.closed(connections, name=f"round {i + 1} served, {connections} connections")
        limit = engine.limit(session.plan.seconds) if not session.stop.is_set() else None
        report.runs.append(replace(run, limit=limit))
        if limit is None or not limit.runs:
            break
        served = run.targets[0]
        row: dict[str, float | None] = {
            "served_texts_per_s": served.texts_per_s,
            "bare_texts_per_s": limit.texts_per_s,
            "ratio": served.texts_per_s / limit.texts_per_s,
            "ratio_tokens": (served.tokens_per_s or 0.0) / limit.tokens_per_s,
        }
        if connections == 1 and served.latency:  # with more of them a request also waits for others
            row |= {
                "served_request_ms": served.latency.p50_ms,
                "bare_request_ms": 1000 / limit.requests_per_s,
                "request_ratio": served.latency.p50_ms * limit.requests_per_s / 1000,
            }
        rows.append(row)
        session.progress.say(
            f"  round {i + 1}: served {served.texts_per_s:.1f} texts/s, bare {limit.texts_per_s:.1f}, ratio {rows[-1]['ratio']:.3f}"
        )
    if rows:
        report.judged = median_figures(report.runs)
        report.figures |= {name: _median([row[name] for row in rows]) for name in rows[0]}


def together(session: Session, report: Report, *, connections: int, rounds: int) -> None:
    """Measures each target alone and all at once, in turn; `ratio` is the sum of the shares of its own speed that each kept.

    1 means that together they do as much as one model alone, in tokens.

    Args:
        session: Two targets or more, of different models.
        report: Gets the medians.
        connections: To each target.
        rounds: Of all.
    """
    count = len(session.targets)
    ratios, sums, alone_sums = [], [], []
    for i in range(rounds):
        alone = []
        for k in range(count):
            if not session.stop.is_set():
                alone.append(session.closed(connections, only=k, name=f"round {i + 1} alone {session.targets[k].label}"))
                report.runs.append(alone[-1])
        if session.stop.is_set():
            break
        both = session.closed(connections, name=f"round {i + 1} together")
        report.runs.append(both)
        speeds = [_tokens(run.targets[0]) for run in alone]
        shares = [_tokens(target) / speed for target, speed in zip(both.targets, speeds, strict=True)]
        ratios.append(sum(shares))
        sums.append(sum(map(_tokens, both.targets)))
        alone_sums.append(statistics.fmean(speeds))
        session.progress.say(f"  round {i + 1}: shares {', '.join(f'{share:.3f}' for share in shares)}, sum {ratios[-1]:.3f}")
    if ratios:
        report.judged = median_figures(report.runs)
        report.figures |= {
            "ratio": statistics.median(ratios),
            "together_tokens_per_s": statistics.median(sums),
            "mean_alone_tokens_per_s": statistics.median(alone_sums),
        }


def tail(session: Session, report: Report, *, connections: int, share: float, servers: int, rounds: int) -> None:
    """Compares latencies of an open loop with those of an ideal queue that gets the same arrivals and run times.

    Args:
        session: One target, with an engine.
        report: Gets `queue_ratio`, the measured p99 over the ideal one, and both.
        connections: Of the closed loop that measures the maximum.
        share: Of the maximum that the open loop sends.
        servers: Of the ideal queue: the service's lanes.
        rounds: Of all; the report gets medians.
    """
    engine = _engine(session)
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        full = session.closed(connections, name=f"round {i + 1} maximum, {connections} connections")
        limit = engine.limit(session.plan.seconds) if not session.stop.is_set() else None
        report.runs.append(replace(full, limit=limit))
        most = full.targets[0].rps
        if limit is None or not limit.runs or not most or session.stop.is_set():
            break
        run, load, arrivals = session.open_loop(most * share, name=f"round {i + 1} open, {most * share:.4g}/s")
        report.runs.append(run)
        jobs = queueing.scaled([limit.feed_s[k % len(limit.feed_s)] for k in range(len(arrivals))], servers, most)
        ideal = queueing.simulate(arrivals, jobs, servers)
        start, end = (at - load.start for at in load.measured)
        spread = measurement.latency(taken * 1000 for at, taken in zip(arrivals, ideal, strict=True) if start <= at < end)
        real = run.targets[0].latency
        if spread is None or real is None:
            break
        rows.append(
            {
                "max_rps": most,
                "rate": most * share,
                "p50_ms": real.p50_ms,
                "p99_ms": real.p99_ms,
                "ideal_p50_ms": spread.p50_ms,
                "ideal_p99_ms": spread.p99_ms,
                "queue_ratio": real.p99_ms / spread.p99_ms,
            }
        )
        session.progress.say(
            f"  round {i + 1}: p99 {real.p99_ms:.2f} ms, ideal {spread.p99_ms:.2f} ms, ratio {rows[-1]['queue_ratio']:.3f}"
        )
    if rows:
        open_runs = [run for run in report.runs if run.generator.late_p99_ms is not None]
        report.judged = median_figures(open_runs)
        report.figures |= {name: _median([row[name] for row in rows]) for name in rows[0]}


def _engine(session: Session) -> Engine:
    assert session.engine is not None, "the command line asks for a bundle"
    return session.engine


def _tokens(target: Measurement) -> float:
    """Returns tokens a second.

    Raises:
        BenchError: The service does not count them, or answered nothing.
    """
    if not target.tokens_per_s:
        raise BenchError(f"{target.target}: no tokens were counted; the targets must be different models of one bertserve.")
    return target.tokens_per_s


def _total(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if name in _RATES:
        return sum(known)
    return max(known) if FIGURES[name] else min(known)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
