"""A sweep of 13 loads, in one of which the generator was late, and its HTML page: `python sweep_page.py FILE`."""

import sys
from pathlib import Path

from bertserve.bench.measurement import LoadMetrics, latency_metrics
from bertserve.bench.report import BenchReport, html_page, parse_objectives


def report() -> BenchReport:
    """Returns the report of 13 loads at rates of 100, 200, and so on; at 600, the generator was late."""
    result = BenchReport("sweep", {}, parse_objectives(["p99_ms=50"]))
    for i in range(13):
        latency = latency_metrics([2.0**i * (1 + k / 100) for k in range(1000)])
        rate, late = 100 * (i + 1), i == 5
        counts = (1.0, rate, {"200": rate}, 0.0, rate, rate, None, {})
        result.loads.append(LoadMetrics(f"open, {rate}/s", True, *counts, latency, {}, None, 0.1, 9.0 * late, ["late"] * late))
    result.results = {"max_rate": 200, "lowest_rate_not_held": 300}
    return result


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(html_page(report()), encoding="utf-8")
