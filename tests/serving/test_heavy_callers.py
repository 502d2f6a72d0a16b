"""A caller with long lists or documents, in virtual time: how much longer other callers with short texts wait."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest
from test_waits import COST, Simulation

SHORT = 23
THREADS = 2
SECONDS = 40.0
OTHERS = 0.3  # load of the other callers, as a share of the capacity
HEAVY = {"lists of 500 texts": (SHORT,) * 500, "documents of 100 windows": (384,) * 100}


@dataclass
class Crowd(Simulation):
    """A simulation in which no request gets all inference threads, as in the scheduler while there are several callers.

    Attributes:
        slower: Factor by which runs take longer than predicted, for example because another process uses the machine.
        heavy: Lengths of the texts in each request of the heavy caller.
        others: Requests of the other callers.
        times: Seconds from arrival to answer of each of these requests.
    """

    slower: float = 1.0
    heavy: tuple[int, ...] = ()
    others: set[ScheduledRequest] = field(default_factory=set)
    times: list[float] = field(default_factory=list)

    def ask(self) -> None:
        if self.heavy and self.now < SECONDS:
            self.arrive(*self.heavy)

    def _start(self) -> None:
        while len(self.runs) < self.threads:
            if not (batch := self.queue.take(self.now, last_thread=len(self.runs) == self.threads - 1)):
                return
            run, seconds = self.made, batch[0].cost(len(batch), max(item.length for item in batch)) * self.slower
            self.runs[run] = (self.now, self.now + seconds)
            self.at(self.now + seconds * self.random.lognormvariate(0, 0.1), lambda run=run, batch=batch: self._end(run, batch))  # type: ignore[misc]

    def _end(self, run: int, batch: list[Item]) -> None:
        super()._end(run, batch)
        for request in {item.request for item in batch if not item.request.open}:
            if request in self.others:
                self.times.append(self.now - request.arrived)
            else:
                self.ask()


def p99(slower: float, heavy: tuple[int, ...] = (), *, callers: int = 1) -> float:
    """Returns the seconds within which 99 % of the other callers' requests are answered."""
    crowd, dice = Crowd(THREADS, "model", slower=slower, heavy=heavy), random.Random(5)

    def come() -> None:
        before = set(crowd.waits)
        crowd.arrive(dice.randint(SHORT - 4, SHORT + 4))
        crowd.others |= set(crowd.waits) - before

    time = 0.0
    while time < SECONDS:
        time += dice.expovariate(OTHERS * THREADS / (COST(1, SHORT) * slower))
        crowd.at(time, come)
    for caller in range(callers):
        crowd.at(0.5 + 0.01 * caller, crowd.ask)
    crowd.play()
    assert len(crowd.times) == len(crowd.others) > 500
    return sorted(crowd.times)[int(0.99 * len(crowd.times))]


@pytest.mark.parametrize(("slower", "most"), [(1.0, 3.0), (3.0, 3.5)])
@pytest.mark.parametrize("heavy", HEAVY)
def test_a_heavy_caller_at_most_triples_the_wait_of_others(heavy: str, slower: float, most: float) -> None:
    """The limit is 3.5 times if runs take three times as long as predicted, so that the heavy caller falls behind its priorities."""
    assert p99(slower, HEAVY[heavy]) <= most * p99(slower)


def test_ten_callers_with_short_lists_do_not_block_others() -> None:
    """A list of 30 texts takes 0.33 s. If each list had the pace of a single one, others would wait 70 times as long."""
    assert p99(1.0, (SHORT,) * 30, callers=10) <= 10 * p99(1.0)
