"""Predicted and real waits: a queue whose inference threads run in virtual time, at twice their capacity."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from support.fakes import FakeRunner
from support.simulation import TIMEOUT_S, Simulation, predicted_s, recorded_s


def overload(simulation: Simulation, seconds: float, texts: Callable[[random.Random], tuple[int, ...]]) -> None:
    """Plays random arrivals at twice the capacity of the inference threads, then runs the remaining requests."""
    dice, time = simulation.random, 0.0
    mean = sum(recorded_s(1, length) for _ in range(1000) for length in texts(dice)) / 1000
    while time < seconds:
        time += dice.expovariate(2 * simulation.threads / mean)
        simulation.at(time, lambda: simulation.arrive(*texts(dice)) and None)
    simulation.play()


def share(simulation: Simulation, holds: Callable[[float, float], bool]) -> float:
    """Returns the share of requests after the queue has filled whose predicted and real wait meet a condition."""
    pairs = ((request, progress) for request, progress in simulation.progress.items() if request.arrived > TIMEOUT_S)
    waits = [(progress.predicted_s, progress.first_s) for _, progress in pairs if progress.first_s is not None]
    assert len(waits) > 200
    return sum(holds(predicted_s, real_s) for predicted_s, real_s in waits) / len(waits)


def short_and_long(dice: random.Random) -> tuple[int, ...]:
    """Returns the lengths of a request's texts: four of five requests are a short text, the fifth is a long text."""
    return (dice.randint(8, 40),) if dice.random() < 0.8 else (dice.randint(200, 512),)


def with_documents(dice: random.Random) -> tuple[int, ...]:
    """Returns the lengths of a request's texts: one of fifty requests is a document of up to thirty windows."""
    return (400,) * dice.randint(3, 30) if dice.random() < 0.02 else short_and_long(dice)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("texts", [short_and_long, with_documents])
def test_the_predicted_wait_is_within_a_factor_of_two(threads: int, texts: Any) -> None:
    """At twice the capacity, this holds for at least nine in ten of the admitted requests, and at most a tenth of them expire."""
    simulation = Simulation(threads)
    overload(simulation, 30.0, texts)

    expirations = [progress for progress in simulation.progress.values() if progress.answered_s is None]
    assert simulation.refusals
    assert share(simulation, lambda predicted_s, real_s: predicted_s <= 2 * real_s and real_s <= 2 * predicted_s) >= 0.9
    assert len(expirations) <= len(simulation.progress) / 10


@pytest.mark.parametrize("threads", [1, 2])
def test_long_requests_are_admitted_like_short_ones(threads: int) -> None:
    """This applies also while short texts of many clients fill the queue, and long requests leave a thread to them."""
    simulation = Simulation(threads, FakeRunner(predicted_s, shares_batches=False))
    admitted: dict[bool, list[bool]] = {False: [], True: []}
    for i in range(5000 * threads):
        is_long = i % 100 == 99
        simulation.play(i * recorded_s(1, 24) / (2 * threads))
        request = simulation.arrive(*((300,) * 8 if is_long else (24,)))
        if simulation.refusals:
            admitted[is_long].append(request is not None)
    short, long = (sum(outcomes) / len(outcomes) for outcomes in admitted.values())
    assert long == pytest.approx(short, rel=0.5)


@pytest.mark.parametrize("shares", [pytest.param(False, marks=pytest.mark.full_grid), True])
@pytest.mark.parametrize("max_queue_tokens", [5_000, 10**6], ids=["queue_full", "deadline"])
def test_a_retry_after_the_announced_time_is_admitted(shares: bool, max_queue_tokens: int) -> None:
    """Without other clients, nine in ten are admitted at the announced time, and all if they wait a tenth longer."""
    refused_again = {1.0: 0, 1.1: 0}
    for seed in range(10):
        for factor in refused_again:
            simulation = Simulation(2, FakeRunner(predicted_s, max_batch_tokens=8192, shares_batches=shares), max_queue_tokens, seed)
            while not simulation.refusals:
                simulation.play(simulation.now + 0.001)
                last = short_and_long(simulation.random)
                simulation.arrive(*last)
            simulation.play(simulation.now + simulation.refusals.pop() * factor + 0.05)
            simulation.arrive(*last)
            refused_again[factor] += len(simulation.refusals)

    assert refused_again[1.0] <= 1
    assert refused_again[1.1] == 0
