"""Overload at twice the capacity: the service keeps its throughput, and refuses the other requests at once with `Retry-After`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slow
from bertserve.bench.generator import LoadResult, poisson_arrivals
from bertserve.bench.workloads import workload_inputs
from conftest import ROOT
from loads import (
    LONG,
    accesses,
    assert_each_ended_once,
    closed_loop,
    measured,
    open_loop,
    percentile,
    samples,
    seconds,
    show,
    target,
    total,
)

pytestmark = pytest.mark.serial

DEADLINE_MS, FILLS_S = (2000, 5.0) if LONG else (200, 0.3)
CONNECTIONS = (8, 32, 128) if LONG else (8,)


def short_and_long() -> list[Any]:
    """Returns bodies in random order: four of five have a short text, the fifth has a long text.

    In a fixed order, a long text would always follow short texts. Then the queue has capacity again, and accepts it more often.
    """
    short, long = workload_inputs("short", seed=1), workload_inputs("long", seed=1)
    bodies = [{"inputs": text} for i, one in enumerate(long) for text in (*(short[(4 * i + k) % len(short)] for k in range(4)), one)]
    random.Random(1).shuffle(bodies)
    return bodies


def test_each_request_ends_once_under_overload(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Each request gets exactly one answer: 200, 504, or 429 with Retry-After."""
    models = ROOT / "models" if LONG else slow.bundle(tmp_path / "models").parent
    with serve(models, "--access-log", "--log-format", "json") as served:
        texts = target(served, "/classify", short_and_long(), **{"x-request-timeout-ms": str(DEADLINE_MS)})
        closed_loop(texts, 32, seconds(5) / 4)
        before = samples(served)
        best = [closed_loop(texts, connections, seconds(10) / 4, warmup_s=seconds(1) / 4) for connections in CONNECTIONS]
        throughput = max(10.0, *(answered_per_s(load) for load in best))  # there can be no answers while the machine stalls
        middle = samples(served)
        lasts_s = seconds(60)
        arrivals = poisson_arrivals(2 * throughput, FILLS_S + lasts_s, seed=1)
        load = open_loop(texts, arrivals, lasts_s, warmup_s=FILLS_S)
        after = samples(served)
        assert_each_ended_once(before, middle, *best)
        ended = assert_each_ended_once(middle, after, load)
        assert 0 < ended[200]
        assert {200, 429, 504} >= set(ended)
        _show_figures(throughput, load, accesses(served)[-len(arrivals) :], middle, after)
        assert 0 < len(closed_loop(texts, 2, 0.1).records)


def answered_per_s(load: LoadResult) -> float:
    """Returns the number of requests per second that were answered with 200 within the measured time."""
    start, end = load.measured
    return sum(record.outcome == 200 and start <= record.ended < end for record in load.records) / (end - start)


def _show_figures(throughput: float, load: LoadResult, lines: list[dict[str, Any]], before: Any, after: Any) -> None:
    goodput = answered_per_s(load)
    accepted = [record.ended - record.intended for record in measured(load) if record.outcome == 200]
    refused = [line["ms"] for line in lines if line.get("status") == 429]
    expired = sum(record.outcome == 504 for record in load.records)
    ratios = after - before

    def within(bound: str) -> float:
        return total(ratios, "wait_prediction_ratio_bucket", le=bound)

    show("best closed loop", f"{throughput:.0f} requests/s")
    show("goodput at twice that, bar 95 %", f"{goodput:.0f} requests/s, {goodput / throughput:.1%}")
    show(
        f"accepted p99, bar {DEADLINE_MS} ms", f"{percentile(accepted, 0.99) * 1000:.0f} ms; p50 {percentile(accepted, 0.5) * 1000:.0f} ms"
    )
    show("refused p50 by the service's clock, bar 5 ms", f"{percentile(refused, 0.5):.2f} ms; p99 {percentile(refused, 0.99):.2f} ms")
    show("refused, all with Retry-After; expired", f"{len(refused)}; {expired}")
    judged = max(total(ratios, "wait_prediction_ratio_count"), 1)
    show("predicted wait within 2x of the real one, bar 90 %", f"{(within('2.0') - within('0.5')) / judged:.1%}")
    show("predicted wait over 2x; under 0.5x the real one", f"{1 - within('2.0') / judged:.1%}; {within('0.5') / judged:.1%}")
    show("how late the generator was, p99", f"{percentile(load.timer_lags_s, 0.99) * 1000:.1f} ms; capped {load.capped}")
