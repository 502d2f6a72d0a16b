"""Callers with long lists or documents, in virtual time: how much longer other callers with short texts wait."""

import random
from functools import cache

import pytest

from bertserve.service.scheduling.records import ScheduledRequest
from support.simulation import Simulation, recorded_s

SHORT = 23
THREADS = 2
SECONDS = 20.0
OTHERS = 0.3  # load of the other callers, as a share of the capacity
LIST, DOCUMENT = (SHORT,) * 500, (384,) * 70  # a document of 80,000 characters


@cache
def p99(slower: float, heavy: tuple[int, ...] = (), *, callers: int = 1) -> float:
    """Returns the seconds within which 99 % of the other callers' requests are answered.

    Args:
        slower: Factor by which runs take longer than predicted, for example because another process uses the machine.
        heavy: Lengths of the texts in each request of a heavy caller, who sends the next one after an answer.
        callers: Number of heavy callers.
    """
    others: set[ScheduledRequest] = set()
    dice = random.Random(5)

    def send_request() -> None:
        if heavy and simulation.now < SECONDS and simulation.arrive(*heavy) is None:
            simulation.at(simulation.now + 0.1, send_request)

    def come() -> None:
        if request := simulation.arrive(dice.randint(SHORT - 4, SHORT + 4)):
            others.add(request)

    simulation = Simulation(THREADS, slower=slower, on_end=lambda request: None if request in others else send_request())
    time = 0.0
    while time < SECONDS:
        time += dice.expovariate(OTHERS * THREADS / (recorded_s(1, SHORT) * slower))
        simulation.at(time, come)
    for caller in range(callers):
        simulation.at(0.5 + 0.01 * caller, send_request)
    simulation.play()
    times = sorted(progress.answered_s for request in others if (progress := simulation.progress[request]).answered_s is not None)
    assert len(times) == len(others) > 500
    return times[int(0.99 * len(times))]


@pytest.mark.parametrize("slower", [1.0, 3.0])
@pytest.mark.parametrize(
    ("heavy", "callers"), [(LIST, 1), (LIST, 10), (DOCUMENT, 1), (DOCUMENT, 10)], ids=["list", "ten lists", "document", "ten documents"]
)
def test_others_wait_at_most_four_times_as_long_beside_heavy_callers(heavy: tuple[int, ...], callers: int, slower: float) -> None:
    """This holds too if runs take three times as long as predicted, so that the heavy callers fall behind their priorities."""
    assert p99(slower, heavy, callers=callers) <= 4 * p99(slower)


def test_ten_callers_with_short_lists_do_not_block_others() -> None:
    """If each of the ten lists had the pace of a single one, others would wait 70 times as long."""
    assert p99(1.0, (SHORT,) * 30, callers=10) <= 4 * p99(1.0)
