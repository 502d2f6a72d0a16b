"""The service and the bare engine in turn: medians of both, and of their ratios."""

from __future__ import annotations

from dataclasses import replace

from bertserve.bench.experiments.load_test import LoadTest, median, median_figures
from bertserve.bench.report.report import Report


def compare(test: LoadTest, report: Report, *, connections: int, rounds: int) -> None:
    """Measures the service in a closed loop and the bare engine, in turn.

    Args:
        test: One target, with an engine benchmark.
        report: Gets the medians over the rounds: `ratio` of the speeds in texts, `ratio_tokens` of the speeds in tokens, and with a
            single connection `request_ratio`, the median latency of a request over the time that the bare loop needs for one.
        connections: Number of connections of the closed loop.
        rounds: Measurements of each.
    """
    engine = test.require_engine()
    rows: list[dict[str, float | None]] = []
    for i in range(rounds):
        run = test.run_closed_loop(connections, name=f"round {i + 1} served, {connections} connections")
        limit = engine.measure_limit(test.durations.seconds) if not test.stop.is_set() else None
        report.runs.append(replace(run, limit=limit))
        if limit is None or not limit.runs:
            break
        served = run.targets[0]
        ratio = served.texts_per_s / limit.texts_per_s
        row: dict[str, float | None] = {
            "served_texts_per_s": served.texts_per_s,
            "bare_texts_per_s": limit.texts_per_s,
            "ratio": ratio,
            "ratio_tokens": (served.tokens_per_s or 0.0) / limit.tokens_per_s,
        }
        if connections == 1 and served.latency:  # with more connections a request also waits for others
            row |= {
                "served_request_ms": served.latency.p50_ms,
                "bare_request_ms": 1000 / limit.requests_per_s,
                "request_ratio": served.latency.p50_ms * limit.requests_per_s / 1000,
            }
        rows.append(row)
        test.progress.log(f"  round {i + 1}: served {served.texts_per_s:.1f} texts/s, bare {limit.texts_per_s:.1f}, ratio {ratio:.3f}")
    if rows:
        report.judged = median_figures(report.runs)
        report.figures |= {name: median([row[name] for row in rows]) for name in rows[0]}
