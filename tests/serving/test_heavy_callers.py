"""One caller with long lists or documents and others with short texts, in virtual time: how much longer the others wait."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from bertserve.service.scheduling.scheduled_request import Item, ScheduledRequest
from test_waits import COST, Simulation

SHORT = 23
THREADS = 2
SECONDS = 40.0
OTHERS = 0.3  # of what the inference threads can do
HEAVY = {"lists of 500 texts": (SHORT,) * 500, "documents of 100 windows": (384,) * 100}


@dataclass
class Crowd(Simulation):
    """Inference threads of which no request has all, as the scheduler has it while there are several callers.

    Attributes:
        slower: Times its prediction that a run takes: a neighbor may have the machine.
        heavy: What the one caller sends, again and again.
        others: The other requests.
        times: Seconds from arrival to answer of each of the others' requests.
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
    """Returns the seconds within which 99 of 100 of the others' requests are answered."""
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


@pytest.mark.parametrize(("slower", "most"), [(1.0, 3.0), (1.3, 3.0), (3.0, 3.5)])
@pytest.mark.parametrize("heavy", HEAVY)
def test_a_heavy_caller_makes_others_wait_three_times_as_long_at_most(heavy: str, slower: float, most: float) -> None:
    """And hardly more where runs take much longer than predicted, so that the heavy one falls behind its priorities."""
    assert p99(slower, HEAVY[heavy]) <= most * p99(slower)


def test_ten_callers_with_short_lists_let_others_through() -> None:
    """A list of 30 texts takes a third of a second; with the pace of one such list the others would wait 70 times as long."""
    assert p99(1.0, (SHORT,) * 30, callers=10) <= 10 * p99(1.0)
