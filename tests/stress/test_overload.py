"""Overload at three times the capacity: the service keeps its throughput, and refuses the other requests at once with `Retry-After`."""

import random
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bertserve.bench.generator import Load, poisson_arrivals
from bertserve.bench.workloads import workload_inputs
from support import ROOT, slow
from support.loads import LONG, accesses, assert_each_ended_once, load, measured_records, metrics, seconds, show, target
from support.replica import running

pytestmark = pytest.mark.serial

DEADLINE_MS, FILLS_S = (2000, 5.0) if LONG else (200, 0.3)
OVERLOAD = 3  # arrivals, relative to the throughput of a closed loop
CONNECTIONS = (8, 32, 128) if LONG else (8,)


def short_and_long() -> list[Any]:
    """Returns bodies in random order: four of five have a short text, the fifth has a long text.

    In a fixed order, a long text would always follow short texts. Then the queue has capacity again, and accepts it more often.
    """
    short, long = workload_inputs("short", seed=1), workload_inputs("long", seed=1)
    bodies = [{"inputs": text} for i, one in enumerate(long) for text in (*(short[(4 * i + k) % len(short)] for k in range(4)), one)]
    random.Random(1).shuffle(bodies)
    return bodies


def test_each_request_ends_once_under_overload(tmp_path: Path) -> None:
    models = ROOT / "models" if LONG else slow.bundle(tmp_path / "models").parent
    with running(models, tmp_path / "log", "--access-log", "--log-format", "json") as server:
        texts = target(server, "/classify", short_and_long(), **{"x-request-timeout-ms": str(DEADLINE_MS)})
        load(texts, 32, seconds(5) / 4)
        before = metrics(server)
        best = [load(texts, connections, seconds(10) / 4, warmup_s=seconds(1) / 4) for connections in CONNECTIONS]
        throughput = max(map(answered_per_s, best))
        middle = metrics(server)
        lasts_s = seconds(60)
        arrivals = poisson_arrivals(OVERLOAD * max(10.0, throughput), FILLS_S + lasts_s, seed=1)
        overload = load(texts, 4000, lasts_s, warmup_s=FILLS_S, arrivals=arrivals)
        after = metrics(server)
        assert_each_ended_once(before, middle, *best)
        outcomes = assert_each_ended_once(middle, after, overload)
        assert {200, 429} <= set(outcomes) <= {200, 429, 504}
        goodput = answered_per_s(overload)
        accepted_ms = [1000 * (record.ended - record.intended) for record in measured_records(overload) if record.outcome == 200]
        refused_ms = [line["ms"] for line in accesses(server)[-len(arrivals) :] if line.get("status") == 429]
        show("goodput, and throughput of the best closed loop", f"{goodput:.0f} and {throughput:.0f} requests/s")
        show("p50 of accepted and of refused requests", f"{median(accepted_ms):.1f} and {median(refused_ms):.2f} ms")
        assert goodput > throughput / 2
        assert median(refused_ms) < median(accepted_ms) / 4
        assert 200 in {record.outcome for record in load(texts, 2, 0.1).records}


def answered_per_s(result: Load) -> float:
    """Returns the number of requests per second that were answered with 200 within the measured time."""
    start, end = result.measured
    return sum(record.outcome == 200 and start <= record.ended < end for record in result.records) / (end - start)
