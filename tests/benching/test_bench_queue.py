"""The arrival times of an open loop and the simulated queue: pure arithmetic, checked against queueing theory."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from bertserve.bench.experiments import scale_to_capacity, simulate_queue
from bertserve.bench.load.generator import poisson_arrivals


def test_arrivals_are_a_poisson_process() -> None:
    """Their number is near rate x seconds, and their gaps spread like an exponential: deviation as large as the mean."""
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


def test_the_queue_by_hand() -> None:
    """Two servers, four requests: the third and the fourth wait for whoever is free first."""
    requests = [[3.0], [1.0], [1.0], [1.0]]

    assert [3.0, 1.0, 1.5, 2.0] == simulate_queue([0.0, 0.0, 0.5, 1.0], requests, 2)


def test_parts_of_a_job_run_side_by_side() -> None:
    """A request of three parts on two servers is done when its last part is."""
    assert [2.0, 1.0] == simulate_queue([0.0, 1.0], [[1.0, 1.0, 1.0], [1.0]], 2)


def test_the_queue_gives_the_known_mean_of_one_exponential_server() -> None:
    """M/M/1 at 50 % load: the mean time in the system is 1 / (mu - lambda)."""
    random_ = random.Random(98)
    times = poisson_arrivals(0.5, 50_000, seed=0)
    latencies = simulate_queue(times, [[random_.expovariate(1.0)] for _ in times], 1)

    assert 2.0 == pytest.approx(fmean(latencies), rel=0.03)


def test_the_queue_gives_the_known_mean_of_one_steady_server() -> None:
    """M/D/1 at 50 % load: half of the waiting of M/M/1, so 1 + 0.5 of the run time."""
    times = poisson_arrivals(0.5, 50_000, seed=0)

    assert 1.5 == pytest.approx(fmean(simulate_queue(times, [[1.0]] * len(times), 1)), rel=0.03)


def test_the_queue_gives_the_known_wait_of_two_exponential_servers() -> None:
    """M/M/2 at 70 % load: by Erlang's formula a request is 1 / (1 - 0.7^2) of its run time in the system."""
    random_ = random.Random(99)
    times = poisson_arrivals(1.4, 50_000, seed=1)
    latencies = simulate_queue(times, [[random_.expovariate(1.0)] for _ in times], 2)

    assert 1 / (1 - 0.49) == pytest.approx(fmean(latencies), rel=0.03)


def test_scaling_gives_the_queue_its_capacity() -> None:
    """Run times keep their proportions, and servers / mean run time is the capacity."""
    requests = scale_to_capacity([[1.0], [2.0, 1.0]], 2, 10.0)

    assert 10.0 == pytest.approx(2 / fmean(map(sum, requests)))
    assert 2.0 == pytest.approx(requests[1][0] / requests[0][0])
