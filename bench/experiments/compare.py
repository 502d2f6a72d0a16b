"""Served and bare in turn."""

from __future__ import annotations

from dataclasses import replace

from bench.experiments.aggregation import median, median_figures
from bench.experiments.load_test import Session
from bench.report.report import Report


def compare(session: Session, report: Report, *, connections: int, rounds: int) -> None:
    """Measures the service and the bare engine in turn; the report gets the medians and the median of their ratios.

    Args:
        session: One target, with an engine.
        report: Gets `ratio` of the speeds in texts, and `ratio_tokens`; of a single connection also `request_ratio`, the median
            latency of a request over the time that the bare loop needs for as much.
        connections: Of the closed loop.
        rounds: Of both.
    """
    engine = session.require_engine()
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
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}
