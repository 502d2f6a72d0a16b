"""The arrival times of an open loop and the simulated queue: pure arithmetic, checked against queueing theory."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from bertserve.bench.experiments import scale_to_capacity, simulate_queue
from bertserve.bench.load.generator import poisson_arrivals


def test_arrivals_are_a_poisson_process() -> None:
    """Their number is near rate x seconds. The gaps have a standard deviation equal to their mean, like an exponential distribution."""
    times = poisson_arrivals(100, 200, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]

    assert 20_000 == pytest.approx(len(times), rel=0.03)
    assert 0.01 == pytest.approx(fmean(gaps), rel=0.03)
    assert 0.01 == pytest.approx(math.sqrt(fmean((gap - 0.01) ** 2 for gap in gaps)), rel=0.05)
    assert sorted(times) == times
    assert 200 > times[-1]


def test_arrivals_are_the_same_for_a_seed() -> None:
    times = poisson_arrivals(10, 5, seed=3)

    assert times == poisson_arrivals(10, 5, seed=3)
    assert times != poisson_arrivals(10, 5, seed=4)
    assert [t / 2 for t in times] == pytest.approx(poisson_arrivals(20, 2.5, seed=3))


def test_the_queue_matches_a_calculation_by_hand() -> None:
    """With two servers, the third and the fourth request wait for the first free server."""
    requests = [[3.0], [1.0], [1.0], [1.0]]

    assert [3.0, 1.0, 1.5, 2.0] == simulate_queue([0.0, 0.0, 0.5, 1.0], requests, 2)


def test_parts_of_a_request_run_in_parallel() -> None:
    """A request of three parts on two servers ends with its last part."""
    assert [2.0, 1.0] == simulate_queue([0.0, 1.0], [[1.0, 1.0, 1.0], [1.0]], 2)


@pytest.mark.parametrize(
    ("load", "servers", "run_s", "mean_s"),
    [
        pytest.param(0.5, 1, random.Random(98).expovariate, 2.0, id="M/M/1 at 50 %: 1 / (mu - lambda)"),
        pytest.param(0.5, 1, lambda rate: 1 / rate, 1.5, id="M/D/1 at 50 %: half of the waiting of M/M/1"),
        pytest.param(1.4, 2, random.Random(99).expovariate, 1 / (1 - 0.49), id="M/M/2 at 70 %, by Erlang's formula"),
    ],
)
def test_the_queue_has_the_theoretical_mean(load: float, servers: int, run_s: Callable[[float], float], mean_s: float) -> None:
    times = poisson_arrivals(load, 50_000, seed=servers - 1)

    assert mean_s == pytest.approx(fmean(simulate_queue(times, [[run_s(1.0)] for _ in times], servers)), rel=0.03)


def test_scaling_gives_the_queue_its_capacity() -> None:
    """Run times keep their proportions, and servers / mean run time is the capacity."""
    requests = scale_to_capacity([[1.0], [2.0, 1.0]], 2, 10.0)

    assert 10.0 == pytest.approx(2 / fmean(map(sum, requests)))
    assert 2.0 == pytest.approx(requests[1][0] / requests[0][0])
