"""The simulated replicas: by hand, against the simulated queue of one service, and as the page of docs shows them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from bertserve.bench.experiments import queue_simulation, scaling
from bertserve.bench.experiments.replica_simulation import (
    Policy,
    Replica,
    least_connections,
    least_work,
    reported_work,
    round_robin,
    simulate,
    two_choices,
)
from bertserve.bench.load.arrivals import poisson_arrivals

PAGE = Path(__file__).parent.parent.parent / "docs/explanation/scaling.md"


def replicas(*lanes: int) -> list[Replica]:
    """Returns idle replicas."""
    return [Replica(number, free) for number, free in enumerate(lanes)]


@pytest.mark.parametrize("policy", [round_robin(), least_connections(), least_work(), two_choices(0)])
def test_one_replica_is_the_queue_of_one_service(policy: Policy) -> None:
    """Whoever chooses among one replica, requests of one run take as long as in the simulation of a single service."""
    random_ = random.Random(7)
    arrivals = poisson_arrivals(2.5, 2000, seed=2)
    requests = [[random_.expovariate(1.0)] for _ in arrivals]

    assert queue_simulation.simulate(arrivals, requests, 3) == simulate(arrivals, requests, replicas(3), policy).latencies


def test_least_connections_avoids_whom_it_sent_much() -> None:
    """The third request goes where the short one has ended; in turn it waits behind the long one."""
    arrivals, requests = [0.0, 0.1, 2.0], [[9.0], [1.0], [1.0]]

    assert [9.0, 1.0, 1.0] == pytest.approx(simulate(arrivals, requests, replicas(1, 1), least_connections()).latencies)
    assert [9.0, 1.0, 8.0] == pytest.approx(simulate(arrivals, requests, replicas(1, 1), round_robin()).latencies)


def test_tokens_tell_a_long_request_from_a_short_one() -> None:
    """With one request at each of two replicas, work says which ends first, and connections do not."""
    arrivals, requests = [0.0, 0.1, 0.2], [[9.0], [1.0], [1.0]]

    assert [9.0, 1.0, 1.9] == pytest.approx(simulate(arrivals, requests, replicas(1, 1), least_work()).latencies)
    assert [9.0, 1.0, 9.8] == pytest.approx(simulate(arrivals, requests, replicas(1, 1), least_connections()).latencies)


def test_a_report_of_work_is_as_old_as_its_interval() -> None:
    """Until the next report all go to whom the last one named, in turn where it named several."""
    arrivals, requests = [0.0, 0.1, 0.2, 1.0], [[5.0], [0.2], [0.2], [0.2]]

    # at 1.0 the report says that the first one is busy; before, that none was
    assert [5.0, 0.2, 5.0, 0.2] == pytest.approx(simulate(arrivals, requests, replicas(1, 1), reported_work(1.0)).latencies)


def test_balancers_know_their_own_requests_alone() -> None:
    """Many balancers find every replica idle, as if each request came first."""
    arrivals, requests = [i / 1000 for i in range(40)], [[1.0]] * 40
    one = simulate(arrivals, requests, replicas(*[1] * 40), least_connections())
    many = simulate(arrivals, requests, replicas(*[1] * 40), least_connections(), balancers=1000)

    assert [1.0] * 40 == pytest.approx(one.latencies)
    assert max(many.latencies) > 30


def test_short_requests_slip_between_the_windows_of_a_document() -> None:
    """A text that comes half a window after a document runs after its second window, which ranks one and a half windows behind."""
    found = simulate([0.0, 1.6], [[1.0] * 4, [1.0]], replicas(1), round_robin())

    assert [5.0, 1.4] == pytest.approx(found.latencies)


def test_the_first_answer_counts_and_the_other_copy_does_not_run() -> None:
    """A request behind a long one is sent again, is answered there, and its first copy leaves the queue without a run."""
    arrivals, requests = [0.0, 0.1, 0.2, 0.3], [[9.0], [1.0], [1.0], [2.0]]
    plain = simulate(arrivals, requests, replicas(1, 1, 1), round_robin())
    hedged = simulate(arrivals, requests, replicas(1, 1, 1), round_robin(), hedge_after_s=1.5)

    assert [9.0, 1.0, 1.0, 10.7] == pytest.approx(plain.latencies)
    assert [9.0, 1.0, 1.0, 3.5] == pytest.approx(hedged.latencies)
    # the long one was sent again too, and ran twice
    assert 13.0 + 9.0 == pytest.approx(hedged.busy_s)
    assert 2 / 4 == pytest.approx(hedged.hedged)


def test_an_answer_that_comes_late_is_overtaken_by_its_second_copy() -> None:
    """The run is done after 1 s, the answer would come after 6, and the other replica's comes after 3."""
    late = [Replica(0, 1, late=(1.0, 5.0)), Replica(1, 1)]
    assert [6.0] == pytest.approx(simulate([0.0], [[1.0]], late, round_robin()).latencies)
    late = [Replica(0, 1, late=(1.0, 5.0)), Replica(1, 1)]
    assert [3.0] == pytest.approx(simulate([0.0], [[1.0]], late, round_robin(), hedge_after_s=2.0).latencies)


def test_a_slow_replica_takes_longer() -> None:
    """Its runs take as many times as long as its slowdown says."""
    slow = [Replica(0, 1, slowdown=5.0), Replica(1, 1)]

    assert [5.0, 1.0] == pytest.approx(simulate([0.0, 0.0], [[1.0], [1.0]], slow, round_robin()).latencies)


def test_a_load_keeps_lanes_as_busy_as_asked() -> None:
    """Seconds of work over seconds of lanes are the share, and one request in twenty is a document of five windows."""
    load = scaling.make_load(5000, 8, 0.7, documents=True)

    assert 0.7 == pytest.approx(sum(map(sum, load.requests)) / (8 * load.arrivals[-1]), rel=0.05)
    assert 0.05 == pytest.approx(sum(len(runs) == 5 for runs in load.requests) / len(load.requests), abs=0.003)


def test_the_tables_are_the_same_each_time() -> None:
    """A seed decides everything."""
    assert scaling.balancing(300) == scaling.balancing(300)
    assert scaling.hedging(300, 4) == scaling.hedging(300, 4)


@pytest.mark.full_grid
@pytest.mark.parametrize("table", scaling.TABLES)
def test_the_page_shows_what_the_script_prints(table: str) -> None:
    """docs/explanation/scaling.md has the tables as they are simulated."""
    shown = re.search(rf"<!-- simulated: {table} -->\n(.*?)<!-- end of simulated -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None

    assert scaling.TABLES[table]() == shown[1]
